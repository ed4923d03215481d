"""Runs in processes of their own, as users start them, with ranks that can be stopped and killed."""

import json
import os
import re
import resource
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.support.command import Command, losses
from tpfuse import cli
from tpfuse.comm.errors import Unavailable
from tpfuse.commands.hang import hang
from tpfuse.errors import PeerLost, RunError, UserError
from tpfuse.testing.patience import patient, wait_until
from tpfuse.train import launch
from tpfuse.train.launch import STOP_SIGNALS
from tpfuse.train.messages import fail
from tpfuse.train.metrics import read_metrics

ENDLESS = "--train.steps 1000000 --train.log-every 1 --train.eval-every 0 --train.save-every 0"
TRAIN = "-m tpfuse train"
TORCHRUN = f"-m torch.distributed.run --standalone --nproc-per-node 2 {TRAIN}"
DOUBLE = "--train.dtype float64 --model.dropout 0.1"
Start = Callable[..., Command]


@pytest.fixture
def start(flags: list[str], tmp_path: Path) -> Iterator[Start]:
    """Return start(options, out=, program=, limits=), which starts a tiny run in the folder `out` of tmp_path."""
    started: list[Command] = []

    def begin(
        options: str = "", out: str = "run", program: str = TRAIN, limits: Mapping[int, int] | None = None
    ) -> Command:
        arguments = [*program.split(), *flags, "--out", str(tmp_path / out), *options.split()]
        started.append(Command(arguments, limits=limits))
        return started[-1]

    yield begin
    for command in started:
        command.send(signal.SIGKILL, command.processes())
        command.process.communicate()


@pytest.fixture
def endless(start: Start) -> Callable[..., Command]:
    """Return endless(options, **more), which starts a run that does not end, and waits for its third step."""

    def begin(options: str = "--parallel.tp 2", **more: str) -> Command:
        command = start(f"{ENDLESS} {options}", **more)
        command.wait_for("step 3/")
        return command

    return begin


def check_losses(run: Path, flags: list[str]) -> None:
    """Raise AssertionError unless the losses of a run of DOUBLE, ENDLESS or not, are those of one rank."""
    found, one = losses(run), run.with_name("one")
    words = f"{ENDLESS} {DOUBLE} --optim.decay-steps 1000000 --train.steps {len(found)} --out {one}"
    assert cli.run(["train", *flags, *words.split()]) == 0
    assert found == pytest.approx(losses(one), rel=1e-9)


@pytest.mark.processes
def test_a_suspended_run_goes_on_and_ctrl_c_stops_it(endless: Start, flags: list[str], tmp_path: Path) -> None:
    """It is suspended for longer than its deadline: the signals are those of Ctrl-Z, and of `fg`."""
    timeout, run = patient(3.0), tmp_path / "run"
    command = endless(f"{DOUBLE} --parallel.tp 2 --comm.timeout {timeout:.1f}")
    command.send(signal.SIGSTOP, command.ranks())
    sleep(1.5 * timeout)
    before = read_metrics(run / "metrics.jsonl")[-1]["step"]
    command.send(signal.SIGCONT, command.ranks())
    wait_until(lambda: read_metrics(run / "metrics.jsonl")[-1]["step"] > before + 3, "the run goes on")
    os.killpg(command.process.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
    out, err = command.end()
    assert "stopped at step" in out and "tpfuse train --resume --out" in out and err == ""
    (saved,) = run.glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, step + 1))
    words = f"{ENDLESS} --parallel.tp 1 --train.steps {step + 2} --out {run}".split()
    assert cli.run(["train", "--resume", *words]) == 0
    assert len(losses(run)) == step + 2
    check_losses(run, flags)


@pytest.mark.processes
def test_a_signal_during_the_start_stops_the_run(start: Start) -> None:
    command = start(f"{ENDLESS} --parallel.tp 2")
    wait_until(command.ranks, "a rank has started", 120.0)
    command.process.send_signal(signal.SIGTERM)
    assert command.end()[1] == ""


@pytest.mark.processes
def test_ctrl_c_before_training_is_one_line(start: Start) -> None:
    command = start(ENDLESS)
    command.wait_for("reading")  # torch is imported now
    command.process.send_signal(signal.SIGINT)
    assert command.end(130)[1] == "tpfuse: interrupted\n"


