"""The global memory of a kernel: the buffers that its caller names, and nothing else."""

import ctypes
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tpfuse.explore.ptx.faults import MemoryFault, Stuck
from tpfuse.explore.spins import Place

Array = NDArray[Any]
Change = Callable[[int, Any], Any]
_PATIENCE = 2000  # how often a program reads words without a change, in a run in which nobody else can change them
_ADDRESSES = 2**48  # more than a process has on x86-64


@dataclass
class Buffer:
    """Memory of `size` bytes from address `base` on."""

    name: str
    base: int
    size: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Buffer":
        """Return the memory of a tensor on the CPU, which reaches from its first to its last element."""
        assert tensor.device.type == "cpu", f"{name} is on {tensor.device}"
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(name, tensor.data_ptr(), (elements if tensor.numel() else 0) * tensor.element_size())


@cache
def _process(dtype: Any, count: int) -> Array:
    """Return the memory of the process from the second unit on as [units, count] numbers."""
    size = np.dtype(dtype).itemsize * count
    # Only places that were checked may be accessed. NumPy takes no memory at address 0.
    memory = (ctypes.c_uint8 * (_ADDRESSES // size * size)).from_address(size)
    return np.frombuffer(memory, dtype).reshape(-1, count)


class GlobalMemory:
    """Buffers, whose accesses must be inside one of them and aligned."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._buffers = [Buffer("", 0, 0)]
        for buffer in sorted(buffers, key=lambda x: (x.base, -x.size)):  # several tensors may share memory
            if buffer.base + buffer.size > self._buffers[-1].base + self._buffers[-1].size:
                self._buffers.append(buffer)
        self._bases = np.array([x.base for x in self._buffers], np.uint64)
        self._sizes = np.array([x.size for x in self._buffers], np.uint64)
        self.waits: Counter[bytes] = Counter()  # addresses that the program has read since a word was changed
        self.source: Callable[[], tuple[str, int]] = lambda: ("?", 0)  # the source line that accesses memory now

    def begin(self, source: Callable[[], tuple[str, int]], state: Callable[[Place], Hashable]) -> None:
        """Take note that a program begins. source, state: return the source line and the state that it is at."""
        self.source = source
        self.waits.clear()

    def load(self, addresses: Array, warps: Array, dtype: Any, count: int) -> Array:
        """Return [accesses, count] numbers of a type. warps: the warp of each access."""
        return self.read(addresses, dtype, count)

    def store(self, addresses: Array, warps: Array, values: Array) -> None:
        """Store [accesses, count] numbers."""
        self.waits.clear()
        self.write(addresses, values)

    def ordered(
        self,
        addresses: Array,
        warps: Array,
        dtype: Any,
        order: frozenset[str],
        name: str,
        change: Change | None = None,
    ) -> Array:
        """Perform an operation with an order, such as {"acq_rel", "sys"}, at one address after another.

        Return the old numbers. name: "ld", "st" or "atom.add" and the like. change: as of `_replace`; None for a load.
        """
        old, new, _ = self._replace(addresses, dtype, change)
        if name == "st" or (old != new).any():
            self.waits.clear()
        elif name not in ("atom.min", "atom.max"):  # which often change nothing, and do not wait
            words = addresses.tobytes()
            self.waits[words] += 1
            if self.waits[words] > _PATIENCE:
                raise Stuck(f"the program has read words {_PATIENCE} times, and nobody changes them")
        return old

    def barrier(self, warps: list[int]) -> None:
        """Take note that warps have met at a barrier."""

    def arrive(self, mbarrier: int, warp: int) -> None:
        """Take note that a thread of a warp arrives at the mbarrier with this address."""

    def wait(self, mbarrier: int, warp: int) -> None:
        """Take note that a thread of a warp has waited at an mbarrier."""

    def proxy_fence(self, warps: list[int]) -> None:
        """Take note that bulk copies see from now on what is ordered before this by some warps."""

    def begin_copy(self, addresses: Array, warp: int, size: int, mbarrier: int | None = None) -> int:
        """Take note that a bulk copy begins: a load, whose end an mbarrier tells, or a store. Return its number.

        size: of an element.
        """
        return 0

    def end_store(self, number: int, addresses: Array, warp: int) -> None:
        """Take note that a bulk store has ended, for which its warp has waited."""
        self.waits.clear()

    def end(self) -> None:
        """Take note that the program ends."""

    def read(self, addresses: Array, dtype: Any, count: int) -> Array:
        """Return what is there, as `load` does, without taking note of it."""
        units = self._units(addresses, np.dtype(dtype).itemsize * count)
        return _process(dtype, count)[units]

    def write(self, addresses: Array, values: Array) -> None:
        """Store what `store` does, without taking note of it."""
        units = self._units(addresses, values.dtype.itemsize * values.shape[1])
        _process(values.dtype, values.shape[1])[units] = values

    def _replace(self, addresses: Array, dtype: Any, change: Change | None) -> tuple[Array, Array, Array]:
        """Replace each number by change(its position, itself) if not None. Return old, new and whether stored."""
        stored = np.zeros(len(addresses), bool)
        if change is None:
            old = new = self.read(addresses, dtype, 1)[:, 0]
            return old, new, stored
        old, new = np.empty((2, len(addresses)), dtype)
        for position in range(len(addresses)):
            place = addresses[position : position + 1]
            old[position] = new[position] = self.read(place, dtype, 1)[0, 0]
            value = change(position, old[position])
            if value is not None:
                new[position], stored[position] = value, True
                self.write(place, new[position : position + 1, None])
        return old, new, stored

    def _units(self, addresses: Array, size: int) -> Array:
        """Return which units of `_process` have these addresses. Raise MemoryFault for one that is wrong."""
        self._check(addresses, np.uint64(size))
        return addresses // np.uint64(size) - np.uint64(1)

    def _check(self, addresses: Array, size: Any) -> None:
        """Raise MemoryFault unless all accesses of `size` bytes are aligned and inside buffers."""
        owners = np.searchsorted(self._bases, addresses, side="right") - 1
        inside, sizes = addresses - self._bases[owners], self._sizes[owners]
        unaligned = addresses % size != 0
        bad = unaligned | (inside >= sizes) | (sizes - inside < size)
        if bad.any():
            first = int(np.argmax(unaligned if unaligned.any() else bad))
            buffer = self._buffers[owners[first]]
            near = f", byte {inside[first]} of {buffer.name} ({buffer.size})" if buffer.size else ""
            why = "the address is not aligned" if unaligned.any() else "outside all memory it was given"
            raise MemoryFault(f"{size} bytes at address {int(addresses[first]):#x}{near}: {why}")
