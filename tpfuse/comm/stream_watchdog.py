"""Deadlines for operations on a stream, which the host begins and does not wait for.

Each operation has an event at its beginning and one at its end. A thread checks the operations in order. The oldest
one that has not ended is late if it began longer ago than its deadline: the work on the stream before it does not
count. The thread then tells every rank to stop waiting, and keeps the error for the next caller of `failure`.

A kernel that heeds no abort word, such as one of torch's operators, cannot be stopped. If an operation has not ended
one more deadline later, the thread ends the process, as NCCL's watchdog does.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tpfuse.comm.control_block import ControlBlock
from tpfuse.comm.cuda_calls import Event
from tpfuse.comm.errors import Disagreement, PeerTimeout
from tpfuse.comm.futex import Stopwatch
from tpfuse.comm.watchdog import check_often, is_late, write_flight_record

LEAST_PATIENCE = 10.0  # the least seconds between the alarm and the end of the process


@dataclass
class Pending:
    """An operation between two events.

    peer: the rank that it waits for, if known; patience: how many times the timeout it may take; running: the time
    since it began; stuck: the time for which it has gone on after the alarm.
    """

    op: str
    begun: Event
    ended: Event
    peer: int | None = None
    patience: float = 1.0
    running: Stopwatch | None = None
    stuck: Stopwatch | None = None


class StreamWatchdog:
    """Watches the operations on the streams of the rank that owns `control`. Each memory has one.

    alarm: makes the rank's kernels stop waiting; enter: the thread calls it first.
    """

    def __init__(self, control: ControlBlock, alarm: Callable[[], None], enter: Callable[[], None]) -> None:
        self._control, self._alarm = control, alarm
        self._pending: deque[Pending] = deque()
        self._failure: PeerTimeout | Disagreement | None = None
        self._alarmed = False
        self._lock = threading.Lock()
        self._awake = threading.Event()
        check_often(self, self._awake, enter)

    def add(self, operation: Pending) -> None:
        """Watch one more operation."""
        with self._lock:
            self._pending.append(operation)
            self._awake.set()

    def check(self) -> None:
        """Drop the operations that have ended. End all waits if the oldest one is late or a rank has left.

        End the process if the oldest one still goes on long after that.
        """
        with self._lock:
            while self._pending and self._pending[0].ended.query():
                self._pending.popleft()
            if self._pending and self._alarmed:
                self._check_stuck(self._pending[0])
            elif self._pending:
                self._check_oldest(self._pending[0])
            if not self._pending:
                self._awake.clear()

    def _check_oldest(self, oldest: Pending) -> None:
        if oldest.running is None and oldest.begun.query():
            oldest.running = Stopwatch()
        self._control.stop_if_others_differ()
        waited = 0.0 if oldest.running is None else oldest.running.seconds()
        if oldest.running is not None:
            self._control.note_wait(oldest.peer)
        if self._control.aborted or is_late(self._control, oldest.peer, waited, oldest.patience):
            self._failure = self._control.fail(oldest.op, oldest.peer, waited)
            write_flight_record(self._control, self._failure)
            self._alarm()
            self._alarmed = True

    def _check_stuck(self, oldest: Pending) -> None:
        if oldest.stuck is None and oldest.begun.query():
            oldest.stuck = Stopwatch()
        if oldest.stuck is not None and oldest.stuck.seconds() > max(self._control.timeout, LEAST_PATIENCE):
            end_process(f"rank {self._control.ranks[self._control.rank]}: {oldest.op} does not heed the alarm")

    def failure(self) -> PeerTimeout | Disagreement | None:
        """Return the error of an operation, once; None if there is none."""
        with self._lock:
            failure, self._failure = self._failure, None
            return failure

    def forget(self) -> None:
        """Drop all operations. Call it after the device has finished all its work."""
        with self._lock:
            self._pending.clear()
            self._failure, self._alarmed = None, False
            self._awake.clear()


def end_process(reason: str) -> None:
    """End the process at once, with the reason on the standard error: no Python code can stop a kernel."""
    print(f"tpfuse: {reason}: its kernel cannot be stopped, so this process ends", file=sys.stderr, flush=True)
    os._exit(1)
