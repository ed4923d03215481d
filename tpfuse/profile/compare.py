"""`tpfuse profile compare A B` finds the operators that take longer in profile B than in profile A."""

from collections import defaultdict
from pathlib import Path

from tpfuse.profile.summary import kind_of
from tpfuse.train.errors import UserError
from tpfuse.train.untrusted import Unreadable, read_json

SUMMARY = "summary.json"
_WORDS = {"operator": str, "layer": str, "implementation": str}
_SCHEMA = {"ranks": [{"wall_s": float, "operators": [{**_WORDS, "total_s": float, "waiting_s": float}]}]}
_LEAST = 0.005  # the share of a step below which a difference is not reported: the clock and the system differ by it


def compare(before: Path, after: Path, slower: float) -> tuple[str, bool]:
    """Return (the comparison as text, whether the step or an operator became slower by more than the share `slower`).

    before, after: folders that `tpfuse profile` has written. The times of a step are compared, each the mean over the
    ranks, without waiting: an operator that waits longer is not slower itself. Raise UserError.
    """
    (old, ranks), (new, others) = _seconds(before), _seconds(after)
    if ranks != others:
        raise UserError(f"{before} has {ranks} ranks, {after} has {others}: expected as many")
    step, found = old["step"], False
    lines = [f"{'':<52}{'A':>11}{'B':>11}{'B / A':>8}"]
    for name in sorted({**old, **new}, key=lambda name: -new[name]):
        one, other = old[name], new[name]
        is_slower = other > one * (1 + slower) and (name == "step" or other - one > _LEAST * step)
        found = found or is_slower
        if is_slower or max(one, other) > 4 * _LEAST * step:
            ratio = f"{other / one:.2f}" if one else "new"
            line = f"{name[:51]:<52}{one * 1e3:>8.2f} ms{other * 1e3:>8.2f} ms{ratio:>8}"
            lines.append(line + ("  slower" if is_slower else ""))
    conclusion = f"by more than {slower:.0%}"
    lines.append(f"B is slower {conclusion}." if found else f"Nothing is slower {conclusion}.")
    return "\n".join(lines), found


def _seconds(path: Path) -> tuple[dict[str, float], int]:
    """Return the seconds of a "step" and of each operator without waiting, means over the ranks, and their number."""
    file = path / SUMMARY if path.is_dir() else path
    try:
        ranks = read_json(file, _SCHEMA)["ranks"]
        if not ranks:
            raise Unreadable("there are no ranks")
    except (OSError, Unreadable) as error:
        raise UserError(f"cannot read {file}, which `tpfuse profile` writes: {error}") from None
    seconds: dict[str, float] = defaultdict(float)
    for rank in ranks:
        seconds["step"] += rank["wall_s"] / len(ranks)
        for row in rank["operators"]:
            name = row["operator"] if row["implementation"] else kind_of(row)
            seconds[name] += (row["total_s"] - row["waiting_s"]) / len(ranks)
    return seconds, len(ranks)
