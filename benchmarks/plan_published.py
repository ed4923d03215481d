"""Compare the model of cost with published speeds of whole training runs: Megatron-LM and torchtitan.

    python -m benchmarks.plan_published

Nothing is fitted here: the GPUs, links and networks are those of tpfuse/cost/hardware. The two rows with asynchronous
tensor parallelism have given tpfuse.cost.program its share of what overlap hides. benchmarks/data/README.md names the
sources. Beside the model is a constant rate: one share of the GPU's highest rate for the model's operations, which is
fitted to the rows that it predicts, so that their median ratio is 1.

Megatron-LM (arXiv:2104.04473, table 1) trained GPTs on 32 to 3,072 A100 with sequences of 2,048 tokens, a vocabulary of
51,200, float16, recomputation of all blocks, and 8 x 200 Gb/s of InfiniBand in each node. The time of a step follows
from its formula of operations. The table does not say how large the micro-batches were, nor how many stages a rank had.
They come from the script that the authors published for it, examples/sc21/run_table_1.sh, which agrees with the table
in all other columns. Its gradients have 16 bits; torch's DistributedDataParallel overlaps their all-reduce, and
Megatron's own does not. Dropout is on, which is the default. The ranks of tp do not share the tokens, and attention
writes its scores, since this was before arXiv:2205.05198 and FlashAttention.

torchtitan trained Llamas in bfloat16 by FSDP2, which is stage 3 of ZeRO, some with tensor parallelism besides. Rows
with float8 are left out, and so none of 405B remains. "selective layer" recomputes some blocks: every second one is
assumed, since the page does not say which. "selective op" recomputes every second product and what is elementwise. The
time of both is predicted as the mean of the times without recomputation and with that of all blocks. The page does not
name the network of the A100: 200 Gb/s are assumed. That the A100's rows are eager is assumed too, since `compile` was
false in the settings of that time. The H100 have HBM2e with 2.4 TB/s and a limit of 500 W, so that they are slower than
those that h100.toml describes. The model has no term for operators that eager PyTorch does not fuse, and predicts the
same times for eager and for compiled runs.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from benchmarks.harness import Row, aligned
from benchmarks.plan_b200 import DATA as B200
from tpfuse.choices import PipelineSchedule, Recompute
from tpfuse.cost.hardware import Cluster, load_gpu, load_link, parse_network
from tpfuse.cost.layout import Layout
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.cost.step import step_times

DATA = B200.parent
# Megatron-LM, and Megatron-DeepSpeed of 2022: attention writes its scores, tensor-parallel ranks all-reduce, gradients
# have 16 bits and are reduced at the end, and the blocks are cut equally. A block launches about 20 operators forward.
MEGATRON = Program(
    "Megatron",
    fused_attention=False,
    sequence_parallel=False,
    overlap_tp=False,
    overlap_dp=False,
    block_operators=20,
    equal_stages=True,
    gradient_bytes=2,
)
TORCHTITAN = Program("torchtitan", overlap_tp=False)
# layers, width, heads, heads of keys and values, inner width, vocabulary (arXiv:2307.09288, arXiv:2407.21783)
LLAMAS = {
    "llama2-13b": (40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256),
}
RECOMPUTED: dict[str, tuple[Recompute, ...]] = {
    "none": ("none",),
    "full": ("full",),
    "selective layer": ("none", "full"),
    "selective op": ("none", "full"),
}


@dataclass(frozen=True)
class Case:
    """A measured run. seconds: of a step, which is predicted as the mean over layouts that differ in recomputation."""

    source: str
    name: str
    sizes: ModelSizes
    layouts: tuple[Layout, ...]
    cluster: Cluster
    program: Program
    seconds: float

    def predicted_seconds(self) -> float:
        """Return the predicted time of a step."""
        return mean(step_times(self.sizes, layout, self.cluster, self.program).total for layout in self.layouts)

    def least_seconds(self) -> float:
        """Return the time of a step in which all GPUs reach their highest rate, without recomputation."""
        operations = self.sizes.flops_per_token * self.layouts[0].batch * self.sizes.tokens
        return operations / self.layouts[0].ranks / self.cluster.gpu.half_rate


def cases() -> list[Case]:
    """Return the measured runs of all sources."""
    return [*_megatron(), *_torchtitan()]


def _megatron() -> Iterator[Case]:
    with (DATA / "megatron_a100_weak_scaling.csv").open() as file:
        for row in csv.DictReader(file):
            width, layers, heads, batch = (int(row[key]) for key in ("hidden", "layers", "heads", "batch"))
            tp, pp, gpus, stages = (int(row[key]) for key in ("tp", "pp", "gpus", "stages_per_rank"))
            name = f"{row['billions']}B, tp {tp} pp {pp} dp {gpus // (tp * pp)}"
            sizes = ModelSizes(
                name, layers, width, heads, heads, width // heads, 4 * width, False, 51200, 2048,
                positions=2048, dropout=True,
            )  # fmt: skip
            schedule: PipelineSchedule = "1f1b" if stages == 1 else "interleaved_1f1b"
            layout = Layout(
                tp, 1, gpus // (tp * pp), pp, schedule, stages, 0, "full", int(row["micro_batch"]), batch
            )  # fmt: skip
            # Formula 3 of the paper, with recomputation.
            operations = (
                96 * batch * 2048 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
            )
            yield Case(
                "Megatron-LM, A100",
                name,
                sizes,
                (layout,),
                Cluster(load_gpu("a100"), gpus, 8, load_link("nvlink3"), parse_network("200Gb")),
                replace(MEGATRON, overlap_dp=row["data_parallel"] == "torch"),
                operations / (gpus * float(row["teraflops"]) * 1e12),
            )


def _torchtitan() -> Iterator[Case]:
    links = {
        "a100": (load_link("nvlink3"), parse_network("200Gb")),
        "h100": (load_link("nvlink4"), parse_network("400Gb")),
    }
    with (DATA / "torchtitan_llama.csv").open() as file:
        for row in csv.DictReader(file):
            gpus, tp, tokens, local = (int(row[key]) for key in ("gpus", "tp", "sequence", "local_batch"))
            layers, width, heads, kv_heads, inner, vocabulary = LLAMAS[row["model"]]
            sizes = ModelSizes(
                row["model"], layers, width, heads, kv_heads, 128, inner, True, vocabulary, tokens,
                tied=False, biases=False, norm_bias=False,
            )  # fmt: skip
            dp = gpus // tp
            yield Case(
                f"torchtitan, {row['gpu'].upper()}",
                f"{row['model']}, tp {tp} dp {dp}, {row['checkpointing']}, {row['runs']}",
                sizes,
                tuple(
                    Layout(tp, 1, dp, 1, "1f1b", 1, 3, recompute, local, local * dp)
                    for recompute in RECOMPUTED[row["checkpointing"]]
                ),
                Cluster(load_gpu(row["gpu"]), gpus, 8, *links[row["gpu"]]),
                replace(TORCHTITAN, overlap_tp=row["runs"] == "async TP"),
                local * tokens / tp / float(row["tokens_per_second"]),
            )


def summary(source: str, measured: Sequence[Case]) -> Row:
    """Return the mean and the worst of the absolute errors in percent, and those of the constant rate."""
    share = median(case.seconds / case.least_seconds() for case in measured)
    errors = {
        "": [abs(case.predicted_seconds() / case.seconds - 1) * 100 for case in measured],
        "_constant": [abs(share * case.least_seconds() / case.seconds - 1) * 100 for case in measured],
    }
    found: Row = {"source": source, "runs": len(measured)}
    for name, values in errors.items():
        found |= {f"error_mean{name}": mean(values), f"error_worst{name}": max(values)}
    return found


def main() -> Row:
    """Print a row for each run, and the errors of each source. Return what benchmarks/results/plan.jsonl keeps."""
    measured = cases()
    lines = [("source", "run", "measured", "predicted", "error")]
    rows: list[Row] = []
    for case in measured:
        predicted = case.predicted_seconds()
        error = predicted / case.seconds - 1
        lines.append((case.source, case.name, f"{case.seconds:.2f} s", f"{predicted:.2f} s", f"{error:+.1%}"))
        rows.append({"source": case.source, "run": case.name, "seconds": case.seconds, "predicted": predicted})
    print(aligned(lines))
    sources = dict.fromkeys(case.source for case in measured)
    table = [summary(source, [case for case in measured if case.source == source]) for source in sources]
    for row in table:
        print(
            f"{row['source']}: mean {row['error_mean']:.1f} %, worst {row['error_worst']:.1f} %;"
            f" a constant rate, fitted: {row['error_mean_constant']:.1f} %, {row['error_worst_constant']:.1f} %"
        )
    return {"subject": "published", "table": table, "rows": rows}


if __name__ == "__main__":
    main()
