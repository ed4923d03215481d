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

from tpfuse.explore.ptx.faults import GlobalRace
from tpfuse.explore.ptx.shared_memory import Array, CheckedSharedMemory

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

    def add(self, addresses: Any, warps: Array, size: int, at: int, *, writes: bool) -> None:
        """Take note of accesses of `size` bytes each by instruction `at`. addresses, warps: of each thread."""
        self._kept.append(_Access(addresses, warps, size, at, writes, self._shared.clocks()))

    def barrier(self) -> None:
        """Begin anew. Raise GlobalRace if nothing orders a write by a warp and an access there by another one."""
        if writes := [x for x in self._kept if x.writes]:
            low = min(int(np.min(x.addresses)) for x in writes)
            high = max(int(np.max(x.addresses)) + x.size for x in writes)
            _check([x for x in self._kept if np.min(x.addresses) < high and np.max(x.addresses) + x.size > low])
        self._kept.clear()


def _check(accesses: list[_Access]) -> None:
    """Raise GlobalRace if two of the accesses to a place, one of which writes, are of two warps and not ordered."""
    unit = min(x.size for x in accesses)
    columns = []
    for number, x in enumerate(accesses):
        first = np.broadcast_to(np.asarray(x.addresses, np.uint64) // np.uint64(unit), x.warps.shape)
        places = first[:, None] + np.arange(x.size // unit, dtype=np.uint64)
        columns.append([y.ravel() for y in np.broadcast_arrays(places, x.warps[:, None], number)])
    unsorted = [np.concatenate(x) for x in zip(*columns, strict=True)]
    order = np.argsort(unsorted[0], kind="stable")
    place, warp, numbers = (x[order] for x in unsorted)
    starts = np.flatnonzero(np.append(True, place[1:] != place[:-1]))
    several = np.minimum.reduceat(warp, starts) != np.maximum.reduceat(warp, starts)
    written = np.logical_or.reduceat(np.array([x.writes for x in accesses])[numbers], starts)
    ends = np.append(starts[1:], len(place))
    for start, end in zip(starts[several & written], ends[several & written], strict=True):
        pairs = dict.fromkeys(zip(numbers[start:end].tolist(), warp[start:end].tolist(), strict=True))
        for (i, first), (j, second) in combinations(pairs, 2):
            one, two = accesses[i], accesses[j]
            if first != second and (one.writes or two.writes) and two.clocks[second, first] < one.clocks[first, first]:
                did = [f"warp {x} {'wrote' if y.writes else 'read'} it" for y, x in ((one, first), (two, second))]
                where = f"address {int(place[start]) * unit:#x}: {did[0]}, {did[1]}"
                raise GlobalRace(f"{where}, and no barrier orders the two", at=two.at, site=one.at)
