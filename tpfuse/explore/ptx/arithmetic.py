"""The instructions of PTX that compute each thread's result from its own registers.

`operation(opcode)` returns a function from bits to bits, with the widths of its operands. An opcode or a modifier that
is not known raises Unsupported. The definitions are those of NVIDIA's PTX ISA 8.7, chapter "Instruction Set".

A fused multiply-add is computed in float64 and then rounded; in rare cases this differs from one rounding in the last
bit. Instructions that a GPU only approximates (`.approx`, `div.full`) are computed exactly and rounded.
"""

import operator
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tpfuse.explore.ptx.faults import Unsupported
from tpfuse.explore.ptx.numbers import (
    TYPES,
    UNSIGNED,
    Bits,
    Float,
    bits_of,
    decoder,
    encoder,
    joined,
    on_bits,
    to_tf32,
)


class Operation(NamedTuple):
    """An instruction's function. widths: bits of the sources."""

    function: Callable[..., Bits]
    widths: tuple[int, ...]


_Maker = Callable[[list[str]], Operation]
_MAKERS: dict[str, _Maker] = {}


@cache
def operation(opcode: str) -> Operation:
    """Return the function of an opcode. Raise Unsupported if it, or one of its modifiers, is not known."""
    name, *modifiers = opcode.split(".")
    if name not in _MAKERS:
        raise Unsupported(f"{opcode} is not supported")
    try:
        return _MAKERS[name](modifiers)
    except (KeyError, IndexError, ValueError):
        raise Unsupported(f"{opcode} is not supported: {'.'.join(modifiers)!r}") from None


def _opcode(*names: str) -> Callable[[_Maker], _Maker]:
    def register(maker: _Maker) -> _Maker:
        _MAKERS.update(dict.fromkeys(names, maker))
        return maker

    return register


def _is_float(name: str) -> bool:
    return name.startswith(("f", "bf"))


def _fused(a: Float, b: Float, c: Float) -> Float:
    return a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)


# name -> (its modifiers, what it computes)
_FLOATS: dict[str, tuple[str, Callable[..., Float]]] = {
    "add": ("rn ftz", operator.add),
    "sub": ("rn ftz", operator.sub),
    "mul": ("rn ftz", operator.mul),
    "div": ("rn ftz full approx", operator.truediv),
    "min": ("ftz NaN", np.fmin),
    "max": ("ftz NaN", np.fmax),
    "fma": ("rn ftz", _fused),
    "abs": ("ftz", np.abs),
    "neg": ("ftz", operator.neg),
    "sqrt": ("rn ftz approx", np.sqrt),
    "rsqrt": ("ftz approx", lambda x: 1 / np.sqrt(x.astype(np.float64))),
    "ex2": ("ftz approx", lambda x: np.exp2(x.astype(np.float64))),
    "lg2": ("ftz approx", lambda x: np.log2(x.astype(np.float64))),
}
_INTEGERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "min": np.minimum,
    "max": np.maximum,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "rem": np.fmod,
    "div": lambda a, b: (a - np.fmod(a, b)) // b,
    "abs": np.abs,
    "neg": operator.neg,
    "not": np.invert,
}
_ARITY = dict.fromkeys(("abs", "neg", "not", "sqrt", "rsqrt", "ex2", "lg2"), 1) | {"fma": 3}


def _elementwise(name: str) -> _Maker:
    def make(modifiers: list[str]) -> Operation:
        *given, kind = modifiers
        if name == "mul" and not _is_float(kind):
            return _integer_product(modifiers, 2)
        if (name, kind) == ("fma", "f64") or (name in ("abs", "neg") and kind.startswith("u")):
            raise ValueError  # float64 has no wider type in which to compute a fused product
        known = "relu" if name in ("min", "max") and kind == "s32" else ""
        if _is_float(kind):
            known, function = _FLOATS[name]
        else:
            function = _INTEGERS[name]
        if set(given) - set(known.split()):
            raise ValueError
        if "NaN" in given:
            function = _INTEGERS[name]
        if "relu" in given:
            plain = function
            function = lambda a, b: np.maximum(plain(a, b), np.int32(0))  # noqa: E731
        arity = _ARITY.get(name, 2)
        return Operation(on_bits(function, kind, "ftz" in given, arity), (bits_of(kind),) * arity)

    return make


