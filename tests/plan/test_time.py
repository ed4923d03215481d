"""The times of a step, and of its parts: products, messages and pipelines."""

import itertools
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from tpfuse.choices import PipelineSchedule
from tpfuse.parallel.pipeline.order import stage_ranks
from tpfuse.plan import communication
from tpfuse.plan.bubble import Cut, StageKind, StageSeconds, cut_of, simulated, step_length, usual_cut
from tpfuse.plan.hardware import Cluster, GpuSpec, Link
from tpfuse.plan.sizes import TPFUSE, ModelSizes, RankLayout, TrainingProgram
from tpfuse.plan.time import HIDDEN_SHARE, STEP_OPERATORS, StepTimes, simulated_step, step_times
from tpfuse.plan.work import TILES, MatrixProduct, product_seconds

NVLINK, NETWORK = Link("nvlink", 400e9, 2e-6, 10e-6), Link("network", 50e9, 5e-6, 20e-6)
GPU = GpuSpec("toy", 80e9, 990e12, 495e12, 0.7, 0.6, 3e12, 132, 2e-6, 10e-6, link=NVLINK)
CLUSTER = Cluster(GPU, 64, 8, NETWORK)
SIZES = ModelSizes("toy", 32, 4096, 32, 8, 128, 14336, True, 128256, 4096)
LAYOUT = RankLayout(1, 1, 1, 1, "1f1b", 1, 0, "none", 1, 64)


def _times(program: TrainingProgram = TPFUSE, **options: object) -> StepTimes:
    return step_times(SIZES, replace(LAYOUT, **options), CLUSTER, program)  # type: ignore[arg-type]


def test_one_rank_computes_its_operations() -> None:
    times = _times()
    assert times.total == pytest.approx(sum(getattr(times, kind.name) for kind in fields(times)))
    assert times.tensor == times.context == times.pipeline == times.data == times.bubble == 0
    least = SIZES.flops_per_token * 64 * SIZES.tokens / GPU.half_rate
    assert least / 0.7 * 0.9 < times.products + times.attention < least / 0.7 * 1.4


@pytest.mark.parametrize(
    "options, kind",
    [
        ({"tp": 8}, "tensor"),
        ({"cp": 8}, "context"),
        ({"dp": 8}, "data"),
        ({"pp": 8}, "pipeline"),
        ({"pp": 8}, "bubble"),
    ],
)
def test_each_dimension_adds_its_kind(options: dict[str, int], kind: str) -> None:
    slow, layout = replace(CLUSTER, gpu=replace(GPU, link=replace(NVLINK, bandwidth=10e9))), replace(LAYOUT, **options)
    times, slower = step_times(SIZES, layout, CLUSTER, TPFUSE), step_times(SIZES, layout, slow, TPFUSE)
    assert getattr(slower, kind) > 0 and slower.total > times.total
    also = {"pp": {"pipeline", "bubble"}, "cp": {"context", "data"}}  # context-parallel ranks reduce gradients too
    others = {"tensor", "context", "data", "pipeline", "bubble"} - {kind}
    others -= also.get(next(iter(options)), set())
    assert all(getattr(slower, other) == 0 for other in others)


def test_overlap_hides_communication() -> None:
    alone = replace(TPFUSE, overlap_tp=False, overlap_dp=False)
    for options, kind in (({"tp": 8}, "tensor"), ({"dp": 8, "zero": 3}, "data")):
        assert getattr(_times(**options), kind) < getattr(_times(alone, **options), kind)


def test_a_share_of_what_could_be_hidden_is_hidden() -> None:
    """All messages of the blocks could hide behind the products of a slow GPU, and those of a fast one cannot."""
    edges = 64 * 2 * communication.all_reduce(2.0 * 4096 * 4096, 8, NVLINK)
    hidden = []
    for faster in (0.1, 10):
        cluster = replace(CLUSTER, gpu=replace(GPU, half_rate=faster * GPU.half_rate))
        layout, programs = replace(LAYOUT, tp=8), (TPFUSE, replace(TPFUSE, overlap_tp=False))
        times, alone = (step_times(SIZES, layout, cluster, program).tensor for program in programs)
        hidden.append((alone - times) / (alone - edges))
    assert hidden[0] == pytest.approx(HIDDEN_SHARE) and hidden[1] < 0.8 * HIDDEN_SHARE


