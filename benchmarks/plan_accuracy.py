"""Compare the model of cost (`tpfuse.cost`) with iteration times that others measured.

    python -m benchmarks.plan_accuracy [--data FOLDER]        `make figures` does not run this

vTrain (VIA-Research/vTrain, MIT licence; arXiv:2312.12391) published iteration times of Megatron-DeepSpeed on up to 8
A100. The few parameters of PARAMETERS are fitted to a part of the rows, and the others are predicted: in five folds
that hold out whole models, and from 2 and 4 GPUs to 8. The links come from its measured all-reduces alone.

The rows are said to recompute activations. Products would need more than the A100's rate if that were the whole block,
and so `selective` recomputation is assumed. Rows of the same width, tp and micro-batch agree within 1 % about the time
of a layer, whatever their depth, pp and dp. Between these groups the times jump by up to 30 % where the host limits
them: tp 4 of width 2,048 takes 2.7 ms for 2 sequences, 3.0 for 1 and 5.0 for 4. No parameter here explains that.

The regret of a planner is how much longer its choice takes than the best measured layout, for the same model, GPUs and
batch. It is what a user loses, and a small error does not bound it.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness, plan_b200, plan_page, plan_published
from benchmarks.plan_published import MEGATRON
from tpfuse.cost.hardware import Cluster, Gpu, Link
from tpfuse.cost.layout import Layout
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.cost.step import step_times

DATA = Path(__file__).parent / "data"
FOLDS = 5
_SPREAD = 0.05
# NVIDIA A100 data sheet, 2021: dense products in 16-bit types, and memory. Most of the rest is fitted. The products are
# cuBLAS's, which chooses among many tiles: waves of tiles are not counted (multiprocessors is 0).
A100 = Gpu("A100", 80e9, 312e12, 156e12, 0.8, 0.5, 1.5e12, 0, 2e-6, 50e-6)
# Megatron's fused softmax takes 4 heads of all sequences at once; otherwise torch computes it, with a cast to float32,
# the scale, the mask and a cast back besides.
_SOFTMAX_HEADS, _SOFTMAX_OPERATORS = 4, 5
_VOCABULARY, _VOCABULARY_MULTIPLE = 50257, 128  # GPT-2's, which tensor-parallel ranks pad


class Parameters(NamedTuple):
    """The fields of the GPU and of the program that are fitted, with the values that the fit begins with."""

    product_share: float = 0.8
    bandwidth: float = 1.4e12
    host_seconds: float = 50e-6
    unaligned_share: float = 0.4
    pass_operators: float = 10.0
    collective_operators: float = 1.5


@dataclass(frozen=True)
class Measured:
    """A measured iteration. seconds: its time. model: a name, by which models are held out."""

    sizes: ModelSizes
    layout: Layout
    seconds: float

    @property
    def model(self) -> str:
        """Return the name of the model."""
        return self.sizes.name


Array = NDArray[np.float64]
Predict = Callable[[Sequence[Measured]], Array]


def read_vtrain(folder: Path) -> list[Measured]:
    """Return the measured iterations of vTrain."""
    result = []
    with (folder / "vtrain_a100_single_node.csv").open() as file:
        for row in csv.DictReader(file):
            number = {key: int(value) for key, value in row.items() if key != "iteration_ms"}
            width, layers, tp = number["hidden"], number["layers"], number["tp"]
            padded = _VOCABULARY_MULTIPLE * tp * -(-_VOCABULARY // (_VOCABULARY_MULTIPLE * tp))
            sizes = ModelSizes(
                name=f"{width} x {layers}",
                layers=layers,
                width=width,
                heads=number["heads"],
                kv_heads=number["heads"],
                head_size=width // number["heads"],
                inner=4 * width,
                gated=False,
                vocabulary=_VOCABULARY if tp == 1 else padded,
                tokens=number["sequence"],
                positions=number["sequence"],
                dropout=True,
            )
            layout = Layout(
                tp,
                1,
                number["dp"],
                number["pp"],
                "1f1b",
                1,
                0,
                "selective",
                number["micro_batch"],
                number["global_batch"],
            )
            result.append(Measured(sizes, layout, float(row["iteration_ms"]) * 1e-3))
    return result


@cache
def fitted_link(folder: Path, gpu: str) -> Link:
    """Return the link whose all-reduces are nearest to the measured ones, by relative error."""
    with (folder / "nccl_all_reduce_vtrain.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == gpu]
    ranks, size, seconds = (np.array([float(row[key]) for row in rows]) for key in ("ranks", "bytes", "time_ns"))
    seconds *= 1e-9
    terms = np.stack([np.ones_like(size), 2 * (ranks - 1), 2 * (ranks - 1) / ranks * size], axis=1)
    start, latency, per_byte = np.linalg.lstsq(terms / seconds[:, None], np.ones_like(seconds), rcond=None)[0]
    return Link(f"NVLink of {gpu.upper()}", float(1 / per_byte), float(latency), float(start))


def program_of(measured: Measured, parameters: Parameters) -> Program:
    """Return the program that ran a layout: the softmax that it uses depends on the heads of a rank."""
    heads = measured.layout.micro_batch * measured.sizes.heads // measured.layout.tp
    operators = MEGATRON.block_operators + (_SOFTMAX_OPERATORS if heads % _SOFTMAX_HEADS else 0)
    return replace(
        MEGATRON,
        block_operators=operators,
        pass_operators=parameters.pass_operators,
        collective_operators=parameters.collective_operators,
    )


def predictor(parameters: Parameters, link: Link) -> Predict:
    """Return the function that predicts iterations with the model of cost."""
    gpu = replace(
        A100,
        product_share=parameters.product_share,
        bandwidth=parameters.bandwidth,
        host_seconds=parameters.host_seconds,
        unaligned_share=parameters.unaligned_share,
    )
    cluster = Cluster(gpu, 8, 8, link, link)

    def predict(rows: Sequence[Measured]) -> Array:
        return np.array(
            [step_times(each.sizes, each.layout, cluster, program_of(each, parameters)).total for each in rows]
        )

    return predict


def fit(rows: Sequence[Measured], link: Link, rounds: int = 8) -> Parameters:
    """Return the parameters with the least relative errors, by Gauss and Newton's method on logarithms.

    An error far above _SPREAD weighs by its absolute value, a smaller one by its square.
    """
    seconds = np.array([each.seconds for each in rows])

    def errors(logarithms: Array) -> Array:
        return predictor(Parameters(*np.exp(logarithms)), link)(rows) / seconds - 1

    at, step = np.log(np.array(Parameters())), 1e-3
    now = errors(at)
    for _ in range(rounds):
        slopes = np.stack([(errors(at + step * unit) - now) / step for unit in np.eye(len(at))], axis=1)
        weight = (1 + (now / _SPREAD) ** 2) ** -0.25
        move = np.linalg.lstsq(slopes * weight[:, None], -now * weight, rcond=None)[0]
        at = at + np.clip(move, -0.3, 0.3)
        now = errors(at)
    return Parameters(*(float(each) for each in np.exp(at)))


def held_out(rows: Sequence[Measured], folder: Path) -> Array:
    """Return predictions of all rows, each by parameters that were fitted without any row of its model."""
    link, models = fitted_link(folder, "a100"), sorted({each.model for each in rows})
    result = np.zeros(len(rows))
    for fold in range(FOLDS):
        held = set(models[fold::FOLDS])
        parameters = fit([each for each in rows if each.model not in held], link)
        chosen = [index for index, each in enumerate(rows) if each.model in held]
        result[chosen] = predictor(parameters, link)([rows[index] for index in chosen])
    return result


def regrets(rows: Sequence[Measured], predicted: Array) -> Array:
    """Return the regret of the smallest prediction for each model, number of GPUs and batch with several layouts."""
    groups: dict[tuple[int, int, str], list[tuple[float, float]]] = defaultdict(list)
    for each, seconds in zip(rows, predicted, strict=True):
        groups[each.layout.ranks, each.layout.batch, each.model].append((float(seconds), each.seconds))
    choices = [(min(group)[1], min(seconds for _, seconds in group)) for group in groups.values() if len(group) > 1]
    return np.array([chosen / best - 1 for chosen, best in choices])


def constant_rate(rows: Sequence[Measured], *, bubble: bool) -> Array:
    """Return the relative shape of a planner with one rate of operations, and with `bubble` the idle share of 1F1B."""
    result = []
    for each in rows:
        layout = each.layout
        seconds = each.sizes.flops_per_token * layout.batch * each.sizes.tokens / layout.ranks
        result.append(seconds * (1 + (layout.pp - 1) / layout.micro_batches if bubble else 1.0))
    return np.array(result)


def pure_dp(rows: Sequence[Measured]) -> Array:
    """Return an order of layouts: the most data-parallel ranks first, and of these the largest micro-batch."""
    return np.array([-each.layout.dp - each.layout.micro_batch / 1000 for each in rows])


def _scaled(relative: Array, seconds: Array, known: NDArray[np.bool_]) -> Array:
    """Return predictions scaled so that their median ratio to the known rows is 1."""
    return relative * float(np.median(seconds[known] / relative[known]))


def scores(folder: Path) -> tuple[list[harness.Row], list[Measured], Array]:
    """Return the table's rows, the measurements, and the held-out predictions of the model of cost."""
    rows, link = read_vtrain(folder), fitted_link(folder, "a100")
    seconds = np.array([each.seconds for each in rows])
    eight = np.array([each.layout.ranks == 8 for each in rows])
    small, large = ([each for each, is_large in zip(rows, eight, strict=True) if is_large == side] for side in (0, 1))
    ours = held_out(rows, folder)
    to_eight = predictor(fit(small, link), link)(large)
    table = [_row("tpfuse.cost", rows, ours, ours, to_eight)]
    for name, bubble in (("constant rate", False), ("constant rate and bubble", True)):
        relative = constant_rate(rows, bubble=bubble)
        # One number is scaled on all rows at once: holding models out changes nothing that shows.
        predicted = _scaled(relative, seconds, np.ones_like(eight))
        table.append(_row(name, rows, predicted, predicted, _scaled(relative, seconds, ~eight)[eight]))
    table.append(_row("pure dp, largest micro-batch", rows, pure_dp(rows), None, None))
    return table, rows, ours


