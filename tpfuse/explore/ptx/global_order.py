"""The order of what the warps of a program do in global memory: only barriers and mbarriers order two warps.

A compiler puts barriers between accesses to shared memory, but not between a store to global memory and a load of it:
these belong to the kernel (`tl.debug_barrier`). The accesses between two barriers are kept with the clocks that their
warps have in `shared_memory`, and compared when the second one is passed, or at the program's end. Atomic operations
are left out, and the lanes of one warp count as ordered.
"""

from collections import deque
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.ptx.faults import GlobalRace
from tpfuse.explore.ptx.shared_memory import CheckedSharedMemory

Array = NDArray[Any]
_MOST_KEPT = 4096  # accesses, each of one instruction; a longer run without a barrier forgets the first ones


class _Access(NamedTuple):
    addresses: Any  # of each thread, or one of all
    warps: Array
    size: int
    at: int  # the index of the instruction
    writes: bool
    clocks: Array


class GlobalOrder:
    """The accesses of one program since its last barrier. shared: has the clocks of its warps."""

    def __init__(self, shared: CheckedSharedMemory) -> None:
        self._shared = shared
        self._kept: deque[_Access] = deque(maxlen=_MOST_KEPT)
        self._writes = False

    def add(self, addresses: Any, warps: Array, size: int, at: int, *, writes: bool) -> None:
        """Take note of accesses of `size` bytes each by instruction `at`. addresses, warps: of each thread."""
        self._kept.append(_Access(addresses, warps, size, at, writes, self._shared.clocks()))
        self._writes |= writes

    def barrier(self) -> None:
        """Begin anew. Raise GlobalRace if nothing orders a write by a warp and an access there by another one."""
        if self._writes:
            self._check()
        self._kept.clear()
        self._writes = False

    def _check(self) -> None:
        low = min(int(np.min(x.addresses)) for x in self._kept if x.writes)
        high = max(int(np.max(x.addresses)) + x.size for x in self._kept if x.writes)
        near = [x for x in self._kept if np.min(x.addresses) < high and np.max(x.addresses) + x.size > low]
        unit = np.uint64(min(x.size for x in near))
        places = [_units(x, unit) for x in near]
        place, counts = np.concatenate(places), [len(x) for x in places]
        warp = np.concatenate([np.repeat(x.warps, x.size // int(unit)) for x in near])
        order = np.argsort(place, kind="stable")
        place, warp = place[order], warp[order]
        starts = np.flatnonzero(np.append(True, place[1:] != place[:-1]))
        several = np.minimum.reduceat(warp, starts) != np.maximum.reduceat(warp, starts)
        if several.any():
            number = np.repeat(np.arange(len(near)), counts)[order]
            written = np.logical_or.reduceat(np.array([x.writes for x in near])[number], starts)
            for start in starts[several & written]:
                these = place == place[start]
                pairs = dict.fromkeys(zip(number[these].tolist(), warp[these].tolist(), strict=True))
                self._check_place(int(place[start] * unit), [(near[x], of) for x, of in pairs])

    @staticmethod
    def _check_place(address: int, accesses: list[tuple[_Access, int]]) -> None:
        """Raise GlobalRace if two of the accesses to a place, each with its warp, are not ordered."""
        for (one, first), (two, second) in combinations(accesses, 2):
            if first != second and (one.writes or two.writes) and two.clocks[second, first] < one.clocks[first, first]:
                did = [f"warp {x} {'wrote' if y.writes else 'read'} it" for y, x in ((one, first), (two, second))]
                error = GlobalRace(f"address {address:#x}: {did[0]}, {did[1]}, and no barrier orders the two")
                error.at, error.site = two.at, one.at
                raise error


def _units(access: _Access, unit: np.uint64) -> Array:
    """Return the numbers of the units that each thread accesses, thread after thread."""
    first = np.broadcast_to(np.asarray(access.addresses, np.uint64) // unit, access.warps.shape)
    return (first[:, None] + np.arange(access.size // int(unit), dtype=np.uint64)).ravel()
