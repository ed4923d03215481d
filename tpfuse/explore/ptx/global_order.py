"""The order of what the warps of a program do in global memory: only a barrier orders two warps.

A compiler puts barriers between accesses to shared memory, but not between a store to global memory and a load of it:
these belong to the kernel (`tl.debug_barrier`). The accesses between two barriers are kept, and compared when the
second one is passed, or at the program's end. Atomic operations are left out, and the lanes of one warp count as
ordered.
"""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.ptx.faults import GlobalRace

Array = NDArray[Any]
_MOST_KEPT = 4096  # accesses, each of one instruction; a longer run without a barrier forgets the first ones


class _Access(NamedTuple):
    addresses: Any  # of each thread, or one of all
    warps: Array
    size: int
    at: int  # the index of the instruction
    writes: bool


class GlobalOrder:
    """The accesses of one program since its last barrier."""

    def __init__(self) -> None:
        self._kept: deque[_Access] = deque(maxlen=_MOST_KEPT)
        self._writes = False

    def add(self, addresses: Any, warps: Array, size: int, at: int, *, writes: bool) -> None:
        """Take note of accesses of `size` bytes each by instruction `at`. addresses, warps: of each thread."""
        self._kept.append(_Access(addresses, warps, size, at, writes))
        self._writes |= writes

    def barrier(self) -> None:
        """Begin anew. Raise GlobalRace if a warp has written where another one has read or written."""
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
            if (bad := several & written).any():
                these = place == place[starts[bad][0]]
                accesses = [near[x] for x in number[these]]
                self._report(int(place[these][0] * unit), warp[these].tolist(), accesses)

    @staticmethod
    def _report(address: int, warps: list[int], accesses: list[_Access]) -> None:
        """Raise the error for one place, whose accesses are in their order."""
        first = next(i for i, x in enumerate(accesses) if x.writes)
        other = next(i for i, warp in enumerate(warps) if warp != warps[first])
        one, two = sorted((first, other))
        did = [f"warp {warp} {'wrote' if x.writes else 'read'} it" for warp, x in zip(warps, accesses, strict=True)]
        error = GlobalRace(f"address {address:#x}: {did[one]}, {did[two]}, and no barrier orders the two")
        error.at, error.site = accesses[two].at, accesses[one].at
        raise error


def _units(access: _Access, unit: np.uint64) -> Array:
    """Return the numbers of the units that each thread accesses, thread after thread."""
    first = np.broadcast_to(np.asarray(access.addresses, np.uint64) // unit, access.warps.shape)
    return (first[:, None] + np.arange(access.size // int(unit), dtype=np.uint64)).ravel()
