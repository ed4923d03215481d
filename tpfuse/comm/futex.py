"""Words of shared memory on the host: writing and reading them, and waiting until one changes.

Words are written with release and read with acquire semantics by the atomics of Triton's interpreter, which are
std::atomic (x86 would not need them, ARM does). A waiting rank reads the word a few times, which is enough if ranks run
in step, then yields its core to others, and then sleeps in the kernel until the word is written (futex(2)). If more
processes are busy than there are cores, a process that spins gets its next turn late, and so does the one that it waits
for.
"""

import ctypes
import os
import platform
import time

import numpy as np
from numpy.typing import NDArray
from triton._C.libtriton import interpreter as atomics

_POLLS, _YIELDS = 50, 20  # reads before a waiting rank yields its core, and yields before it sleeps
_NAP = 0.01  # the most seconds that it sleeps before it checks deadlines and aborts
_LONGEST_LOOK = 1.0  # the most seconds that a stopwatch counts between two calls
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1  # operations of futex(2) between processes
_ONE = np.ones(1, bool)
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # the number of the system call
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_TIMEOUT = _Timespec(0, int(_NAP * 1e9))


def publish(address: NDArray[np.uint64], value: NDArray[np.int32] | NDArray[np.int64]) -> None:
    """Store one word after everything that this process has written before. No process may sleep on the word."""
    atomics.atomic_rmw(atomics.RMW_OP.XCHG, address, value, _ONE, atomics.MEM_SEMANTIC.ACQUIRE_RELEASE)


def store_release(address: NDArray[np.uint64], value: NDArray[np.int32] | NDArray[np.int64]) -> None:
    """Store one word after everything that this process has written before. Wake the processes that sleep on it."""
    atomics.atomic_rmw(atomics.RMW_OP.XCHG, address, value, _ONE, atomics.MEM_SEMANTIC.RELEASE)
    if _FUTEX is not None:
        _libc.syscall(_FUTEX, ctypes.c_void_p(int(address[0])), _WAKE, _ALL)


def load_acquire(address: NDArray[np.uint64], zero: NDArray[np.int32] | NDArray[np.int64]) -> int:
    """Load one word before everything that this process reads later. zero: a 0, [1], of the word's dtype."""
    return int(atomics.atomic_rmw(atomics.RMW_OP.ADD, address, zero, _ONE, atomics.MEM_SEMANTIC.ACQUIRE).item())


def compare_and_swap(address: NDArray[np.uint64], old: NDArray[np.int32], new: NDArray[np.int32]) -> None:
    """Replace one word by `new` if it is `old`, in one access."""
    atomics.atomic_cas(address, old, new, atomics.MEM_SEMANTIC.ACQUIRE_RELEASE)


class Stopwatch:
    """Counts seconds, but at most one between two calls, so that it stops while the process is stopped (Ctrl-Z)."""

    def __init__(self) -> None:
        self._waited, self._looked = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Return the seconds so far."""
        now = time.monotonic()
        self._waited, self._looked = self._waited + min(now - self._looked, _LONGEST_LOOK), now
        return self._waited


class Backoff:
    """The growing pauses of a process between two reads of a word. waited: the seconds so far, of a `Stopwatch`."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._turns, self._stopwatch = 0, Stopwatch()

    def rest(self, address: NDArray[np.uint64], seen: int) -> bool:
        """Pause after a read that returned `seen`. Return whether it is time to check deadlines and aborts."""
        self._turns += 1
        if self._turns <= _POLLS:
            return False
        if self._turns <= _POLLS + _YIELDS:
            os.sched_yield()
            return False
        if _FUTEX is None:
            time.sleep(50e-6)
        else:  # The call returns at once if the lower half of the (little-endian) word is no longer what was read.
            seen_low = ctypes.c_uint32(seen & 0xFFFFFFFF)
            _libc.syscall(_FUTEX, ctypes.c_void_p(int(address[0])), _WAIT, seen_low, ctypes.byref(_TIMEOUT), None, 0)
        self.waited = self._stopwatch.seconds()
        return True
