"""The formula of memory gives what papers say, and follows each of its options."""

import dataclasses

import pytest

from tests.support.tiers import exhaustive
from tpfuse.choices import PipelineSchedule, Recompute
from tpfuse.parallel.pipeline.order import order
from tpfuse.parallel.pipeline.timeline import Held, holding_bytes, holdings
from tpfuse.plan.activations import activations
from tpfuse.plan.in_flight import parts
from tpfuse.plan.memory import memories, rank_memory
from tpfuse.plan.muon import update_bytes
from tpfuse.plan.sizes import TPFUSE, ModelSizes, RankLayout, RankShare, TrainingProgram

SIZES = ModelSizes("7.5B", 36, 4096, 32, 32, 128, 16384, False, 50257, 1024, positions=1024)
# Korthikanti et al., arXiv:2205.05198, counts 16-bit activations of a GPT with dropout and scores in memory.
MEGATRON_2022 = TrainingProgram(
    "Megatron 2022", fused_attention=False, sequence_parallel=False, symmetric_slots=False, reserve=0.0
)


@pytest.mark.parametrize(("tp", "micro_batch"), [(1, 1), (8, 4)])
def test_formulas_of_megatron_for_a_block(tp: int, micro_batch: int) -> None:
    """Table 2 of the paper: s tokens, b sequences, h features, a heads, t tensor-parallel ranks.

    The paper counts two masks of a byte for each feature, which tpfuse computes again, and no statistics of norms.
    """
    s, b, h, a, t = 2048, micro_batch, 6144, 64, tp
    masks, statistics = 2 * h, 2 * 2 * 4
    sizes = ModelSizes("22B", 48, h, a, a, h // a, 4 * h, False, 51200, s, positions=s, dropout=True)
    shared = dataclasses.replace(MEGATRON_2022, sequence_parallel=True)

    def check(program: TrainingProgram, recompute: Recompute, each: float) -> None:
        block = activations(sizes, RankShare(t, 1, b, recompute), program).block
        tokens = 0 if recompute == "full" else s * b // (t if program.sequence_parallel else 1)
        assert block == pytest.approx(s * b * h * each + tokens * (statistics - masks), rel=1e-12)

    check(MEGATRON_2022, "none", 10 + 24 / t + 5 * a * s / (h * t))
    check(shared, "none", 34 / t + 5 * a * s / (h * t))
    check(MEGATRON_2022, "selective", 10 + 24 / t)
    check(shared, "selective", 34 / t)
    check(MEGATRON_2022, "full", 2)
    # Section 4.3: the first stage of 1F1B keeps as many micro-batches as there are stages, hence all layers. The paper
    # does not count the ids, and tpfuse keeps the inputs of stages in buffers, of which the first stage has none.
    layout = RankLayout(t, 1, 1, 8, "1f1b", 1, 0, "selective", b, 64 * b)
    expected = 48 * s * b * (h * 34 - masks) / t + 8 * 8 * s * b
    assert memories(sizes, layout, shared)[0].activations == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("zero", "expected"), [(0, 120e9), (1, 31.4e9), (2, 16.6e9), (3, 1.88e9)])
def test_table_of_zero(zero: int, expected: float) -> None:
    """arXiv:1910.02054, table 1: 7.5 billion parameters on 64 ranks, 16-bit parameters and gradients, K = 12.

    The paper does not count the gradients that are not sent yet: here those of the embedding. tpfuse sums shards of
    gradients in float32, and at stage 3 has no 16-bit shard of the parameters beside the masters.
    """
    program = dataclasses.replace(TPFUSE, gradient_bytes=2)
    memory = rank_memory(SIZES, RankLayout(1, 1, 64, 1, "1f1b", 1, zero, "full", 1, 64), program)
    unsent = SIZES.table_parameters * 2 if zero >= 2 else 0
    wider = 2 / 64 * 7.5e9 if zero == 2 else 0
    held = (memory.parameters + memory.gradients + memory.optimizer - unsent) * 7.5e9 / SIZES.parameters
    assert held == pytest.approx(expected + wider, rel=0.01)


