"""The times of a step add up, and each kind of communication appears with the option that causes it."""

from dataclasses import fields, replace
from time import perf_counter
from typing import Any

import pytest

from tpfuse.cost.hardware import Cluster, Gpu, Link
from tpfuse.cost.layout import Layout
from tpfuse.cost.program import TPFUSE, Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.cost.step import Times, played_step, step_times

GPU = Gpu("toy", 80e9, 990e12, 495e12, 0.7, 0.6, 3e12, 132, 2e-6, 10e-6)
CLUSTER = Cluster(GPU, 64, 8, Link("nvlink", 400e9, 2e-6, 10e-6), Link("network", 50e9, 5e-6, 20e-6))
SIZES = ModelSizes("toy", 32, 4096, 32, 8, 128, 14336, True, 128256, 4096)
LAYOUT = Layout(1, 1, 1, 1, "1f1b", 1, 0, "none", 1, 64)


def _times(program: Program = TPFUSE, **options: object) -> Times:
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
    slow, layout = replace(CLUSTER, inside=replace(CLUSTER.inside, bandwidth=10e9)), replace(LAYOUT, **options)
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
    alone, all_hidden = replace(TPFUSE, overlap_tp=False), replace(TPFUSE, hidden_share=1.0)
    most, least = (_times(program, tp=8).tensor for program in (alone, all_hidden))
    assert _times(tp=8).tensor == pytest.approx(most - TPFUSE.hidden_share * (most - least)) and least < 0.5 * most


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


def test_a_step_is_predicted_quickly() -> None:
    layouts = [
        replace(LAYOUT, tp=tp, pp=pp, batch=batch)
        for tp in (1, 2, 4)
        for pp in (1, 2, 4)
        for batch in range(64, 4096, 64)
    ]
    start = perf_counter()
    for layout in layouts:
        step_times(SIZES, layout, CLUSTER, TPFUSE)
    assert (perf_counter() - start) / len(layouts) < 1e-3, "150 microseconds on a quiet core"


def test_accumulated_gradients_are_reduced_once_and_stage_3_gathers_for_each_micro_batch_without_a_pipeline() -> None:
    alone = replace(TPFUSE, overlap_dp=False)
    for options, grows in (
        ({"zero": 0}, False),
        ({"zero": 2}, False),
        ({"zero": 3}, True),
        ({"zero": 3, "pp": 2}, False),
    ):
        few, many = (_times(alone, dp=8, batch=8 * count, **options).data for count in (4, 16))
        assert (many > 2 * few) if grows else (many == pytest.approx(few)), options


def test_the_played_step_of_a_pipeline_takes_the_time_of_its_passes() -> None:
    for schedule, turns in (("1f1b", 1), ("zbv", 2)):
        layout = replace(LAYOUT, pp=4, schedule=schedule, stages_per_rank=turns, micro_batch=4)  # type: ignore[arg-type]
        for blocks in ((), [32 - 4 * turns + 1] + [1] * (4 * turns - 1)):
            times, played = (step(SIZES, layout, CLUSTER, TPFUSE, blocks) for step in (step_times, played_step))
            apart = times.pipeline + times.data + times.optimizer + TPFUSE.step_operators * GPU.host_seconds
            assert played.length == pytest.approx(times.total - apart, rel=0.02), schedule
            last = played.order.rank_of[-1]
            assert played.busy(last) == pytest.approx(times.total - apart - times.bubble, rel=1e-9), schedule
            idle = played.idle_share(last)
            assert idle == pytest.approx(times.bubble / (times.total - apart), abs=0.01), schedule


HOST = replace(GPU, multiprocessors=0, at_once=2.0, packing_share=0.25, half_rate=0.1e12, bandwidth=40e9)
CPUS = Cluster(HOST, 4, 4, Link("memory", 10e9, 20e-6, 50e-6), Link("network", 1e9, 5e-6, 20e-6))


def test_cpu_ranks_multiply_chunk_by_chunk_and_issue_the_operators_of_the_ring() -> None:
    one, tp, cp = (step_times(SIZES, replace(LAYOUT, batch=1, **x), CPUS, TPFUSE) for x in ({}, {"tp": 2}, {"cp": 2}))  # type: ignore[arg-type]
    packed = 3 * SIZES.block_weights * SIZES.layers * 2 / (HOST.bandwidth * HOST.packing_share)
    more = tp.products - one.products / 2  # packing all rows of the inputs, which a rank alone does once
    assert 0 < more < 0.3 * packed, "the second chunk finds the rank's half of the weights in the caches"
    issued = HOST.host_seconds * SIZES.layers
    assert cp.launches - one.launches == pytest.approx((5 + 9) * 2 * issued)
    assert tp.launches - one.launches > (4 + 8) * issued, "a chunk more for each of the products"


def test_ranks_that_take_turns_do_the_work_of_all() -> None:
    few = replace(SIZES, layers=6, vocabulary=128)  # the last two ranks have one block, the others two
    times = step_times(few, replace(LAYOUT, pp=4, micro_batch=8), CPUS, TPFUSE)
    alone = step_times(few, LAYOUT, CPUS, TPFUSE)
    assert times.total > 0.9 * alone.total / HOST.at_once, "two cores compute the work of four ranks"
    assert times.bubble > 0.1 * times.total, "the last rank waits for those that have more blocks"


@pytest.mark.parametrize(
    ("ranks", "kind", "count"),
    [
        ({"tp": 4}, "tensor", 8 * 32),
        ({"cp": 4}, "context", 3 * 3 * 32),
        ({"pp": 4, "micro_batch": 2}, "pipeline", 2 * 2 * 4),
        ({"dp": 2, "tp": 2, "recompute": "full"}, "tensor", 12 * 32),
        ({"tp": 2}, "tensor", 0),
    ],
)
def test_ranks_that_take_turns_lose_time_when_they_wait(ranks: dict[str, Any], kind: str, count: int) -> None:
    """Two of them do not take turns on two cores."""
    layout = replace(LAYOUT, **{"micro_batch": 8, "batch": 8 * ranks.get("dp", 1), **ranks})
    waiting = replace(CPUS, gpu=replace(HOST, wait_seconds=1e-3))
    before, after = (step_times(SIZES, layout, cpus, TPFUSE) for cpus in (CPUS, waiting))
    assert getattr(after, kind) - getattr(before, kind) == pytest.approx(count * 1e-3)
    assert after.total - before.total == pytest.approx(count * 1e-3)
