"""Runs in processes of their own, as users start them, with ranks that can be stopped and killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tpfuse import cli
from tpfuse.testing.patience import patient, wait_until
from tpfuse.train import launch
from tpfuse.train.errors import PeerLost, RunError
from tpfuse.train.launch import STOP_SIGNALS
from tpfuse.train.messages import fail
from tpfuse.train.metrics import read_metrics

ENDLESS = ["--train.steps", "1000000", "--train.log-every", "1", "--train.eval-every", "0", "--train.save-every", "0"]


class Started:
    """A running command. Every process that it starts has the command's mark in its environment."""

    def __init__(self, arguments: list[str]) -> None:
        self.mark = f"TPFUSE_TEST={uuid.uuid4()}"
        key, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, key: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # no new session: the scheduler divides processors among sessions
        )

    def wait_for(self, word: str) -> None:
        """Reads stdout until a line contains `word`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if word in line:
                return
        pytest.fail(f"ended without {word!r}: {self.process.communicate()[1]}")

    def end(self, seconds: float = 120.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=patient(seconds))
        return self.process.returncode, out, err

    def left(self) -> list[int]:
        """Returns the processes with the mark that still run."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def ranks(self) -> list[int]:
        """Returns the processes that compute, which are those with several threads of torch."""
        return [
            pid
            for pid in self.left()
            if pid != self.process.pid and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def assert_nothing_is_left(self) -> None:
        wait_until(lambda: not self.left(), "all processes have ended")


@pytest.fixture
def start(flags: list[str]) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def begin(*extra: str, program: tuple[str, ...] = ("-m", "tpfuse", "train")) -> Started:
        started.append(Started([*program, *flags, *extra]))
        return started[-1]

    yield begin
    for command in started:
        for pid in command.left():
            os.kill(pid, signal.SIGKILL)
        command.process.communicate()


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if row["loss"] is not None]


@pytest.mark.processes
def test_ranks_of_tpfuse_and_of_torchrun_train_alike(start: Callable[..., Started], tmp_path: Path) -> None:
    double = ("--train.dtype", "float64", "--model.dropout", "0.1")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tpfuse", "train")
    commands = {
        "tp 2": start(*double, "--parallel.tp", "2", "--out", str(tmp_path / "a")),
        "torchrun": start(*double, "--out", str(tmp_path / "b"), program=torchrun),
    }
    for name, command in commands.items():
        status, out, err = command.end()
        assert status == 0, (name, err)
        assert "validation loss" in out
        command.assert_nothing_is_left()
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-9)
    layouts = [json.loads((tmp_path / run / "step-12" / "manifest.json").read_text()) for run in "ab"]
    assert '"tp": 2' in json.dumps(layouts[0])
    assert '"dp": 2' in json.dumps(layouts[1])


@pytest.mark.processes
def test_context_parallel_ranks_of_torchrun_train_as_one_rank(
    start: Callable[..., Started], flags: list[str], tmp_path: Path
) -> None:
    double = ("--train.dtype", "float64", "--model.dropout", "0.1")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tpfuse", "train")
    shared = start(*double, "--parallel.cp", "2", "--out", str(tmp_path / "b"), program=torchrun)
    assert cli.run(["train", *flags, *double, "--out", str(tmp_path / "a")]) == 0
    status, out, err = shared.end()
    assert status == 0, err
    assert "ranks    tp 1 x cp 2 x dp 1 on cpu" in out
    assert "layers   2 direct (ulysses, zigzag: the heads can be divided" in out
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-9)
    assert '"cp": 2' in (tmp_path / "b" / "step-12" / "manifest.json").read_text()


def _decisions(step: Path) -> dict[str, str]:
    """Returns the implementation of each case in a checkpoint."""
    cases = json.loads((step / "manifest.json").read_text())["state"]["decisions"]["cases"]
    return {case: decision["taken"] for case, decision in cases.items()}


