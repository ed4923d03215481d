"""Runs that others measured, as `tpfuse.plan` describes runs. benchmarks/data/README.md has their sources."""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from tpfuse.choices import PipelineSchedule, Recompute
from tpfuse.plan.hardware import Cluster, GpuSpec, Link, load_gpu, parse_network
from tpfuse.plan.memory import memories
from tpfuse.plan.sizes import ModelSizes, RankLayout, TrainingProgram
from tpfuse.plan.time import step_times

DATA = Path(__file__).parent / "data"
# NVIDIA A100 data sheet, 2021: dense products in 16-bit types, and memory. Most of the rest is fitted. The products are
# cuBLAS's, which chooses among many tiles: waves of tiles are not counted (multiprocessors is 0).
A100 = GpuSpec("A100", 80e9, 312e12, 156e12, 0.8, 0.5, 1.5e12, 0, 2e-6, 50e-6)
_VOCABULARY, _VOCABULARY_MULTIPLE = 50257, 128  # GPT-2's, which tensor-parallel ranks pad
# Megatron-LM, and Megatron-DeepSpeed of 2022: attention writes its scores, tensor-parallel ranks all-reduce, gradients
# have 16 bits and are reduced at the end, and the blocks are cut equally. A block launches about 20 operators forward.
MEGATRON = TrainingProgram(
    "Megatron",
    fused_attention=False,
    sequence_parallel=False,
    overlap_tp=False,
    overlap_dp=False,
    block_operators=20,
    equal_stages=True,
    gradient_bytes=2,
    reduce_bytes=2,
)
MEGATRON_CORE = TrainingProgram(
    "Megatron-core with TransformerEngine",
    overlap_tp=False,
    overlap_dp=False,
    equal_stages=True,
    fused_gate=True,  # bias_swiglu_fusion
    placeholder_gradients=True,  # get_dummy_wgrad of transformer_engine/pytorch/module/base.py
    symmetric_slots=False,
    reserve=0.0,  # the peak is that of torch's allocator
)
TORCHTITAN = TrainingProgram("torchtitan", overlap_tp=False)
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
class MeasuredRun:
    """A run that others measured."""

    source: str
    name: str
    sizes: ModelSizes
    # Layouts that differ in recomputation: the time is predicted as the mean over them.
    layouts: tuple[RankLayout, ...]
    cluster: Cluster
    program: TrainingProgram
    # The measured time of a step.
    seconds: float
    # The most bytes that the first pipeline stage has allocated; 0 if that is not known.
    peak: float = 0.0

    @property
    def layout(self) -> RankLayout:
        """Return the layout with the least recomputation."""
        return self.layouts[0]

    def predicted_seconds(self, product_share: float | None = None) -> float:
        """Return the predicted time of a step. product_share: in place of that of hardware.toml."""
        cluster = self.cluster
        if product_share is not None:
            cluster = replace(cluster, gpu=replace(cluster.gpu, product_share=product_share))
        times = [step_times(self.sizes, layout, cluster, self.program).total for layout in self.layouts]
        return sum(times) / len(times)

    def predicted_peak(self) -> float:
        """Return the predicted bytes of the first pipeline stage."""
        return memories(self.sizes, self.layout, self.program)[0].total

    def least_seconds(self) -> float:
        """Return the time of a step in which all GPUs reach their highest rate, without recomputation."""
        operations = self.sizes.flops_per_token * self.layout.batch * self.sizes.tokens
        return operations / self.layout.ranks / self.cluster.gpu.half_rate


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (DATA / name).open() as file:
        yield from csv.DictReader(file)


