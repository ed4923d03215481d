"""`tpfuse plan` finds the best of all layouts that `tpfuse train` accepts, in seconds."""

import itertools
import random
import time
from dataclasses import replace

import pytest

from tests.support.tiers import exhaustive
from tpfuse.choices import Accumulate, PipelineSchedule, Recompute
from tpfuse.commands.plan.planned import PlannedModel, planned_model
from tpfuse.commands.plan.report import train_arguments
from tpfuse.commands.plan.search import (
    PlanCandidate,
    SearchResult,
    accepts,
    divisors,
    schedules,
    search,
    shapes,
    smallest,
    tensor_ranks,
    train_options,
    usable_memory,
    zero_stages,
)  # fmt: skip
from tpfuse.errors import UserError
from tpfuse.parallel.pipeline.order import SCHEDULES, order, stage_ranks
from tpfuse.plan.hardware import Cluster, load_gpu, parse_network
from tpfuse.plan.memory import RankMemory, rank_memory
from tpfuse.plan.sizes import RankLayout
from tpfuse.plan.time import StepTimes, step_times
from tpfuse.train.check_options import with_layout
from tpfuse.train.config import parse_train
from tpfuse.train.options import PlanCommand

GPT = PlanCommand(layers=6, width=256, heads=4, tokens=256, batch=16)
WIDE = PlanCommand(layers=4, width=2048, heads=4, tokens=128, batch=16)  # most of its memory is that of parameters


def cluster_of(gpus: int) -> Cluster:
    return Cluster(load_gpu("h100"), gpus, min(gpus, 8), parse_network("400Gb"))


def scarce(model: PlannedModel, cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with `factor` times the memory that the smallest layout needs."""
    needed = smallest(model, cluster)[1].total * cluster.gpu.memory / usable_memory(cluster)
    return replace(cluster, gpu=replace(cluster.gpu, memory=factor * needed))


def test_what_an_order_accepts_is_known_without_making_it() -> None:
    refused = 0
    for schedule, ranks, stages, count in itertools.product(SCHEDULES, (2, 3), (1, 2), range(1, 9)):
        try:
            stage_ranks(schedule, ranks, stages)
        except ValueError:
            continue
        try:
            order(schedule, ranks, stages, count)
            accepted = True
        except ValueError:
            accepted, refused = False, refused + 1
        assert accepts(schedule, ranks, count) == accepted, (schedule, ranks, stages, count)
    assert refused > 5


def test_shapes_use_all_gpus_and_divide_the_model() -> None:
    model, cluster = planned_model(replace(GPT, batch=8)), cluster_of(16)
    found = list(shapes(model, cluster))
    assert len(set(found)) == len(found) > 10
    assert {tp for tp, *_ in found} == {1, 2, 4}, "4 heads, and 8 GPUs in a node"
    assert {cp for _, cp, _, _ in found} == {1, 2}, "256 tokens are two tiles"
    assert {pp for *_, pp in found} == {1, 2, 4}, "6 layers"
    assert all(tp * cp * dp * pp == 16 and 8 % dp == 0 for tp, cp, dp, pp in found)
    assert tensor_ranks(planned_model(PlanCommand(model="gpt2-1558m")), cluster) == [1], "25 heads"


def test_tpfuse_train_accepts_what_is_proposed_and_the_command_gives_the_same_options() -> None:
    model = planned_model(GPT)
    fitting = search(model, scarce(model, cluster_of(8), 1.2)).fitting
    assert len({each.layout for each in fitting}) == len(fitting) > 60
    sample = random.Random(0).sample(fitting, 30)
    assert len({each.layout.schedule for each in sample}) == 4 and {each.layout.pp for each in sample} == {1, 2, 4}
    for each in sample:
        options = train_options(model, each.layout)
        assert with_layout(parse_train(train_arguments(model, options)), 8) == options, each.layout


def test_a_layout_that_train_refuses_is_an_error() -> None:
    with pytest.raises(UserError, match="tp 3 does not divide n_head 4"):
        train_options(planned_model(GPT), RankLayout(3, 1, 1, 1, "1f1b", 1, 0, "none", 1, 16))


def _all(model: PlannedModel, cluster: Cluster) -> list[RankLayout]:
    """Return the layouts of a search that leaves nothing out."""
    layouts = []
    for tp, cp, dp, pp in shapes(model, cluster):
        share = model.options.train.batch // dp
        further: list[tuple[PipelineSchedule, int]] = [("gpipe", 1)] * (pp > 1) + [("zero_bubble", 2)] * (pp == 2)
        choices = itertools.product(
            [*schedules(model, pp), *further], divisors(share), zero_stages(model.options, dp * cp), model.recomputes
        )
        for (schedule, stages), size, zero, recompute in choices:
            if pp == 1 or accepts(schedule, pp, share // size):
                batch = model.options.train.batch
                layouts.append(RankLayout(tp, cp, dp, pp, schedule, stages, zero, recompute, size, batch))
    return layouts


@pytest.mark.parametrize(
    ("command", "accumulate", "factor"),
    [
        (GPT, "sharded", 0.99), (GPT, "sharded", 1.01), (WIDE, "whole", 1.003),
        *exhaustive((GPT, "sharded", 1.1), (WIDE, "whole", 0.99), (WIDE, "whole", 1.05)),
    ],
)  # fmt: skip
def test_what_the_search_leaves_out_is_not_better(command: PlanCommand, accumulate: Accumulate, factor: float) -> None:
    model = planned_model(command)
    model = replace(model, program=replace(model.program, accumulate=accumulate))
    cluster = scarce(model, cluster_of(8), factor)
    every = _all(model, cluster)
    bytes_of = {layout: rank_memory(model.sizes, layout, model.program).total for layout in every}
    fitting = [layout for layout in every if bytes_of[layout] <= usable_memory(cluster)]
    seconds = {layout: step_times(model.sizes, layout, cluster, model.program).total for layout in fitting}
    found = search(model, cluster)
    assert found.compared < len(every)
    assert {each.layout for each in found.fitting} <= set(fitting)
    assert bool(found.fitting) == bool(fitting) == (factor > 1)
    if fitting:
        assert found.fitting[0].times.total == pytest.approx(min(seconds.values()), rel=0.005)
    if not fitting:
        assert found.nearest[0].memory.total == pytest.approx(min(bytes_of.values()), rel=0.02)
        assert smallest(model, cluster)[1].total == pytest.approx(min(bytes_of.values()), rel=0.02)


def test_of_layouts_that_take_equally_long_the_simplest_is_first() -> None:
    def of(seconds: float, zero: int, recompute: Recompute = "none") -> PlanCandidate:
        return PlanCandidate(
            RankLayout(1, 1, 8, 1, "1f1b", 1, zero, recompute, 1, 8), RankMemory(), StepTimes(products=seconds)
        )

    equal = [of(1.000, 3), of(1.001, 1, "full"), of(1.002, 1), of(1.003, 1)]
    slower = of(1.02, 0)
    other = replace(of(1.05, 0), layout=replace(slower.layout, dp=4, pp=2))
    assert SearchResult([*equal, other, slower], [], 6).best == [equal[2], other]


@pytest.mark.exhaustive
def test_a_search_takes_seconds() -> None:
    model = planned_model(PlanCommand(layers=48, width=8192, heads=64, tokens=4096, batch=16384))
    started = time.process_time()
    assert sum(i * i for i in range(10**7))
    unit = time.process_time() - started  # 0.4 to 1.1 seconds
    found = search(model, cluster_of(16384))
    assert time.process_time() - started < 10 * unit
    assert found.compared > 2000 and found.fitting
