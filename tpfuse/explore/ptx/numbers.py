"""The numbers of PTX as arrays of bits: their types, roundings and conversions.

A register is a NumPy array of unsigned integers, one for each thread of a program, or a single number where all threads
have the same. bfloat16 is rounded to the nearest, ties to even, in integer arithmetic. NaNs that an operation makes
need not have the bits that a GPU gives them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tpfuse.explore.ptx.faults import Unsupported

Bits = Any  # an array of unsigned integers or of booleans, or a NumPy scalar of such a type
Float = Any  # float16, float32 or float64

_TYPES: dict[str, Any] = {f"{kind}{bits}": f"{kind}{bits // 8}" for kind in "f" for bits in (16, 32, 64)}
_TYPES |= {f"s{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)}
_TYPES |= {f"{kind}{bits}": f"u{bits // 8}" for kind in "bu" for bits in (8, 16, 32, 64)}
TYPES = {name: np.dtype(code).type for name, code in _TYPES.items()}
UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def bits_of(name: str) -> int:
    """Return the width of a type, such as 32 of "s32" and of "bf16x2", and 1 of "pred"."""
    if name == "pred":
        return 1
    if name.endswith("x2"):
        return 32
    width = name.lstrip("bsutf")
    if not width.isdigit() or int(width) not in UNSIGNED:
        raise Unsupported(f"{name} is no type that is known")
    return int(width)


def immediate(value: int, bits: int) -> Bits:
    """Return a constant as a scalar of `bits` bits."""
    return np.bool_(value != 0) if bits == 1 else UNSIGNED[bits](value & (1 << bits) - 1)


def flushed(x: Float) -> Float:
    """Return float32 numbers with subnormal ones replaced by zero of the same sign (.ftz)."""
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


def to_bfloat16(x: Float) -> Bits:
    """Return float32 numbers rounded to bfloat16."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def to_tf32(bits: Bits) -> Bits:
    """Return the bits of float32 numbers rounded to tf32: to the nearest, ties away from zero."""
    finite = bits & np.uint32(0x7F800000) != np.uint32(0x7F800000)
    return np.where(finite, bits + np.uint32(0x1000), bits) & np.uint32(0xFFFFE000)


def decoder(name: str, ftz: bool = False) -> Callable[[Bits], Any]:
    """Return the function that turns bits of a type into numbers; 16-bit floating-point types become float32."""
    if name == "pred":
        return lambda x: x
    if name == "bf16":
        return lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "f16":
        return lambda x: x.view(np.float16).astype(np.float32)
    if name == "f32" and ftz:
        return lambda x: flushed(x.view(np.float32))
    dtype = TYPES[name]
    return lambda x: x.view(dtype)


def encoder(name: str, ftz: bool = False) -> Callable[[Any], Bits]:
    """Return the function that turns numbers into bits of a type, rounded to the nearest, ties to even.

    A number of float64 is rounded to float32 before it is rounded to 16 bits. Integers have the type's width.
    """
    if name == "pred":
        return lambda x: x
    if name == "bf16":
        return lambda x: to_bfloat16(x.astype(np.float32))
    if name == "f16":
        return lambda x: x.astype(np.float32).astype(np.float16).view(np.uint16)
    if name == "f32" and ftz:
        return lambda x: flushed(x.astype(np.float32)).view(np.uint32)
    dtype, unsigned = TYPES[name], UNSIGNED[bits_of(name)]
    return lambda x: x.astype(dtype, copy=False).view(unsigned)


def halves(x: Bits) -> tuple[Bits, Bits]:
    """Return the lower and the upper half of 32-bit numbers."""
    return (x & np.uint32(0xFFFF)).astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)


def joined(low: Bits, high: Bits) -> Bits:
    """Return 32-bit numbers from their halves."""
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def on_bits(f: Callable[..., Any], name: str, ftz: bool, arity: int) -> Callable[..., Bits]:
    """Return a function of bits of a type, such as "s32" or "bf16x2", that computes f of the numbers."""
    if name.endswith("x2"):
        half = on_bits(f, name[:-2], ftz, arity)

        def both(*sources: Bits) -> Bits:
            low, high = zip(*map(halves, sources), strict=True)
            return joined(half(*low), half(*high))

        return both
    decode, encode = decoder(name, ftz), encoder(name, ftz)
    if arity == 1:
        return lambda a: encode(f(decode(a)))
    if arity == 2:
        return lambda a, b: encode(f(decode(a), decode(b)))
    return lambda a, b, c: encode(f(decode(a), decode(b), decode(c)))
