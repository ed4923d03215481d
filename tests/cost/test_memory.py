"""The memory of a rank is what `tpfuse memory` counts, what autograd saves, and what papers and measurements say."""

import dataclasses
import timeit

import pytest
import torch
import transformers

import tpfuse
from benchmarks.long_context import SavedBytes
from benchmarks.plan_b200 import Case, cases
from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive, pairwise
from tpfuse.backend import kernels
from tpfuse.choices import PipelineSchedule, Recompute
from tpfuse.comm.layout import local_tensor
from tpfuse.cost.activations import block_bytes, saved
from tpfuse.cost.in_flight import parts
from tpfuse.cost.layout import Layout, Share
from tpfuse.cost.memory import memories, rank_memory
from tpfuse.cost.program import TPFUSE, Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.parallel.pipeline.order import order
from tpfuse.parallel.pipeline.timeline import Held, holding_bytes, most_held
from tpfuse.testing.ranks import pool
from tpfuse.train.config import parse_train
from tpfuse.train.memory import count
from tpfuse.train.setup import with_layout

PRESETS = {  # layers, width, heads, vocabulary, tokens, tensor-parallel ranks
    "gpt2-124m": (12, 768, 12, 50257, 1024, 4),
    "gpt2-1558m": (48, 1600, 25, 50257, 1024, 5),
    "tiny": (4, 128, 4, 256, 128, 2),
}
PIPELINES: dict[str, tuple[PipelineSchedule, int, int]] = {
    "none": ("1f1b", 1, 1),
    "1f1b": ("1f1b", 4, 1),
    "gpipe": ("gpipe", 2, 1),
    "interleaved": ("interleaved_1f1b", 2, 2),
    "zero_bubble": ("zero_bubble", 4, 1),
    "zbv": ("zbv", 2, 2),
}


def gpt(name: str) -> ModelSizes:
    """Return the sizes of a preset."""
    layers, width, heads, vocabulary, tokens, _ = PRESETS[name]
    return ModelSizes(
        name, layers, width, heads, heads, width // heads, 4 * width, False, vocabulary, tokens, positions=tokens
    )


@pytest.mark.parametrize(
    *pairwise(
        2,
        preset=list(PRESETS),
        pipeline=list(PIPELINES),
        zero=[2, 1, 0, 3],
        recompute=["none", "selective", "full"],
        dtype=["bfloat16", "float32"],
        tensor=[True, False],
        cp=[1, 2, 4],
        dp=[4, 1, 2],
        micro_batch=[3, 1],
        rounds=[1, 5],
    )
)
def test_tpfuse_memory_counts_the_same(
    preset: str,
    pipeline: str,
    zero: int,
    recompute: Recompute,
    dtype: str,
    tensor: bool,
    cp: int,
    dp: int,
    micro_batch: int,
    rounds: int,
) -> None:
    """Activations and messages are equal, and all together differ by the padding of buckets: less than 1 %."""
    (schedule, pp, stages), tp = PIPELINES[pipeline], PRESETS[preset][-1] if tensor else 1
    batch = rounds * pp * micro_batch * dp
    options = parse_train(
        f"--model.preset {preset} --parallel.tp {tp} --parallel.cp {cp} --parallel.pp {pp} --parallel.pp-schedule"
        f" {schedule} --train.recompute {recompute} --train.micro-batch {micro_batch} --train.batch {batch}"
        f" --train.dtype {dtype}".split()
    )
    sizes = gpt(preset)
    counted = count(with_layout(options, tp * cp * dp * pp), sizes.vocabulary, [zero]).accounts[zero]
    layout = Layout(tp, cp, dp, pp, schedule, stages, zero, recompute, micro_batch, batch)
    program = TPFUSE if dtype == "bfloat16" else dataclasses.replace(TPFUSE, parameter_bytes=4, state_bytes=8)
    found = max(memories(sizes, layout, program), key=lambda memory: memory.total - memory.workspace)
    assert found.activations == counted.activations
    for name, expected in {
        "parameters": counted.parameters,
        "gradients": counted.gradients,
        "optimizer": counted.master + counted.moments,
        "buffers": counted.buffers,
        "total": counted.total,
    }.items():
        value = found.total - found.workspace if name == "total" else getattr(found, name)
        assert value == pytest.approx(expected, rel=0.01), name


