"""The shared memory of a program, in which every access by two warps must be ordered by a barrier.

Each warp has a vector clock, as chains of operations have in `tpfuse.explore.clocks`. A barrier joins the clocks of its
warps. Shadow memory holds for each granule the warp that wrote it last with its time, and for each warp the time of its
last read. A granule is as wide as the narrowest access of the kernel, which PTX aligns to its width. The lanes of one
warp count as ordered, except within one instruction, by which threads may store the same values alone at one place.

The asynchronous proxy (bulk copies, wgmma) is one more chain of operations, behind those of the warps. It sees what
warps have stored once a proxy fence comes between (PTX ISA 8.7, "Proxy-preserved base causality order"): a second
vector of times says for each warp up to when in shared memory, and a third one in global memory.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.ptx.faults import MemoryFault, SharedRace, Unsupported
from tpfuse.explore.ptx.parser import SHARED_BASE

Array = NDArray[Any]
_WIDEST = 128  # bytes of an access


class CheckedSharedMemory:
    """The shared memory of one program: `size` bytes, which nobody has written.

    site: the index of the instruction that is executed, which the program sets. The argument `warps` of an access:
    the warp of each address, or one warp for all of them.
    """

    def __init__(self, size: int, granule: int, warps: int) -> None:
        self.size, self.site, self._proxy = size, 0, warps  # the proxy's number follows those of the warps
        padded = -(-size // _WIDEST) * _WIDEST
        self._bytes = np.full(padded, 0xFF, np.uint8)
        self._granule = granule
        self._clocks: Array = np.zeros((3, warps + 1, warps + 1), np.int32)
        self._knows, self._fenced, self._fenced_outside = self._clocks
        np.fill_diagonal(self._knows, 1)
        # For each granule: who wrote it last, when (0: never) and at which site; and how many products read it
        self._writer, self._written, self._wrote, self._reading = np.zeros((4, padded // granule), np.int32)
        self._read = np.zeros((padded // granule, warps), np.int32)
        self._copying = np.zeros(padded // granule, bool)
        # `_used` says where nothing was written since the last read, `_left_out` where a digest has left that out.
        self._used, self._left_out = np.ones(padded // granule, bool), np.zeros(padded // granule, bool)

    def load(self, addresses: Array, warps: Any, dtype: Any, count: int) -> Array:
        """Return [accesses, count] numbers of a type."""
        index, granules, warps = self._places(addresses, warps, np.dtype(dtype).itemsize * count)
        self._check_read(granules, warps, "read")
        self._read[granules, warps] = self._knows[warps, warps]
        self._used[granules] = True
        return self._rows(dtype, count)[index]

    def store(self, addresses: Array, warps: Any, values: Array) -> None:
        """Store [accesses, count] numbers."""
        index, granules, warps = self._places(addresses, warps, values[0].nbytes)
        rows = self._rows(values.dtype, values.shape[1])
        # Several threads may store the same values with one instruction, warps also one after another.
        same = (rows[index] == values).all(1) & (self._wrote[granules] == self.site).all(1)
        self._check_write(granules[~same], np.broadcast_to(warps, (len(index), 1))[~same])
        self._record(granules, warps)
        rows[index] = values
        if (rows[index] != values).any():
            raise SharedRace("two threads store different values at one place with one instruction")

    def begin_copy(self, addresses: Array, warps: Any, size: int, *, proxy: bool = False) -> None:
        """Begin asynchronous writes of `size` bytes: until they end, nobody may access these places.

        proxy: whether the asynchronous proxy makes them for the warps.
        """
        _, granules, warps = self._places(addresses, warps, size)
        self._check_write(granules, warps, proxy=proxy)
        self._copying[granules] = True

    def end_copy(self, addresses: Array, warps: Any, values: Array) -> None:
        """End asynchronous writes of [accesses, bytes]: who writes now sees them, the others after a barrier."""
        index, granules, warps = self._places(addresses, warps, values.shape[1])
        self._copying[granules] = False
        self._record(granules, warps)
        self._rows(np.uint8, values.shape[1])[index] = values

    def end_bulk_copy(self, addresses: Array, values: Array) -> Array:
        """End writes of the asynchronous proxy. Return the clocks of who has seen that they ended."""
        self.end_copy(addresses, self._proxy, values)
        self.proxy_fence([self._proxy])
        return self.release(self._proxy)

    def begin_read(self, chunks: Array, warps: Sequence[int]) -> None:
        """Begin reads of 16 bytes each by wgmma or TMA for some warps: until they end, nobody may write there."""
        _, granules, together = self._places(chunks.ravel(), np.array(warps)[:, None], 16)
        self._check_read(granules, together, "reads by wgmma or TMA", proxy=True)
        self._reading[granules] += 1

    def end_read(self, chunks: Array, warps: Sequence[int]) -> Array:
        """End such reads: other warps may write there after a barrier. Return the bytes [*chunks, 16]."""
        index, granules, together = self._places(chunks.ravel(), np.array(warps)[:, None], 16)
        self._reading[granules] -= 1
        self._used[granules] = True
        self._read[granules, together] = self._knows[together, together]
        return self._rows(np.uint8, 16)[index].reshape(*chunks.shape, 16)

    def proxy_fence(self, warps: Any, *, inside: bool = True, outside: bool = False) -> None:
        """Let the asynchronous proxy see all stores that are ordered before this by some warps.

        inside, outside: whether in shared, in global memory.
        """
        for fenced in [self._fenced] * inside + [self._fenced_outside] * outside:
            fenced[warps] = np.maximum(fenced[warps], self._knows[warps])
        self._knows[warps, warps] += 1

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

    def seen(self, warp: int) -> tuple[Array, Array]:
        """Return what a warp has seen of each warp, and what of that its bulk copies see in global memory."""
        return self._knows[warp], self._fenced_outside[warp]

    def has_seen(self, warp: int, clocks: Array) -> bool:
        """Return whether a warp has seen what others have released."""
        return bool((self._knows[warp] >= clocks[0]).all())

    def content(self) -> bytes:
        """Return a digest of what may be read from here on: whatever was not read since it was written.

        To read anything else raises Unsupported from now on, so that the digest is right for all that follows.
        """
        self._left_out |= self._used
        kept = np.where(self._used.repeat(self._granule), np.uint8(0), self._bytes)
        return blake2b(kept.tobytes()).digest()

    def barrier(self, warps: Sequence[int]) -> None:
        """Order everything that these warps have done before everything that they do afterwards."""
        rows = list(warps)
        self._clocks[:, rows] = self._clocks[:, rows].max(axis=1, keepdims=True)
        self._knows[rows, rows] += 1

    def _rows(self, dtype: Any, count: int) -> Array:
        """Return the memory as [units, count] numbers."""
        rows: Array = self._bytes.view(dtype).reshape(-1, count)
        return rows

    def _places(self, addresses: Array, warps: Any, size: int) -> tuple[Array, Array, Array]:
        """Return for accesses of `size` bytes their numbers in such units, their granules, and the warp of each."""
        index = addresses.astype(np.int64) - SHARED_BASE
        bits = int(np.bitwise_or.reduce(index))  # negative if one of them is
        if bits < 0 or bits & size - 1 or index.max(initial=0) > self.size - size:
            outside = (index < 0) | (index > self.size - size)
            bad = int(index[outside if outside.any() else index % size != 0][0])
            why = f", which has {self.size} bytes" if outside.any() else ": the address is not aligned"
            raise MemoryFault(f"{size} bytes at byte {bad} of shared memory{why}")
        granules = index[:, None] // self._granule + np.arange(max(1, size // self._granule))
        return index // size, granules, np.asarray(warps)[..., None]

    def _check_read(self, granules: Array, warps: Array, what: str, *, proxy: bool = False) -> None:
        self._refuse(self._written[granules] == 0, granules, warps, f"{what}, but nothing has been written there")
        if self._left_out[granules].any():
            raise Unsupported("explore_all: shared memory is read before and after an operation on a word: use explore")
        self._check_order(granules, warps, what, proxy)

    def _check_write(self, granules: Array, warps: Array, *, proxy: bool = False) -> None:
        self._check_order(granules, warps, "write", proxy)
        reading, read = self._reading[granules] > 0, self._read[granules] > self._knows[warps, : self._proxy]
        self._refuse(reading, granules, warps, "write, but a wgmma or TMA store that nobody has waited for reads it")
        self._refuse(read.any(-1), granules, warps, "write, which another warp read, and no barrier orders the two")
        self._record(granules, warps)

    def _check_order(self, granules: Array, warps: Array, what: str, proxy: bool) -> None:
        """Raise SharedRace if a write to the granules runs, or is not ordered before an access by the warps."""
        copied = f"{what}, but an asynchronous copy that nobody has waited for writes it"
        self._refuse(self._copying[granules], granules, warps, copied)
        writer, written = self._writer[granules], self._written[granules]
        unordered = f"{what}, which {{}} wrote, and no barrier orders the two"
        self._refuse(written > self._knows[warps, writer], granules, warps, unordered)
        if proxy:
            fenced = "uses by the asynchronous proxy, which {} wrote, and no fence.proxy.async comes between"
            self._refuse(written > self._fenced[warps, writer], granules, warps, fenced)

    def _record(self, granules: Array, warps: Array) -> None:
        self._writer[granules] = warps
        self._written[granules] = self._knows[warps, warps]
        self._wrote[granules] = self.site
        self._used[granules] = self._left_out[granules] = False

    def _refuse(self, bad: Array, granules: Array, warps: Array, what: str) -> None:
        """Raise SharedRace with the first bad access, if there is one. what: {} stands for the last writer."""
        if bad.any():
            bad, *places = np.broadcast_arrays(bad, granules, warps)
            granule, warp = (int(x[bad][0]) for x in places)
            writer = int(self._writer[granule])
            who = "the asynchronous proxy" if writer == self._proxy else f"warp {writer}"
            site = int(self._wrote[granule]) if self._written[granule] else None
            message = f"byte {granule * self._granule} of shared memory: warp {warp} {what}"
            raise SharedRace(message.format(who), site=site)
