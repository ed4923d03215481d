"""Deadlines for operations on a stream, which the host begins and leaves behind.

Each leaves an event where it begins and one where it ends. A thread looks at them in order. The oldest one that has not
ended is late when it began longer ago than its deadline: what the stream has to do before it does not count. Then every
rank is told to stop waiting, and the error is kept for whoever asks next.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tpfuse.comm.control_block import ControlBlock
from tpfuse.comm.cuda_calls import Event
from tpfuse.comm.errors import Disagreement, PeerTimeout
from tpfuse.comm.futex import Stopwatch
from tpfuse.comm.watchdog import look_often, write_flight_record


@dataclass
class Pending:
    """An operation between two events. peer: who is waited for, where that is known; running: since it has begun."""

    op: str
    begun: Event
    ended: Event
    peer: int | None = None
    running: Stopwatch | None = None


class StreamWatchdog:
    """Watches what is on the streams of the rank that owns `board`.

    alarm: makes the rank's kernels stop waiting; enter: what the thread does first. One per memory.
    """

    def __init__(self, control: ControlBlock, alarm: Callable[[], None], enter: Callable[[], None]) -> None:
        self._control, self._alarm = control, alarm
        self._pending: deque[Pending] = deque()
        self._failure: PeerTimeout | Disagreement | None = None
        self._alarmed = False
        self._lock = threading.Lock()
        self._awake = threading.Event()
        look_often(self, self._awake, enter)

    def add(self, operation: Pending) -> None:
        """Watches one more operation."""
        with self._lock:
            self._pending.append(operation)
            self._awake.set()

    def look(self) -> None:
        """Forgets what has ended; when the oldest one is late, or a rank is gone or has given up, ends all waits."""
        with self._lock:
            while self._pending and self._pending[0].ended.query():
                self._pending.popleft()
            if self._pending and not self._alarmed:
                self._check_oldest(self._pending[0])
            if not self._pending:
                self._awake.clear()

    def _check_oldest(self, oldest: Pending) -> None:
        if oldest.running is None and oldest.begun.query():
            oldest.running = Stopwatch()
        self._control.stop_if_others_differ()
        waited = 0.0 if oldest.running is None else oldest.running.look()
        if self._control.aborted or waited > self._control.timeout or self._control.first_left() is not None:
            self._failure = self._control.fail(oldest.op, oldest.peer, waited)
            write_flight_record(self._control, self._failure)
            self._alarm()
            self._alarmed = True

    def failure(self) -> PeerTimeout | Disagreement | None:
        """What an operation has met, once."""
        with self._lock:
            failure, self._failure = self._failure, None
            return failure

    def forget(self) -> None:
        """When the device has done everything that it was given."""
        with self._lock:
            self._pending.clear()
            self._failure, self._alarmed = None, False
            self._awake.clear()
