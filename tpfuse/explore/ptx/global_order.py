"""The order of what the warps of a program do in global memory: only barriers and mbarriers order two warps.

A compiler puts barriers between accesses to shared memory, but not between a store to global memory and a load of it:
these belong to the kernel (`tl.debug_barrier`). The accesses between two barriers of all warps are kept with the clocks
that their warps have in `shared_memory`, and compared when the second one is passed, or at the program's end. Atomic
operations are left out, and the lanes of one warp count as ordered.

Bulk copies belong to the asynchronous proxy. What a warp has stored must be ordered before a copy that uses the place,
with a proxy fence between. While a bulk store runs, nobody may use its target; when its warp has waited for it, it
counts as an access of that warp.
"""

from collections import deque
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from tpfuse.explore.ptx.faults import GlobalRace
from tpfuse.explore.ptx.shared_memory import Array, CheckedSharedMemory

_MOST_KEPT = 4096  # accesses, each of one instruction; a longer run without a barrier forgets the first ones


class Access(NamedTuple):
    """The accesses of one instruction. bulk: by a copy. low, high: the first address, and the one after all."""

    addresses: Any  # of each thread, or one of all
    warps: Array
    size: int
    at: int  # the index of the instruction
    writes: bool
    bulk: bool
    clocks: Array
    low: int
    high: int

    def places(self, unit: int) -> Array:
        """Return the places [threads, size / unit] of `unit` bytes that each thread accesses."""
        first = np.broadcast_to(np.asarray(self.addresses, np.uint64) // np.uint64(unit), self.warps.shape)
        return first[:, None] + np.arange(self.size // unit, dtype=np.uint64)

    def meets(self, other: "Access") -> bool:
        """Return whether the two may have common places."""
        return self.low < other.high and other.low < self.high

    def common(self, other: "Access") -> Array:
        """Return which threads of the other access use a place of this one."""
        unit = min(self.size, other.size)
        used: Array = np.isin(other.places(unit), self.places(unit)).max(1)
        return used

    def did(self, warp: int) -> str:
        """Return what a warp did."""
        return f"warp {warp} {'wrote' if self.writes else 'read'} it" + " by TMA" * self.bulk


class GlobalOrder:
    """The accesses of one program since its last barrier. shared: has the clocks of its warps."""

    def __init__(self, shared: CheckedSharedMemory) -> None:
        self._shared = shared
        self._kept: deque[Access] = deque(maxlen=_MOST_KEPT)
        self._written: deque[Access] = deque(maxlen=_MOST_KEPT)  # all writes, also those before barriers
        self._stores: list[Access] = []  # by bulk stores that nobody has waited for

    def add(self, addresses: Any, warps: Array, size: int, at: int, *, writes: bool) -> None:
        """Take note of accesses of `size` bytes each by instruction `at`. addresses, warps: of each thread."""
        access = self._access(addresses, warps, size, at, writes, bulk=False)
        self._keep(access)
        if writes:
            self._written.append(access)

    def begin_copy(self, addresses: Array, warp: int, size: int, at: int, *, writes: bool) -> Access:
        """Begin a bulk copy of elements of `size` bytes, which a warp has issued. writes: whether it is a store."""
        access = self._access(addresses, np.full(len(addresses), warp), size, at, writes, bulk=True)
        seen, fenced = self._shared.seen(warp)
        for other in self._written:
            if access.meets(other) and (common := access.common(other)).any():
                warps = np.unique(other.warps[common])
                times = other.clocks[warps, warps]
                if (late := times > (seen if other.bulk else fenced)[warps]).any():
                    unfenced = (times <= seen[warps])[late][0]
                    why = "no fence.proxy.async comes between" if unfenced else "no barrier orders the two"
                    did = f"{other.did(int(warps[late][0]))}, {access.did(warp)}"
                    raise GlobalRace(f"{did}, and {why}", at=at, site=other.at)
        if writes:
            self._keep(access)
            self._stores.append(access)
        else:
            self._refuse_stores(access)
        return access

    def end_store(self, store: Access) -> None:
        """End a bulk store, for which its warp has waited."""
        self._stores = [x for x in self._stores if x is not store]
        ended = self._access(store.addresses, store.warps, store.size, store.at, writes=True, bulk=True)
        self._keep(ended)
        self._written.append(ended)

    def barrier(self) -> None:
        """Begin anew. Raise GlobalRace if nothing orders a write by a warp and an access there by another one."""
        if writes := [x for x in self._kept if x.writes]:
            low, high = min(x.low for x in writes), max(x.high for x in writes)
            _check([x for x in self._kept if x.low < high and x.high > low])
        self._kept.clear()

    def _access(self, addresses: Any, warps: Array, size: int, at: int, writes: bool, bulk: bool) -> Access:
        low, high = (int(np.min(addresses)), int(np.max(addresses)) + size) if np.size(addresses) else (0, 0)
        return Access(addresses, warps, size, at, writes, bulk, self._shared.clocks(), low, high)

    def _keep(self, access: Access) -> None:
        self._refuse_stores(access)
        if access.high:  # a tile may be outside its tensor
            self._kept.append(access)

    def _refuse_stores(self, access: Access) -> None:
        """Raise GlobalRace if an access meets the target of a bulk store that runs."""
        for store in self._stores:
            if store.meets(access) and (common := store.common(access)).any():
                did = access.did(int(access.warps[common][0]))
                why = "but a TMA store that nobody has waited for writes it"
                raise GlobalRace(f"{did}, {why}", at=access.at, site=store.at)


def _check(accesses: list[Access]) -> None:
    """Raise GlobalRace if two of the accesses to a place, one of which writes, are of two warps and not ordered."""
    unit = min(x.size for x in accesses)
    columns = []
    for number, x in enumerate(accesses):
        columns.append([y.ravel() for y in np.broadcast_arrays(x.places(unit), x.warps[:, None], number)])
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
                where = f"address {int(place[start]) * unit:#x}: {one.did(first)}, {two.did(second)}"
                raise GlobalRace(f"{where}, and no barrier orders the two", at=two.at, site=one.at)
