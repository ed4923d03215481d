"""Deadlines of tests, which become longer when the machine is slow.

A deadline is the number of seconds that something may take on an idle machine. A machine that is busy with other
processes takes longer, and a test that fails for that reason says nothing about the code under test. `Deadline` and
`patient` therefore multiply the seconds by `slowness`, which is measured. Tests do not sleep for a fixed time in the
hope that it is enough: `wait_until` waits for a condition.
"""

import os
import time
from collections.abc import Callable

_SPIN = 0.005  # seconds of processor time that one measurement takes
_KEPT = 1.0  # seconds after which slowness is measured again
_LARGEST = 15.0  # a larger factor is taken for an error of measurement, so that no test waits for hours

_last: tuple[float, float] = (-_KEPT, 1.0)  # the time of the last measurement, and the factor


def slowness() -> float:
    """Return how many times longer work takes on this machine now than on an idle one: at least 1.

    It is the larger of two numbers. The first is the ratio of the wall time of a short computation to its processor
    time. The second is the load average of the last minute per core, less one, because a test's own ranks keep about
    as many processes running as there are cores.
    """
    global _last
    if time.monotonic() - _last[0] >= _KEPT:
        factor = max(1.0, _stretch(), _load())
        _last = time.monotonic(), min(factor, _LARGEST)
    return _last[1]


def _stretch() -> float:
    """Return the ratio of wall time to processor time of a computation in this thread."""
    started, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < _SPIN:
        pass
    return (time.perf_counter() - started) / (time.thread_time() - used)


def _load() -> float:
    """Return the load average of the last minute per core that this process may use, less one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return os.getloadavg()[0] / (cores or 1) - 1.0


def patient(seconds: float) -> float:
    """Return the seconds that something may take now if it takes at most `seconds` on an idle machine."""
    return seconds * slowness()


class Deadline:
    """A point in time that becomes later when the machine is slow.

    It is `seconds`, times the largest slowness measured since the deadline was made, after that moment.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self._began, self._factor = seconds, time.monotonic(), 1.0

    def left(self) -> float:
        """Return the seconds that are left; 0 once the deadline has passed."""
        self._factor = max(self._factor, slowness())
        return max(0.0, self._began + self.seconds * self._factor - time.monotonic())

    def next_look(self) -> float:
        """Return the seconds to wait until `left` should be called again, since slowness may have changed by then."""
        return min(self.left(), _KEPT)


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Return once `condition()` is true. Raise AssertionError with `what` after the `Deadline` of `seconds`."""
    deadline = Deadline(seconds)
    while not condition():
        assert deadline.left(), f"{seconds} s times the slowness of the machine were not enough until: {what}"
        time.sleep(0.01)
