"""Python stacks of other processes of this host, for the flight record of a wait that has expired.

A process offers its stack: faulthandler writes it into a file when the process receives SIGUSR2, even while the process
holds the interpreter's lock or waits in C code. Another process asks for it. No process is asked that would die from
the signal.
"""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_SIGNAL = signal.SIGUSR2
_PATIENCE = 1.0  # seconds for all processes together


def _file(folder: Path, pid: int) -> Path:
    return folder / f".stack-{pid}"


@contextlib.contextmanager
def offered_stack(folder: Path) -> Iterator[None]:
    """Let other processes ask this one for its stack, within a with block of the main thread. Raise OSError."""
    path = _file(folder, os.getpid())
    with path.open("w") as file:
        signal.signal(_SIGNAL, signal.SIG_IGN)  # `unregister` restores this: who asks late must not end this process
        faulthandler.register(_SIGNAL, file)
        try:
            yield
        finally:
            faulthandler.unregister(_SIGNAL)
            path.unlink(missing_ok=True)


def remove_stacks(folder: Path) -> None:
    """Remove the files of processes that were killed. No process may offer its stack there now. Raise OSError."""
    for path in folder.glob(".stack-*"):
        path.unlink(missing_ok=True)


def state_of(pid: int) -> str:
    """Return what a process of this host does, such as "S (sleeping)" or "T (stopped)"; "" if it has ended."""
    return _status(pid).get("State", "")


def has_ended(pid: int) -> bool:
    """Return whether a process of this host has ended; a zombie has."""
    return state_of(pid)[:1] in ("", "Z")


def stacks_of(folder: Path, pids: Sequence[int]) -> dict[int, str]:
    """Return the Python stacks of these processes, by their pid. Those that do not answer in a second are left out."""
    asked = [pid for pid in pids if _file(folder, pid).exists() and _answers(pid)]
    for pid in asked:
        with contextlib.suppress(OSError):
            if not _file(folder, pid).stat().st_size:  # another rank may have asked already
                os.kill(pid, _SIGNAL)
    found: dict[int, str] = {}
    end = time.monotonic() + _PATIENCE
    while len(found) < len(asked) and time.monotonic() < end:
        for pid in asked:
            with contextlib.suppress(OSError):
                if _is_writing(pid):
                    continue
                text = _file(folder, pid).read_text(errors="replace")
                if text and not _is_writing(pid):  # a signal that is being delivered is neither pending nor blocked
                    found[pid] = text
        time.sleep(0.02)
    return found


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _answers(pid: int) -> bool:
    """Return whether the process catches the signal and runs, so that it can answer."""
    status = _status(pid)
    return _has(status, "SigCgt") and status["State"][0] in "RSD"


def _is_writing(pid: int) -> bool:
    """Return whether the process has yet to receive the signal, or is in its handler, which blocks it."""
    status = _status(pid)
    return any(_has(status, signals) for signals in ("SigPnd", "ShdPnd", "SigBlk"))


def _has(status: dict[str, str], signals: str) -> bool:
    """Return whether a set of signals in a process's status has the signal."""
    return bool(int(status.get(signals, "0"), 16) >> (_SIGNAL - 1) & 1)
