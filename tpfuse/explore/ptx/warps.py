"""The instructions by which the lanes of a warp exchange and multiply numbers, on registers of all warps at once.

The layouts of fragments are those of the PTX ISA 8.7, "Warp Level Matrix Multiply-Accumulate Instructions", figures of
m16n8k16 and m16n8k8, and of ldmatrix. In the comments g is a lane's number divided by 4, and t is the rest.

Products of 16-bit numbers and of tf32 numbers are exact, and summed in float32 in NumPy's order. A GPU rounds the sum
of a product of matrices differently, as its documentation allows.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LANES = 32
_LANE = np.arange(LANES, dtype=np.int64)


def shuffle(mode: str, value: Array, argument: Array, clamp: Array) -> tuple[Array, Array]:
    """Return what each lane gets by shfl.sync, and whether it came from a lane in range. Arrays have all threads."""
    lanes = value.reshape(-1, LANES)
    b, c = (x.reshape(-1, LANES).astype(np.int64) for x in (argument, clamp))
    segment, limit = c >> 8 & 31, c & 31
    last, first = (_LANE & segment) | (limit & ~segment), _LANE & segment
    if mode == "up":
        source = _LANE - (b & 31)
        inside = source >= last
    else:
        source = {"down": _LANE + (b & 31), "bfly": _LANE ^ b & 31, "idx": first | (b & ~segment & 31)}[mode]
        inside = source <= last
    source = np.where(inside, source, _LANE)
    return np.take_along_axis(lanes, source, 1).ravel(), inside.ravel()


_REDUCE: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}
_REDUCE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def reduced(name: str, value: Array) -> Array:
    """Return for each lane the reduction over its warp (redux.sync)."""
    return np.repeat(_REDUCE[name].reduce(value.reshape(-1, LANES), axis=1, dtype=value.dtype), LANES)


def matrix_fragments(rows: Array, count: int, transposed: bool) -> Array:
    """Return the registers [count, threads] that ldmatrix loads. rows: [warps, 8 * count, 8], 16-bit numbers."""
    matrices = rows.reshape(-1, count, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 1, 3, 2)
    pairs = np.ascontiguousarray(matrices.transpose(1, 0, 2, 3)).view(np.uint32)
    return pairs.reshape(count, -1)


def matrix_rows(registers: Array, transposed: bool) -> Array:
    """Return the rows [warps * 8 * count, 8] that stmatrix stores of registers [count, threads]."""
    pairs = np.ascontiguousarray(registers.reshape(len(registers), -1, 8, 4).transpose(1, 0, 2, 3))
    matrices = pairs.view(np.uint16)
    return np.ascontiguousarray(matrices.swapaxes(2, 3) if transposed else matrices).reshape(-1, 8)


def unpacked(kind: str, bits: Array) -> Array:
    """Return the float32 numbers in 32-bit words: one of tf32 in each, or two of 16 bits, along the last dimension."""
    bits = np.ascontiguousarray(bits)
    if kind == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    if kind == "bf16":
        return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


# Register i of a fragment has n numbers: 2 of 16 bits, or 1 of tf32.


def left_matrices(kind: str, registers: Array) -> Array:
    """Return A [products, warps, 16, 8 n] of [products, 4, threads]: row g + 8 (i & 1), columns 4 n (i >> 1) + n t …"""
    parts = unpacked(kind, registers).reshape(len(registers), 2, 2, registers.shape[-1] // LANES, 8, 4, -1)
    return parts.transpose(0, 3, 2, 4, 1, 5, 6).reshape(len(registers), parts.shape[3], 16, -1)


def right_matrices(kind: str, registers: Array) -> Array:
    """Return B [products, warps, 8 n, 8] of [products, 2, threads]: rows 4 n i + n t and the next, column g."""
    parts = unpacked(kind, registers).reshape(len(registers), 2, registers.shape[-1] // LANES, 8, 4, -1)
    return parts.transpose(0, 2, 1, 4, 5, 3).reshape(len(registers), parts.shape[2], -1, 8)


def sum_matrices(registers: Array) -> Array:
    """Return C [products, warps, 16, 8] of [products, 4, threads]: row g + 8 (i >> 1), column 2 t + (i & 1)."""
    parts = registers.view(np.float32).reshape(len(registers), 2, 2, -1, 8, 4)
    return parts.transpose(0, 3, 1, 4, 5, 2).reshape(len(registers), -1, 16, 8)


def sum_registers(sums: Array) -> Array:
    """Return the registers [products, 4, threads] of D: the inverse of `sum_matrices`."""
    parts = sums.reshape(*sums.shape[:2], 2, 8, 4, 2).transpose(0, 2, 5, 1, 3, 4)
    return np.ascontiguousarray(parts).view(np.uint32).reshape(len(sums), 4, -1)