_MAKERS.update({name: _elementwise(name) for name in _FLOATS.keys() | _INTEGERS.keys()})


def _integer_product(modifiers: list[str], arity: int) -> Operation:
    """Return mul or mad (arity 3) of integers. Widened operands have twice the bits."""
    part, kind = modifiers
    bits, signed = bits_of(kind), kind[0] == "s"
    narrow, unsigned = TYPES[kind], UNSIGNED[bits]
    if part == "lo":
        if arity == 2:
            return Operation(lambda a, b: a * b, (bits, bits))
        return Operation(lambda a, b, c: a * b + c, (bits, bits, bits))
    if part not in ("wide", "hi") or bits == 64:
        raise ValueError
    wide, out = TYPES[f"{'s' if signed else 'u'}{2 * bits}"], UNSIGNED[2 * bits]

    def product(a: Bits, b: Bits) -> Bits:
        return (a.view(narrow).astype(wide) * b.view(narrow).astype(wide)).view(out)

    if part == "wide":
        if arity == 2:
            return Operation(product, (bits, bits))
        return Operation(lambda a, b, c: product(a, b) + c, (bits, bits, 2 * bits))

    def high(a: Bits, b: Bits) -> Bits:
        return (product(a, b) >> out(bits)).astype(unsigned)

    if arity == 2:
        return Operation(high, (bits, bits))
    return Operation(lambda a, b, c: high(a, b) + c, (bits, bits, bits))


@_opcode("mad")
def _mad(modifiers: list[str]) -> Operation:
    return _integer_product(modifiers, 3)


@_opcode("mov")
def _mov(modifiers: list[str]) -> Operation:
    (kind,) = modifiers
    return Operation(lambda a: a, (bits_of(kind),))


@_opcode("cvta")
def _cvta(modifiers: list[str]) -> Operation:
    if modifiers != ["global", "u64"]:  # global addresses are generic ones
        raise ValueError
    return Operation(lambda a: a, (64,))


@_opcode("selp")
def _selp(modifiers: list[str]) -> Operation:
    (kind,) = modifiers
    return Operation(lambda a, b, p: np.where(p, a, b), (bits_of(kind), bits_of(kind), 1))


def _shift_maker(right: bool) -> _Maker:
    def make(modifiers: list[str]) -> Operation:
        (kind,) = modifiers
        bits = bits_of(kind)
        dtype, unsigned = TYPES[kind], UNSIGNED[bits]
        function = operator.rshift if right else operator.lshift

        def shift(a: Bits, amount: Bits) -> Bits:
            # NumPy defines shifts by a number's width and more as PTX does, up to the amounts that the type holds.
            return function(a.view(dtype), np.minimum(amount, np.uint32(bits)).astype(dtype)).view(unsigned)

        return Operation(shift, (bits, 32))

    return make


_MAKERS.update({"shl": _shift_maker(False), "shr": _shift_maker(True)})


@_opcode("bfe")
def _bfe(modifiers: list[str]) -> Operation:
    """Return the bits from position b on, c of them, extended by zeros or by the highest of them."""
    (kind,) = modifiers
    bits, wide = bits_of(kind), np.int64 if kind[0] == "s" else np.uint64

    def extract(a: Bits, position: Bits, length: Bits) -> Bits:
        value = a.view(TYPES[kind]).astype(wide) >> (position & np.uint32(0xFF)).astype(wide)
        unused = (np.uint32(64) - np.minimum(length & np.uint32(0xFF), np.uint32(64))).astype(wide)
        return (value << unused >> unused).astype(wide).view(np.uint64).astype(UNSIGNED[bits])

    return Operation(extract, (bits, 32, 32))