def vtrain() -> list[MeasuredRun]:
    """Return the measured iterations of vTrain."""
    found, link = [], fitted_link()
    for row in _rows("vtrain_a100_single_node.csv"):
        number = {key: int(value) for key, value in row.items() if key != "iteration_ms"}
        width, layers, tp, heads, length = (number[key] for key in ("hidden", "layers", "tp", "heads", "sequence"))
        padded = _VOCABULARY_MULTIPLE * tp * -(-_VOCABULARY // (_VOCABULARY_MULTIPLE * tp))
        sizes = ModelSizes(
            f"{width} x {layers}", layers, width, heads, heads, width // heads, 4 * width, False,
            _VOCABULARY if tp == 1 else padded, length, positions=length, dropout=True,
        )  # fmt: skip
        batch, size = number["global_batch"], number["micro_batch"]
        layout = RankLayout(tp, 1, number["dp"], number["pp"], "1f1b", 1, 0, "selective", size, batch)
        cluster = Cluster(replace(A100, link=link), 8, 8, link)
        seconds = float(row["iteration_ms"]) * 1e-3
        found.append(MeasuredRun("vTrain", sizes.name, sizes, (layout,), cluster, MEGATRON, seconds))
    return found


@cache
def fitted_link() -> Link:
    """Return the link whose all-reduces are nearest to the measured ones on A100, by relative error."""
    rows = [row for row in _rows("nccl_all_reduce_vtrain.csv") if row["gpu"] == "a100"]
    ranks, size, seconds = (np.array([float(row[key]) for row in rows]) for key in ("ranks", "bytes", "time_ns"))
    seconds *= 1e-9
    terms = np.stack([np.ones_like(size), 2 * (ranks - 1), 2 * (ranks - 1) / ranks * size], axis=1)
    start, latency, per_byte = np.linalg.lstsq(terms / seconds[:, None], np.ones_like(seconds), rcond=None)[0]
    return Link("NVLink of A100", float(1 / per_byte), float(latency), float(start))


def b200() -> Iterator[MeasuredRun]:
    """Yield the runs of SimuMax. Megatron adds an end token to the vocabulary, and rows up to a multiple of 128 tp."""
    cluster = Cluster(load_gpu("b200"), 8, 8, parse_network("400Gb"))
    for row in _rows("simumax_b200_llama3_70b.csv"):
        tp, pp, dp, count = (int(re.search(rf"_{key}(\d+)", row["case"])[1]) for key in ("tp", "pp", "dp", "mbc"))  # type: ignore[index]
        vocabulary = -(-(128256 + 1) // (128 * tp)) * 128 * tp
        sizes = ModelSizes(
            "llama3-70b, 12 layers", 12, 8192, 64, 8, 128, 28672, True, vocabulary, 4096,
            tied=False, biases=False, norm_bias=False,
        )  # fmt: skip
        layout = RankLayout(tp, 1, dp, pp, "1f1b", 1, 1, "none", 1, count * dp)
        yield MeasuredRun(
            "Megatron on 8 B200 (SimuMax)", f"tp {tp} pp {pp} dp {dp}", sizes, (layout,), cluster, MEGATRON_CORE,
            float(row["iteration_ms"]) / 1e3, float(row["peak_allocated_GiB"]) * 2**30,
        )  # fmt: skip


def megatron() -> Iterator[MeasuredRun]:
    """Yield the runs of Megatron-LM."""
    for row in _rows("megatron_a100_weak_scaling.csv"):
        width, layers, heads, batch = (int(row[key]) for key in ("hidden", "layers", "heads", "batch"))
        tp, pp, gpus, stages = (int(row[key]) for key in ("tp", "pp", "gpus", "stages_per_rank"))
        dp = gpus // (tp * pp)
        name = f"{row['billions']}B, tp {tp} pp {pp} dp {dp}"
        sizes = ModelSizes(
            name, layers, width, heads, heads, width // heads, 4 * width, False, 51200, 2048,
            positions=2048, dropout=True,
        )  # fmt: skip
        schedule: PipelineSchedule = "1f1b" if stages == 1 else "interleaved_1f1b"
        layout = RankLayout(tp, 1, dp, pp, schedule, stages, 0, "full", int(row["micro_batch"]), batch)
        # Formula 3 of the paper, with recomputation.
        operations = 96 * batch * 2048 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
        yield MeasuredRun(
            "Megatron-LM, A100", name, sizes, (layout,), Cluster(load_gpu("a100"), gpus, 8, parse_network("200Gb")),
            replace(MEGATRON, overlap_dp=row["data_parallel"] == "torch"),
            operations / (gpus * float(row["teraflops"]) * 1e12),
        )  # fmt: skip


def torchtitan() -> Iterator[MeasuredRun]:
    """Yield the runs of torchtitan."""
    networks = {"a100": parse_network("200Gb"), "h100": parse_network("400Gb")}
    for row in _rows("torchtitan_llama.csv"):
        gpus, tp, tokens, local = (int(row[key]) for key in ("gpus", "tp", "sequence", "local_batch"))
        layers, width, heads, kv_heads, inner, vocabulary = LLAMAS[row["model"]]
        sizes = ModelSizes(
            row["model"], layers, width, heads, kv_heads, 128, inner, True, vocabulary, tokens,
            tied=False, biases=False, norm_bias=False,
        )  # fmt: skip
        dp = gpus // tp
        yield MeasuredRun(
            f"torchtitan, {row['gpu'].upper()}",
            f"{row['model']}, tp {tp} dp {dp}, {row['checkpointing']}, {row['runs']}",
            sizes,
            tuple(
                RankLayout(tp, 1, dp, 1, "1f1b", 1, 3, recompute, local, local * dp)
                for recompute in RECOMPUTED[row["checkpointing"]]
            ),
            Cluster(load_gpu(row["gpu"]), gpus, 8, networks[row["gpu"]]),
            replace(TORCHTITAN, overlap_tp=row["runs"] == "async TP"),
            local * tokens / tp / float(row["tokens_per_second"]),
        )  # fmt: skip
