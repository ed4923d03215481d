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

    arrived, seen: the clocks (`shared_memory`) of the arrivals of this phase, and of those of the phases that have
    ended. copies: those that have begun, with their bytes; each is a function that performs it and returns the clocks.
    """

    count: int
    pending: int
    arrived: Array
    seen: Array
    bytes: int = 0
    phase: int = 0
    copies: list[tuple[int, Callable[[], Array]]] = field(default_factory=list)

    def arrive(self, clocks: Array, expected: int) -> None:
        """Count the arrival of a thread, which expects so many bytes more."""
        if self.pending == 0:
            raise MbarrierFault(f"more than {self.count} threads arrive at an mbarrier in one phase")
        self._expect(expected)
        self.pending -= 1
        self._join(clocks)

    def complete(self, parity: int) -> bool:
        """Return whether the phase of this parity has ended, after the copies that end it."""
        while self.phase % 2 == parity and self.pending == 0 and self.copies:
            size, perform = self.copies.pop(0)
            self._expect(-size)
            self._join(perform())
        return self.phase % 2 != parity

    def _expect(self, size: int) -> None:
        self.bytes += size
        if abs(self.bytes) > _MOST_BYTES:
            raise MbarrierFault(f"an mbarrier expects {self.bytes} bytes: at most {_MOST_BYTES}")

    def _join(self, clocks: Array) -> None:
        self.arrived = np.maximum(self.arrived, clocks)
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending, self.seen = self.phase + 1, self.count, self.arrived


class Mbarriers:
    """The mbarriers of a program by address."""

    def __init__(self) -> None:
        self._all: dict[int, Mbarrier] = {}

    def initialize(self, address: int, count: int, clocks: Array) -> None:
        """Make an mbarrier. clocks: some, to know their shape."""
        if address in self._all:
            raise MbarrierFault("an mbarrier is initialized where there is one already")
        if not 1 <= count < 2**20:
            raise MbarrierFault(f"an mbarrier is initialized for {count} arrivals: expected 1 to {2**20 - 1}")
        self._all[address] = Mbarrier(count, count, np.zeros_like(clocks), np.zeros_like(clocks))

    def invalidate(self, address: int) -> None:
        """End an mbarrier."""
        if self.at(address).copies:
            raise MbarrierFault("an mbarrier is invalidated, but bulk copies of its phase have not ended")
        del self._all[address]

    def at(self, address: int) -> Mbarrier:
        """Return the mbarrier at an address."""
        if address not in self._all:
            raise MbarrierFault("there is no mbarrier at this address")
        return self._all[address]

    def copying(self) -> bool:
        """Return whether a bulk copy has not ended."""
        return any(barrier.copies for barrier in self._all.values())