@_opcode("prmt")
def _prmt(modifiers: list[str]) -> Operation:
    """Return four bytes of a and b, which the digits of c number; a digit of 8 or more takes the byte's sign alone."""
    if modifiers != ["b32"]:
        raise ValueError

    def permute(a: Bits, b: Bits, digits: Bits) -> Bits:
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        result: Bits = np.uint32(0)
        for place in range(4):
            digit = digits >> np.uint32(4 * place) & np.uint32(15)
            byte = both >> (digit.astype(np.uint64) & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
            sign = np.where(byte >= 0x80, np.uint32(0xFF), np.uint32(0))
            result = result | np.where(digit >= 8, sign, byte.astype(np.uint32)) << np.uint32(8 * place)
        return result

    return Operation(permute, (32, 32, 32))


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
# Comparisons that hold if a number is NaN are the negations of the opposite ones.
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _float_comparison(name: str) -> Callable[[Float, Float], Any]:
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name.endswith("u"):
        opposite = _float_comparison(_OPPOSITE[name[:-1]])
        return lambda a, b: ~opposite(a, b)
    return _COMPARE[name]


@_opcode("setp")
def _setp(modifiers: list[str]) -> Operation:
    name, *given, kind = modifiers
    if set(given) - {"ftz"}:
        raise ValueError
    compare = _float_comparison(name) if _is_float(kind) else _COMPARE[name]
    decode = decoder(kind, "ftz" in given)
    return Operation(lambda a, b: compare(decode(a), decode(b)), (bits_of(kind),) * 2)


@_opcode("cvt")
def _cvt(modifiers: list[str]) -> Operation:
    """Return a conversion. cvt.rn.bf16x2.f32 packs its first operand above its second one."""
    *_, to, source = modifiers
    given, bits = set(modifiers[:-2]), bits_of(source)
    if given - {"rn", "rz", "rna", "rni", "rzi", "rmi", "rpi", "ftz", "sat"} or "sat" in given:
        raise ValueError
    if to == "tf32":
        if source != "f32" or given != {"rna"}:
            raise ValueError
        return Operation(to_tf32, (32,))
    ftz = "ftz" in given
    if to.endswith("x2"):
        if source != "f32" or given - {"rn", "ftz"}:
            raise ValueError
        decode, encode = decoder("f32", ftz), encoder(to[:-2])
        return Operation(lambda a, b: joined(encode(decode(b)), encode(decode(a))), (32, 32))
    if _is_float(source) and _is_float(to):
        if given - {"rn", "ftz"}:
            raise ValueError
        decode, encode = decoder(source, ftz and source == "f32"), encoder(to, ftz and to == "f32")
        return Operation(lambda a: encode(decode(a)), (bits,))
    decode, encode = decoder(source, ftz), encoder(to)
    if _is_float(to):
        if given != {"rn"}:
            raise ValueError
        # Integers of up to 53 bits are exact in float64; of longer ones the sum is rounded twice.
        return Operation(lambda a: encode(decode(a).astype(np.float64)), (bits,))
    if _is_float(source):
        return Operation(_to_integer(given, to, decode), (bits,))
    if given:
        raise ValueError
    return Operation(lambda a: encode(decode(a)), (bits,))


def _to_integer(given: set[str], to: str, decode: Callable[[Bits], Float]) -> Callable[[Bits], Bits]:
    """Return the conversion of a float to an integer: clamped to the integer's range, and 0 for NaN."""
    (rounding,) = given - {"ftz"}
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding]
    limits, encode = np.iinfo(TYPES[to]), encoder(to)
    above = 2.0 ** (limits.bits - (limits.min < 0))

    def convert(a: Bits) -> Bits:
        x = function(decode(a)).astype(np.float64)
        inside = np.where(np.isnan(x) | (x >= above) | (x < limits.min), 0, x).astype(TYPES[to])
        value = np.where(x >= above, TYPES[to](limits.max), inside)
        return encode(np.where(x < limits.min, TYPES[to](limits.min), value))

    return convert
