"""The shared memory of a program, in which every access by two warps must be ordered by a barrier.

Each warp has a vector clock, as chains of operations have in `tpfuse.explore.clocks`. A barrier joins the clocks of its
warps. Shadow memory holds for each granule the warp that wrote it last with its time, and for each warp the time of its
last read. A granule is as wide as the narrowest access of the kernel, which PTX aligns to its width. The lanes of one
warp count as ordered: where they store different values at one place with one instruction, the last one's remains.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.ptx.faults import MemoryFault, SharedRace
from tpfuse.explore.ptx.parser import SHARED_BASE

Array = NDArray[Any]


class CheckedSharedMemory:
    """The shared memory of one program: `size` bytes, which nobody has written.

    site: the index of the instruction that is executed, which the program sets.
    """

    def __init__(self, size: int, granule: int, warps: int) -> None:
        self.size, self.site = size, 0
        padded = -(-size // 16) * 16
        self._bytes = np.full(padded, 0xFF, np.uint8)
        self._views: dict[Any, Array] = {}
        self._granule = granule
        granules = padded // granule
        self._knows = np.eye(warps, dtype=np.int32)
        self._writer = np.zeros(granules, np.int32)
        self._written = np.zeros(granules, np.int32)  # 0: never
        self._wrote = np.zeros(granules, np.int32)  # the site of the last write
        self._read = np.zeros((granules, warps), np.int32)
        self._copying = np.zeros(granules, bool)

    def load(self, addresses: Array, warps: Array, dtype: Any, count: int) -> Array:
        """Return [accesses, count] numbers of a type. warps: the warp of each access."""
        index = self._index(addresses, np.dtype(dtype).itemsize * count)
        self._check_read(index, warps, np.dtype(dtype).itemsize * count)
        values: Array = self._view(dtype)[index[:, None] // np.dtype(dtype).itemsize + np.arange(count)]
        return values

    def store(self, addresses: Array, warps: Array, values: Array) -> None:
        """Store [accesses, count] numbers."""
        size, count = values.dtype.itemsize, values.shape[1]
        index = self._index(addresses, size * count)
        self._check_write(index, warps, size * count)
        places = index[:, None] // size + np.arange(count)
        view = self._view(values.dtype)
        view[places] = values
        lost = (view[places] != values).any(axis=1)
        if lost.any() and (self._writer[index[lost] // self._granule] != warps[lost]).any():
            raise SharedRace("two warps store different values at one place with one instruction")

    def begin_copy(self, addresses: Array, warps: Array, size: int) -> None:
        """Begin asynchronous writes of `size` bytes: until they end, nobody may access these places."""
        index = self._index(addresses, size)
        self._check_write(index, warps, size)
        self._copying[self._granules(index, size)] = True

    def end_copy(self, addresses: Array, warps: Array, values: Array) -> None:
        """End asynchronous writes of [accesses, bytes]: the copying warp now sees them, the others after a barrier."""
        index = self._index(addresses, values.shape[1])
        granules = self._granules(index, values.shape[1])
        self._copying[granules] = False
        self._record(granules, warps[:, None])
        self._bytes[index[:, None] + np.arange(values.shape[1])] = values

    def barrier(self, warps: Sequence[int]) -> None:
        """Order everything that these warps have done before everything that they do afterwards."""
        rows = list(warps)
        self._knows[rows] = self._knows[rows].max(axis=0)
        self._knows[rows, rows] += 1

    def _view(self, dtype: Any) -> Array:
        if dtype not in self._views:
            self._views[dtype] = self._bytes.view(dtype)
        return self._views[dtype]

    def _index(self, addresses: Array, size: int) -> Array:
        index = addresses.astype(np.int64) - SHARED_BASE
        if ((index < 0) | (index > self.size - size)).any():
            bad = int(index[(index < 0) | (index > self.size - size)][0])
            raise MemoryFault(f"{size} bytes at byte {bad} of shared memory, which has {self.size} bytes")
        if (index % size).any():
            bad = int(index[index % size != 0][0])
            raise MemoryFault(f"{size} bytes at byte {bad} of shared memory: the address is not aligned")
        return index

    def _granules(self, index: Array, size: int) -> Array:
        return index[:, None] // self._granule + np.arange(max(1, size // self._granule))

    def _check_read(self, index: Array, warps: Array, size: int) -> None:
        granules, warps = self._granules(index, size), warps[:, None]
        written = self._written[granules]
        if (bad := written == 0).any():
            self._report(granules, bad, warps, "read, but nothing has been written there")
        self._check_order(granules, warps, written, "read")
        self._read[granules, warps] = self._knows[warps, warps]

    def _check_write(self, index: Array, warps: Array, size: int) -> None:
        granules, warps = self._granules(index, size), warps[:, None]
        self._check_order(granules, warps, self._written[granules], "write")
        bad: Array = np.any(self._read[granules] > self._knows[warps[:, 0], None], axis=-1)
        if bad.any():
            self._report(granules, bad, warps, "write, which another warp read, and no barrier orders the two")
        self._record(granules, warps)

    def _record(self, granules: Array, warps: Array) -> None:
        self._writer[granules] = warps
        self._written[granules] = self._knows[warps, warps]
        self._wrote[granules] = self.site

    def _check_order(self, granules: Array, warps: Array, written: Array, what: str) -> None:
        if (bad := self._copying[granules]).any():
            self._report(granules, bad, warps, f"{what}, but an asynchronous copy that nobody has waited for writes it")
        if (bad := written > self._knows[warps, self._writer[granules]]).any():
            self._report(granules, bad, warps, f"{what}, which warp {{}} wrote, and no barrier orders the two")

    def _report(self, granules: Array, bad: Array, warps: Array, what: str) -> None:
        granule = int(granules[bad][0])
        warp = int(np.broadcast_to(warps, granules.shape)[bad][0])
        error = SharedRace(
            f"byte {granule * self._granule} of shared memory: warp {warp} {what}".format(self._writer[granule])
        )
        error.site = int(self._wrote[granule]) if self._written[granule] else None
        raise error