@pytest.mark.processes
def test_a_resumed_run_uses_the_measurements_of_its_first_step(
    start: Callable[..., Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, kept = tmp_path / "run", tmp_path / "cache" / "tpfuse" / "decisions.json"
    flags = ("--parallel.tp", "2", "--parallel.measure-seconds", "20", "--out", str(run))
    status, out, err = start(*flags, "--train.steps", "5").end()
    assert (status, err) == (0, "")
    assert (found := re.search(r"^auto     ((\d+) \w+(, (\d+) \w+)?); measured in (\d+\.\d) s$", out, re.MULTILINE))
    decisions = _decisions(run / "step-5")
    assert int(found[2]) + int(found[4] or 0) == len(decisions) == 8  # four products of a layer, forward and backward
    document = json.loads(kept.read_text())
    (cases,) = document.values()
    assert {case: decision["taken"] for case, decision in cases.items()} == decisions
    for decision in cases.values():  # as a run on another day might decide
        (decision["taken"],) = decision["milliseconds"].keys() - {decision["taken"]}
    kept.write_text(json.dumps(document))
    status, out, err = start(*flags, "--train.steps", "7", "--resume").end()
    assert (status, err) == (0, "")
    assert f"auto     {found[1]}; measured in 0.0 s\n" in out
    assert _decisions(run / "step-7") == decisions
    other = tmp_path / "other"
    status, out, err = start(*flags[:-1], str(other), "--train.steps", "5").end()
    assert (status, err) == (0, "")
    assert all(taken != decisions[case] for case, taken in _decisions(other / "step-5").items())


@pytest.mark.parametrize(
    ("number", "to_all"), [(signal.SIGTERM, False), pytest.param(signal.SIGINT, True, marks=pytest.mark.processes)]
)
def test_a_stopped_run_saves_and_can_be_resumed(
    start: Callable[..., Started], tmp_path: Path, number: signal.Signals, to_all: bool
) -> None:
    run = tmp_path / "run"
    command = start(*ENDLESS, "--parallel.tp", "2", "--out", str(run))
    command.wait_for("step 3/")
    if to_all:  # what a terminal does at Ctrl-C
        os.killpg(command.process.pid, number)
    else:
        command.process.send_signal(number)
    status, out, err = command.end()
    assert (status, err) == (0, "")
    assert "stopped at step" in out
    assert "tpfuse train --resume --out" in out
    command.assert_nothing_is_left()
    (saved,) = run.glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, step + 1))
    again = start("--parallel.tp", "2", "--resume", "--out", str(run), *ENDLESS, "--train.steps", str(step + 2))
    status, _, err = again.end()
    assert (status, err) == (0, "")
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == step + 2


@pytest.mark.processes
def test_a_signal_during_the_start_stops_the_run(start: Callable[..., Started], tmp_path: Path) -> None:
    command = start(*ENDLESS, "--parallel.tp", "2", "--out", str(tmp_path / "run"))
    wait_until(command.ranks, "a rank has started", 120.0)
    command.process.send_signal(signal.SIGTERM)
    status, _, err = command.end()
    assert (status, err) == (0, "")
    command.assert_nothing_is_left()


@pytest.mark.processes
def test_ctrl_c_before_training_is_one_line(start: Callable[..., Started], tmp_path: Path) -> None:
    command = start(*ENDLESS, "--out", str(tmp_path / "run"))
    command.wait_for("reading")  # torch is imported now
    command.process.send_signal(signal.SIGINT)
    status, _, err = command.end()
    assert (status, err) == (130, "tpfuse: interrupted\n")


