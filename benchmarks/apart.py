"""Run the steps of a long run in one process for each step, and keep every row; a later run continues where it ended.

A folder holds the results:

    rows.jsonl  a line for each row, synced to the disk before the next row is begun: "step" and "row" name the row,
                "seconds" is its duration, and "error" is the end of the traceback where it raised; the other keys
                are the step's own. A line with "begun" names the row that is in progress from then on, and one with
                "finished" is the last one of the step.
    log.txt     the output of the processes

A row that raises does not end its step. Where a row hangs, or ends its process, the parent process writes the row, and
a new process continues after it. A row is begun only while there is time left for its step. A row that the end of the
whole run cuts off is not blamed: the next run begins with it.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch

Row = dict[str, Any]

ALL = "all that follow"  # the row of a step that failed outside its rows
_LATER, _RESTART = 76, 75  # exit statuses: no time is left; a row was kept after which the process must not be used
_TRACEBACK = 6  # lines of a traceback that are kept
_LOOK = 0.1  # seconds between two checks of a process
_PRELOADED = ["benchmarks.candidates", "torch._dynamo"]


class Later(Exception):
    """There is no time left for another row."""


class Rows:
    """The rows of one step, which the step's process writes.

    until: the time by time.monotonic after which no other row is begun; the first row is always begun, so that every
    process makes progress. since: the number of lines in the folder that do not count as done.
    """

    def __init__(self, folder: Path, step: str, until: float, since: int = 0) -> None:
        """Read the rows that are done."""
        self.folder, self.step, self.until, self._begun = folder, step, until, False
        self.done = {row["row"] for row in lines(folder)[since:] if row["step"] == step and "row" in row}

    def each(self, name: str, work: Callable[[], Row], *, fatal: bool = False) -> None:
        """Make the row `name` unless it exists: the result of `work`, or its error. Raise Later, as `work` may.

        fatal: the process must not be used after `work` has raised. The same holds where CUDA refuses every call after
        an error.
        """
        if name in self.done:
            return
        self.begin(name)
        started = monotonic()
        try:
            outcome = work()
        except Later:
            raise
        except Exception as error:
            outcome = {"error": ending(error)}
        self.write(name, {"seconds": round(monotonic() - started, 3)} | outcome)
        if ("error" in outcome and fatal) or _cuda_is_broken():
            raise SystemExit(_RESTART)

    def begin(self, name: str) -> None:
        """Record that this row is in progress from now on. Raise Later."""
        if self._begun and monotonic() > self.until:
            raise Later
        self._begun = True
        append(self.folder, {"step": self.step, "begun": name})

    def alive(self) -> None:
        """Record that the row in progress does not hang."""
        os.utime(self.folder / "rows.jsonl")

    def write(self, name: str, outcome: Row) -> None:
        """Keep a row."""
        append(self.folder, {"step": self.step, "row": name} | outcome)
        self.done.add(name)


@dataclass(frozen=True)
class Step:
    """A part of the run. call: the function that makes its rows, in a process of its own.

    patience: the seconds that a row may take before it counts as a hang. most: the seconds after which no row is begun
    in this turn; the step has its next turn after all other steps have had theirs. least: the seconds that must be left
    for the step to be begun. environment: variables of its process. again: whether every run makes its rows again.
    """

    name: str
    call: Callable[[Rows], None]
    patience: float = 120.0
    most: float = float("inf")
    least: float = 10.0
    environment: dict[str, str] = field(default_factory=dict)
    again: bool = False


def append(folder: Path, row: Row) -> None:
    """Append a line to rows.jsonl; it is on the disk when this function returns."""
    with (folder / "rows.jsonl").open("ab") as file:
        file.write(f"{json.dumps(row, default=str)}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def lines(folder: Path) -> list[Row]:
    """Return all lines. An incomplete last one, which is being written or was cut off, is left out."""
    path = folder / "rows.jsonl"
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def read(folder: Path) -> list[Row]:
    """Return all rows, and the last lines of finished steps."""
    return [line for line in lines(folder) if "begun" not in line]


def _mend(folder: Path) -> None:
    """Remove a last line that was cut off. It must be called while no process writes."""
    path = folder / "rows.jsonl"
    path.touch()
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def finished(folder: Path) -> set[str]:
    """Return the names of the steps that have nothing left to do."""
    return {row["step"] for row in read(folder) if row.get("finished")}


def failed(row: Row) -> bool:
    """Return whether the row reports a failure."""
    return "error" in row or row.get("passed") is False


def ending(error: BaseException) -> str:
    """Return the last lines of the error's traceback."""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return "\n".join(line[:500] for line in lines[-_TRACEBACK:])


