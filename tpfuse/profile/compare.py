"""`tpfuse profile compare A B` finds the operators that take longer in profile B than in profile A."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from tpfuse.profile.summary import kind_of
from tpfuse.train.errors import UserError
from tpfuse.train.untrusted import Unreadable, read_json

SUMMARY = "summary.json"
_TIMES = {"computing_s": float, "communication_s": float, "waiting_s": float, "idle_s": float}
_WORDS = {"operator": str, "layer": str, "implementation": str}
_SCHEMA = {
    "format": int,
    "ranks": [{"rank": int, "wall_s": float, "operators": [{**_WORDS, "total_s": float, **_TIMES}]}],
}
_LEAST = 0.005  # the share of a step below which a difference is not reported: the clock and the system differ by it


def compare(before: Path, after: Path, slower: float) -> tuple[str, bool]:
    """Returns (the comparison as text, whether a step or an operator became slower by more than the share `slower`).

    before, after: folders that `tpfuse profile` has written. The times of a step are compared, each the mean over the
    ranks, without waiting: an operator that waits longer is not slower itself. Raises UserError.
    """
    old, new = _read(before), _read(after)
    if len(old["ranks"]) != len(new["ranks"]):
        raise UserError(f"{before} has {len(old['ranks'])} ranks, {after} has {len(new['ranks'])}: expected as many")
    steps = _mean(old, "wall_s"), _mean(new, "wall_s")
    lines = [f"{'':<52}{'A':>11}{'B':>11}{'B / A':>8}", _line("step", *steps)]
    found = steps[1] > steps[0] * (1 + slower)
    times = _operators(old), _operators(new)
    for name in sorted({*times[0], *times[1]}, key=lambda name: -times[1].get(name, 0.0)):
        one, other = (each.get(name, 0.0) for each in times)
        is_slower = other > one * (1 + slower) and other - one > _LEAST * steps[0]
        found = found or is_slower
        if is_slower or max(one, other) > 4 * _LEAST * steps[0]:
            lines.append(_line(name, one, other) + ("  slower" if is_slower else ""))
    conclusion = f"by more than {slower:.0%}"
    lines.append(f"B is slower {conclusion}." if found else f"Nothing is slower {conclusion}.")
    return "\n".join(lines), found


def _read(path: Path) -> dict[str, Any]:
    file = path / SUMMARY if path.is_dir() else path
    try:
        found: dict[str, Any] = read_json(file, _SCHEMA)
        if not found["ranks"]:
            raise Unreadable("there are no ranks")
    except (OSError, Unreadable) as error:
        raise UserError(f"cannot read {file}, which `tpfuse profile` writes: {error}") from None
    return found


def _mean(document: dict[str, Any], key: str) -> float:
    return sum(float(row[key]) for row in document["ranks"]) / len(document["ranks"])


def _operators(document: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of each operator in a step, over all its layers, without waiting: the mean over the ranks."""
    seconds: dict[str, float] = defaultdict(float)
    for rank in document["ranks"]:
        for row in rank["operators"]:
            name = row["operator"] if row["implementation"] else kind_of(row)
            seconds[name] += (row["total_s"] - row["waiting_s"]) / len(document["ranks"])
    return seconds


def _line(name: str, one: float, other: float) -> str:
    ratio = f"{other / one:.2f}" if one else "new"
    return f"{name[:51]:<52}{one * 1e3:>8.2f} ms{other * 1e3:>8.2f} ms{ratio:>8}"