def test_recomputation_and_the_host_cost_time() -> None:
    assert _times().total < _times(recompute="selective").total < _times(recompute="full").total
    lazy = replace(CLUSTER, gpu=replace(GPU, host_seconds=10e-3))
    times = step_times(SIZES, LAYOUT, lazy, TPFUSE)
    issued = 64 * 32 * 2 * TPFUSE.block_operators * 10e-3
    assert times.total == pytest.approx(issued, rel=0.1), "a step cannot be shorter than its operators take to issue"


def test_more_micro_batches_shrink_the_share_of_the_bubble() -> None:
    shares = [(t := _times(pp=8, batch=batch)).bubble / t.total for batch in (8, 64, 4096)]
    assert shares[0] > shares[1] > shares[2] > 0


def test_zero_shards_the_optimizer_and_gathers() -> None:
    none, two, three = (_times(dp=8, zero=stage) for stage in (0, 2, 3))
    assert two.optimizer == pytest.approx(none.optimizer / 8)
    assert three.data > 0


def test_the_rank_of_the_head_sends_and_updates_its_tables() -> None:
    """An untied model has a second table where the first stage is too, which has learned positions as well."""
    program, table = replace(TPFUSE, overlap_dp=False), SIZES.table_parameters
    for pp, schedule, turns, first in ((1, "1f1b", 1, 1), (2, "1f1b", 1, 0), (2, "zbv", 2, 1)):
        layout = replace(LAYOUT, dp=4, pp=pp, schedule=schedule, stages_per_rank=turns)  # type: ignore[arg-type]
        blocks = () if pp == 1 else (32 // (pp * turns),) * pp * turns
        tied, untied, positioned = (
            step_times(replace(SIZES, **more), layout, CLUSTER, program, blocks)  # type: ignore[arg-type]
            for more in ({}, {"tied": False}, {"positions": 10**6})
        )
        for other, more in ((untied, table), (positioned, 10**6 * 4096)):
            assert other.optimizer - tied.optimizer == pytest.approx(first * more * (2 * 12 + 4 * 4 + 2) / 3e12)
            assert other.data - tied.data == pytest.approx(first * 2 * 3 / 4 * more * 4 / 400e9)
        shared = communication.all_reduce(4.0 * table, 2, NVLINK) if schedule == "1f1b" and pp > 1 else 0
        assert tied.pipeline - untied.pipeline == pytest.approx(shared), "the first and the last rank"


def test_gradients_take_the_time_of_the_bytes_that_are_sent() -> None:
    """All gradients, and those of the table that the first and the last stage share."""
    alone = replace(TPFUSE, overlap_dp=False)
    for zero, exchanges in ((0, 2), (2, 1), (3, 1)):
        narrow, wide = (_times(replace(alone, reduce_bytes=size), dp=4, batch=4, zero=zero) for size in (2, 4))
        elements = 32 * SIZES.block_parameters + SIZES.table_parameters
        assert wide.data - narrow.data == pytest.approx(exchanges * 3 / 4 * 2 * elements / 400e9)
    narrow, wide = (_times(replace(alone, reduce_bytes=size), pp=2) for size in (2, 4))
    assert wide.pipeline - narrow.pipeline == pytest.approx(2 * SIZES.table_parameters / 400e9)


def test_muon_adds_the_products_of_its_owners_and_its_exchange_and_keeps_one_moment_less() -> None:
    """5 iterations of X Xᵀ, (X Xᵀ)² and a product of that with X; in 16 bits to the owners and back."""
    gpu = replace(GPU, multiprocessors=0, host_seconds=0.0)
    cluster, muon = replace(CLUSTER, gpu=gpu), replace(TPFUSE, muon_steps=5)
    shapes = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    each = [5 * (4 * m * m * n + 2 * m**3) / (990e12 * 0.7) for m, n in shapes]
    elements = 32 * sum(m * n for m, n in shapes)
    moment = 2 * 4 * elements / 3e12
    for dp, zero, owner in ((1, 0, 32 * sum(each)), (8, 1, 4 * sum(each)), (8, 0, 4 * sum(each)), (2048, 3, max(each))):
        layout = replace(LAYOUT, dp=dp, zero=zero, batch=dp)
        with_muon, without = (step_times(SIZES, layout, cluster, program) for program in (muon, TPFUSE))
        added = with_muon.optimizer - without.optimizer + moment / (dp if zero else 1)
        assert added == pytest.approx(owner, rel=1e-9)
        link = NVLINK if dp < 9 else NETWORK
        sent = 2 * elements * (1 - 1 / dp) * (1 if zero == 0 else 2 / dp)
        exchanges = 2 * -(-elements // (dp * 2**25)) if dp > 1 else 0
        latencies = exchanges * (link.start + (dp - 1) * link.latency)
        assert with_muon.data - without.data == pytest.approx(sent / link.bandwidth + latencies, rel=1e-9)
    lazy = replace(cluster, gpu=replace(gpu, host_seconds=1.0))
    assert step_times(SIZES, LAYOUT, lazy, muon).optimizer > 32 * 7 * 5 * 3, "the host issues three products each time"
    small = replace(SIZES, width=256, heads=2, kv_heads=2, inner=1024)
    issued = step_times(small, LAYOUT, lazy, muon).optimizer
    assert issued == pytest.approx(32 * 7 * 8 + 3 * (5 * 3 + 4), rel=1e-6), "together for matrices of one shape"


def test_stage_2_reduces_each_micro_batch_or_whole_gradients_once_and_stage_3_gathers_for_each_without_a_pipeline() -> (
    None
):
    alone = replace(TPFUSE, overlap_dp=False)
    whole = replace(alone, accumulate="whole")
    for program, options, grows in (
        (alone, {"zero": 1}, False),
        (whole, {"zero": 2}, False),
        (alone, {"zero": 2}, True),
        (whole, {"zero": 3}, True),
        (whole, {"zero": 3, "pp": 2}, False),
        (alone, {"zero": 3, "pp": 2}, True),
    ):
        few, many = (_times(program, dp=8, batch=8 * count, **options).data for count in (4, 16))
        assert (many > 2 * few) if grows else (many == pytest.approx(few)), options


def test_the_simulated_step_of_a_pipeline_takes_the_time_of_its_passes() -> None:
    for schedule, turns in (("1f1b", 1), ("zbv", 2)):
        layout = replace(LAYOUT, pp=4, schedule=schedule, stages_per_rank=turns, micro_batch=4)  # type: ignore[arg-type]
        for blocks in ((), (32 - 4 * turns + 1,) + (1,) * (4 * turns - 1)):
            times, simulated = (step(SIZES, layout, CLUSTER, TPFUSE, blocks) for step in (step_times, simulated_step))
            apart = times.pipeline + times.data + times.optimizer + STEP_OPERATORS * GPU.host_seconds
            assert simulated.length == pytest.approx(times.total - apart, rel=0.02), schedule
            last = simulated.order.rank_of[-1]
            assert simulated.busy(last) == pytest.approx(times.total - apart - times.bubble, rel=1e-9), schedule
            idle = simulated.idle_share(last)
            assert idle == pytest.approx(times.bubble / (times.total - apart), abs=0.01), schedule


def test_a_large_product_reaches_the_share_of_the_rate_and_a_thin_one_that_of_the_memory() -> None:
    free = replace(GPU, multiprocessors=0, unaligned_share=0.25)
    product = MatrixProduct(128 * 132, 256 * 40, 8192)
    assert product_seconds(product, GPU) == pytest.approx(product.flops / (990e12 * 0.7), rel=1e-9)
    thin = MatrixProduct(8, 8192, 8192)
    assert product_seconds(thin, free) == pytest.approx(2 * (8 * 8192 * 2 + 8192**2) / 3e12)
    odd, even = (product_seconds(MatrixProduct(4096, columns, 4096), free) for columns in (50257, 50264))
    assert odd / even == pytest.approx(4 * 50257 / 50264), "unaligned rows"


def test_a_tile_beyond_a_full_wave_takes_another_wave() -> None:
    full, beyond = MatrixProduct(128 * 132, 256, 8192), MatrixProduct(128 * 133, 256, 8192)
    assert min(TILES, key=lambda tile: -tile[0] * tile[1])[:2] == (128, 256)
    ratio = product_seconds(beyond, GPU) / product_seconds(full, GPU)
    assert 1.2 < ratio <= 2.0, "a smaller tile may fill the second wave better"
    free = replace(GPU, multiprocessors=0)
    assert product_seconds(beyond, free) / product_seconds(full, free) == pytest.approx(133 / 132)


def test_collectives_follow_the_formulas_of_their_algorithms() -> None:
    both = 2 * communication.all_gather(1e9, 4, NVLINK)
    assert communication.all_reduce(1e9, 4, NVLINK) == pytest.approx(both - NVLINK.start)
    assert communication.all_reduce(1e9, 4, NVLINK) == pytest.approx(10e-6 + 6 * 2e-6 + 2 * 3 / 4 * 1e9 / 400e9)
    assert communication.all_reduce(1e9, 1, NVLINK) == communication.all_gather(1e9, 1, NVLINK) == 0.0
    for size, faster in ((1e3, True), (1e11, False)):
        tree = communication.all_reduce(size, 64, NVLINK, tree=True)
        assert (tree < communication.all_reduce(size, 64, NVLINK)) == faster, "a tree, for small tensors only"


def test_a_group_has_the_link_of_a_node_if_all_such_groups_are_inside_nodes() -> None:
    for per_node, nodes, ranks, stride in itertools.product((1, 2, 6, 8, 9), (1, 2, 3), (2, 3, 4), (1, 2, 3, 4, 9)):
        gpus, span = per_node * nodes, ranks * stride
        if gpus % span == 0:
            groups = [
                range(at, at + span, stride) for start in range(0, gpus, span) for at in range(start, start + stride)
            ]
            apart = any(group[0] // per_node != group[-1] // per_node for group in groups)
            link = Cluster(GPU, gpus, per_node, NETWORK).link(ranks, stride)
            assert (link is NETWORK) == apart, (per_node, nodes, ranks, stride)


def test_a_message_costs_the_network_if_one_does() -> None:
    """On nodes of 8, stages of 4 ranks send each other the second of their messages between nodes."""
    layout, tensor = replace(LAYOUT, dp=4, pp=4, batch=256), 2 * 4096 * 4096
    for nodes, link in ((CLUSTER, NETWORK), (replace(CLUSTER, gpus=16, per_node=16), NVLINK)):
        sizes = replace(SIZES, tied=False)
        assert step_times(sizes, layout, nodes, TPFUSE).pipeline == pytest.approx(6 * communication.send(tensor, link))


def test_nodes_reduce_inside_first() -> None:
    """8 ranks of each of 4 nodes send an eighth of the tensor over the network."""
    inside = 2 * communication.all_gather(1e9, 8, NVLINK)
    apart = communication.all_reduce(1e9 / 8, 4, NETWORK)
    for ranks, stride, expected in (
        (32, 1, inside + apart),
        (4, 8, communication.all_reduce(1e9, 4, NETWORK)),
        (8, 1, communication.all_reduce(1e9, 8, NVLINK)),
    ):
        assert communication.grouped(1e9, ranks, stride, CLUSTER, reduce=True) == pytest.approx(expected)
    uneven = communication.grouped(1e9, 36, 2, Cluster(GPU, 72, 9, NETWORK), reduce=False)
    assert uneven == communication.all_gather(1e9, 36, NETWORK), "4 or 5 of the ranks are in a node of 9"
    gathered = communication.all_gather(1e9, 8, NVLINK) + communication.all_gather(1e9 / 8, 4, NETWORK)
    assert communication.grouped(1e9, 32, 1, CLUSTER, reduce=False) == pytest.approx(gathered)


@pytest.mark.parametrize("exposed", [communication.gather_exposed, communication.scatter_exposed])
def test_chunks_hide_each_other(exposed: Callable[[float, float, int], float]) -> None:
    assert exposed(8.0, 0.0, 4) == 0
    assert exposed(8.0, 3.0, 4) == pytest.approx(3 * 3.0 + 2.0 - 8.0), "messages of 3 behind chunks of 2"
    assert exposed(0.0, 3.0, 4) == 9.0, "nothing to hide behind"
    assert exposed(8.0, 1.9, 4) == pytest.approx(0.0), "the own chunk covers the first arrival or the last message"


def test_rings_and_rests() -> None:
    assert communication.ring_exposed(8.0, 1.0, 4) == 0 and communication.ring_exposed(8.0, 3.0, 4) == 3.0
    assert communication.hidden_rest(5.0, 3.0, 1.0) == 2.0 and communication.hidden_rest(5.0, 9.0, 1.0) == 1.0


EVEN: list[StageSeconds] = [(1.0, 2.0)] * 3
UNEVEN: list[StageSeconds] = [(1.125, 2.125), (1.0, 2.0), (1.5, 3.0)]
PIPELINES: list[tuple[PipelineSchedule, int]] = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zbv", 2)
]  # fmt: skip


def _cut(schedule: PipelineSchedule, turns: int) -> Cut:
    """Return a cut on 4 ranks whose stages are the first one, the last one, and those between."""
    return cut_of([1] * (4 * turns), stage_ranks(schedule, 4, turns))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 4, 50])
