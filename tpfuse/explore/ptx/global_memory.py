"""The global memory of a kernel: the buffers that its caller names, and nothing else."""

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tpfuse.explore.ptx.faults import MemoryFault, Stuck

Array = NDArray[Any]
Change = Callable[[int, Any], Any]
_PATIENCE = 2000  # words in a row that a program reads without a change, in a run in which nobody else can change them


class Buffer:
    """Memory from address `base` on. A tensor's memory reaches from its first to its last element."""

    def __init__(self, name: str, base: int, size: int) -> None:
        self.name, self.base, self.end = name, base, base + size
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
        self._views: dict[Any, tuple[Array, int]] = {}

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Buffer":
        """Return the memory of a tensor on the CPU."""
        assert tensor.device.type == "cpu", f"{name} is on {tensor.device}"
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(name, tensor.data_ptr(), (elements if tensor.numel() else 0) * tensor.element_size())

    def units(self, dtype: Any) -> tuple[Array, int]:
        """Return the memory as numbers of a type, and the address of the first one, which is aligned."""
        if dtype not in self._views:
            width = np.dtype(dtype).itemsize
            start = -(-self.base // width) * width
            count = max(0, (self.end - start) // width)
            begin = start - self.base
            self._views[dtype] = self._bytes[begin : begin + count * width].view(dtype), start
        return self._views[dtype]


class GlobalMemory:
    """Buffers, whose accesses must be inside one of them and aligned."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._buffers = sorted((x for x in buffers if x.end > x.base), key=lambda x: (x.base, -x.end))
        inside = -1
        kept = []
        for buffer in self._buffers:  # several tensors may share memory
            if buffer.end > inside:
                kept.append(buffer)
                inside = buffer.end
        self._buffers = kept
        self._bases = [x.base for x in kept]
        self._unchanged = 0
        self.source: Callable[[], tuple[str, int]] = lambda: ("?", 0)  # the source line that accesses memory now

    def load(self, addresses: Array, dtype: Any, count: int) -> Array:
        """Return [accesses, count] numbers of a type."""
        return self._read(addresses, dtype, count)

    def store(self, addresses: Array, values: Array) -> None:
        """Store [accesses, count] numbers."""
        self._unchanged = 0
        self._write(addresses, values)

    def ordered(
        self, addresses: Array, dtype: Any, order: frozenset[str], name: str, change: Change | None = None
    ) -> Array:
        """Perform an operation with an order, such as {"acq_rel", "sys"}, at one address after another.

        Return the old numbers. name: "ld", "st" or "atom.add" and the like. change: as of `_replace`; None for a load.
        """
        old, new = self._replace(addresses, dtype, change)
        self._looked(changed=name == "st" or bool((old != new).any()))
        return old

    def barrier(self) -> None:
        """Take note that all threads of the program have met at a barrier."""

    def _looked(self, *, changed: bool) -> None:
        self._unchanged = 0 if changed else self._unchanged + 1
        if self._unchanged > _PATIENCE:
            raise Stuck(f"the program has read words {_PATIENCE} times, and nobody changes them")

    def _read(self, addresses: Array, dtype: Any, count: int) -> Array:
        result = np.empty((len(addresses), count), dtype)
        for buffer, chosen in self._parts(addresses, np.dtype(dtype).itemsize * count):
            words, index = self._places(buffer, addresses[chosen], dtype, count)
            result[chosen] = words[index]
        return result

    def _write(self, addresses: Array, values: Array) -> None:
        for buffer, chosen in self._parts(addresses, values.dtype.itemsize * values.shape[1]):
            words, index = self._places(buffer, addresses[chosen], values.dtype, values.shape[1])
            words[index] = values[chosen]

    def _replace(self, addresses: Array, dtype: Any, change: Change | None) -> tuple[Array, Array]:
        """Replace each number by change(its position among the accesses, itself). Return the old and the new ones."""
        if change is None:
            old = new = self._read(addresses, dtype, 1)[:, 0]
            return old, new
        old, new = np.empty((2, len(addresses)), dtype)
        for position in range(len(addresses)):
            place = addresses[position : position + 1]
            old[position] = self._read(place, dtype, 1)[0, 0]
            new[position] = change(position, old[position])
            self._write(place, new[position : position + 1, None])
        return old, new

    @staticmethod
    def _places(buffer: Buffer, addresses: Array, dtype: Any, count: int) -> tuple[Array, Array]:
        words, start = buffer.units(dtype)
        index = (addresses - np.uint64(start)).astype(np.int64) // np.dtype(dtype).itemsize
        return words, index[:, None] + np.arange(count)

    def _parts(self, addresses: Array, size: int) -> Iterable[tuple[Buffer, Any]]:
        """Yield the buffers that are accessed, with the accesses to each. Raise MemoryFault for a wrong address."""
        if not len(addresses):
            return
        if (addresses % np.uint64(size)).any():
            bad = int(addresses[addresses % np.uint64(size) != 0][0])
            raise MemoryFault(f"{size} bytes at address {bad:#x}{self._near(bad)}: the address is not aligned")
        low, high = int(addresses.min()), int(addresses.max())
        buffer = self._at(low)
        if buffer is not None and high + size <= buffer.end:
            yield buffer, slice(None)
            return
        owners = np.searchsorted(np.array(self._bases, np.uint64), addresses, side="right") - 1
        for owner in np.unique(owners):
            chosen = np.flatnonzero(owners == owner)
            buffer = self._buffers[owner] if owner >= 0 else None
            if buffer is None or int(addresses[chosen].max()) + size > buffer.end:
                bad = int(addresses[chosen].max())
                raise MemoryFault(f"{size} bytes at address {bad:#x}{self._near(bad)}: outside all memory it was given")
            yield buffer, chosen

    def _at(self, address: int) -> Buffer | None:
        index = bisect_right(self._bases, address) - 1
        return self._buffers[index] if index >= 0 else None

    def _near(self, address: int) -> str:
        buffer = self._at(address)
        return "" if buffer is None else f", byte {address - buffer.base} of {buffer.name} ({buffer.end - buffer.base})"
