"""Steps of a long run, each in a process of its own, whose rows are kept as they come; a later run goes on.

A folder holds what has been found:

    rows.jsonl     a line for each row, synced to the disk before the next one is begun: "step" and "row" name it,
                   "seconds" is what it took, "error" the end of the traceback of one that raised; what else there is is
                   the step's. A line with "finished" is the step's last.
    running.json   the row that is being made: what the blame falls on where the process dies or hangs
    log.txt        what the processes print

A row that raises does not end its step; one that hangs, or takes its process down, is written by the parent, and a new
process goes on behind it. A row is begun only while there is time left for its step, and what the end of the whole run
cuts off is not blamed: the next run begins with it.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

Row = dict[str, Any]

ALL = "all that follow"  # the row of a step that has ended in none of its rows
_LATER, _RESTART = 76, 75  # exit statuses: no time left; a row was kept that leaves the process unfit
_TRACEBACK = 6  # lines that are kept of one
_LOOK = 0.1  # seconds between two looks at a process
_PRELOADED = ["benchmarks.candidates", "torch._dynamo"]


class Later(Exception):
    """There is no time left for another row."""


class Rows:
    """The rows of one step, as its process writes them.

    until: by time.monotonic, when no other row is begun; the first one is, so that every process comes on.
    """

    def __init__(self, folder: Path, step: str, until: float, *, again: bool = False) -> None:
        """again: what an earlier run has found does not count."""
        self.folder, self.step, self.until, self._begun = folder, step, until, False
        self.done = set() if again else {row["row"] for row in read(folder) if row["step"] == step and "row" in row}

    def each(self, name: str, work: Callable[[], Row], *, fatal: bool = False) -> None:
        """Makes the row `name`, unless it is there: what work returns, or how it raised. Raises Later, as work may.

        fatal: the process is not to be trusted once it has raised. It is not either where CUDA refuses everything that
        follows an error.
        """
        if name in self.done:
            return
        self.begin(name)
        started = monotonic()
        try:
            found = work()
        except Later:
            raise
        except Exception as error:
            found = {"error": ending(error)}
        self.write(name, {"seconds": round(monotonic() - started, 3)} | found)
        if ("error" in found and fatal) or _cuda_is_broken():
            raise SystemExit(_RESTART)

    def begin(self, name: str) -> None:
        """Says that this row is being made from now on. Raises Later."""
        if self._begun and monotonic() > self.until:
            raise Later
        self._begun = True
        _replace_file(self.folder / "running.json", {"step": self.step, "row": name})

    def alive(self) -> None:
        """Says that the row which is being made is no hang."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.folder / "running.json")

    def write(self, name: str, found: Row) -> None:
        """Keeps a row."""
        append(self.folder, {"step": self.step, "row": name} | found)
        self.done.add(name)


@dataclass(frozen=True)
class Step:
    """A part of the run. call: makes its rows, in a process of its own.

    patience: seconds that a row may take before it counts as a hang. most: seconds after which no row is begun in this
    turn; the step's next turn comes when all others have had theirs. least: seconds without which it is not begun.
    environment: variables of its process. again: whether every run does it anew.
    """

    name: str
    call: Callable[[Rows], None]
    patience: float = 120.0
    most: float = float("inf")
    least: float = 10.0
    environment: dict[str, str] = field(default_factory=dict)
    again: bool = False


