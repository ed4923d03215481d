"""configurations.toml as text: rows are replaced one by one, and everything else stays as people wrote it."""

import json
from collections.abc import Mapping
from typing import Any

from tpfuse.kernels.configurations import Configuration

Key = tuple[str, str, int]
"""(operator, family, how many rows of both stand before it)."""


def _value(value: Any) -> str:
    """A TOML value; strings and booleans are written as JSON writes them."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(x)}" for key, x in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def written(row: Configuration) -> str:
    """A row as TOML, its header first."""
    lines = [f"[[{row.operator}.{row.family}]]", f"bits = {row.bits}"]
    if row.at_most:
        lines.append(f"at_most = {_value(row.at_most)}")
    lines.append(f"blocks = {_value(row.blocks)}")
    lines += [f"num_warps = {row.num_warps}", f"num_stages = {row.num_stages}", f"measured = {_value(row.measured)}"]
    return "\n".join(lines)


def _is_row_line(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(("#", "["))


def with_rows(text: str, rows: Mapping[Key, Configuration]) -> str:
    """The text of a table with rows replaced.

    Comments, blank lines and all other rows stay. Raises ValueError for a row that the text does not have.
    """
    counts: dict[str, int] = {}
    headers = {f"[[{operator}.{family}]]": (operator, family) for operator, family, _ in rows}
    left, lines, skipping = dict(rows), [], False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            skipping = False
            header = line.partition("#")[0].strip()
            if header in headers:
                counts[header] = counts.get(header, -1) + 1
                row = left.pop((*headers[header], counts[header]), None)
                if row is not None:
                    lines += written(row).splitlines()
                    skipping = True
                    continue
        if not (skipping and _is_row_line(line)):
            lines.append(line)
    if left:
        raise ValueError(f"the table has no row {', '.join(f'{index + 1} of {o}.{f}' for o, f, index in left)}")
    return "\n".join(lines) + "\n"