@pytest.mark.processes
def test_a_signal_to_one_rank_of_torchrun_stops_all_ranks(start: Start, flags: list[str], tmp_path: Path) -> None:
    command = start(f"{ENDLESS} {DOUBLE} --parallel.cp 2", program=TORCHRUN)
    said = command.wait_for("step 3/")
    assert "ranks    tp 1 x cp 2 x dp 1 on cpu" in said
    assert "layers   2 direct (ulysses, zigzag: the heads can be divided" in said
    command.send(signal.SIGTERM, [_rank(command, 1)])
    assert "stopped at step" in command.end()[0]
    check_losses(tmp_path / "run", flags)
    (manifest,) = (tmp_path / "run").glob("step-*/manifest.json")
    assert '"cp": 2' in manifest.read_text()


def _has_losses(run: Path, count: int) -> bool:
    return (run / "metrics.jsonl").exists() and len(losses(run)) >= count


@pytest.mark.processes
def test_a_run_that_is_killed_and_resumed_in_other_layouts_has_the_same_bits(start: Start, tmp_path: Path) -> None:
    """All processes of a run are killed 20 times, at random moments; the next ones have another layout."""
    random, run, steps = Random(7), tmp_path / "run", 400
    options = (
        f"--train.virtual-ranks 4 --train.steps {steps} --train.log-every 1 --train.eval-every 0 --model.dropout 0.1"
    )
    start(f"{options} --parallel.dp 1", out="undisturbed").end()
    layouts = ["--parallel.dp 1 --parallel.pp 2", "--parallel.dp 2 --zero.stage 3", "--parallel.dp 1 --zero.stage 1"]
    layouts += ["--parallel.dp 4 --zero.stage 2", "--parallel.dp 2 --parallel.pp 2 --zero.stage 1"]
    for kill in range(20):
        layout = random.choice(layouts)
        command = start(f"{options} --train.save-every 7 --train.keep 2 {layout} --resume auto")
        wait_until(partial(_has_losses, run, 1 + (len(losses(run)) if kill else 0)), "a step", 60.0)
        sleep(random.uniform(0.0, 0.3))
        command.send(signal.SIGKILL, command.processes())
        command.process.communicate()
        command.wait_for_processes()
        assert len(losses(run)) < steps, "it was killed in a step"
    start(f"{options} --resume auto --parallel.dp 2").end()
    assert losses(run) == losses(tmp_path / "undisturbed")
    manifests = [
        json.loads((tmp_path / out / f"step-{steps}/manifest.json").read_text()) for out in ("run", "undisturbed")
    ]
    digests = [{name: x["digest"] for name, x in each["tensors"].items()} for each in manifests]
    assert digests[0] == digests[1] and len(digests[0]) > 40, "weights and moments"


