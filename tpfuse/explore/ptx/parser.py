"""A parser of the PTX that Triton writes: one kernel, its parameters, and its instructions with their source lines.

The syntax is that of NVIDIA's PTX ISA 8.7, chapters "Syntax" and "State Spaces, Types, and Variables", as far as
compilers write it: one entry function, registers with or without a number, labels, and blocks in braces, whose
registers are their own. Debugging sections are not read; `.loc` and `.file` name the source line of an instruction.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from typing import Any, TypeVar

from tpfuse.explore.ptx.faults import Unsupported
from tpfuse.explore.ptx.numbers import bits_of

_T = TypeVar("_T")
SHARED_BASE = 1024  # the address of the first byte of shared memory: no access to address 0 is a valid one


@dataclass(frozen=True)
class Register:
    """A register, or one that the hardware sets, such as %tid.x. name: unique in the kernel. bits: 1: a predicate."""

    name: str
    bits: int


@dataclass(frozen=True)
class Immediate:
    """A constant. value: its bits; for an integer, its value, which may be negative."""

    value: int


@dataclass(frozen=True)
class Address:
    """A register, or 0 if it is None, plus an offset in bytes. coordinates: of a tensor map's tile."""

    base: Register | None
    offset: int
    coordinates: tuple["Operand | None", ...] = ()


Operand = Register | Immediate | Address


@dataclass(frozen=True)
class Vector:
    """Operands in braces. An element that is written `_` is None: its value is dropped."""

    elements: tuple[Operand | None, ...]


