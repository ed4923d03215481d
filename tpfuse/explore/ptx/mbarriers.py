"""The mbarriers of a program: objects in shared memory at which threads wait for arrivals and for bulk copies.

A phase of an mbarrier ends when as many threads have arrived as it was initialized for, and all bytes have come that
they said to expect (PTX ISA 8.7, "Parallel Synchronization and Communication Instructions: mbarrier"). An arrival
releases, and a wait acquires. Bulk copies are performed when a thread waits for the phase that they end: as late as
they may be.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.ptx.faults import MbarrierFault

Array = NDArray[Any]
_MOST_BYTES = 2**20 - 1


@dataclass
class Mbarrier:
    """An mbarrier. pending: arrivals that the phase still needs. bytes: that are still to come; may be negative.

    arrived, seen: the clocks (`shared_memory`) of all arrivals, and of those of phases that have ended; 0 without any.
    copies: those that have begun, with their bytes; each is a function that performs it and returns the clocks.
    """

    count: int
    pending: int
    arrived: Any = 0
    seen: Any = 0
    bytes: int = 0
    phase: int = 0
    copies: list[tuple[int, Callable[[], Array]]] = field(default_factory=list)

    def arrive(self, clocks: Array, expected: int) -> None:
        """Count the arrival of a thread, which expects so many bytes more."""
        if self.pending == 0:
            raise MbarrierFault(f"more than {self.count} threads arrive at an mbarrier in one phase")
        self.pending -= 1
        self._update(expected, clocks)

    def complete(self, parity: int) -> bool:
        """Return whether the phase of this parity has ended, after the copies that end it."""
        while self.phase % 2 == parity and self.pending == 0 and self.copies:
            size, perform = self.copies.pop(0)
            self._update(-size, perform())
        return self.phase % 2 != parity

    def _update(self, size: int, clocks: Array) -> None:
        """Expect so many bytes more, and end the phase if it needs nothing more."""
        self.bytes += size
        if abs(self.bytes) > _MOST_BYTES:
            raise MbarrierFault(f"an mbarrier expects {self.bytes} bytes: at most {_MOST_BYTES}")
        self.arrived = np.maximum(self.arrived, clocks)
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending, self.seen = self.phase + 1, self.count, self.arrived


class Mbarriers(dict[int, Mbarrier]):
    """The mbarriers of a program by address."""

    def __missing__(self, address: int) -> Mbarrier:
        raise MbarrierFault("there is no mbarrier at this address")

    def initialize(self, address: int, count: int) -> None:
        """Make an mbarrier for so many arrivals."""
        if address in self:
            raise MbarrierFault("an mbarrier is initialized where there is one already")
        if not 1 <= count < 2**20:
            raise MbarrierFault(f"an mbarrier is initialized for {count} arrivals: expected 1 to {2**20 - 1}")
        self[address] = Mbarrier(count, count)

    def invalidate(self, address: int) -> None:
        """End an mbarrier."""
        if self[address].copies:
            raise MbarrierFault("an mbarrier is invalidated, but bulk copies of its phase have not ended")
        del self[address]

    def copying(self) -> bool:
        """Return whether a bulk copy has not ended."""
        return any(barrier.copies for barrier in self.values())
