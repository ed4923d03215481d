"""Words of shared memory on the host: how they are written and read, and how a rank waits for one to change.

Words are written with release and read with acquire semantics by the atomics of Triton's interpreter, which are
std::atomic (x86 would not need it, ARM does). A waiting rank looks a few times, which is all that it takes when ranks
run in step, lends its core to others, and then sleeps in the kernel until the word is written (futex(2)): with more
busy processes than cores, one that spins gets its next turn late, and so does whoever it waits for.
"""

import ctypes
import os
import platform
import time

import numpy as np
from numpy.typing import NDArray
from triton._C.libtriton import interpreter as atomics

_POLLS, _YIELDS = 50, 20  # before a waiting rank lends its core, and before it sleeps
_NAP = 0.01  # seconds, the longest that it sleeps before it sees to deadlines and aborts
_LONGEST_LOOK = 1.0  # seconds
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1  # operations of futex(2) between processes
_ONE = np.ones(1, bool)
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # number of the system call
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_TIMEOUT = _Timespec(0, int(_NAP * 1e9))


def publish(address: NDArray[np.uint64], value: NDArray[np.int32] | NDArray[np.int64]) -> None:
    """Stores one word after everything that this process has written before; nobody sleeps on it."""
    atomics.atomic_rmw(atomics.RMW_OP.XCHG, address, value, _ONE, atomics.MEM_SEMANTIC.ACQUIRE_RELEASE)


def store_release(address: NDArray[np.uint64], value: NDArray[np.int32] | NDArray[np.int64]) -> None:
    """Stores one word after everything that this process has written before, and wakes those who sleep on it."""
    atomics.atomic_rmw(atomics.RMW_OP.XCHG, address, value, _ONE, atomics.MEM_SEMANTIC.RELEASE)
    if _FUTEX is not None:
        _libc.syscall(_FUTEX, ctypes.c_void_p(int(address[0])), _WAKE, _EVERYBODY)


def load_acquire(address: NDArray[np.uint64], zero: NDArray[np.int32] | NDArray[np.int64]) -> int:
    """Loads one word, before everything that this process reads after. zero: [1], of the word's dtype."""
    return int(atomics.atomic_rmw(atomics.RMW_OP.ADD, address, zero, _ONE, atomics.MEM_SEMANTIC.ACQUIRE).item())


class Stopwatch:
    """Counts seconds, but no more than one between two looks: it stands still while the process does (Ctrl-Z)."""

    def __init__(self) -> None:
        self._waited, self._looked = 0.0, time.monotonic()

    def look(self) -> float:
        """Seconds so far."""
        now = time.monotonic()
        self._waited, self._looked = self._waited + min(now - self._looked, _LONGEST_LOOK), now
        return self._waited


class Backoff:
    """How a waiting process passes the time between two looks at a word. waited: seconds so far, of a `Stopwatch`."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._turns, self._stopwatch = 0, Stopwatch()

    def rest(self, address: NDArray[np.uint64], seen: int) -> bool:
        """After a look that saw `seen`. Returns whether it is time to see to deadlines and aborts."""
        self._turns += 1
        if self._turns <= _POLLS:
            return False
        if self._turns <= _POLLS + _YIELDS:
            os.sched_yield()
            return False
        if _FUTEX is None:
            time.sleep(50e-6)
        else:  # returns at once if the (little-endian) word's lower half is not what was seen
            seen_low = ctypes.c_uint32(seen & 0xFFFFFFFF)
            _libc.syscall(_FUTEX, ctypes.c_void_p(int(address[0])), _WAIT, seen_low, ctypes.byref(_TIMEOUT), None, 0)
        self.waited = self._stopwatch.look()
        return True