@pytest.mark.processes
def test_a_run_starts_again_when_a_rank_is_killed(start: Start, tmp_path: Path) -> None:
    """The rank of the second stage is killed before the first checkpoint, and that of the first stage after it; all
    steps of both starts have the same losses again.

    There are so many steps between checkpoints that the test sees a step and kills the rank before the next one.
    """
    interval, steps, run = 30, 80, tmp_path / "run"
    options = f"--train.steps {steps} --train.log-every 1 --train.eval-every 0 --train.save-every {interval}"
    command = start(f"{options} --parallel.pp 2 --restarts 2 --resume auto")
    before: list[float] = []
    for victim, step in ((1, 3), (0, 3 * interval // 2)):
        command.wait_for(f"step {step}/")
        again, before = before, losses(run)
        assert len(before) >= step - 1 and before[: len(again)] == again
        command.send(signal.SIGKILL, [_rank(command, victim)])
    out, err = command.end()
    assert len(losses(run)) == steps and losses(run)[: len(before)] == before
    _check_lost(out, interval)
    trained = rf"^trained {steps} steps, \d+ s; goodput \d+% of \d+ s since the first start$"
    assert re.search(trained, out, re.M), out
    warnings = [line for line in err.splitlines() if "restart" in line]
    assert [line[-14:] for line in warnings] == ["restart 1 of 2", "restart 2 of 2"] and "SIGKILL" in err


def _rank(command: Command, rank: int) -> int:
    """Return the process of a rank that tpfuse or torchrun has started."""
    mark = f"\0LOCAL_RANK={rank}\0".encode()
    of_torchrun = [pid for pid in command.processes() if mark in Path(f"/proc/{pid}/environ").read_bytes() + b"\0"]
    return (of_torchrun or command.ranks()[rank:])[0]


def _check_lost(said: str, interval: int) -> None:
    """Raise AssertionError unless a run has said that it lost the steps after its first or second checkpoint."""
    lost = re.search(rf"^lost     steps (\d+) to \d+ and \d+ s since step ({interval}|{2 * interval})$", said, re.M)
    assert lost is not None and int(lost[1]) == int(lost[2]) + 1, said


@pytest.mark.parametrize(
    ("ends", "starts", "status", "said"),
    [
        ([PeerLost("rank 1 was killed")] * 3, 3, 1, "rank 1 was killed; all restarts are used (--restarts 2)"),
        ([PeerLost("rank 1 was killed"), 0], 2, 0, ""),
        ([RunError("step 3: loss nan")], 1, 1, "step 3: loss nan"),
        ([RunError("RUN/step-5: expected", 3)], 1, 3, "RUN/step-5: expected"),
        ([UserError("12 heads cannot be divided")], 1, 2, "12 heads cannot be divided"),
        ([PeerLost("rank 1 was killed"), RunError("the disk is full")], 2, 1, "the disk is full"),
    ],
)
def test_only_a_lost_rank_is_worth_a_restart(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: list[Exception | int],
    starts: int,
    status: int,
    said: str,
) -> None:
    """A stand-in starts ranks that end at once, so no restart makes a step: those of --restarts are the most."""
    began: list[str] = []

    def start_ranks(_function: Any, _world: int, run: Any, *, timeout: float) -> int:
        began.append(run.options.resume)
        end = ends[len(began) - 1]
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(launch, "start_ranks", start_ranks)
    assert cli.run(["train", *flags, "--out", str(tmp_path / "run"), "--restarts", "2"]) == status
    assert began == ["no", "yes", "yes"][:starts]
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert errors == ([f"tpfuse train: error: {said}"] if said else [])


@pytest.mark.processes
def test_a_rank_that_hangs_is_named(endless: Start, tmp_path: Path) -> None:
    command = endless(f"--parallel.tp 2 --comm.timeout {patient(3.0):.1f}")
    command.send(signal.SIGSTOP, command.ranks()[1:])
    _, err = command.end(1)
    told = r"\w+.*, step \d+: rank 0 .*waited \d+\.\d s for rank 1.*; process \d+, last seen in .*\n"
    assert re.fullmatch(f"tpfuse train: error: {told}", err), err
    record = json.loads((tmp_path / "run" / "flight_record_rank0.json").read_text())
    assert record["missing"] == 1 and [len(rank["operations"]) > 10 for rank in record["ranks"]] == [True, True]
    said = hang(tmp_path / "run")
    expected = r"In .* of step \d+, rank 0 waited \d+\.\d s for rank 1\.\nRank 1 \(process \d+\) was stopped by a"
    assert re.match(expected, said)
    mine, stopped = said.split("\nPython stack of rank ")[1:]
    assert " in train_step" in mine and "the process did not answer (its state was T (stopped))" in stopped


@pytest.mark.processes
def test_a_killed_parent_leaves_no_rank(endless: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    command = endless()
    command.process.kill()
    command.wait_for_processes()
    assert list((tmp_path / "run").glob("step-*")), "the ranks save before they go"
    assert not list(temporary.glob("tpfuse*")), "the file through which ranks meet remains"


# This program starts ranks whose imports never end (those of rank 0 of two, or of all ranks), or that do not end.
RANKS = """
import sys, time
from tpfuse.train import launch
from tpfuse.errors import RunError

class Import:
    def __reduce__(self):
        return time.sleep, (1000.0,)

def rank(place, what):
    time.sleep(1000.0 * place.rank)
    return 0

if __name__ == "__main__":
    try:
        sys.exit(launch.start_ranks(rank, 2, Import() if sys.argv[1] == "import" else None, timeout=1.0))
    except RunError as error:
        sys.exit(str(error))
"""


@pytest.mark.processes
def test_ranks_that_are_still_importing_end_with_their_parent(start: Start, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    command = start(program=f"{tmp_path}/ranks.py import")
    wait_until(lambda: len(command.ranks()) == 2, "the parent has started both")
    command.process.kill()
    command.wait_for_processes()


@pytest.mark.processes
def test_a_rank_that_does_not_end_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    _, err = start(program=f"{tmp_path}/ranks.py end").end(1)
    told = r"rank 1 \(process \d+\) did not end within 1 s after the others \(--comm.timeout\)\n"
    assert re.fullmatch(told, err), err


@pytest.mark.processes
def test_a_rank_that_does_not_start_is_named(start: Start) -> None:
    command = start(f"--parallel.tp 2 --comm.timeout {patient(4.0):.1f}")
    wait_until(lambda: len(command.ranks()) == 2, "the parent has started both")
    command.send(signal.SIGSTOP, [max(command.ranks())])
    _, err = command.end(1)
    told = r"tpfuse train: error: rank 0 waited [\d.]+ s for rank 1 to start \(--comm.timeout\)\n"
    assert re.fullmatch(told, err), err


@dataclass
class _Ended:
    """The part of a rank's process that `_reason` reads."""

    exitcode: int
    pid: int = 7


def _ranks(*errors: RunError | None) -> list[launch._RankProcess]:
    return [launch._RankProcess(n, _Ended(-9 if e is None else 1), None, e) for n, e in enumerate(errors)]  # type: ignore[arg-type]


def test_the_most_informative_error_of_a_rank_is_reported() -> None:
    def reason(*errors: RunError | None, killed: int | None = None) -> str:
        ranks = _ranks(*errors)
        silent = [rank for rank in ranks if rank.error is None]
        told = launch._reason(ranks, None if killed is None else ranks[killed], silent, 5.0)
        assert told is not None
        return str(told)

    assert reason(PeerLost("0 waits", (1,)), RunError("disk full")) == "disk full"
    assert reason(PeerLost("0 waits", (1,)), PeerLost("1 waits", (2,)), None) == "1 waits"
    assert reason(PeerLost("0 waits"), PeerLost("1 waits"), None) == "0 waits; rank 2 (process 7) did not answer"
    assert reason(PeerLost("0 waits", (1,)), PeerLost("1 came too late")) == "0 waits"
    assert reason(PeerLost("0 waits", (1,)), None, killed=1).startswith("rank 1 (process 7) was killed by SIGKILL")


def test_ranks_meet_in_a_store_that_has_keys_of_dead_ranks() -> None:
    """torchrun keeps its store when it starts ranks again. At last rank 2 does not come, and the others name it."""
    store = HashStore()

    def meet(rank: int, seconds: float) -> Any:
        return launch._meet(store, launch.RankInfo(rank, 3, rank, 3, None), timedelta(seconds=seconds))

    with ThreadPoolExecutor(3) as threads:
        for start in range(3):
            ranks = [threads.submit(meet, rank, 30.0) for rank in (0, 1)]
            sleep(0.1)  # ranks 0 and 1 find the token of the dead rank 2
            ranks.append(threads.submit(meet, 2, 30.0))
            for rank, own in enumerate([rank.result() for rank in ranks]):
                assert not own.check([str(rank)]), "a key of the ranks before"
                own.set(str(rank), str(start))
                assert own.get("0") == str(start).encode()
        for rank in [threads.submit(meet, rank, 0.3) for rank in (0, 1)]:
            with pytest.raises(PeerLost, match=r"waited 0.3 s for rank 2 to start") as raised:
                rank.result()
            assert raised.value.missing == (2,)


def test_ranks_that_share_a_gpu_are_named_on_all_ranks() -> None:
    def check(gpus: list[str]) -> list[BaseException | None]:
        store, world = HashStore(), len(gpus)
        with ThreadPoolExecutor(world) as threads:
            infos = [launch.RankInfo(rank, world, rank, world, None) for rank in range(world)]
            ranks = [threads.submit(launch._check_gpus, store, *each) for each in zip(infos, gpus, strict=True)]
            return [rank.exception() for rank in ranks]

    assert check(["a", "b", "c"]) == [None, None, None]
    for error in check(["a", "b", "b"]):
        assert isinstance(error, UserError) and "ranks 1 and 2 have the same GPU" in str(error)


@pytest.mark.parametrize(
    ("error", "alone"), [(OSError(28, "full"), True), (MemoryError(), True), (Unavailable(""), False)]
)
def test_errors_of_one_rank_are_its_own(error: Exception, alone: bool) -> None:
    info = launch.RankInfo(0, 1, 0, 1, None)
    with pytest.raises(RunError) as raised, launch.in_group(info, lambda: "step 3", "take less"):
        raise error
    assert raised.value.alone is alone


@pytest.mark.parametrize(
    ("rank", "missing", "alone", "speaks"),
    [(0, (), False, True), (1, (), False, False), (1, (0,), False, True), (1, (), True, True)],
)
def test_under_torchrun_the_first_rank_reports_unless_it_is_missing_or_another_alone_knows(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    missing: tuple[int, ...],
    alone: bool,
    speaks: bool,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    waited: list[float] = []
    monkeypatch.setattr(signal, "pthread_sigmask", lambda how, signals: None)
    monkeypatch.setattr(signal, "sigtimedwait", lambda _, seconds: waited.append(seconds))
    fail("train", "why", missing, alone)
    assert capsys.readouterr().err == ("tpfuse train: error: why\n" if speaks else "")
    assert bool(waited) != speaks, "torchrun would kill the first rank before it reports"
    monkeypatch.delenv("LOCAL_RANK")
    fail("train", "a container", missing, alone)
    assert capsys.readouterr().err == "tpfuse train: error: a container\n", "torchrun has not started this process"


@pytest.mark.processes
def test_a_second_signal_ends_the_ranks_at_once(endless: Start, tmp_path: Path) -> None:
    command = endless("--parallel.tp 2 --train.save-every 2")
    command.send(signal.SIGSTOP, command.ranks())  # they will not save
    saved = max((tmp_path / "run").glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
    for number in STOP_SIGNALS:
        command.process.send_signal(number)
    expected = f"tpfuse train: error: ended at once by a second signal; the newest checkpoint is {saved}\n"
    assert command.end(1)[1] == expected


@pytest.mark.processes
def test_a_failed_allocation_of_shared_memory_is_one_line(start: Start) -> None:
    _, err = start("--parallel.tp 2", limits={resource.RLIMIT_FSIZE: 200_000}).end(1)
    told = r"tpfuse train: error: .*: rank \d: \d+ bytes of shared memory for .* cannot be made: .*\n"
    assert re.fullmatch(told, err), err


@pytest.mark.processes
def test_a_requeued_job_of_slurm_continues(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of docs/multi_node.md runs with stand-ins of Slurm.

    A rank is killed, and torchrun starts all ranks again. Then the job is preempted, and it runs again as it is.
    """
    page = (Path(__file__).parents[2] / "docs" / "multi_node.md").read_text()
    (script,) = (part.partition("```")[0] for part in page.split("```sh\n") if part.startswith("#!/bin/bash"))
    steps, interval = 120, 20
    options = f"{shlex.join(flags)} {DOUBLE} {ENDLESS} --optim.decay-steps 1000000"
    options += f" --train.steps {steps} --train.save-every {interval}"
    for old, new in {
        "--config run.toml": options,
        "/shared/runs/two": str(tmp_path / "run"),
        "--nproc-per-node 8": "--nproc-per-node 2",
        "--parallel.tp 8": "--parallel.tp 2",
        "29500": "0",
    }.items():
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "script").write_text(script)
    stand_ins = {
        "scontrol": 'test "$*" = "show hostnames this[1-1]" && echo localhost',
        "srun": 'exec "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {"NNODES": "1", "JOB_ID": "7", "JOB_NODELIST": "this[1-1]", "PROCID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    job = f"-c import os; os.execlp('bash', 'bash', '{tmp_path / 'script'}')".split(" ", 1)
    first = Command(job)
    first.wait_for(f"step {3 * interval // 2}/")
    first.send(signal.SIGKILL, [_rank(first, 1)])
    _check_lost(first.wait_for("lost     "), interval)
    first.wait_for("measured")  # after the first step
    first.send(signal.SIGTERM, first.processes())  # Slurm signals all processes of a step
    assert "stopped at step" in first.process.communicate()[0]
    first.wait_for_processes()
    saved = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    out, _ = Command(job).end()
    assert f", continuing after step {saved}" in out
    assert len(losses(tmp_path / "run")) == steps
    check_losses(tmp_path / "run", flags)


@pytest.mark.processes
def test_bad_input_under_torchrun_is_reported_once(start: Start, tmp_path: Path) -> None:
    command = start("--parallel.tp 4", program=TORCHRUN)
    _, err = command.process.communicate(timeout=patient(120.0))  # torchrun adds a traceback of its own
    assert command.process.returncode != 0
    assert err.count("tpfuse train: error: tp 4 x dp 1 needs 4 ranks, and there are 2") == 1
    command.wait_for_processes()
    assert not (tmp_path / "run").exists()
