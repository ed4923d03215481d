"""A parser of the PTX that Triton writes: one kernel, its parameters, and its instructions with their source lines.

The syntax is that of NVIDIA's PTX ISA 8.7, chapters "Syntax" and "State Spaces, Types, and Variables", as far as
compilers write it: one entry function, registers with or without a number, labels, and blocks in braces, whose
registers are their own. Debugging sections are not read; `.loc` and `.file` name the source line of an instruction.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tpfuse.explore.ptx.faults import Unsupported

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

    guard: the predicate under which it is executed, and whether that is negated. target: the label of a branch. line:
    of the PTX's text, from 1. source: (file, line) of the kernel. where: the same for readers, with the callers of an
    inlined function, as Triton writes them.
    """

    opcode: str
    operands: tuple[Any, ...]
    guard: tuple[Register, bool] | None
    target: str
    line: int
    source: tuple[str, int]
    where: str
    text: str

    @property
    def parts(self) -> list[str]:
        """Return the opcode's parts: its name and its modifiers."""
        return self.opcode.split(".")

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Parsed:
    """A kernel. parameters: (name, type) in order. labels: the index of the instruction that follows each label."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    threads: int
    instructions: tuple[PtxInstruction, ...]
    labels: dict[str, int]


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", re.S)
_PARAMETER = re.compile(r"\.param\s+\.(\w+).*?(\w+)\s*(?:,|$)", re.S)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.+)")
_BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64, "b128": 128}
_OPCODE = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+[^/]*(?://\s*(.*))?")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"(?:\s*,?\s*"([^"]*)")?')
_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid)\.[xyz]$|%(laneid|warpid)$")


def parse(text: str) -> Parsed:
    """Return the kernel in a PTX text. Raise Unsupported where the text has what this parser does not know."""
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1:
        raise Unsupported(f"the PTX has {len(entries)} entry functions: expected 1")
    (entry,) = entries
    name, parameters, directives = entry.groups()
    size = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*1)*\s*$", directives.strip())
    if size is None:
        raise Unsupported(f"{name} has no .reqntid with one dimension: {directives.strip()!r}")
    typed = tuple((found[2], found[1]) for found in _PARAMETER.finditer(parameters))
    symbols = {name: 8 * number for number, (name, _) in enumerate(typed)}
    body = _Body(text, entry.end(), symbols)
    body.read()
    return Parsed(name, typed, int(size[1]), tuple(body.instructions), body.labels)


class _Body:
    """The body of a kernel while it is read, from the position `start` of the text. parameters: their addresses."""

    def __init__(self, text: str, start: int, parameters: dict[str, int]) -> None:
        self.instructions: list[PtxInstruction] = []
        self.labels: dict[str, int] = {}
        self._text, self._start = text, start
        self._files = {found[1]: "/".join(filter(None, found.groups()[1:])) for found in _FILE.finditer(text)}
        self._symbols = parameters | self._shared_symbols(text[:start])
        self._scopes: list[dict[str, Register]] = [{}]
        self._opened: list[int] = [0]  # a number of each scope
        self._count = 0
        self._families: list[tuple[str, int, int]] = []  # (prefix, count, bits) of `.reg .b32 %r<9>`
        self._source, self._where = ("", 0), ""

    @staticmethod
    def _shared_symbols(declarations: str) -> dict[str, int]:
        """Return the address of each shared variable. Triton declares one, whose size is given at the launch."""
        names = re.findall(r"\.shared\s+(?:\.align\s+\d+\s+)?\.\w+\s+(\w+)\s*(\[\d*\])?", declarations)
        if len(names) > 1:
            raise Unsupported(f"the kernel has {len(names)} shared variables: expected at most 1")
        return {name: SHARED_BASE for name, _ in names}

    def read(self) -> None:
        """Read all statements up to the brace that closes the body."""
        statement, began = "", 0
        first = self._text.count("\n", 0, self._start) + 1
        for number, line in enumerate(self._text[self._start :].split("\n"), first):
            if found := _LOCATION.match(line.strip()):
                self._source = self._files.get(found[1], ""), int(found[2])
                self._where = re.sub(r":\d+(?= @|$| \])", "", found[3].strip()) if found[3] else ""
                continue
            for piece in re.findall(r"[^;{}]*[;{}]|[^;{}]+$", line.partition("//")[0]) or []:
                began = began if statement.strip() else number
                statement += piece
                if not statement.strip():
                    continue
                while found := re.match(r"\s*(\$?[\w$]+):(?!:)\s*", statement):
                    self.labels[self._scoped(found[1])] = len(self.instructions)
                    statement = statement[found.end() :]
                if statement.strip() == "{":
                    self._scopes.append({})
                    self._count += 1
                    self._opened.append(self._count)
                    statement = ""
                elif statement.strip() == "}":
                    if len(self._scopes) == 1:
                        return
                    self._close()
                    statement = ""
                elif statement.rstrip().endswith(";"):
                    self._statement(" ".join(statement.split())[:-1].strip(), began)
                    statement = ""
        raise Unsupported("the kernel's body has no end")

    def _statement(self, text: str, line: int) -> None:
        if not text or text.startswith(".pragma"):
            return
        try:
            if found := _REGISTERS.match(text):
                self._declare(found[1], found[2])
            else:
                self.instructions.append(self._instruction(text, line))
        except Unsupported as error:
            raise Unsupported(f"line {line}: {text}: {error}") from None

    def _instruction(self, text: str, line: int) -> PtxInstruction:
        found = _OPCODE.match(text)
        if text.startswith(".") or found is None:
            raise Unsupported("no directive or instruction that is known")
        negated, guard, opcode, rest = found.groups()
        target = self._scoped(rest.strip()) if opcode in ("bra", "bra.uni") else ""
        operands = () if target else tuple(map(self._operand, _split(rest)))
        condition = None if guard is None else (self._register(guard), bool(negated))
        return PtxInstruction(opcode, operands, condition, target, line, self._source, self._where, text)

    def _declare(self, type_name: str, names: str) -> None:
        if type_name.lstrip("busf").isdigit():
            bits = int(type_name.lstrip("busf"))
        elif type_name in _BITS:
            bits = _BITS[type_name]
        else:
            raise Unsupported(f".reg .{type_name}: no type of a register that is known")
        for name in names.split(","):
            if family := re.match(r"\s*(%?[\w$]*[A-Za-z_$])<(\d+)>", name):
                self._families.append((family[1], int(family[2]), bits))
            else:
                name = name.strip()
                scoped = f"{name}@{len(self.instructions)}" if len(self._scopes) > 1 else name
                self._scopes[-1][name] = Register(scoped, bits)

    def _scoped(self, label: str) -> str:
        """Return the unique name of a label of the innermost scope."""
        return label if len(self._scopes) == 1 else f"{label}@{self._opened[-1]}"

    def _close(self) -> None:
        """End the innermost scope: branches to labels that it does not have go to those of the scope around it."""
        suffix = f"@{self._opened[-1]}"
        self._scopes.pop()
        self._opened.pop()
        for index, x in enumerate(self.instructions):
            if x.target.endswith(suffix) and x.target not in self.labels:
                self.instructions[index] = replace(x, target=self._scoped(x.target.removesuffix(suffix)))

    def _register(self, name: str) -> Register:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        if found := re.match(r"(%?[\w$]*[A-Za-z_$])(\d+)$", name):
            for prefix, count, bits in self._families:
                if prefix == found[1] and int(found[2]) < count:
                    return self._scopes[0].setdefault(name, Register(name, bits))
        raise Unsupported(f"{name} is not declared")

    def _operand(self, text: str) -> Operand | Vector | None:
        if text == "_":
            return None
        if text.startswith("{"):
            elements = [self._operand(part) for part in _split(text[1:-1])]
            return Vector(tuple(x for x in elements if not isinstance(x, Vector)))
        if text.startswith("["):
            return self._address(text[1:-1].strip())
        if (value := _constant(text)) is not None:
            return Immediate(value)
        if text in self._symbols:
            return Immediate(self._symbols[text])
        if _SPECIAL.match(text):
            return Register(text, 32)
        return self._register(text)

    def _address(self, text: str) -> Address:
        text, _, coordinates = text.partition(",")
        if coordinates:
            place, tile = self._address(text.strip()), self._operand(coordinates.strip())
            if not isinstance(tile, Vector):
                raise Unsupported(f"[{text}]: no address that is known")
            return replace(place, coordinates=tile.elements)
        base, sign, offset = re.match(r"([^+-]*?)\s*(?:([+-])\s*(.+))?$", text).groups()  # type: ignore[union-attr]
        value = _constant(offset) if offset else 0
        if value is None:
            raise Unsupported(f"[{text}]: no address that is known")
        value = -value if sign == "-" else value
        if base in self._symbols:
            return Address(None, self._symbols[base] + value)
        if base.startswith("%") or any(base in scope for scope in self._scopes):
            return Address(self._register(base), value)
        if (constant := _constant(base)) is not None:
            return Address(None, constant + value)
        raise Unsupported(f"[{text}]: {base} is not declared")


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
