"""The state of an interpreted kernel: where each of its functions is, and the variables that it may still read.

A thread that comes back to an operation in the same state, and has changed nothing in between, would do the same for
ever unless it reads other values: it waits. Variables that are assigned before they are read again do not count.
"""

import ast
import dis
import linecache
import sys
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any

import numpy as np
from triton.language import core

from tpfuse.explore.liveness import live_before
from tpfuse.explore.sites import is_foreign

_LEAVES = ("RETURN", "RAISE", "RERAISE")
_SMALL = 64  # elements that are compared as numbers, whatever their type


# Returns, for an address, the name of the memory there, which is the same in every run, and where it begins and ends.
Place = Callable[[int], tuple[Hashable, int, int] | None]
_LOWEST = 1 << 20  # no tensor has an address below


def state_here(roots: frozenset[CodeType], place: Place) -> Hashable:
    """Return what identifies the state of the functions on the stack up to a root, without torch's and Triton's."""
    frame: FrameType | None = sys._getframe(1)
    state: list[Hashable] = []
    while frame is not None and frame.f_code not in roots:
        if not is_foreign(frame.f_code.co_filename):
            (offsets, points), values = _live(frame.f_code), frame.f_locals
            position, live = points[bisect_right(offsets, frame.f_lasti) - 1]  # an instruction's cache follows it
            state.append((frame.f_code, position, tuple(_value(values[x], place) for x in live if x in values)))
        frame = frame.f_back
    return tuple(state)


def may_hold(before: Any, now: Any) -> bool:
    """Return whether the value of an operation may be on a stack of values, which is not seen, in a later state.

    So it is in the same statement, unless that comes back to the same operation: its other values are on no stack then.
    """
    for (code, at, _), (other, there, _) in zip(reversed(before), reversed(now), strict=False):
        if (code, at) != (other, there):
            first, second = (_statement(code.co_filename, x.lineno) for x in (at, there))
            return code is other and first == second
    return len(before) != len(now)


def _statement(file: str, line: int) -> range:
    """Return the lines of the innermost statement at a line."""
    return next((lines for lines in _statements(file) if line in lines), range(line, line + 1))


@cache
def _statements(file: str) -> list[range]:
    tree = ast.parse("".join(linecache.getlines(file)))
    statements = (x for x in ast.walk(tree) if isinstance(x, ast.stmt))
    return sorted((range(x.lineno, (x.end_lineno or x.lineno) + 1) for x in statements), key=len)


def _value(x: Any, place: Place) -> Hashable:
    if isinstance(x, core.constexpr):
        return _value(x.value, place)
    if isinstance(x, core.tensor):
        return _value(x.handle.data, place)
    if isinstance(x, core.tensor_descriptor_base):
        parts = x.handle.base, *x.handle.shape, *x.handle.strides
        return tuple(_value(part.data, place) for part in parts)
    if isinstance(x, np.ndarray):
        return numbers_of(x, place)
    if isinstance(x, tuple | list | core.tuple):
        return tuple(_value(y, place) for y in x)
    if isinstance(x, core.dtype):
        return str(x)
    return x if isinstance(x, int | float | str | type(None)) else id(x)


def numbers_of(x: np.ndarray[Any, Any], place: Place) -> Hashable:
    """Return what identifies numbers in every run, or addresses."""
    if x.dtype.itemsize == 8 and x.dtype.kind in "iu" and x.size and int(x.max()) > _LOWEST:
        if x.size <= _SMALL:
            return tuple(_named(x.ravel().tolist(), place))
        return x.shape, _by_memory(x.ravel().astype(np.int64), place)
    if x.size <= _SMALL:
        return x.item() if x.size == 1 else tuple(x.ravel().tolist())
    return x.shape, x.tobytes()


def _by_memory(addresses: np.ndarray[Any, Any], place: Place) -> Hashable:
    """Return what identifies many addresses; one at no place is past the end of the one before."""
    inside, names, lows = np.full(addresses.size, -1), list[Hashable](), list[int]()
    while (found := next(filter(None, map(place, addresses[inside < 0].tolist())), None)) is not None:
        name, low, high = found
        inside[(addresses >= low) & (addresses < high)] = len(names)
        names.append(name)
        lows.append(low)
    if not names:
        return addresses.tobytes()
    known = np.flatnonzero(inside >= 0)
    before = np.searchsorted(known, np.arange(addresses.size), side="right") - 1
    inside = inside[known[np.maximum(before, 0)]]
    return tuple(names), inside.tobytes(), (addresses - np.array(lows)[inside]).tobytes()


def _named(addresses: list[int], place: Place) -> Iterator[Hashable]:
    """Yield what identifies addresses; one at no place, as masked elements have, is past the end of the one before."""
    inside = None
    for x in addresses:
        inside = place(x) or inside
        yield x if inside is None else (inside[0], x - inside[1])


@cache
def _live(code: CodeType) -> tuple[list[int], list[tuple[Hashable, tuple[str, ...]]]]:
    """Return the instructions' places, and for each its position in the source and the variables that count.

    The compiler may copy an expression, such as the condition of a while loop: its copies have one position. Variables
    count if they may be read after the instruction, or have been read before it on its line.

    Those are on the stack of values, which is not seen. What a for loop assigns always counts: it tells how far the
    loop is.
    """
    instructions = list(dis.get_instructions(code))
    places = {x.offset: number for number, x in enumerate(instructions)}
    following = [
        [number + 1] * (number + 1 < len(instructions) and not _leaves(x))
        + ([places[x.argval]] if x.opcode in dis.hasjrel or x.opcode in dis.hasjabs else [])
        for number, x in enumerate(instructions)
    ]
    before = live_before(following, [list(_variables(x)) for x in instructions])
    always = {*code.co_cellvars, *code.co_freevars, *_counters(instructions)}
    lines = [x.positions.lineno if x.positions else None for x in instructions]
    live: list[tuple[Hashable, tuple[str, ...]]] = []
    for number in range(len(instructions)):
        on_line = [y for y, line in zip(instructions[:number], lines, strict=False) if line == lines[number]]
        loaded = {name for y in on_line for read, name in _variables(y) if read}
        after = set[str]().union(*(before[y] for y in following[number]))
        live.append((instructions[number].positions, tuple(sorted(after | loaded | always))))
    return [x.offset for x in instructions], live


def _leaves(x: dis.Instruction) -> bool:
    return x.opname.startswith(_LEAVES) or x.opname.startswith(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE"))


def _variables(x: dis.Instruction) -> Iterator[tuple[bool, str]]:
    """Yield the variables of an instruction in order, and whether it reads them."""
    if "_FAST" in x.opname:
        kinds = [kind for kind in x.opname.split("_") if kind in ("LOAD", "STORE", "DELETE")]
        names = x.argval if isinstance(x.argval, tuple) else (x.argval,) * len(kinds)
        yield from ((kind == "LOAD", name) for kind, name in zip(kinds, names, strict=True))


def _counters(instructions: list[dis.Instruction]) -> Iterator[str]:
    """Yield the variables that for loops assign."""
    for number, x in enumerate(instructions):
        if x.opname == "FOR_ITER":
            for y in instructions[number + 1 :]:
                stored = [name for read, name in _variables(y) if not read]
                if not stored and not y.opname.startswith(("UNPACK", "CACHE")):
                    break
                yield from stored