class _Shown:
    """A reader that passes on the rows that were added since its last look. count: the number of lines."""

    def __init__(self, folder: Path, say: Callable[[Row], None]) -> None:
        self._folder, self._say, self.count = folder, say, len(lines(folder))

    def look(self) -> list[Row]:
        """Return all lines."""
        found = lines(self._folder)
        for line in found[self.count :]:
            if "begun" not in line:
                self._say(line)
        self.count = len(found)
        return found


def run_steps(
    steps: Sequence[Step], folder: Path, deadline: float, say: Callable[[Row], None] = lambda row: None
) -> list[str]:
    """Run the steps that are not finished, turn by turn, and return the names of those left at the deadline.

    deadline: by time.monotonic. say: is called with every row as soon as the row exists.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _mend(folder)
    known, shown = finished(folder), _Shown(folder, say)
    waiting, moved = [step for step in steps if step.again or step.name not in known], True
    while waiting and moved:
        outcomes = [(step, _turn(step, folder, deadline, shown)) for step in waiting]
        waiting = [step for step, outcome in outcomes if outcome != "finished"]
        moved = any(outcome != "cut off" for _, outcome in outcomes)
    return [step.name for step in waiting]


def _turn(step: Step, folder: Path, deadline: float, shown: _Shown) -> str:
    """Run the processes of a step, one after another; return "finished", "later" or "cut off"."""
    if deadline - monotonic() < step.least:
        return "cut off"
    started, since, log = monotonic(), shown.count if step.again else 0, folder / "log.txt"
    until = min(deadline, started + step.most)
    while True:
        log.touch()
        before, printed = shown.count, log.stat().st_size
        status, reason = _process(step, folder, since, until, deadline, shown)
        if reason == "cut off":
            return reason
        if status not in (0, _LATER, _RESTART):
            how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            running = [ALL, *(line.get("begun", ALL) for line in shown.look()[before:])][-1]
            said = log.read_bytes()[printed:].decode(errors="replace").strip().splitlines()[1:]
            error = "\n".join([*said[-_TRACEBACK:], reason or f"the process ended with {how}"])
            append(folder, {"step": step.name, "row": running, "error": error})
        added = shown.look()[before:]
        if status == _LATER:
            return "later"
        if status == 0 or not added or added[-1].get("row") == ALL:
            append(folder, {"step": step.name, "finished": True, "seconds": round(monotonic() - started, 1)})
            shown.look()
            return "finished"


def _process(step: Step, folder: Path, since: int, until: float, deadline: float, shown: _Shown) -> tuple[int, str]:
    """Return the exit status of the step's process, and why the parent ended it.

    The reason is "" where the process ended by itself, "cut off" at the deadline, and otherwise it names the hang.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_child, args=(step, Rows(folder, step.name, until, since)))
    process.start()
    assert process.pid is not None
    reason, signs, last = "", folder / "rows.jsonl", monotonic()
    seen = signs.stat().st_mtime_ns
    while process.is_alive() and not reason:
        process.join(_LOOK)
        if (written := signs.stat().st_mtime_ns) != seen:
            seen, last = written, monotonic()
            shown.look()
        if monotonic() > deadline:
            reason = "cut off"
        elif monotonic() - last > step.patience:
            reason = f"ended: not done after {step.patience:.0f} s"
    _end(process.pid)
    process.join()
    _mend(folder)
    assert process.exitcode is not None
    return process.exitcode, reason


def _child(step: Step, rows: Rows) -> None:
    """Run the step in this process, in a session of its own, so that the processes it starts can be ended with it."""
    os.setsid()
    os.environ.update(step.environment)
    log = os.open(rows.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    print(f"--- {step.name}", flush=True)
    try:
        step.call(rows)
    except Later:
        raise SystemExit(_LATER) from None
    except Exception as error:
        traceback.print_exc()
        rows.write(ALL, {"error": ending(error)})


def _end(pid: int) -> None:
    """Kill a process, its session, and the processes that it has started in other sessions."""
    below = list(_descendants(pid))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for each in (pid, *below):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and their descendants, while the process still exists."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    waiting = [pid]
    while waiting:
        direct = children.get(waiting.pop(), [])
        yield from direct
        waiting += direct


def _cuda_is_broken() -> bool:
    """Return whether this process can no longer use CUDA after an error."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