@pytest.mark.processes
def test_a_signal_to_one_rank_of_torchrun_stops_all_ranks(start: Callable[..., Started], tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tpfuse", "train")
    command = start(*ENDLESS, "--out", str(tmp_path / "run"), program=torchrun)
    command.wait_for("step 3/")
    rank = next(pid for pid in command.left() if b"LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes() + b"\0")
    os.kill(rank, signal.SIGTERM)
    status, out, err = command.end()
    assert status == 0, err
    assert "stopped at step" in out


def test_a_killed_rank_ends_the_run(start: Callable[..., Started], tmp_path: Path) -> None:
    command = start(*ENDLESS, "--parallel.tp", "2", "--out", str(tmp_path / "run"))
    command.wait_for("step 3/")
    victim = command.ranks()[1]
    os.kill(victim, signal.SIGKILL)
    status, _, err = command.end()
    assert status == 1
    assert re.fullmatch(rf"tpfuse train: error: rank \d \(process {victim}\) was killed by SIGKILL: .*\n", err), err
    command.assert_nothing_is_left()


@pytest.mark.processes
def test_a_token_file_that_gets_shorter_ends_all_ranks(start: Callable[..., Started], tmp_path: Path) -> None:
    """The error names the file. SIGBUS, which would kill a process that has mapped the file, does not occur."""
    command = start(*ENDLESS, "--parallel.dp", "2", "--out", str(tmp_path / "run"))
    command.wait_for("step 3/")
    os.truncate(tmp_path / "run" / "data" / "tokens.bin", 1024)
    status, _, err = command.end()
    assert status == 1
    assert re.search(r"error: step \d+: rank \d: .*tokens.bin has become shorter: expected \d+ tokens, found 0", err), (
        err
    )
    assert "Traceback" not in err and "SIGBUS" not in err
    command.assert_nothing_is_left()


@pytest.mark.processes
def test_a_rank_that_hangs_is_named(start: Callable[..., Started], tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = start(*ENDLESS, "--parallel.tp", "2", "--comm.timeout", f"{patient(3.0):.1f}", "--out", str(run))
    command.wait_for("step 3/")
    os.kill(command.ranks()[1], signal.SIGSTOP)
    status, _, err = command.end()
    assert status == 1
    told = (
        r"tpfuse train: error: \w+.*, step \d+: rank 0 .*waited \d+\.\d s for rank 1.*; process \d+, last seen in .*\n"
    )
    assert re.fullmatch(told, err), err
    command.assert_nothing_is_left()
    record = json.loads((run / "flight_record_rank0.json").read_text())
    assert record["missing"] == 1 and [len(rank["operations"]) > 10 for rank in record["ranks"]] == [True, True]


@pytest.mark.processes
def test_a_run_suspended_for_longer_than_the_deadline_continues(start: Callable[..., Started], tmp_path: Path) -> None:
    """The signals are those of Ctrl-Z, and of `fg` a while later."""
    timeout, run = patient(3.0), tmp_path / "run"
    command = start(*ENDLESS, "--parallel.tp", "2", "--comm.timeout", f"{timeout:.1f}", "--out", str(run))
    command.wait_for("step 3/")
    for pid in command.ranks():
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5 * timeout)
    step = read_metrics(run / "metrics.jsonl")[-1]["step"]
    for pid in command.ranks():
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: read_metrics(run / "metrics.jsonl")[-1]["step"] > step + 3, "the run goes on")
    command.process.send_signal(signal.SIGTERM)
    status, out, err = command.end()
    assert (status, err) == (0, "")
    assert "stopped at step" in out


@pytest.mark.processes
def test_a_killed_parent_leaves_no_rank(
    start: Callable[..., Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    command = start(*ENDLESS, "--parallel.tp", "2", "--out", str(tmp_path / "run"))
    command.wait_for("step 3/")
    command.process.kill()
    command.assert_nothing_is_left()
    assert list((tmp_path / "run").glob("step-*")), "the ranks save before they go"
    assert not list(temporary.glob("tpfuse*")), "the file through which ranks meet remains"


# This program starts ranks whose imports never end (those of rank 0 of two, or of all ranks), or that do not end.
RANKS = """
import sys, time
from tpfuse.train import launch
from tpfuse.train.errors import RunError

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
def test_ranks_that_are_still_importing_end_with_their_parent(start: Callable[..., Started], tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    command = start(program=(str(tmp_path / "ranks.py"), "import"))
    wait_until(lambda: len(command.ranks()) == 2, "the parent has started both")
    command.process.kill()
    command.assert_nothing_is_left()


@pytest.mark.processes
def test_a_rank_that_does_not_end_is_named(start: Callable[..., Started], tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    command = start(program=(str(tmp_path / "ranks.py"), "end"))
    status, _, err = command.end()
    assert status == 1
    assert re.fullmatch(r"rank 1 \(process \d+\) did not end within 1 s after the others \(--comm.timeout\)\n", err), (
        err
    )
    command.assert_nothing_is_left()


@pytest.mark.processes
def test_a_rank_that_does_not_start_is_named(start: Callable[..., Started], tmp_path: Path) -> None:
    command = start("--parallel.tp", "2", "--comm.timeout", f"{patient(4.0):.1f}", "--out", str(tmp_path / "run"))
    wait_until(lambda: len(command.ranks()) == 2, "the parent has started both")
    os.kill(max(command.ranks()), signal.SIGSTOP)
    status, _, err = command.end()
    assert status == 1
    told = r"tpfuse train: error: rank 0 waited [\d.]+ s for rank 1 to start \(--comm.timeout\)\n"
    assert re.fullmatch(told, err), err
    command.assert_nothing_is_left()


@dataclass
class _Ended:
    """The part of a rank's process that `_reason` reads."""

    exitcode: int
    pid: int = 7


def _ranks(*errors: RunError | None) -> list[launch._Rank]:
    return [launch._Rank(n, _Ended(-9 if e is None else 1), None, e) for n, e in enumerate(errors)]  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("rank", "missing", "speaks"), [(0, (), True), (1, (), False), (1, (0,), True)])
def test_under_torchrun_the_first_rank_that_is_not_missing_reports(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    missing: tuple[int, ...],
    speaks: bool,
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    fail("train", "why", missing)
    assert capsys.readouterr().err == ("tpfuse train: error: why\n" if speaks else "")


@pytest.mark.processes
def test_a_second_signal_ends_the_ranks_at_once(start: Callable[..., Started], tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = start(*ENDLESS, "--parallel.tp", "2", "--train.save-every", "2", "--out", str(run))
    command.wait_for("step 3/")
    for pid in command.ranks():  # which will not save
        os.kill(pid, signal.SIGSTOP)
    saved = max(run.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
    for number in STOP_SIGNALS:
        command.process.send_signal(number)
    status, _, err = command.end()
    expected = f"tpfuse train: error: ended at once by a second signal; the newest checkpoint is {saved}\n"
    assert (status, err) == (1, expected)
    command.assert_nothing_is_left()


@pytest.mark.processes
def test_a_failed_allocation_of_shared_memory_is_one_line(start: Callable[..., Started], tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000,) * 2)"
    limited = f"{limit}; from tpfuse.__main__ import main; main()"
    command = start("--parallel.tp", "2", "--out", str(tmp_path / "run"), program=("-c", limited, "train"))
    status, _, err = command.end()
    assert status == 1
    told = r"tpfuse train: error: .*: rank \d: \d+ bytes of shared memory for .* cannot be made: .*\n"
    assert re.fullmatch(told, err), err
    command.assert_nothing_is_left()


@pytest.mark.processes
def test_all_ranks_stop_at_a_loss_that_is_not_finite(start: Callable[..., Started], tmp_path: Path) -> None:
    explosion = ("--optim.lr", "1e30", "--optim.clip", "0", "--optim.warmup", "0", "--parallel.tp", "2")
    command = start(*explosion, "--out", str(tmp_path / "run"))
    status, _, err = command.end()
    assert status == 1
    assert err.count("\n") == 1
    assert "step 1: loss nan" in err
    command.assert_nothing_is_left()


@pytest.mark.processes
def test_bad_input_under_torchrun_is_reported_once(start: Callable[..., Started], tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tpfuse", "train")
    command = start("--parallel.tp", "4", "--out", str(tmp_path / "run"), program=torchrun)
    status, _, err = command.end()
    assert status != 0
    assert err.count("tpfuse train: error: tp 4 x dp 1 needs 4 ranks, and there are 2") == 1
    assert not (tmp_path / "run").exists()
    command.assert_nothing_is_left()


@pytest.mark.processes
def test_bad_input_starts_no_rank(start: Callable[..., Started], tmp_path: Path) -> None:
    command = start("--parallel.tp", "3", "--out", str(tmp_path / "run"))
    status, out, err = command.end()
    assert status == 2 and out.startswith("reading  ") and out.count("\n") == 1
    assert err == "tpfuse train: error: tp 3 does not divide n_head 4: it can be one of [1, 2, 4]\n"
    command.assert_nothing_is_left()
