"""Compare the model of cost (`tpfuse.plan`) with runs that others measured, and print the table of docs/planning.md.

    python -m benchmarks.plan_accuracy [--keep]

benchmarks/data/README.md names the sources, what is assumed about them, and how vTrain's rows are held out. --keep adds
the table to benchmarks/results/plan.jsonl and draws the picture of the page.

The baselines are one rate of operations, whose median ratio to the rows that it predicts is 1, the same with the idle
share of 1F1B, and the layout with the most data-parallel ranks. The regret of a planner is how much longer its choice
takes than the best measured layout, for the same model, GPUs and batch: what a user loses.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness
from benchmarks.measured_runs import DATA, MEGATRON, MeasuredRun, b200, fitted_link, megatron, torchtitan, vtrain
from tpfuse.plan.time import step_times

FOLDS = 5
_SPREAD = 0.05
# Megatron's fused softmax takes 4 heads of all sequences at a time; otherwise torch computes it, with a cast to
# float32, the scale, the mask and a cast back in addition.
_SOFTMAX_HEADS, _SOFTMAX_OPERATORS = 4, 5
_SHARES = [share / 1000 for share in range(300, 700, 2)]
HEAD = ("measured", "prediction", "fitted to", "error", "worst", "regret: median", "mean", "worst")
Array = NDArray[np.float64]


class FittedParameters(NamedTuple):
    """The fields of the GPU and of the program that are fitted, with the values that the fit begins with."""

    product_share: float = 0.8
    bandwidth: float = 1.4e12
    host_seconds: float = 50e-6
    unaligned_share: float = 0.4
    pass_operators: float = 10.0
    collective_operators: float = 1.5


def predicted(rows: Sequence[MeasuredRun], parameters: FittedParameters) -> Array:
    """Return the predicted seconds of runs of vTrain. The softmax that runs depends on the heads of a rank."""
    of_gpu = {name: getattr(parameters, name) for name in FittedParameters._fields[:4]}
    of_program = {name: getattr(parameters, name) for name in FittedParameters._fields[4:]}
    cluster = replace(rows[0].cluster, gpu=replace(rows[0].cluster.gpu, **of_gpu))
    fused = replace(MEGATRON, **of_program)
    unfused = replace(fused, block_operators=MEGATRON.block_operators + _SOFTMAX_OPERATORS)

    def seconds(run: MeasuredRun) -> float:
        heads = run.layout.micro_batch * run.sizes.heads // run.layout.tp
        return step_times(run.sizes, run.layout, cluster, unfused if heads % _SOFTMAX_HEADS else fused).total

    return np.array([seconds(run) for run in rows])


def fit(rows: Sequence[MeasuredRun], rounds: int = 8) -> FittedParameters:
    """Return the parameters with the least relative errors, by Gauss and Newton's method on logarithms.

    An error far above _SPREAD weighs by its absolute value, a smaller one by its square.
    """
    seconds = measured_seconds(rows)

    def errors(logarithms: Array) -> Array:
        return predicted(rows, FittedParameters(*np.exp(logarithms))) / seconds - 1

    at, step = np.log(np.array(FittedParameters())), 1e-3
    now = errors(at)
    for _ in range(rounds):
        slopes = np.stack([(errors(at + step * unit) - now) / step for unit in np.eye(len(at))], axis=1)
        weight = (1 + (now / _SPREAD) ** 2) ** -0.25
        move = np.linalg.lstsq(slopes * weight[:, None], -now * weight, rcond=None)[0]
        at = at + np.clip(move, -0.3, 0.3)
        now = errors(at)
    return FittedParameters(*(float(each) for each in np.exp(at)))


def measured_seconds(rows: Sequence[MeasuredRun]) -> Array:
    """Return the measured time of each run."""
    return np.array([run.seconds for run in rows])


def held_out(rows: Sequence[MeasuredRun]) -> Array:
    """Return predictions of all rows, each by parameters that were fitted without any row of its model."""
    models, result = sorted({run.name for run in rows}), np.zeros(len(rows))
    for fold in range(FOLDS):
        held = set(models[fold::FOLDS])
        parameters = fit([run for run in rows if run.name not in held])
        chosen = [index for index, run in enumerate(rows) if run.name in held]
        result[chosen] = predicted([rows[index] for index in chosen], parameters)
    return result


def regrets(rows: Sequence[MeasuredRun], order: Array) -> Array:
    """Return the regret of the first in `order` for each model, number of GPUs and batch with several layouts."""
    groups: dict[tuple[int, int, str], list[tuple[float, float]]] = defaultdict(list)
    for run, place in zip(rows, order, strict=True):
        groups[run.layout.ranks, run.layout.batch, run.name].append((float(place), run.seconds))
    choices = [(min(group)[1], min(seconds for _, seconds in group)) for group in groups.values() if len(group) > 1]
    return np.array([chosen / best - 1 for chosen, best in choices])


def constant_rate(rows: Sequence[MeasuredRun], known: Sequence[MeasuredRun], *, bubble: bool = False) -> Array:
    """Return the predictions of one rate of operations, fitted to the known rows.

    bubble: whether the idle share of 1F1B is added.
    """

    def relative(some: Sequence[MeasuredRun]) -> Array:
        idle = [1 + bubble * (run.layout.pp - 1) / run.layout.micro_batches for run in some]
        return np.array([run.least_seconds() for run in some]) * np.array(idle)

    return relative(rows) * float(np.median(measured_seconds(known) / relative(known)))


def pure_dp(rows: Sequence[MeasuredRun]) -> Array:
    """Return an order of layouts: the most data-parallel ranks first, and of these the largest micro-batch."""
    return np.array([-run.layout.dp - run.layout.micro_batch / 1000 for run in rows])


def row_of(
    measured: str,
    planner: str,
    fitted: str,
    predictions: Array | None,
    truth: Array,
    regret: Array | None = None,
) -> harness.Row:
    """Return a row of the table, in percent. predictions: None for a planner that predicts no time."""
    row: harness.Row = {"measured": measured, "prediction": planner, "fitted to": fitted}
    errors = None if predictions is None else np.abs(predictions / truth - 1)
    for name, of, values in (
        ("error", np.mean, errors), ("worst", np.max, errors), ("regret_median", np.median, regret),
        ("regret_mean", np.mean, regret), ("regret_worst", np.max, regret),
    ):  # fmt: skip
        row[name] = None if values is None else float(of(values)) * 100
    return row


def vtrain_table(rows: Sequence[MeasuredRun], ours: Array) -> Iterator[harness.Row]:
    """Yield the rows of vTrain. ours: the held-out predictions of the model of cost."""
    seconds, what = measured_seconds(rows), f"{len(rows):,} runs of Megatron-DeepSpeed on 2 to 8 A100 (vTrain)"
    baselines = {"constant rate": False, "constant rate and bubble": True}
    yield row_of(what, "tpfuse.plan", "other models", ours, seconds, regrets(rows, ours))
    for name, bubble in baselines.items():
        # One number is fitted to all rows: holding models out changes nothing that shows.
        found = constant_rate(rows, rows, bubble=bubble)
        yield row_of("the same", name, "all: one rate", found, seconds, regrets(rows, found))
    lost = regrets(rows, pure_dp(rows))
    yield row_of("the same", "pure dp, largest micro-batch", "nothing", None, seconds, lost)
    small, large = ([run for run in rows if (run.layout.ranks == 8) == side] for side in (False, True))
    seconds, what = measured_seconds(large), "those on 8 A100"
    yield row_of(what, "tpfuse.plan", "2 and 4 A100", predicted(large, fit(small)), seconds)
    for name, bubble in baselines.items():
        yield row_of(what, name, "2 and 4 A100: one rate", constant_rate(large, small, bubble=bubble), seconds)


def fitted_share(rows: Sequence[MeasuredRun]) -> float:
    """Return the share of the rate for products with the least mean relative error."""
    return min(_SHARES, key=lambda share: sum(abs(math.log(r.predicted_seconds(share) / r.seconds)) for r in rows))


def published_table() -> Iterator[harness.Row]:
    """Yield the rows of SimuMax, Megatron-LM and torchtitan, which are computed in seconds."""
    rows = list(b200())
    shares = {name: fitted_share([run for run in rows if run.name != name]) for name in {run.name for run in rows}}
    plain, fitted = (
        np.array([run.predicted_seconds(share) for run, share in zip(rows, each, strict=True)])
        for each in ([None] * len(rows), [shares[run.name] for run in rows])
    )
    peaks, truth = (np.array(each) for each in zip(*((run.predicted_peak(), run.peak) for run in rows), strict=True))
    what = f"{len(rows)} runs of {rows[0].source}"
    others = "other layouts: the rate of products"
    yield row_of(f"time of {what}", "tpfuse.plan", "nothing", plain, measured_seconds(rows))
    yield row_of(f"time of {what}", "tpfuse.plan", others, fitted, measured_seconds(rows))
    yield row_of(f"peak memory of {what}", "tpfuse.plan", "nothing", peaks, truth)
    sources: dict[str, list[MeasuredRun]] = defaultdict(list)
    for run in (*megatron(), *torchtitan()):
        sources[run.source].append(run)
    for source, rows in sources.items():
        seconds, found = measured_seconds(rows), np.array([run.predicted_seconds() for run in rows])
        yield row_of(f"{len(rows)} runs of {source}", "tpfuse.plan", "nothing", found, seconds)
        yield row_of("the same", "constant rate", "all: one rate", constant_rate(rows, rows), seconds)


def page(rows: Sequence[harness.Row]) -> str:
    """Return the table of docs/planning.md."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for row in rows:
        words, numbers = [*row.values()][:3], [*row.values()][3:]
        lines.append((*words, *("–" if value is None else f"{value:.1f} %" for value in numbers)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def newest() -> list[harness.Row]:
    """Return the table that was kept last."""
    last = (harness.RESULTS / "plan.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    rows: list[harness.Row] = json.loads(last)["table"]
    return rows


def draw(rows: Sequence[MeasuredRun], predictions: Array, path: Path) -> None:
    """Draw predicted against measured iterations, one colour for each number of tensor-parallel ranks."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 6))
    for tp in sorted({run.layout.tp for run in rows}):
        chosen = [index for index, run in enumerate(rows) if run.layout.tp == tp]
        measured = [rows[index].seconds * 1e3 for index in chosen]
        axes.scatter(measured, predictions[chosen] * 1e3, s=8, alpha=0.6, label=f"tp {tp}")
    ends = [limit(measured_seconds(rows)) * 1e3 for limit in (np.min, np.max)]
    axes.plot(ends, ends, color="#333333", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured iteration, ms", ylabel="predicted iteration, ms")
    axes.set_title(
        f"{len(rows):,} iterations of Megatron-DeepSpeed on A100\n(vTrain); each model was held out of the fit"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> int:
    """Print the fitted numbers and the table; with --keep, keep the table and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="keep the table, and draw the picture of the page")
    keep, rows = parser.parse_args().keep, vtrain()
    parameters, predictions = fit(rows), held_out(rows)
    print("fitted to all rows:", ", ".join(f"{name} {value:.3g}" for name, value in parameters._asdict().items()))
    print(fitted_link())
    table = [*vtrain_table(rows, predictions), *published_table()]
    if keep:
        harness.write_row("plan", {"parameters": parameters._asdict(), "table": table}, keep)
        draw(rows, predictions, DATA.parents[1] / "docs" / "images" / "plan.png")
    print(f"\n{page(table)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
