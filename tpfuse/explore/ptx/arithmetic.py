"""The instructions of PTX that compute each thread's result from its own registers.

`operation(opcode)` returns a function from bits to bits, with the widths of its operands. An opcode or a modifier that
is not known raises Unsupported. The definitions are those of NVIDIA's PTX ISA 8.7, chapter "Instruction Set".

A fused multiply-add of less than 64 bits is computed in float64 and then rounded; in rare cases this differs from one
rounding in the last bit. Instructions that a GPU only approximates (`.approx`, `div.full`) are computed exactly and
rounded.
"""

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tpfuse.explore.ptx.faults import Unsupported
from tpfuse.explore.ptx.numbers import INTEGERS, UNSIGNED, Bits, Float, bits_of, joined, on_bits, on_halves, to_tf32

_Function = Callable[..., Any]  # of numbers


class Operation(NamedTuple):
    """An instruction's function, whose result is a pair for a comparison of pairs. widths: bits of the sources."""

    function: Callable[..., Any]
    widths: tuple[int, ...]


@cache
def operation(opcode: str) -> Operation:
    """Return the function of an opcode. Raise Unsupported if it, or one of its modifiers, is not known."""
    name, *modifiers = opcode.split(".")
    if name not in _MAKERS and name not in _SIMPLE:
        raise Unsupported(f"{opcode} is not supported")
    try:
        return _MAKERS[name](*modifiers) if name in _MAKERS else _simple(name, *modifiers)
    except (LookupError, TypeError, ValueError):  # TypeError: another number of modifiers
        raise Unsupported(f"{opcode} is not supported: {'.'.join(modifiers)!r}") from None


def _is_float(kind: str) -> bool:
    return kind.startswith(("f", "bf"))


def _operation(function: _Function, sources: tuple[str, ...], result: str, ftz: bool = False) -> Operation:
    """Return the operation that computes a function of numbers of some types."""
    return Operation(on_bits(function, sources, result, ftz), tuple(map(bits_of, sources)))


def _rounded_once(a: float, b: float, c: float) -> float:
    twice = a * b + c
    return float(Fraction(a) * Fraction(b) + Fraction(c)) or twice if math.isfinite(twice) else twice


_fused_doubles = np.vectorize(_rounded_once, otypes=[np.float64])


def _fused(a: Float, b: Float, c: Float) -> Float:
    if a.dtype == np.float64:
        return _fused_doubles(a, b, c)
    return a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)


def _with_zeros(name: str, function: _Function) -> _Function:
    """Return min or max of floats, of which -0.0 is lower than +0.0: bits of equal numbers differ for zeros alone."""
    choose = {"min": operator.or_, "max": operator.and_}[name]

    def chosen(a: Float, b: Float) -> Float:
        bits = UNSIGNED[8 * a.itemsize]
        return np.where(a == b, choose(a.view(bits), b.view(bits)).view(a.dtype), function(a, b))

    return chosen


