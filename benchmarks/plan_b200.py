"""Compare the model of cost with measured steps of Llama-3 70B, cut to 12 layers, on 8 B200.

    python -m benchmarks.plan_b200

MooreThreads SimuMax (Apache-2.0) has published the iteration times and the peak of allocated memory of the first
pipeline stage: docs/b200, copied to benchmarks/data. Megatron-core trained with TransformerEngine, sequences of
4,096 tokens, micro-batches of one, sequence parallelism, the distributed optimizer (ZeRO-1), the fused cross entropy,
and gradients that are accumulated in float32 and reduced at the end, as simu_tools/megatron_scripts says.

Nothing is fitted to predict memory. Times are predicted twice: with the numbers of b200.toml and nvlink5.toml, which
come from measurements of single operators; and with a share of the rate for products that is fitted to the steps of
three of the four layouts to predict those of the fourth.
"""

import csv
import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Row
from tpfuse.cost.hardware import Cluster, load_gpu, load_link, parse_network
from tpfuse.cost.layout import Layout
from tpfuse.cost.memory import memories
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.cost.step import step_times

DATA = Path(__file__).parent / "data" / "simumax_b200_llama3_70b.csv"
MEGATRON = Program(
    "Megatron-core with TransformerEngine",
    overlap_tp=False,
    overlap_dp=False,
    equal_stages=True,
    chunked_loss=False,
    fused_gate=True,  # bias_swiglu_fusion
    placeholder_gradients=True,  # get_dummy_wgrad of transformer_engine/pytorch/module/base.py
    symmetric_slots=False,
    reserve=0.0,  # the peak is that of torch's allocator
)
CLUSTER = Cluster(load_gpu("b200"), 8, 8, load_link("nvlink5"), parse_network("400Gb"))
_SHARES = [share / 1000 for share in range(300, 700, 2)]


@dataclass(frozen=True)
class Case:
    """A measured run. seconds: of an iteration. peak: the most bytes that the first pipeline stage has allocated."""

    sizes: ModelSizes
    layout: Layout
    seconds: float
    peak: float

    @property
    def name(self) -> str:
        """Return the name of the layout."""
        return f"tp {self.layout.tp} pp {self.layout.pp} dp {self.layout.dp}"

    def predicted_seconds(self, product_share: float | None = None) -> float:
        """Return the predicted time of an iteration. product_share: in place of that of b200.toml."""
        gpu = CLUSTER.gpu if product_share is None else dataclasses.replace(CLUSTER.gpu, product_share=product_share)
        return step_times(self.sizes, self.layout, dataclasses.replace(CLUSTER, gpu=gpu), MEGATRON).total

    def predicted_peak(self) -> float:
        """Return the predicted bytes of the first pipeline stage."""
        return max(memories(self.sizes, self.layout, MEGATRON), key=lambda memory: memory.activations).total


def llama(tp: int) -> ModelSizes:
    """Return the sizes of the model, with the rows that Megatron adds: an end token, and up to a multiple of 128 tp."""
    vocabulary = -(-(128256 + 1) // (128 * tp)) * 128 * tp
    return ModelSizes(
        "llama3-70b, 12 layers", 12, 8192, 64, 8, 128, 28672, True, vocabulary, 4096,
        tied=False, biases=False, norm_bias=False,
    )  # fmt: skip


def cases() -> list[Case]:
    """Return the measured runs."""
    found = []
    with DATA.open() as file:
        for row in csv.DictReader(file):
            tp, pp, dp, count = (int(re.search(rf"_{key}(\d+)", row["case"])[1]) for key in ("tp", "pp", "dp", "mbc"))  # type: ignore[index]
            layout = Layout(tp, 1, dp, pp, "1f1b", 1, 1, "none", 1, count * dp)
            peak = float(row["peak_allocated_GiB"]) * 2**30
            found.append(Case(llama(tp), layout, float(row["iteration_ms"]) / 1e3, peak))
    return found


def fitted_share(measured: Sequence[Case]) -> float:
    """Return the share of the rate for products with the least mean relative error."""

    def error(share: float) -> float:
        return sum(abs(math.log(case.predicted_seconds(share) / case.seconds)) for case in measured)

    return min(_SHARES, key=error)


def main() -> Row:
    """Print a row for each run, and the mean and the worst of the absolute errors.

    Return what benchmarks/results/plan.jsonl keeps, with the errors in percent.
    """
    measured = cases()
    errors: list[tuple[float, float, float]] = []
    print(f"{'layout':<18}{'micro-batches':>14}{'ms':>9}{'b200.toml':>11}{'one fitted':>12}{'GiB':>8}{'predicted':>11}")
    shares = {
        name: fitted_share([case for case in measured if case.name != name])
        for name in dict.fromkeys(case.name for case in measured)
    }
    for case in measured:
        plain, fitted = (
            case.predicted_seconds() / case.seconds - 1,
            case.predicted_seconds(shares[case.name]) / case.seconds - 1,
        )
        memory = case.predicted_peak() / case.peak - 1
        errors.append((plain, fitted, memory))
        print(
            f"{case.name:<18}{case.layout.micro_batches:>14}{case.seconds * 1e3:>9.1f}{plain:>+11.1%}{fitted:>+12.1%}"
            f"{case.peak / 2**30:>8.2f}{memory:>+11.2%}"
        )
    table: list[Row] = []
    for name, column in zip(("b200.toml", "one fitted", "memory"), zip(*errors, strict=True), strict=True):
        sizes = [abs(error) * 100 for error in column]
        table.append({"name": name, "error_mean": sum(sizes) / len(sizes), "error_worst": max(sizes)})
        print(f"{name}: mean {table[-1]['error_mean']:.2f}%, worst {table[-1]['error_worst']:.2f}%")
    print("fitted shares:", ", ".join(f"{share:.3f} without {name}" for name, share in shares.items()))
    return {"subject": "b200", "runs": len(measured), "table": table}


if __name__ == "__main__":
    main()