def test_the_update_of_muon_begins_when_the_activations_are_free() -> None:
    program = dataclasses.replace(TPFUSE, muon_steps=5, reserve=0.0)
    for recompute, micro_batch in (("full", 1), ("none", 8)):
        layout = RankLayout(1, 1, 8, 1, "1f1b", 1, 1, recompute, micro_batch, 64)  # type: ignore[arg-type]
        memory, update = rank_memory(SIZES, layout, program), update_bytes(SIZES, SIZES.layers, layout, program)
        passes = rank_memory(SIZES, layout, dataclasses.replace(program, muon_steps=0))
        assert memory.activations == passes.activations
        assert memory.activations + memory.workspace == max(update, passes.activations + passes.workspace)
        assert (memory.workspace > passes.workspace) == (recompute == "full")


def test_narrow_gradients_have_buffers_of_their_own() -> None:
    """A bucket of 96 elements on two ranks: gradients are rounded to be sent, and their sums are float32."""
    sizes = ModelSizes("toy", 1, 1, 1, 1, 1, 1, False, 64, 1, biases=False, norm_bias=False)  # 5 small parameters
    found = {}
    for kept, sent in ((4, 4), (4, 2), (2, 2)):
        program = dataclasses.replace(TPFUSE, gradient_bytes=kept, reduce_bytes=sent)
        memory = rank_memory(sizes, RankLayout(1, 1, 2, 1, "1f1b", 1, 1, "none", 1, 2), program)
        found[kept, sent] = memory.gradients, memory.buffers
    size = found[4, 4][0] // 4
    assert found == {(4, 4): (4 * size, 0), (4, 2): (4 * size, 2 * size + 2 * size), (2, 2): (2 * size, 2 * size)}


def test_a_rank_with_nothing_to_shard_holds_at_stage_3_what_it_holds_at_stage_2() -> None:
    two, three = (rank_memory(SIZES, RankLayout(2, 1, 1, 1, "1f1b", 1, zero, "none", 1, 2), TPFUSE) for zero in (2, 3))
    assert two == three


def test_stages_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="stage 4: expected 0, 1, 2 or 3"):
        rank_memory(SIZES, RankLayout(1, 1, 2, 1, "1f1b", 1, 4, "none", 1, 2), TPFUSE)


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "micro_batches"),
    [
        ("1f1b", 4, 1, 12),
        ("zbv", 4, 2, 8),
        *exhaustive(("gpipe", 4, 1, 7), ("interleaved_1f1b", 2, 4, 24), ("zero_bubble", 4, 1, 24)),
    ],
)  # fmt: skip
def test_parts_keep_the_most_that_any_rank_keeps(
    schedule: PipelineSchedule, ranks: int, stages: int, micro_batches: int
) -> None:
    """The short order and the holdings that are left out do not change the most bytes that a rank keeps."""
    found, _ = parts(dataclasses.replace(SIZES, layers=32), (schedule, ranks, stages), micro_batches, True)
    whole = order(schedule, ranks, stages, micro_batches)
    for first, last, block, gradients, passed in ((0, 0, 3, 0, 0), (50, 0, 3, 2, 0), (0, 90, 3, 2, 4), (0, 0, 1, 9, 4)):
        each = [Held(32 // whole.stages * block, gradients)] * whole.stages
        each[0] = Held(each[0].saved + first, gradients)
        each[-1] = Held(each[-1].saved + last, gradients)
        expected = max(
            holding_bytes(holding, [each[stage] for stage in whole.stages_of(rank)], passed)
            for rank in range(ranks)
            for holding in holdings(whole, rank)
        )
        sums = []
        for part in found:
            held = [Held(layers * block, gradients) for layers in part.layers]
            for at, extra in ((part.first, first), (part.last, last)):
                if at is not None:
                    held[at] = Held(held[at].saved + extra, gradients)
            sums += [holding_bytes(peak, held, passed) for peak in part.peaks]
        assert max(sums) == expected