def append(folder: Path, row: Row) -> None:
    """A line of rows.jsonl, on the disk when this returns."""
    with (folder / "rows.jsonl").open("ab") as file:
        file.write(f"{json.dumps(row, default=str)}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> list[Row]:
    """All rows; a last line that is not whole is being written, or was cut off, and counts as none."""
    path = folder / "rows.jsonl"
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def _mend(folder: Path) -> None:
    """Drops a last line that was cut off; while no process writes."""
    path = folder / "rows.jsonl"
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def finished(folder: Path) -> set[str]:
    """The steps that have nothing left to do."""
    return {row["step"] for row in read(folder) if row.get("finished")}


def ending(error: BaseException) -> str:
    """The last lines of its traceback."""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return "\n".join(line[:500] for line in lines[-_TRACEBACK:])


class _Shown:
    """Shows rows that have come since the last look."""

    def __init__(self, folder: Path, say: Callable[[Row], None]) -> None:
        self._folder, self._say, self.count = folder, say, len(read(folder))

    def look(self) -> None:
        rows = read(self._folder)
        for row in rows[self.count :]:
            self._say(row)
        self.count = len(rows)


def run_steps(
    steps: Sequence[Step], folder: Path, deadline: float, say: Callable[[Row], None] = lambda row: None
) -> list[str]:
    """Runs what is not finished, turn by turn; returns the names of what is left at the deadline (by time.monotonic).

    say: is shown every row as soon as it is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _mend(folder)
    known, shown = finished(folder), _Shown(folder, say)
    waiting = [step for step in steps if step.again or step.name not in known]
    moved = True
    while waiting and moved:
        moved, left = False, []
        for step in waiting:
            outcome = "cut off"
            if deadline - monotonic() >= step.least:
                outcome = _turn(step, folder, deadline, shown)
            moved |= outcome != "cut off"
            if outcome != "finished":
                left.append(step)
        waiting = left
    return [step.name for step in waiting]


def _turn(step: Step, folder: Path, deadline: float, shown: _Shown) -> str:
    """Processes of a step, one after another; "finished", "later" or "cut off"."""
    started = monotonic()
    until = min(deadline, started + step.most)
    again = step.again
    while True:
        before, log = shown.count, _size(folder / "log.txt")
        (folder / "running.json").unlink(missing_ok=True)
        status, reason = _process(replace(step, again=again), folder, until, deadline, shown)
        again = False  # what this turn has found counts
        if reason == "cut off":
            return reason
        if status not in (0, _LATER, _RESTART):
            _blame(step, folder, reason or _named(status), log)
        shown.look()
        if status == _LATER:
            return "later"
        if status == 0 or shown.count == before or read(folder)[-1].get("row") == ALL:
            append(folder, {"step": step.name, "finished": True, "seconds": round(monotonic() - started, 1)})
            shown.look()
            return "finished"


def _process(step: Step, folder: Path, until: float, deadline: float, shown: _Shown) -> tuple[int, str]:
    """(exit status, why it was ended: "" where it ended by itself, "cut off" at the deadline, or the hang)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_child, args=(step, folder, until))
    process.start()
    assert process.pid is not None
    reason, seen, last = "", _signs(folder), monotonic()
    while process.is_alive():
        process.join(_LOOK)
        shown.look()
        if _signs(folder) != seen:
            seen, last = _signs(folder), monotonic()
        if monotonic() > deadline:
            reason = "cut off"
        elif monotonic() - last > step.patience:
            reason = f"ended: not done after {step.patience:.0f} s"
        if reason:
            break
    _end(process.pid)
    process.join()
    _mend(folder)
    assert process.exitcode is not None
    return process.exitcode, reason


def _child(step: Step, folder: Path, until: float) -> None:
    """The whole of a process: in a session of its own, so that what it starts can be ended with it."""
    os.setsid()
    os.environ.update(step.environment)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    print(f"--- {step.name}", flush=True)
    rows = Rows(folder, step.name, until, again=step.again)
    try:
        step.call(rows)
    except Later:
        raise SystemExit(_LATER) from None
    except Exception as error:
        traceback.print_exc()
        rows.write(ALL, {"error": ending(error)})


def _blame(step: Step, folder: Path, reason: str, log: int) -> None:
    """Keeps the row that was being made, or all that follow, with the reason and what the process printed last."""
    name = ALL
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        running = json.loads((folder / "running.json").read_text())
        kept = {row.get("row") for row in read(folder) if row["step"] == step.name}
        if running["step"] == step.name and running["row"] not in kept:
            name = running["row"]
    printed: list[str] = []
    with contextlib.suppress(FileNotFoundError), (folder / "log.txt").open("rb") as file:
        file.seek(log)
        printed = file.read().decode(errors="replace").strip().splitlines()[1:]
    append(folder, {"step": step.name, "row": name, "error": "\n".join([*printed[-_TRACEBACK:], reason])})


def _named(status: int) -> str:
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"the process ended with {how}"


def _signs(folder: Path) -> tuple[int, int]:
    """Two numbers that change while a step makes progress."""
    running = folder / "running.json"
    with contextlib.suppress(FileNotFoundError):
        return _size(folder / "rows.jsonl"), running.stat().st_mtime_ns
    return _size(folder / "rows.jsonl"), 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _replace_file(path: Path, row: Row) -> None:
    """Writes it whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(row), encoding="utf-8")
    part.replace(path)


def _end(pid: int) -> None:
    """Kills a process, its session, and what it has started in other ones."""
    below = list(_descendants(pid))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for each in (pid, *below):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and theirs, while it is still there."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    waiting = [pid]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found


def _cuda_is_broken() -> bool:
    """Whether this process can no longer use CUDA after an error."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
