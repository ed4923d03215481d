"""Deadlines for kernels that spin on a signal, which cannot read a clock themselves.

Each memory has a thread that checks a few times a second. If an operation is late, or a peer's process has ended, the
thread tells every rank to stop waiting; the kernels see that in their abort word and return.
"""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from tpfuse.comm.control_block import ControlBlock
from tpfuse.comm.flight_record import Process, write_record
from tpfuse.comm.futex import Stopwatch

INTERVAL = 0.1  # seconds
# The seconds after which a kernel that waits for a single peer is late if that peer has left: it may have signalled
# before, and then the kernel ends soon.
_GRACE = 1.0


class Watchdog:
    """Watches one operation at a time of the rank that owns `control`."""

    def __init__(self, control: ControlBlock) -> None:
        self._control = control
        self._watched: tuple[str, int | None, Stopwatch] | None = None
        self._lock = threading.Lock()
        self._begun = threading.Event()
        check_often(self, self._begun)

    def watch(self, op: str, peer: int | None = None) -> None:
        """Watch the operation `op` from now on. peer: the only rank that it waits for, if there is one."""
        self._watched = op, peer, Stopwatch()
        self._begun.set()

    def unwatch(self) -> None:
        """End the watch: from now on no rank is told to stop because of the operation."""
        self._begun.clear()
        with self._lock:
            self._watched = None

    def check(self) -> None:
        """Tell every rank to stop waiting if the operation is late or a peer has left."""
        with self._lock:
            if self._watched is not None:
                self._control.stop_if_others_differ()
                op, peer, stopwatch = self._watched
                waited = stopwatch.seconds()
                self._control.note_wait(peer)
                if is_late(self._control, peer, waited):
                    self._control.fail(op, peer, waited)


def is_late(control: ControlBlock, peer: int | None, waited: float, patience: float = 1.0) -> bool:
    """Return whether an operation that has waited this long in a kernel must end.

    peer: the only rank that it waits for; None: any rank. patience: how many times the timeout it may wait.
    """
    if waited > patience * control.timeout or control.first_left() is not None:
        return True
    return peer is not None and waited > _GRACE and control.has_left(peer)


def check_often(watchdog: Any, awake: threading.Event, enter: Callable[[], None] = lambda: None) -> None:
    """Start a thread that calls `watchdog.check()` a few times a second while `awake` is set.

    The thread ends when the watchdog is no longer referenced. enter: the thread calls it first.
    """
    reference = weakref.ref(watchdog)

    def run() -> None:
        enter()
        while True:
            awake.wait()
            watching = reference()
            if watching is None:
                return
            watching.check()
            del watching
            time.sleep(INTERVAL)

    threading.Thread(target=run, name="tpfuse watchdog", daemon=True).start()
    weakref.finalize(watchdog, awake.set)


def write_flight_record(control: ControlBlock, error: BaseException) -> None:
    """Write the last operations of every rank of the control block, if `error` is a time-out (`write_record`)."""

    def processes() -> list[Process]:
        return [
            Process(control.ranks[rank], pid, control.has_ended(rank), state.operations())
            for rank, (pid, state) in enumerate(zip(control.pids, control.states, strict=True))
        ]

    write_record(error, processes)
