"""Tensor maps, which tensormap.replace writes, and the tiles that cp.async.bulk.tensor copies.

The 128 bytes of a tensor map have a form that NVIDIA keeps for itself; here each field has a place of its own. The
fields and the values that they may have are those of the PTX ISA 8.7, "tensormap.replace", and of the CUDA driver's
cuTensorMapEncodeTiled. Tiles are supported, without interleaving, with element strides of 1 and zeros outside.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.ptx.faults import MemoryFault, Unsupported
from tpfuse.explore.ptx.global_memory import GlobalMemory
from tpfuse.explore.ptx.numbers import UNSIGNED
from tpfuse.explore.ptx.wgmma import swizzled

Array = NDArray[Any]
SIZE = 128
_MOST_DIMENSIONS = 5
# field -> (byte of its first element, bits, elements); 0 elements: it has no ordinal
FIELDS = {
    "global_address": (0, 64, 0),
    "global_stride": (8, 64, _MOST_DIMENSIONS - 1),
    "global_dim": (40, 32, _MOST_DIMENSIONS),
    "box_dim": (60, 32, _MOST_DIMENSIONS),
    "element_stride": (80, 32, _MOST_DIMENSIONS),
    "rank": (100, 32, 0),
    "elemtype": (104, 32, 0),
    "interleave_layout": (108, 32, 0),
    "swizzle_mode": (112, 32, 0),
    "fill_mode": (116, 32, 0),
}
_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 9: 8, 10: 2}  # of an element, by elemtype
_WIDTHS = {0: 1, 1: 2, 2: 4, 3: 8}  # chunks of 16 bytes in a row of the swizzling pattern, by swizzle_mode


def place_of(field: str, ordinal: int) -> int:
    """Return the byte at which an element of a field is. Raise ValueError if the field does not have it."""
    start, bits, elements = FIELDS[field]
    if not 0 <= ordinal < max(1, elements):
        raise ValueError
    return start + ordinal * bits // 8


class TensorMap(NamedTuple):
    """A tensor map. Sizes have the innermost dimension first. strides: in bytes, of all dimensions."""

    address: int
    element: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    width: int

    @classmethod
    def decode(cls, words: Array) -> "TensorMap":
        """Return the tensor map in 32 words. Raise MemoryFault where a field has a value that is not allowed."""
        given = words.tobytes()

        def field(name: str, ordinal: int = 0) -> int:
            place = place_of(name, ordinal)
            return int.from_bytes(given[place : place + FIELDS[name][1] // 8], "little")

        def each(name: str, count: int) -> tuple[int, ...]:
            return tuple(field(name, axis) for axis in range(count))

        rank, kind, mode = field("rank") + 1, field("elemtype"), field("swizzle_mode")
        if rank > _MOST_DIMENSIONS:
            raise MemoryFault(f"a tensor map of {rank} dimensions: at most {_MOST_DIMENSIONS}")
        for name in ("interleave_layout", "fill_mode"):
            if field(name):
                raise Unsupported(f"a tensor map with {name} {field(name)} is not supported")
        if kind not in _BYTES or mode not in _WIDTHS:
            raise Unsupported(f"a tensor map of elemtype {kind}, swizzle_mode {mode} is not supported")
        if {*each("element_stride", rank)} != {1}:
            raise Unsupported("a tensor map with element strides other than 1 is not supported")
        address, element, width = field("global_address"), _BYTES[kind], _WIDTHS[mode]
        sizes, strides, box = each("global_dim", rank), each("global_stride", rank - 1), each("box_dim", rank)
        if address % 16 or any(stride % 16 or stride >= 2**40 for stride in strides):
            raise MemoryFault(f"a tensor map of address {address:#x}, strides {strides}: no multiple of 16")
        inner = box[0] * element
        if not all(sizes) or not all(1 <= x <= 256 for x in box) or inner % 16:
            raise MemoryFault(f"a tensor map of sizes {sizes} and a box of {box} is not allowed")
        if width > 1 and inner > 16 * width:
            raise MemoryFault(f"the box's rows have {inner} bytes: at most {16 * width} with this swizzle_mode")
        if width > 1 and inner < 16 * width:
            raise Unsupported(f"a box with rows of {inner} bytes, of {16 * width} when swizzled, is not supported")
        return cls(address, element, sizes, (element, *strides), box, width)

    @property
    def nbytes(self) -> int:
        """Return the bytes of a box, which all count at the mbarrier."""
        return self.element * math.prod(self.box)

    def chunks(self, target: int) -> Array:
        """Return where the chunks of 16 bytes of a box go, which begins at an address of shared memory."""
        if target % 128:
            raise MemoryFault(f"a box at byte {target} of shared memory: no multiple of 128")
        return swizzled(target + np.arange(0, self.nbytes, 16), self.width)

    def tile(self, coordinates: tuple[int, ...]) -> "Tile":
        """Return the box at some coordinates. Raise MemoryFault if there are more or fewer than dimensions."""
        if len(self.box) != len(coordinates):
            raise MemoryFault(f"a tensor map of {len(self.box)} dimensions is given {len(coordinates)} coordinates")
        inside, address = np.ones((), bool), np.array(self.address, np.int64)
        for axis, (first, length) in enumerate(zip(coordinates, self.box, strict=True)):
            index = (first + np.arange(length, dtype=np.int64)).reshape(-1, *(1,) * axis)
            inside = inside & (index >= 0) & (index < self.sizes[axis])
            address = address + index * self.strides[axis]
        return Tile(address[inside].astype(np.uint64), inside.reshape(-1), self.element)


class Tile(NamedTuple):
    """A box at a place of global memory. addresses: of the elements of `element` bytes that are inside the tensor."""

    addresses: Array
    inside: Array
    element: int

    def load(self, memory: GlobalMemory) -> Array:
        """Return the chunks [chunks, 16] of the box, with zeros outside the tensor."""
        values = np.zeros(self.inside.shape, UNSIGNED[8 * self.element])
        values[self.inside] = memory.read(self.addresses, values.dtype.type, 1)[:, 0]
        return values.view(np.uint8).reshape(-1, 16)

    def store(self, memory: GlobalMemory, chunks: Array) -> None:
        """Store the chunks of the box, without what is outside the tensor."""
        values = chunks.reshape(-1).view(UNSIGNED[8 * self.element])
        memory.write(self.addresses, values[self.inside][:, None])
