"""The instructions by which the lanes of a warp exchange and multiply numbers, on registers of all warps at once.

The layouts of fragments are those of the PTX ISA 8.7, "Warp Level Matrix Multiply-Accumulate Instructions", figures of
m16n8k16 and m16n8k8, and of ldmatrix. In the comments g is a lane's number divided by 4, and t is the rest.

Products of 16-bit numbers and of tf32 numbers are exact, and summed in float32 in NumPy's order. A GPU rounds the sum
of a product of matrices differently, as its documentation allows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.ptx.faults import Unsupported

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


_REDUCE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduced(name: str, value: Array) -> Array:
    """Return for each lane the reduction over its warp (redux.sync)."""
    result: Any = _REDUCE[name]
    return np.repeat(result.reduce(value.reshape(-1, LANES), axis=1, dtype=value.dtype), LANES)


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


def _halves(registers: Array, kind: str) -> Array:
    """Return float32 numbers [registers, threads, 2] of registers with two 16-bit numbers each."""
    if kind == "bf16":
        return np.stack([registers << np.uint32(16), registers & np.uint32(0xFFFF0000)], -1).view(np.float32)
    return registers.view(np.float16).reshape(*registers.shape, 2).astype(np.float32)


def left_16(kind: str, registers: Array) -> Array:
    """Return A [warps, 16, 16]: register i has row g + 8 (i & 1) and columns 2 t + 8 (i >> 1) and the next."""
    parts = _halves(registers, kind).reshape(2, 2, -1, 8, 4, 2)  # column half, row half, warp, g, t, pair
    return parts.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)


def _right_16(kind: str, registers: Array) -> Array:
    """Return B [warps, 16, 8]: register i has rows 2 t + 8 i and the next, and column g."""
    parts = _halves(registers, kind).reshape(2, -1, 8, 4, 2)  # row half, warp, g, t, pair
    return parts.transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)


def left_8(registers: Array) -> Array:
    """Return A [warps, 16, 8]: register i has row g + 8 (i & 1) and column t + 4 (i >> 1), a tf32 number."""
    parts = (registers & np.uint32(0xFFFFE000)).view(np.float32).reshape(2, 2, -1, 8, 4)
    return parts.transpose(2, 1, 3, 0, 4).reshape(-1, 16, 8)


def _right_8(registers: Array) -> Array:
    """Return B [warps, 8, 8]: register i has row t + 4 i and column g."""
    parts = (registers & np.uint32(0xFFFFE000)).view(np.float32).reshape(2, -1, 8, 4)
    return parts.transpose(1, 0, 3, 2).reshape(-1, 8, 8)


def _sums(registers: Array) -> Array:
    """Return C [warps, 16, 8]: register i has row g + 8 (i >> 1) and column 2 t + (i & 1)."""
    parts = registers.view(np.float32).reshape(2, 2, -1, 8, 4)  # row half, pair, warp, g, t
    return parts.transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)


def _registers(sums: Array) -> Array:
    """Return the registers [4, threads] of D [warps, 16, 8]."""
    parts = sums.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return np.ascontiguousarray(parts).view(np.uint32).reshape(4, -1)


class WarpProducts:
    """mma.sync of one shape and type. A fragment that several products share is unpacked once.

    Registers are never changed in place, so that a fragment is known by the identity of its registers.
    """

    _MOST_KEPT = 64

    def __init__(self, shape: str, kind: str) -> None:
        self._left: Callable[[Array], Array]
        self._right: Callable[[Array], Array]
        if shape == "m16n8k16" and kind in ("bf16", "f16"):
            self._left, self._right = partial(left_16, kind), partial(_right_16, kind)
        elif shape == "m16n8k8" and kind == "tf32":
            self._left, self._right = left_8, _right_8
        else:
            raise Unsupported(f"mma.sync {shape} of {kind} is not supported")
        self._known: dict[tuple[int, ...], tuple[list[Array], Array]] = {}

    def multiply(self, left: list[Array], right: list[Array], sums: list[Array]) -> Array:
        """Return the four registers [4, threads] of A B + C."""
        a, b = self._unpacked(left, self._left), self._unpacked(right, self._right)
        return _registers(a @ b + _sums(np.stack(sums)))

    def _unpacked(self, registers: list[Array], unpack: Callable[[Array], Array]) -> Array:
        key = tuple(map(id, registers))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._MOST_KEPT:
                self._known.clear()
            found = self._known[key] = registers, np.ascontiguousarray(unpack(np.stack(registers)))
        return found[1]
