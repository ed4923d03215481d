"""Print the table of docs/planning.md: all errors and regrets of the model of cost, with the baselines beside them.

    python -m benchmarks.plan_page

They come from the newest row of each subject in benchmarks/results/plan.jsonl, to which `benchmarks.plan_accuracy`
adds.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import RESULTS, Row

HEAD = ("measured", "prediction", "fitted to", "error", "worst", "regret: median", "mean", "worst")
_B200 = {
    "b200.toml": ("time", "nothing"),
    "one fitted": ("time", "other layouts: the rate of products"),
    "memory": ("peak memory", "nothing"),
}


def newest(path: Path = RESULTS / "plan.jsonl") -> dict[str, Row]:
    """Return the newest row of each subject."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {row["subject"]: row for row in rows}


def table(rows: dict[str, Row]) -> str:
    """Return the table in Markdown."""
    lines = [HEAD, ("---",) * len(HEAD), *_vtrain(rows["vtrain"]), *_b200(rows["b200"]), *_published(rows["published"])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(*values: float | None) -> tuple[str, ...]:
    return tuple("–" if value is None else f"{value:.1f} %" for value in values)


def _vtrain(row: Row) -> Iterator[tuple[str, ...]]:
    what = f"{row['runs']:,} runs of Megatron-DeepSpeed on 2 to 8 A100 (vTrain)"
    for each in row["table"]:
        ours, untimed = each["planner"] == "tpfuse.cost", each["error_folds"] is None
        fitted = "other models" if ours else "nothing" if untimed else "all: one rate"
        values = [each[key] for key in ("error_folds", "worst_folds", "regret_median", "regret_mean", "regret_worst")]
        yield (what, each["planner"], fitted, *_percent(*values))
        what = "the same"
    for each in row["table"]:
        if each["error_to_8_gpus"] is not None:
            fitted = "2 and 4 A100" + ("" if each["planner"] == "tpfuse.cost" else ": one rate")
            errors = _percent(each["error_to_8_gpus"], each["worst_to_8_gpus"], None, None, None)
            yield ("those on 8 A100", each["planner"], fitted, *errors)


def _b200(row: Row) -> Iterator[tuple[str, ...]]:
    for each in row["table"]:
        what, fitted = _B200[each["name"]]
        errors = _percent(each["error_mean"], each["error_worst"], None, None, None)
        yield (f"{what} of {row['runs']} runs of Megatron on 8 B200 (SimuMax)", "tpfuse.cost", fitted, *errors)


def _published(row: Row) -> Iterator[tuple[str, ...]]:
    for each in row["table"]:
        what = f"{each['runs']} runs of {each['source']}"
        yield (what, "tpfuse.cost", "nothing", *_percent(each["error_mean"], each["error_worst"], None, None, None))
        errors = _percent(each["error_mean_constant"], each["error_worst_constant"], None, None, None)
        yield ("the same", "constant rate", "all: one rate", *errors)


if __name__ == "__main__":
    print(table(newest()))
