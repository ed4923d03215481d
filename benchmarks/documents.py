"""The files of a run of all benchmarks on one machine: a JSON document with its rows, and a table in Markdown.

A row has the keys benchmark, case, mode and candidate, and median_ms, p20_ms and p80_ms, or "error" where it could not
be measured. A row of a case that failed as a whole has no candidate. The names of tpfuse's candidates begin with
tpfuse.
"""

import itertools
import json
import re
from collections.abc import Sequence

from benchmarks.harness import OURS, Row


def slug(machine: str) -> str:
    """Return a machine's name as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", machine.lower())).strip("-")


def document_of(head: Row, rows: Sequence[Row]) -> str:
    """Return the text of the JSON file, with a line for each row."""
    text = json.dumps(head, indent=1).removesuffix("\n}")
    return text + ',\n "rows": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]\n}\n"


def _duration(milliseconds: float) -> str:
    if milliseconds < 1:
        return f"{1e3 * milliseconds:.0f} µs"
    return f"{milliseconds:.1f} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"


def _cell(row: Row) -> str:
    """Return a row's time and the name of its candidate; tpfuse has none where it has one candidate."""
    name = row["candidate"].removeprefix(OURS).strip() if row["candidate"].startswith(OURS) else row["candidate"]
    if "error" in row:
        text = f"failed: {row['error']}"
    else:
        text = _duration(row["median_ms"]) + (f" ({row['bus_gb_s']:.2g} GB/s)" if "bus_gb_s" in row else "")
    return (f"{text}, {name}" if name else text).replace("|", "\\|").replace("\n", " ")


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table: one for each case and mode, with the candidates of tpfuse beside the peers."""
    lines = ["| benchmark | case | tpfuse | peers |", "|---|---|---|---|"]

    def case_of(row: Row) -> tuple[str, str, str]:
        return row["benchmark"], row["case"], row.get("mode", "")

    for (benchmark, case, mode), group in itertools.groupby(rows, case_of):
        candidates = list(group)
        name = case if not mode or mode in case else f"{case}; {mode}"
        if "candidate" not in candidates[0]:
            error = candidates[0]["error"].strip().splitlines()[-1].replace("|", "\\|")
            lines.append(f"| {benchmark} | {name} | failed: {error} | |")
            continue
        sides = [
            "; ".join(_cell(row) for row in candidates if row["candidate"].startswith(OURS) == ours)
            for ours in (True, False)
        ]
        lines.append(f"| {benchmark} | {name} | {sides[0]} | {sides[1]} |")
    return lines
