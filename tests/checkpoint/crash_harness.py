"""Run saves that are killed, or whose disk fails, at their k-th operation, for every k.

`sweep` runs in a process that never starts a thread, and forks the ranks of each save. Each rank counts the calls by
which the os module changes the disk. At the k-th call, the rank is killed before or after the call (kill), or the call
fails (fail). `sweep` returns how many calls there are of each kind, which outcomes occurred, and a line for each error.

Before each save, the run holds steps 8 and 9, the remains of an earlier crash, and on request a damaged step 10. After
saving step 10 with keep=2, exactly step 10 or exactly step 9 must load, and saving step 11 afterwards must work.
"""

import collections
import errno
import json
import os
import shutil
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tpfuse.checkpoint import checkpoint, safetensors_file
from tpfuse.checkpoint.checkpoint import Shard
from tpfuse.comm import handle
from tpfuse.testing.patience import Deadline, patient

COUNTED = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
SHAPES = {"weight": ((4, 6), torch.float32), "moment": ((3,), torch.float64), "count": ((), torch.int64)}
DEADLINE = 30.0  # seconds, for a save that takes milliseconds
# What a failing disk does at call k: error, whether all later calls fail as well, and whether unlink still works.
FAILURES = {
    "ENOSPC": (errno.ENOSPC, False),
    "ENOSPC from then on": (errno.ENOSPC, True),
    "EIO": (errno.EIO, False),
    "EIO from then on": (errno.EIO, True),
    "short write": (0, False),
}


def whole(name: str, step: int) -> torch.Tensor:
    shape, dtype = SHAPES[name]
    return (torch.arange(torch.Size(shape).numel()) * 7 + step).to(dtype).view(shape)


def shards_of(step: int, rank: int, world: int) -> dict[str, list[Shard]]:
    """Return shards of the weight on all ranks and of the other tensors on the last, so that each rank writes some."""
    shards = {}
    for name, (shape, _) in SHAPES.items():
        cuts = [tuple((0, size) for size in shape)]
        if name == "weight":
            rows = 4 * rank // world, 4 * (rank + 1) // world
            cuts = [(rows, (0, 2)), (rows, (2, 6))]
        tensors = [whole(name, step)[tuple(slice(*s) for s in slices)] for slices in cuts]
        is_owner = name == "weight" or rank == world - 1
        shards[name] = [Shard(shape, slices, x, is_owner) for slices, x in zip(cuts, tensors, strict=True)]
    return shards


def state_of(step: int) -> dict[str, object]:
    return {"step": step, "random": list(range(step, step + 20))}


def save(run: Path, step: int, group: dist.ProcessGroup | None = None, warn=print) -> Path | None:
    rank, world = (group.rank(), group.size()) if group is not None else (0, 1)
    return checkpoint.save(run, step, shards_of(step, rank, world), state_of(step), keep=2, group=group, warn=warn)


def is_planted(line: str) -> bool:
    """Return whether a warning is about the damaged step 10 that was placed there before the save."""
    return "step-10/manifest.json: expected the step of step-10, found step 8" in line


def what_loads(run: Path) -> int:
    """Return the step that loads, after comparing every tensor and the state with those of that step."""
    said: list[str] = []
    saved = checkpoint.newest_good(run, warn=said.append)
    assert saved is not None and all(map(is_planted, said)), f"damaged checkpoints: {said}"
    shards = shards_of(0, 0, 1)
    saved.load(shards)
    for name, held in shards.items():
        loaded = torch.cat([shard.tensor for shard in held], -1) if len(held) > 1 else held[0].tensor
        assert torch.equal(loaded, whole(name, saved.step)), f"{name} is not that of step {saved.step}"
    assert saved.state == state_of(saved.step), f"the state is not that of step {saved.step}"
    return saved.step


