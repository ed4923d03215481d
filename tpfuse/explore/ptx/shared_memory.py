"""The shared memory of a program, in which every access by two warps must be ordered by a barrier.

Each warp has a vector clock, as chains of operations have in `tpfuse.explore.clocks`. A barrier joins the clocks of its
warps. Shadow memory holds for each granule the warp that wrote it last with its time, and for each warp the time of its
last read. A granule is as wide as the narrowest access of the kernel, which PTX aligns to its width. The lanes of one
warp count as ordered: where they store different values at one place with one instruction, the last one's remains.

The asynchronous proxy (bulk copies, wgmma) is one more chain of operations, behind those of the warps. It sees what
warps have stored once a proxy fence comes between (PTX ISA 8.7, "Proxy-preserved base causality order"): a second
vector of times says for each warp up to when.
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
        self._clocks = np.stack([np.eye(warps + 1, dtype=np.int32), np.zeros((warps + 1, warps + 1), np.int32)])
        self._knows, self._fenced = self._clocks
        self._proxy = warps  # the chain of the asynchronous proxy
        self._writer = np.zeros(granules, np.int32)
        self._written = np.zeros(granules, np.int32)  # 0: never
        self._wrote = np.zeros(granules, np.int32)  # the site of the last write
        self._read = np.zeros((granules, warps), np.int32)
        self._copying = np.zeros(granules, bool)
        self._reading = np.zeros(granules, np.int32)  # how many operations of the asynchronous proxy read it

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

    def begin_read(self, addresses: Array, warps: Sequence[int], size: int) -> None:
        """Begin reads by the asynchronous proxy for these warps together: until they end, nobody may write there."""
        granules = self._granules(self._index(addresses, size), size)
        written, rows = self._written[granules], list(warps)
        if (bad := written == 0).any():
            self._report(granules, bad, np.array(rows[0]), "reads by wgmma, but nothing has been written there")
        for row in rows:
            self._check_order(granules, np.array(row), written, "reads by wgmma")
        self._check_fenced(granules, rows)
        self._reading[granules] += 1

    def end_read(self, addresses: Array, warps: Sequence[int], size: int) -> None:
        """End such reads: other warps may write there after a barrier."""
        granules = self._granules(self._index(addresses, size), size)
        self._reading[granules] -= 1
        for row in warps:
            self._read[granules, row] = self._knows[row, row]

    def chunks(self, addresses: Array) -> Array:
        """Return 16 bytes from each address on, without a check."""
        result: Array = self._bytes.reshape(-1, 16)[(addresses - SHARED_BASE) // 16]
        return result

    def begin_bulk_copy(self, addresses: Array, warp: int, size: int) -> None:
        """Begin writes by the asynchronous proxy for a warp: until they end, nobody may access these places."""
        index = self._index(addresses, size)
        self._check_write(index, np.full(len(index), warp), size, proxy=True)
        self._copying[self._granules(index, size)] = True

    def end_bulk_copy(self, addresses: Array, values: Array) -> Array:
        """End such writes of [accesses, bytes]. Return the clocks of who has seen that they ended."""
        index = self._index(addresses, values.shape[1])
        granules = self._granules(index, values.shape[1])
        self._copying[granules] = False
        self._clocks[:, self._proxy, self._proxy] += 1
        self._record(granules, np.array(self._proxy))
        self._bytes[index[:, None] + np.arange(values.shape[1])] = values
        result = np.zeros_like(self._clocks[:, 0])
        result[:, self._proxy] = self._knows[self._proxy, self._proxy]
        return result

    def proxy_fence(self, warps: Sequence[int]) -> None:
        """Let the asynchronous proxy see all stores that are ordered before this."""
        for row in warps:
            self._fenced[row] = np.maximum(self._fenced[row], self._knows[row])
            self._knows[row, row] += 1

    def release(self, warp: int) -> Array:
        """Return the clocks of who has seen what a warp has done up to now."""
        result = self._clocks[:, warp].copy()
        self._knows[warp, warp] += 1
        return result

    def acquire(self, warp: int, clocks: Array) -> None:
        """Let a warp see what others have released."""
        self._clocks[:, warp] = np.maximum(self._clocks[:, warp], clocks)

    def clocks(self) -> Array:
        """Return for each warp what it has seen of each warp now."""
        result: Array = self._knows[:-1, :-1].copy()
        return result

    def has_seen(self, warp: int, clocks: Array) -> bool:
        """Return whether a warp has seen what others have released."""
        return bool((self._clocks[0, warp] >= clocks[0]).all())

    def barrier(self, warps: Sequence[int]) -> None:
        """Order everything that these warps have done before everything that they do afterwards."""
        rows = list(warps)
        self._clocks[:, rows] = self._clocks[:, rows].max(axis=1, keepdims=True)
        self._knows[rows, rows] += 1

    def _view(self, dtype: Any) -> Array:
        if dtype not in self._views:
            self._views[dtype] = self._bytes.view(dtype)
        return self._views[dtype]

    def _index(self, addresses: Array, size: int) -> Array:
        index = addresses.astype(np.int64) - SHARED_BASE
        bits = int(np.bitwise_or.reduce(index))  # negative if one of them is
        if bits < 0 or bits & size - 1 or index.max(initial=0) > self.size - size:
            outside = (index < 0) | (index > self.size - size)
            bad = int(index[outside if outside.any() else index % size != 0][0])
            why = f", which has {self.size} bytes" if outside.any() else ": the address is not aligned"
            raise MemoryFault(f"{size} bytes at byte {bad} of shared memory{why}")
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

    def _check_write(self, index: Array, warps: Array, size: int, *, proxy: bool = False) -> None:
        granules, warps = self._granules(index, size), warps[:, None]
        self._check_order(granules, warps, self._written[granules], "write")
        if (reading := self._reading[granules] > 0).any():
            self._report(granules, reading, warps, "write, but a wgmma that nobody has waited for reads it")
        if proxy:
            self._check_fenced(granules, [int(warps[0, 0])])
        bad: Array = np.any(self._read[granules] > self._knows[warps[:, 0], None, : self._proxy], axis=-1)
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
            self._report(granules, bad, warps, f"{what}, which {{}} wrote, and no barrier orders the two")

    def _check_fenced(self, granules: Array, rows: list[int]) -> None:
        if (bad := self._written[granules] > self._fenced[rows].min(axis=0)[self._writer[granules]]).any():
            what = "uses by the asynchronous proxy, which {} wrote, and no fence.proxy.async comes between"
            self._report(granules, bad, np.array(rows[0]), what)

    def _report(self, granules: Array, bad: Array, warps: Array, what: str) -> None:
        granule = int(granules[bad][0])
        warp = int(np.broadcast_to(warps, granules.shape)[bad][0])
        writer = int(self._writer[granule])
        who = "the asynchronous proxy" if writer == self._proxy else f"warp {writer}"
        error = SharedRace(f"byte {granule * self._granule} of shared memory: warp {warp} {what}".format(who))
        error.site = int(self._wrote[granule]) if self._written[granule] else None
        raise error