def _of_llama(sizes: ModelSizes, sequences: int) -> int:
    """Return the bytes that autograd saves of a model of transformers after `parallelize`, on one rank."""
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.width, intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.tokens, tie_word_embeddings=sizes.tied,
    )  # fmt: skip
    with kernels("triton"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = tpfuse.parallelize(model, mesh_of(1, 1)["tp"])
        ids = torch.arange(sequences * sizes.tokens).view(sequences, -1) % sizes.vocabulary
        counted = SavedBytes([local_tensor(parameter) for parameter in model.parameters()])
        with counted.hooks:
            model(ids, labels=ids)
    return counted.total


LLAMAS = [
    ModelSizes("a", 2, 128, 4, 2, 32, 352, True, 512, 64, tied=False, biases=False, norm_bias=False),
    *exhaustive(ModelSizes("b", 3, 96, 6, 6, 16, 128, True, 1000, 40, biases=False, norm_bias=False)),
]


@pytest.mark.parametrize("sizes", LLAMAS)
def test_activations_of_models_of_transformers(sizes: ModelSizes) -> None:
    [expected] = pool(1).run(_of_llama, sizes, 2)
    kept = saved(sizes, Share(1, 1, 2, "none"), TPFUSE)
    total = sizes.layers * kept.block + kept.stage + kept.first + kept.last
    assert total == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "micro_batches"),
    [
        ("1f1b", 4, 1, 12),
        ("zbv", 4, 2, 8),
        *exhaustive(
            ("gpipe", 4, 1, 7), ("1f1b", 8, 1, 100), ("interleaved_1f1b", 4, 2, 64), ("interleaved_1f1b", 2, 4, 24),
            ("zero_bubble", 4, 1, 24), ("zero_bubble", 2, 2, 8), ("zbv", 2, 2, 16),
        ),
    ],
)  # fmt: skip
def test_parts_keep_the_most_that_any_rank_keeps(
    schedule: PipelineSchedule, ranks: int, stages: int, micro_batches: int
) -> None:
    """The short order and the ranks that are left out do not change the most bytes that a rank keeps."""
    sizes = dataclasses.replace(gpt("gpt2-1558m"), layers=32)
    found, _ = parts(sizes, schedule, ranks, stages, micro_batches, True)
    whole = order(schedule, ranks, stages, micro_batches)
    for first, last, block, gradients, passed in ((0, 0, 3, 0, 0), (50, 0, 3, 2, 0), (0, 90, 3, 2, 4), (0, 0, 1, 9, 4)):
        each = [Held(32 // whole.stages * block, gradients)] * whole.stages
        each[0] = Held(each[0].saved + first, gradients)
        each[-1] = Held(each[-1].saved + last, gradients)
        expected = max(
            most_held(whole, rank, {stage: each[stage] for stage in whole.stages_of(rank)}, passed)
            for rank in range(ranks)
        )
        sums = []
        for part in found:
            held = [Held(layers * block, gradients) for layers in part.layers]
            for at, extra in ((part.first, first), (part.last, last)):
                if at is not None:
                    held[at] = Held(held[at].saved + extra, gradients)
            sums += [holding_bytes(peak, held, passed) for peak in part.peaks]
        assert max(sums) == expected


# Korthikanti et al., arXiv:2205.05198, counts 16-bit activations of a GPT with dropout and scores in memory.
MEGATRON_2022 = Program(
    "Megatron 2022",
    fused_attention=False,
    sequence_parallel=False,
    chunked_loss=False,
    keeps_masks=True,
    keeps_statistics=False,
    symmetric_slots=False,
    reserve=0.0,
)


@pytest.mark.parametrize(("tp", "micro_batch"), [(1, 1), (8, 4)])
def test_formulas_of_megatron_for_a_block(tp: int, micro_batch: int) -> None:
    """Table 2 of the paper: s tokens, b sequences, h features, a heads, t tensor-parallel ranks."""
    s, b, h, a, t = 2048, micro_batch, 6144, 64, tp
    sizes = ModelSizes("22B", 48, h, a, a, h // a, 4 * h, False, 51200, s, positions=s, dropout=True)
    shared = dataclasses.replace(MEGATRON_2022, sequence_parallel=True)

    def check(program: Program, recompute: Recompute, each: float) -> None:
        assert block_bytes(sizes, t, s, b, recompute, program) == pytest.approx(s * b * h * each, rel=1e-12)

    check(MEGATRON_2022, "none", 10 + 24 / t + 5 * a * s / (h * t))
    check(shared, "none", 34 / t + 5 * a * s / (h * t))
    check(MEGATRON_2022, "selective", 10 + 24 / t)
    check(shared, "selective", 34 / t)
    check(MEGATRON_2022, "full", 2)
    # Section 4.3: the first stage of 1F1B keeps as many micro-batches as there are stages, hence all layers. The paper
    # does not count the ids, and tpfuse keeps the inputs of stages in buffers, of which the first stage has none.
    layout = Layout(t, 1, 1, 8, "1f1b", 1, 0, "selective", b, 64 * b)
    first = max(memories(sizes, layout, shared), key=lambda memory: memory.activations)
    masks, ids = s * b * h / t, 8 * s * b
    assert first.activations == pytest.approx(48 * s * b * h * 34 / t + 8 * (masks + ids), rel=0.03)


@pytest.mark.parametrize(("zero", "expected"), [(0, 120e9), (1, 31.4e9), (2, 16.6e9), (3, 1.88e9)])
def test_table_of_zero(zero: int, expected: float) -> None:
    """arXiv:1910.02054, table 1: 7.5 billion parameters on 64 ranks, 16-bit parameters and gradients, K = 12.

    The paper does not count the gradients that are not sent yet: here those of the embedding. At stage 3, tpfuse has no
    16-bit shard of the parameters beside the masters.
    """
    sizes = ModelSizes("7.5B", 36, 4096, 32, 32, 128, 16384, False, 50257, 1024, positions=1024)
    program = dataclasses.replace(TPFUSE, gradient_bytes=2)
    memory = rank_memory(sizes, Layout(1, 1, 64, 1, "1f1b", 1, zero, "full", 1, 64), program)
    unsent = sizes.table_parameters * 2 if zero >= 2 else 0
    held = (memory.parameters + memory.gradients + memory.optimizer - unsent) * 7.5e9 / sizes.parameters
    assert held == pytest.approx(expected * (14 / 16 if zero == 3 else 1), rel=0.01)


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.layout.micro_batches == 4], ids=lambda case: case.name
)
def test_peaks_that_were_measured_on_b200(case: Case) -> None:
    """Nothing is fitted to them: the formulas count Megatron's tensors."""
    assert case.predicted_peak() == pytest.approx(case.peak, rel=0.01)


def test_more_micro_batches_do_not_need_more_memory_on_b200() -> None:
    peaks = {(case.name, case.predicted_peak()) for case in cases()}
    assert len(peaks) == 4 and len(cases()) == 12


def test_the_memory_of_a_layout_is_found_fast() -> None:
    """`tpfuse plan` counts tens of thousands of layouts: 50 microseconds each, and more on a busy machine."""
    sizes = gpt("gpt2-1558m")
    layouts = [Layout(5, 1, 2, 4, "1f1b", 1, zero, "full", size, 64) for zero in (0, 1, 2) for size in (1, 2, 4)]
    for layout in layouts:
        rank_memory(sizes, layout, TPFUSE)
    seconds = min(timeit.repeat(lambda: [rank_memory(sizes, each, TPFUSE) for each in layouts], number=10, repeat=5))
    assert seconds / 90 < 500e-6