class Disk:
    """Count the calls that change the disk, and make the k-th one fail in the given mode (k 0: none)."""

    def __init__(self, mode: str, k: int) -> None:
        self.mode, self.k, self.log = mode, k, []
        self.functions = {name: getattr(os, name) for name in COUNTED}
        for name in COUNTED:
            setattr(os, name, self._counting(name))

    def mend(self) -> None:
        for name, function in self.functions.items():
            setattr(os, name, function)

    def _counting(self, name):
        def call(*args, **options):
            if name == "open" and not args[1] & os.O_CREAT:
                return self.functions[name](*args, **options)
            self.log.append(name)
            return self._strike(name, args, options)

        return call

    def _strike(self, name, args, options):
        if self.mode in FAILURES:
            code, lasting = FAILURES[self.mode]
            if self.k and (len(self.log) == self.k or (lasting and len(self.log) > self.k)):
                if code:
                    # A full disk accepts a part of the write before it fails, and files can still be removed.
                    if name == "write" and len(self.log) == self.k:
                        self.functions[name](args[0], args[1][: len(args[1]) // 2])
                    if code == errno.EIO or name not in ("unlink", "rmdir", "rename"):
                        raise OSError(code, os.strerror(code), *([] if name in ("write", "fsync") else args[:1]))
                elif name == "write":
                    return self.functions[name](args[0], args[1][: (len(args[1]) + 1) // 2])
            return self.functions[name](*args, **options)
        if len(self.log) == self.k and self.mode == "kill before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = self.functions[name](*args, **options)
        if len(self.log) == self.k and self.mode == "kill after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def rank_main(run: Path, rank: int, world: int, mode: str, k: int) -> dict[str, object]:
    """Save step 10 on the given disk. Unless ranks are killed, check the result afterwards and save step 11."""
    group = None
    handle.PATIENCE = 0.0  # the test does not read which rank is missing
    if world > 1:
        store = dist.FileStore(str(run.with_suffix(".store")), world)
        limit = timedelta(seconds=patient(DEADLINE / 2))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        group = dist.group.WORLD
        store.set(f"connected {rank}", "")
        store.wait([f"connected {other}" for other in range(world)])
    said: list[str] = []
    disk = Disk(mode, k)
    try:
        saved = save(run, 10, group, said.append)
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        disk.mend()
    report: dict[str, object] = {"log": disk.log, "saved": saved is not None, "said": said}
    if mode in FAILURES:
        if rank == 0:
            report |= {"loads": what_loads(run), "left": [path.name for path in run.iterdir()]}
        later: list[str] = []
        report["next"] = save(run, 11, group, later.append) is not None and all(map(is_planted, later))
    return report


def fork(run: Path, rank: int, *args) -> int:
    child = os.fork()
    if child:
        return child
    try:
        report = rank_main(run, rank, *args)
    except BaseException:
        report = {"exception": traceback.format_exc()}
    run.with_suffix(f".{rank}").write_text(json.dumps(report))
    os._exit(0)


def ranks(run: Path, world: int, victim: int, mode: str, k: int) -> list[dict[str, object] | None]:
    """Return the report of each rank; None for a rank that was killed."""
    children = [fork(run, rank, world, mode, k if rank == victim else 0) for rank in range(world)]
    deadline, late = Deadline(DEADLINE), False
    for child in children:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            late = late or not deadline.left()
            if late:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
    assert not late, "a rank did not end in time"
    files = [run.with_suffix(f".{rank}") for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def check_killed(run: Path, victim: int, reports) -> int:
    loads = what_loads(run)
    for rank, report in enumerate(reports):
        if rank == victim:
            assert report is None, f"the victim lived: {report}"
        else:
            assert "exception" not in report, report["exception"]
            assert "error" in report, f"rank {rank} does not know that rank {victim} died: {report}"
    assert save(run, 11, warn=lambda line: None) is not None, "step 11 cannot be saved"
    return loads


def check_failed(run: Path, victim: int, mode: str, reports) -> int:
    for report in reports:
        assert "saved" in report, report.get("exception") or report
    loads, saved, said = reports[0]["loads"], reports[0]["saved"], reports[0]["said"]
    assert all(report["saved"] == saved for report in reports), "ranks disagree on whether step 10 was saved"
    assert not any(report["said"] for report in reports[1:]), "a rank other than 0 warns"
    assert not saved or loads == 10, "step 10 was reported as saved and does not load"
    if not saved:
        said = [line for line in said if not is_planted(line)]
        assert "step 10 was not saved: rank " + str(victim) in said[0] and str(run) in said[0], said
        assert "from then on" in mode or ".staging-step-10" not in reports[0]["left"], "staging is left behind"
    assert mode != "short write" or (saved and all(map(is_planted, said))), "a short write is not an error"
    assert all(report["next"] for report in reports), "step 11 cannot be saved"
    return loads


def check(run: Path, world: int, victim: int, mode: str, k: int, *, durable: bool) -> int:
    """Run one save with a failure at the victim's k-th call, and return the step that loads. Raise AssertionError.

    durable: whether step 10 is durable on the disk at that call.
    """
    reports = ranks(run, world, victim, mode, k)
    loads = check_failed(run, victim, mode, reports) if mode in FAILURES else check_killed(run, victim, reports)
    assert not durable or loads == 10, "step 10 was durable and does not load"
    assert not durable or mode not in FAILURES or reports[0]["saved"], "step 10 is durable and was reported as failed"
    assert loads in (9, 10), f"step {loads} loads"
    assert what_loads(run) == 11, "step 11 does not load"
    left = {path.name for path in run.iterdir()}
    # A damaged step 10 that was not replaced is left for a person to inspect.
    left -= {"step-10"} if loads == 9 and is_damaged(run / "step-10") else set()
    assert left == {"step-11", f"step-{loads}"}, f"left behind: {left}"
    return loads


def is_damaged(folder: Path) -> bool:
    return folder.exists() and b'"step": 8' in (folder / "manifest.json").read_bytes()


def prepare(template: Path, damaged: bool) -> None:
    for step in (8, 9):
        save(template, step)
    for junk in (".staging-step-10", ".staging-step-7", ".deleting-step-3"):
        shutil.copytree(template / "step-8", template / junk)
    if damaged:
        shutil.copytree(template / "step-8", template / "step-10")


def sweep(kind: str, world: int, damaged: bool, every: int, folder: Path) -> dict[str, object]:
    """Fail every call of each victim. If `every` is not 1, fail each `every`-th call, of the victims in turn."""
    torch.set_num_threads(1)  # a thread of torch would not survive the fork
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    safetensors_file.CHUNK_BYTES = 32
    template = folder / "template"
    prepare(template, damaged)
    shutil.copytree(template, folder / "untouched")
    logs = [report["log"] for report in ranks(folder / "untouched", world, 0, "kill before", 0)]
    # The last rename but one is that of step 10, which an fsync makes durable. The last is that of step 8.
    durable = [call for call, name in enumerate(logs[0], 1) if name == "rename"][-2] + 1
    assert logs[0][durable - 1] == "fsync"
    outcomes, problems, cases = collections.Counter(), [], 0
    modes = tuple(FAILURES) if kind == "fail" else ("kill before", "kill after")
    for number, mode in enumerate(modes):
        for victim in range(world):
            turn = number + 2 * victim
            for k in range(1 + turn % every, len(logs[victim]) + 1, every):
                run = folder / f"run-{cases}"
                cases += 1
                shutil.copytree(template, run)
                try:
                    outcomes[check(run, world, victim, mode, k, durable=victim == 0 and k > durable)] += 1
                except (AssertionError, checkpoint.CheckpointError) as error:
                    problems.append(f"{mode}, rank {victim}, call {k} ({logs[victim][k - 1]}): {error}")
                shutil.rmtree(run)
    calls = [dict(collections.Counter(log)) for log in logs]
    return {"calls": calls, "outcomes": dict(outcomes), "cases": cases, "problems": problems}
