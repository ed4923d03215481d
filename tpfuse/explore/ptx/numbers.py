"""The numbers of PTX as arrays of bits: their types, roundings and conversions.

A register is a NumPy array of unsigned integers, one for each thread of a program, or a single number where all threads
have the same. bfloat16 is rounded to the nearest, ties to even, in integer arithmetic. NaNs that an operation makes
need not have the bits that a GPU gives them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpfuse.explore.ptx.faults import Unsupported

Bits = Any  # an array of unsigned integers or of booleans, or a NumPy scalar of such a type
Float = Any  # float16, float32 or float64

UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
INTEGERS: dict[str, Any] = {f"{kind}{bits}": UNSIGNED[bits] for kind in "bu" for bits in (8, 16, 32, 64)}
INTEGERS |= {"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64}
TYPES: dict[str, Any] = INTEGERS | {"pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64}
_BITS: dict[str, int] = {name: 8 * np.dtype(dtype).itemsize for name, dtype in TYPES.items()}
_BITS |= {"pred": 1, "bf16": 16} | {f"{name}16x2": 32 for name in ("f", "bf", "s", "u")}


def bits_of(name: str) -> int:
    """Return the width of a type, such as 32 of "s32" and of "bf16x2", and 1 of "pred"."""
    if name not in _BITS:
        raise Unsupported(f"{name} is no type that is known")
    return _BITS[name]


def immediate(value: int, bits: int) -> Bits:
    """Return a constant as a scalar of `bits` bits."""
    return np.bool_(value != 0) if bits == 1 else UNSIGNED[bits](value & (1 << bits) - 1)


def flushed(x: Float) -> Float:
    """Return float32 numbers with subnormal ones replaced by zero of the same sign (.ftz)."""
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


def to_bfloat16(x: Float) -> Bits:
    """Return numbers rounded to float32, and then to bfloat16."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def to_tf32(bits: Bits) -> Bits:
    """Return the bits of float32 numbers rounded to tf32: to the nearest, ties away from zero."""
    finite = bits & np.uint32(0x7F800000) != np.uint32(0x7F800000)
    return np.where(finite, bits + np.uint32(0x1000), bits) & np.uint32(0xFFFFE000)


def decoder(name: str, ftz: bool) -> Callable[[Bits], Any]:
    """Return the function that turns bits of a type into numbers; 16-bit floating-point types become float32."""
    if name == "bf16":
        return lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "f16":
        return lambda x: x.view(np.float16).astype(np.float32)
    if name == "f32" and ftz:
        return lambda x: flushed(x.view(np.float32))
    dtype = TYPES[name]
    return lambda x: x.view(dtype)


def encoder(name: str, ftz: bool) -> Callable[[Any], Bits]:
    """Return the function that turns numbers into bits of a type, rounded to the nearest, ties to even.

    A number of float64 is rounded to float32 before it is rounded to 16 bits. Integers lose the bits above the type's.
    """
    if name == "bf16":
        return to_bfloat16
    if name == "f16":
        return lambda x: x.astype(np.float32).astype(np.float16).view(np.uint16)
    if name == "f32" and ftz:
        return lambda x: flushed(x.astype(np.float32)).view(np.uint32)
    dtype, unsigned = TYPES[name], UNSIGNED[bits_of(name)]
    return lambda x: x.astype(dtype, copy=False).view(unsigned)


def halves(x: Bits, bits: int = 32) -> tuple[Bits, Bits]:
    """Return the lower and the upper half of numbers of 32 or 64 bits."""
    half = UNSIGNED[bits // 2]
    return x.astype(half), (x >> UNSIGNED[bits](bits // 2)).astype(half)


def joined(low: Bits, high: Bits, bits: int = 32) -> Bits:
    """Return numbers of 32 or 64 bits from their halves."""
    whole = UNSIGNED[bits]
    return low.astype(whole) | high.astype(whole) << whole(bits // 2)


def on_halves(f: Callable[..., Bits]) -> Callable[..., list[Bits]]:
    """Return a function that applies f to the lower and to the upper halves of 32-bit numbers."""
    return lambda *sources: [f(*x) for x in zip(*map(halves, sources), strict=True)]


def on_bits(f: Callable[..., Any], sources: Sequence[str], result: str, ftz: bool = False) -> Callable[..., Bits]:
    """Return a function from bits of types to bits of a type that computes f of the numbers, or of those of pairs."""
    if ftz and "f32" not in (*sources, result):
        raise ValueError("only float32 numbers are flushed here")
    if result.endswith("x2"):
        both = on_halves(on_bits(f, [x[:-2] for x in sources], result[:-2], ftz))
        return lambda *bits: joined(*both(*bits))
    decoders, encode = [decoder(name, ftz) for name in sources], encoder(result, ftz)
    if len(decoders) == 1:
        return lambda a: encode(f(decoders[0](a)))
    if len(decoders) == 2:
        return lambda a, b: encode(f(decoders[0](a), decoders[1](b)))
    return lambda *bits: encode(f(*[decode(x) for decode, x in zip(decoders, bits, strict=True)]))