@dataclass(frozen=True)
class PtxInstruction:
    """An instruction. operands: each an Operand, a Vector, or None for `_`.

    guard: the predicate under which it is executed, and whether that is negated. targets: the indices of the
    instructions to which a branch may go; those of brx.idx in the order of its table. line: of the PTX's text, from 1.
    source: (file, line) of the kernel. where: the same for readers, with the callers of an inlined function, as Triton
    writes them.
    """

    opcode: str
    operands: tuple[Any, ...]
    guard: tuple[Register, bool] | None
    targets: tuple[int, ...]
    line: int
    source: tuple[str, int]
    where: str
    text: str

    @property
    def parts(self) -> list[str]:
        """Return the opcode's parts: its name and its modifiers."""
        return self.opcode.split(".")

    def registers(self, first: int = 0, last: int | None = None) -> list[str]:
        """Return the names of the registers in some of the operands."""
        operands = [*self.operands[first:last]]
        for x in operands:  # which grows by the parts of an operand
            if isinstance(x, Vector):
                operands += x.elements
            elif isinstance(x, Address):
                operands += [x.base, *x.coordinates]
        return [x.name for x in operands if isinstance(x, Register)]

    def uses(self) -> list[tuple[bool, str]]:
        """Return the registers that it reads (True), and those that it certainly writes."""
        written = any(isinstance(x, Register | Vector) for x in self.operands[:1]) and self.parts[0] not in _WRITE_NONE
        guard = [] if self.guard is None else [self.guard[0].name]
        results = [] if guard else self.registers(0, int(written))
        return [*((True, x) for x in (*self.registers(int(written)), *guard)), *((False, x) for x in results)]

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Parsed:
    """A kernel. parameters: (name, type) in order. registers: that each thread has at the start; 0 if not given."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    threads: int
    registers: int
    instructions: tuple[PtxInstruction, ...]


_WRITE_NONE = ("brx", "wgmma")  # instructions whose first operand is a register that they read
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", re.S)
_PARAMETER = re.compile(r"\.param\s+\.(\w+).*?(\w+)\s*(?:,|$)", re.S)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+\d+\s+)?\.\w+\s+(\w+)\s*(?:\[\d*\])?")
_COMMENT = re.compile(r"^(?!\s*\.loc\b)(.*?)//.*$", re.M)  # the comment of a .loc names the callers
_STATEMENT = re.compile(r"\s*(\.loc\s[^\n]*|[{}]|\$?[\w$]+:(?!:)|[^;]*;)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.+)")
_DECLARED = re.compile(r"([%\w$]+)(?:<(\d+)>)?")
_OPCODE = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+[^/]*(?://\s*(.*))?")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"(?:\s*,?\s*"([^"]*)")?')
_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid)\.[xyz]$|%(laneid|warpid)$|%globaltimer$")
_ADDRESS = re.compile(r"([^+-]*?)\s*(?:([+-])\s*(.+))?$")


def parse(text: str) -> Parsed:
    """Return the kernel in a PTX text. Raise Unsupported where the text has what this parser does not know."""
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1:
        raise Unsupported(f"the PTX has {len(entries)} entry functions: expected 1")
    (entry,) = entries
    name, parameters, directives = entry.groups()
    size = re.fullmatch(r"\s*\.reqntid\s+(\d+)(?:\s*,\s*1)*\s*(?:\.maxnreg\s+(\d+)\s*)?", directives)
    if size is None:
        raise Unsupported(f"{name} has no .reqntid with one dimension: {directives.strip()!r}")
    typed = tuple((found[2], found[1]) for found in _PARAMETER.finditer(parameters))
    shared = _SHARED.findall(text[: entry.end()])  # Triton declares one variable, whose size is given at the launch
    if len(shared) > 1:
        raise Unsupported(f"the kernel has {len(shared)} shared variables: expected at most 1")
    symbols = {name: 8 * number for number, (name, _) in enumerate(typed)} | dict.fromkeys(shared, SHARED_BASE)
    body = _Body(text, entry.end(), symbols)
    code = tuple(starmap(body.instruction, body.lines))
    return Parsed(name, typed, int(size[1]), int(size[2] or 0), code)


class _Body:
    """The body of a kernel, from a position of its text up to the brace that closes it.

    A block in braces is a scope, which has registers and labels of its own. symbols: the addresses of parameters and of
    shared memory. lines: of each instruction its text, the numbers of the scopes around it, the innermost one last, and
    the last fields of a PtxInstruction.
    """

    def __init__(self, text: str, start: int, symbols: dict[str, int]) -> None:
        self.lines: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = []
        self._symbols = symbols
        self._labels: dict[tuple[int, str], int] = {}
        self._tables: dict[tuple[int, str], str] = {}  # of branch targets
        self._registers: dict[tuple[int, str], Register] = {}
        self._read(text, start)

    def _read(self, text: str, start: int) -> None:
        files = {found[1]: "/".join(filter(None, found.groups()[1:])) for found in _FILE.finditer(text)}
        line, text, position = text.count("\n", 0, start) + 1, _COMMENT.sub(r"\1", text[start:]), 0
        source, where, opened = ("", 0), "", 0
        scopes: tuple[int, ...] = (0,)
        label = ""
        while found := _STATEMENT.match(text, position):
            first = line + text.count("\n", position, found.start(1))
            line, position, statement = first + found[1].count("\n"), found.end(), " ".join(found[1].split())
            if location := _LOCATION.match(statement):
                source = files.get(location[1], ""), int(location[2])
                where = re.sub(r":\d+(?= @|$| \])", "", location[3]) if location[3] else ""
            elif statement == "{":
                opened += 1
                scopes = (*scopes, opened)
            elif statement == "}":
                scopes = scopes[:-1]
                if not scopes:
                    return
            elif statement.endswith(":"):
                label = statement[:-1]
                self._labels[scopes[-1], label] = len(self.lines)
            elif statement.startswith(".branchtargets"):
                self._tables[scopes[-1], label] = statement.removeprefix(".branchtargets")[:-1]
            elif registers := _REGISTERS.match(statement):
                with _named(first, statement):
                    self._declare(registers[1], registers[2], scopes[-1])
            elif statement != ";" and not statement.startswith(".pragma"):
                statement = statement[:-1].strip()
                self.lines.append((statement, scopes, (first, source, where, statement)))
        raise Unsupported("the kernel's body has no end")

    def _declare(self, kind: str, names: str, scope: int) -> None:
        """Declare registers of a type in a scope. `%r<9>` are nine."""
        for name, count in _DECLARED.findall(names):
            for each in [f"{name}{number}" for number in range(int(count))] if count else [name]:
                self._registers[scope, each] = Register(f"{each}@{scope}" if scope else each, bits_of(kind))

    def instruction(self, text: str, scopes: tuple[int, ...], rest: tuple[Any, ...]) -> PtxInstruction:
        """Return an instruction, one of `lines`."""
        with _named(rest[0], text):
            found = _OPCODE.match(text)
            if found is None:
                raise Unsupported("no directive or instruction that is known")
            negated, guard, opcode, given = found.groups()
            labels: list[str] = []
            if opcode in ("bra", "bra.uni"):
                labels, given = [given], ""
            elif opcode in ("brx.idx", "brx.idx.uni"):
                given, table = _split(given)
                labels = [*_split(_innermost(self._tables, table, scopes))]
            targets = tuple(_innermost(self._labels, x, scopes) for x in labels)
            operands = tuple(self._operand(x, scopes) for x in _split(given))
            condition = None if guard is None else (_innermost(self._registers, guard, scopes), bool(negated))
            return PtxInstruction(opcode, operands, condition, targets, *rest)

    def _operand(self, text: str, scopes: tuple[int, ...]) -> Any:
        if text == "_":
            return None
        if text.startswith("{"):
            return Vector(tuple(self._operand(part, scopes) for part in _split(text[1:-1])))
        if text.startswith("["):
            place, _, tile = text[1:-1].partition(",")
            return self._address(place.strip(), self._operand(tile.strip(), scopes) if tile else Vector(()), scopes)
        if (value := _constant(text)) is not None:
            return Immediate(value)
        if text in self._symbols:
            return Immediate(self._symbols[text])
        if _SPECIAL.match(text):
            return Register(text, 64 if text == "%globaltimer" else 32)
        return _innermost(self._registers, text, scopes)

    def _address(self, text: str, tile: Any, scopes: tuple[int, ...]) -> Address:
        base, sign, digits = _ADDRESS.match(text).groups()  # type: ignore[union-attr]
        start, offset = self._operand(base, scopes), _constant(digits or "0")
        if offset is None or not isinstance(start, Register | Immediate) or not isinstance(tile, Vector):
            raise Unsupported(f"[{text}]: no address that is known")
        offset = -offset if sign == "-" else offset
        if isinstance(start, Immediate):
            return Address(None, start.value + offset, tile.elements)
        return Address(start, offset, tile.elements)


@contextmanager
def _named(line: int, statement: str) -> Iterator[None]:
    """Let errors within the block name a statement."""
    try:
        yield
    except Unsupported as error:
        raise Unsupported(f"line {line}: {statement}: {error}") from None


def _innermost(declared: dict[tuple[int, str], _T], name: str, scopes: tuple[int, ...]) -> _T:
    """Return what the innermost scope that declares a name means by it."""
    for scope in reversed(scopes):
        if (scope, name) in declared:
            return declared[scope, name]
    raise Unsupported(f"{name} is not declared")


def _split(text: str) -> Iterator[str]:
    """Yield operands, which commas separate outside braces and brackets; `p|q` counts as two."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character in ",|" and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    if text[start:].strip():
        yield text[start:].strip()


def _constant(text: str) -> int | None:
    """Return the value of an integer, or the bits of a floating-point number such as 0f3F800000."""
    if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
        return int(text[2:], 16)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0 if "x" in text.lower() else 10)
    return None
