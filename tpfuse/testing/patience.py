"""Deadlines of tests, which grow with how slow the machine is while they run.

A deadline says how many seconds something may take on an idle machine. A machine that is busy with other processes
takes longer for it, and a test that fails for that reason tells nothing about what it tests. `Deadline` and
`patient` therefore multiply the seconds by `slowness`, which is measured, and nobody needs to sleep for luck:
`wait_until` waits for a condition.
"""

import os
import time
from collections.abc import Callable

_SPIN = 0.005  # seconds of processor time of a measurement
_KEPT = 1.0  # seconds for which a measurement is kept
_LARGEST = 15.0  # a factor beyond this is an error of measurement: nobody waits for hours

_last: tuple[float, float] = (-_KEPT, 1.0)  # when it was measured, and the factor


def slowness() -> float:
    """How many times longer work takes here, now, than on an idle machine: at least 1.

    It is the larger of two ratios: of the wall time of a short computation to its processor time, and of the
    processes that want to run (the load average of a minute) to the cores, less one: a test's own ranks are as many.
    """
    global _last
    if time.monotonic() - _last[0] >= _KEPT:
        factor = max(1.0, _stretch(), _load())
        _last = time.monotonic(), min(factor, _LARGEST)
    return _last[1]


def _stretch() -> float:
    """The ratio of wall time to processor time of a computation in this thread."""
    started, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < _SPIN:
        pass
    return (time.perf_counter() - started) / (time.thread_time() - used)


def _load() -> float:
    """The load average of the last minute for each core that this process may use, beyond one for each core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return os.getloadavg()[0] / (cores or 1) - 1.0


def patient(seconds: float) -> float:
    """The seconds that something may take now, which takes at most `seconds` on an idle machine."""
    return seconds * slowness()


class Deadline:
    """A point in time that moves away while the machine is slow.

    It is `seconds` after the deadline was made, times the largest slowness seen since then.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self._began, self._factor = seconds, time.monotonic(), 1.0

    def left(self) -> float:
        """The seconds that are left; 0 once the deadline has passed."""
        self._factor = max(self._factor, slowness())
        return max(0.0, self._began + self.seconds * self._factor - time.monotonic())

    def next_look(self) -> float:
        """How long to wait before `left` is asked again: the slowness of the machine may have changed by then."""
        return min(self.left(), _KEPT)


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Returns once `condition()` is true. Raises AssertionError with `what` after the seconds of a `Deadline`."""
    deadline = Deadline(seconds)
    while not condition():
        assert deadline.left(), f"after {seconds} s times the slowness of the machine, still not: {what}"
        time.sleep(0.01)
