"""The text of configurations.toml: an operator's lines are written again, and all other lines stay as they are."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpfuse.kernels.configurations import Configuration, rows_of
from tpfuse.kernels.launch import FAMILIES

_OPERATOR = re.compile(r"^(\w+) = \[$")


@dataclass
class _Line:
    """A line of the table for rows that are equal but for family and bits. content: the rest of the line, as TOML."""

    families: list[str]
    bits: list[int]
    content: str

    def __str__(self) -> str:
        return f"    {{families = {_value(self.families)}, bits = {_value(self.bits)}, {self.content}}},"


def _value(value: Any) -> str:
    """Return a TOML value; strings, numbers and booleans are written as in JSON."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(x)}" for key, x in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _content(row: Configuration) -> str:
    fields: dict[str, Any] = {"at_most": row.at_most} if row.at_most else {}
    fields |= {"blocks": row.blocks, "num_warps": row.num_warps, "num_stages": row.num_stages}
    return ", ".join(f"{name} = {_value(value)}" for name, value in (fields | {"measured": row.measured}).items())


def section(operator: str, rows: Sequence[Configuration]) -> list[str]:
    """Return the lines of an operator's rows. Rows that agree share a line if the order of all rows allows it.

    The order of the rows of one family and element type decides which of them is chosen, so the lines keep it.
    """
    lines: list[_Line] = []
    for family in ("interpreted", *FAMILIES):
        _append_family(lines, _lines_of_family([row for row in rows if row.family == family]))
    return [f"{operator} = [", *map(str, lines), "]"]


def _lines_of_family(rows: Sequence[Configuration]) -> list[_Line]:
    lines: list[_Line] = []
    last: dict[int, int] = {}  # bits -> the line of the last row with these bits
    for row in rows:
        content, after = _content(row), last.get(row.bits, -1)
        position = next((i for i, line in enumerate(lines) if i > after and line.content == content), len(lines))
        if position == len(lines):
            lines.append(_Line([row.family], [], content))
        lines[position].bits.append(row.bits)
        last[row.bits] = position
    return lines


def _append_family(lines: list[_Line], more: Sequence[_Line]) -> None:
    """Add a family's lines to those of other families."""
    after = -1
    for new in more:
        same = (i for i, x in enumerate(lines) if i > after and (x.bits, x.content) == (new.bits, new.content))
        after = next(same, len(lines))
        if after == len(lines):
            lines.append(_Line([], new.bits, new.content))
        lines[after].families += new.families


def with_rows(text: str, rows: Iterable[Configuration]) -> str:
    """Return the text of a table in which `rows` replace the rows with the same keys.

    The text between operators stays as it is, including comments; an operator's own lines have no comments. Raise
    ValueError for a row whose key the table does not have.
    """
    left = {row.key: row for row in rows}
    operators = {row.operator for row in left.values()}
    lines, block = [], list[str]()
    for line in text.splitlines():
        if block or ((match := _OPERATOR.match(line)) and match[1] in operators):
            block.append(line)
            if line == "]":
                known = rows_of("\n".join(block), "the table")
                lines += section(known[0].operator, [left.pop(row.key, row) for row in known])
                block = []
        else:
            lines.append(line)
    if left:
        raise ValueError(f"the table has no row for {', '.join(map(str, left))}")
    return "\n".join(lines) + "\n"