def test_the_bubble_of_equal_stages(schedule: PipelineSchedule, micro_batches: int) -> None:
    """Narayanan et al., arXiv:2104.04473, section 2.2: (p - 1) passes of idle time beside m."""
    length = step_length(schedule, 4, 1, micro_batches, _cut(schedule, 1), EVEN)
    assert length == pytest.approx(3.0 * (micro_batches + 3))


@pytest.mark.parametrize(("schedule", "turns"), PIPELINES)
@pytest.mark.parametrize("times", [EVEN, UNEVEN])
def test_the_extrapolation_equals_the_full_simulation(
    schedule: PipelineSchedule, turns: int, times: list[StageSeconds]
) -> None:
    cut = _cut(schedule, turns)
    full = simulated(schedule, 4, turns, 40, [times[index] for index in cut.of_stages])
    # 1.125 and 2.125 are not on the grid of sixteenths of 1.5.
    assert step_length(schedule, 4, turns, 40, cut, times) == pytest.approx(full, rel=1e-9 if times is EVEN else 2e-3)


def test_a_cut_counts_the_head_and_names_each_kind_of_stages_and_ranks_once() -> None:
    sizes = ModelSizes("toy", 24, 1024, 16, 16, 64, 4096, False, 50304, 1024)
    equal, usual = (usual_cut(sizes, "1f1b", 4, 1, equal) for equal in (True, False))
    assert [equal.kinds[index].blocks for index in equal.of_stages] == [6] * 4
    blocks = [usual.kinds[index].blocks for index in usual.of_stages]
    assert sum(blocks) == 24 and blocks[-1] < 6 < blocks[0] and usual.last_blocks == blocks[-1]
    cut = cut_of([2, 3, 3, 3, 3, 1], stage_ranks("zbv", 3, 2))
    first, middle, last = StageKind(2, True, False), StageKind(3, False, False), StageKind(1, False, True)
    assert cut == Cut((first, middle, last), (0, 1, 1, 1, 1, 2), ((0, 2), (1, 1)), (0, 2)) and cut.last_blocks == 3
    assert usual_cut(replace(sizes, layers=5), "zbv", 1, 1, False) == Cut(
        (StageKind(5, True, True),), (0,), ((0,),), (0,)
    )