def _row(
    name: str, rows: Sequence[Measured], order: Array, predicted: Array | None, to_eight: Array | None
) -> harness.Row:
    """Return the errors and regrets of a planner in percent; errors are None for one that predicts no time."""
    seconds = np.array([each.seconds for each in rows])
    eight = np.array([each.layout.ranks == 8 for each in rows])
    lost = regrets(rows, order)

    def error(values: Array | None, measured: Array, of: Callable[[Array], Any] = np.mean) -> float | None:
        return None if values is None else float(of(np.abs(values / measured - 1))) * 100

    return {
        "planner": name,
        "error_folds": error(predicted, seconds),
        "worst_folds": error(predicted, seconds, np.max),
        "error_to_8_gpus": error(to_eight, seconds[eight]),
        "worst_to_8_gpus": error(to_eight, seconds[eight], np.max),
        "regret_median": float(np.median(lost)) * 100,
        "regret_mean": float(np.mean(lost)) * 100,
        "regret_worst": float(np.max(lost)) * 100,
        "choices": len(lost),
    }


def draw(rows: Sequence[Measured], predicted: Array, path: Path) -> None:
    """Draw predicted against measured iterations, one colour for each number of tensor-parallel ranks."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 6))
    for tp in sorted({each.layout.tp for each in rows}):
        chosen = [index for index, each in enumerate(rows) if each.layout.tp == tp]
        axes.scatter([rows[i].seconds * 1e3 for i in chosen], predicted[chosen] * 1e3, s=8, alpha=0.6, label=f"tp {tp}")
    ends = [min(each.seconds for each in rows) * 1e3, max(each.seconds for each in rows) * 1e3]
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
    """Keep the errors for each source, print them, and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of the measurements")
    folder = parser.parse_args().data
    table, rows, predicted = scores(folder)
    parameters = fit(rows, fitted_link(folder, "a100"))
    print("fitted to all rows:", ", ".join(f"{name} {value:.3g}" for name, value in parameters._asdict().items()))
    print(fitted_link(folder, "a100"))
    figures = {"subject": "vtrain", "runs": len(rows), "table": table, "parameters": parameters._asdict()}
    harness.write_row("plan", figures, keep=True)
    draw(rows, predicted, DATA.parents[1] / "docs" / "images" / "plan.png")
    for published in (plan_b200, plan_published):
        print()
        harness.write_row("plan", published.main(), keep=True)
    print(f"\n{plan_page.table(plan_page.newest())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