# name -> (number of sources; what it computes of floats, with which modifiers; what it computes of integers)
_SIMPLE: dict[str, tuple[int, _Function | None, str, _Function | None]] = {
    "add": (2, operator.add, "rn ftz", operator.add),
    "sub": (2, operator.sub, "rn ftz", operator.sub),
    "mul": (2, operator.mul, "rn ftz", None),  # of integers: `_product`
    "fma": (3, _fused, "rn ftz", None),
    "div": (2, operator.truediv, "rn ftz full approx", lambda a, b: (a - np.fmod(a, b)) // b),
    "rem": (2, None, "", np.fmod),
    "min": (2, np.fmin, "ftz NaN", np.minimum),
    "max": (2, np.fmax, "ftz NaN", np.maximum),
    "abs": (1, np.abs, "ftz", np.abs),
    "neg": (1, operator.neg, "ftz", operator.neg),
    "and": (2, None, "", operator.and_),
    "or": (2, None, "", operator.or_),
    "xor": (2, None, "", operator.xor),
    "not": (1, None, "", np.invert),
    "sqrt": (1, np.sqrt, "rn ftz approx", None),
    "rsqrt": (1, lambda x: 1 / np.sqrt(x.astype(np.float64)), "ftz approx", None),
    "rcp": (1, lambda x: 1 / x.astype(np.float64), "rn ftz approx", None),
    "tanh": (1, lambda x: np.tanh(x.astype(np.float64)), "approx", None),
    "ex2": (1, lambda x: np.exp2(x.astype(np.float64)), "ftz approx", None),
    "lg2": (1, lambda x: np.log2(x.astype(np.float64)), "ftz approx", None),
}


def _simple(name: str, *modifiers: str) -> Operation:
    *given, kind = modifiers
    arity, function, known, of_integers = _SIMPLE[name]
    if not _is_float(kind):
        function, known = of_integers, "relu" if name in ("min", "max") and kind == "s32" else ""
    elif "NaN" in given:
        function = of_integers
    if function is None or set(given) - set(known.split()):
        raise ValueError
    if name in ("abs", "neg") and kind.startswith("u"):
        raise ValueError
    if _is_float(kind) and name in ("min", "max"):
        function = _with_zeros(name, function)
    if "relu" in given:
        return _operation(lambda *sources: np.maximum(function(*sources), np.int32(0)), (kind,) * arity, kind)
    return _operation(function, (kind,) * arity, kind, "ftz" in given)


def _product(part: str, kind: str, *, adds: bool = False) -> Operation:
    """Return mul or mad of integers. part: "wide" has twice the bits, of which "lo" and "hi" are the halves."""
    if kind not in INTEGERS:
        raise ValueError
    shift = {"lo": 0, "wide": 0, "hi": bits_of(kind)}[part]
    wide = kind if part == "lo" else f"{kind[0]}{2 * bits_of(kind)}"
    result, dtype = kind if shift else wide, INTEGERS[wide]

    def product(a: Any, b: Any) -> Any:
        both = a.astype(dtype, copy=False) * b.astype(dtype, copy=False)
        return both >> dtype(shift) if shift else both

    if adds:
        return _operation(lambda a, b, c: product(a, b) + c, (kind, kind, result), result)
    return _operation(product, (kind, kind), result)


def _shift(function: _Function, kind: str) -> Operation:
    bits, dtype = np.uint32(bits_of(kind)), INTEGERS[kind]
    # NumPy defines shifts by a number's width and more as PTX does, up to the amounts that the type holds.
    return _operation(lambda a, amount: function(a, np.minimum(amount, bits).astype(dtype)), (kind, "u32"), kind)


def _bfe(kind: str) -> Operation:
    """Return the bits from position b on, c of them, extended by zeros or by the highest of them."""
    wide: Any = {"s": np.int64, "u": np.uint64}[kind[0]]

    def extract(a: Any, position: Any, length: Any) -> Any:
        value = a.astype(wide) >> (position & np.uint32(0xFF)).astype(wide)
        unused = (np.uint32(64) - np.minimum(length & np.uint32(0xFF), np.uint32(64))).astype(wide)
        return value << unused >> unused

    return _operation(extract, (kind, "u32", "u32"), kind)


def _prmt(kind: str) -> Operation:
    """Return four bytes of a and b, which the digits of c number; a digit of 8 or more takes the byte's sign alone."""

    def permute(a: Bits, b: Bits, digits: Bits) -> Bits:
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        result: Bits = np.uint32(0)
        for place in range(4):
            digit = digits >> np.uint32(4 * place) & np.uint32(15)
            byte = both >> (digit.astype(np.uint64) & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
            sign = np.where(byte >= 0x80, np.uint32(0xFF), np.uint32(0))
            result = result | np.where(digit >= 8, sign, byte.astype(np.uint32)) << np.uint32(8 * place)
        return result

    return {"b32": Operation(permute, (32, 32, 32))}[kind]


_COMPARE: dict[str, _Function] = {x: getattr(operator, x) for x in ("eq", "ne", "lt", "le", "gt", "ge")}
# Comparisons that hold if a number is NaN (equ, neu, ...) are the negations of the opposite ones.
_COMPARE_FLOATS: dict[str, _Function] = _COMPARE | {
    "ne": lambda a, b: (a < b) | (a > b),
    "neu": operator.ne,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


def _setp(name: str, *modifiers: str) -> Operation:
    *given, kind = modifiers
    if given not in ([], ["ftz"]):
        raise ValueError
    compare = (_COMPARE_FLOATS if _is_float(kind) else _COMPARE)[name]
    compared = on_bits(compare, (kind.removesuffix("x2"),) * 2, "pred", bool(given))
    return Operation(on_halves(compared) if kind.endswith("x2") else compared, (bits_of(kind),) * 2)


_TO_INTEGERS: dict[str, _Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _cvt(*modifiers: str) -> Operation:
    """Return a conversion. cvt.rn.bf16x2.f32 packs its first operand above its second one."""
    *given, to, source = modifiers
    ftz, rounding = "ftz" in given, ".".join(x for x in given if x != "ftz")
    if (given, to, source) == (["rna"], "tf32", "f32"):
        return Operation(to_tf32, (32,))
    if not _is_float(source):
        if given != (["rn"] if _is_float(to) else []):
            raise ValueError
        # Integers of up to 53 bits are exact in float64; of longer ones the sum is rounded twice.
        return _operation(lambda x: x.astype(np.float64) if given else x, (source,), to)
    if not _is_float(to):
        return _operation(_clamped(_TO_INTEGERS[rounding], INTEGERS[to], source), (source,), to, ftz)
    if rounding not in ("", "rn") or (to.endswith("x2") and source != "f32"):
        raise ValueError
    convert = on_bits(lambda x: x, (source,), to.removesuffix("x2"), ftz)
    if to.endswith("x2"):
        return Operation(lambda a, b: joined(convert(b), convert(a)), (32, 32))
    return Operation(convert, (bits_of(source),))


def _clamped(function: _Function, dtype: Any, source: str) -> _Function:
    """Return the rounding of floats to integers, clamped to their range. NaN becomes 0, or with 64 bits the top bit."""
    limits = np.iinfo(dtype)
    above = 2.0 ** (limits.bits - (limits.min < 0))
    of_nan = float(limits.min or 2 ** (limits.bits - 1)) if source == "f64" or limits.bits == 64 else 0

    def convert(x: Float) -> Any:
        x = function(x).astype(np.float64)
        inside = np.where(np.isnan(x) | (x >= above) | (x < limits.min), of_nan, x).astype(dtype)
        return np.where(x >= above, dtype(limits.max), np.where(x < limits.min, dtype(limits.min), inside))

    return convert


_MAKERS: dict[str, Callable[..., Operation]] = {
    "mul": lambda *x: _simple("mul", *x) if _is_float(x[-1]) else _product(*x),
    "mad": lambda part, kind: _product(part, kind, adds=True),
    "mov": lambda kind: Operation(lambda a: a, (bits_of(kind),)),
    "cvta": lambda *x: {("global", "u64"): Operation(lambda a: a, (64,))}[x],  # global addresses are generic ones
    "selp": lambda kind: Operation(lambda a, b, p: np.where(p, a, b), (bits_of(kind), bits_of(kind), 1)),
    "shl": lambda kind: _shift(operator.lshift, kind),
    "shr": lambda kind: _shift(operator.rshift, kind),
    "bfe": _bfe,
    "prmt": _prmt,
    "setp": _setp,
    "cvt": _cvt,
}
