"""The direct reducer on simulated memory, under many schedules: its counters order every access."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.support.tiers import exhaustive
from tpfuse.comm.errors import PeerTimeout
from tpfuse.explore import Sequential, SimulatedMemory, explore, explore_all
from tpfuse.explore.mutants import surviving
from tpfuse.explore.suite import Fault, ProtocolSuite, current, replace
from tpfuse.testing.inputs import integers
from tpfuse.zero.reducer import direct as direct_module
from tpfuse.zero.reducer.base import BucketSpec, GradientReducer

STAGES = (0, 1, 2)


class AddingUpdate:
    """An update that replaces AdamW: it adds the sum of the gradients to the parameters, in blocks of two sizes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def apply(self, gradient: Tensor, values: Tensor) -> None:
        for a, b in self.blocks():
            self.block(a, b, gradient[a:b], values[a:b])

    def blocks(self) -> Iterator[tuple[int, int]]:
        cut = self._size // 3
        yield from ((0, cut), (cut, self._size))

    def block(self, a: int, b: int, gradient: Tensor, values: Tensor) -> None:
        values.add_(gradient)


def specs(world: int, sent: torch.dtype) -> list[BucketSpec]:
    return [BucketSpec(16 * world * n, torch.float32, sent) for n in (1, 2, 1, 1)]


def gradients(step: int, index: int, world: int, size: int) -> Tensor:
    """Return the gradients of all ranks, [world, size]."""
    return integers(10 * step + index, world, size, low=-3, high=3)


def compute(reducer: GradientReducer, expected: list[Tensor]) -> None:
    """Read all parameters, as forward and backward passes do."""
    for index, values in enumerate(expected):
        assert torch.equal(reducer.values(index), values)


class EqualNode:
    """Replaces `InterNodeReducer`: a second node has the same gradients, and owns no part of the shards."""

    nodes, node, group = 1, 0, None

    def reduce_scatter(self, part: Tensor, *_: object) -> Tensor:
        return part * 2

    def all_reduce(self, part: Tensor, *_: object) -> None:
        part.mul_(2)

    def all_gather(self, shard: Tensor, out: Tensor, _: object) -> None:
        assert shard.data_ptr() == out.data_ptr()
        assert shard.numel() == out.numel()


def one_step(
    reducer: GradientReducer,
    memory: SimulatedMemory,
    step: int,
    expected: list[Tensor],
    update: bool,
    sums: bool,
    nodes: int = 1,
    turns: Sequence[int] = (0, 1, 2, 3),
    sign: int = 1,
) -> None:
    """Reduce all gradients, check this rank's sums, and update. nodes: the number of nodes with these gradients.

    turns: the buckets in the order of their reductions. sign: of the gradients.
    """
    world = memory.world
    compute(reducer, expected)
    reducer.begin()
    wholes = [torch.zeros(spec.size) for spec in reducer.specs]
    for turn, index in enumerate(turns):
        drawn = sign * gradients(step + 20 * turn, index, world, reducer.specs[index].size)
        reducer.gradient_buffer(index).copy_(drawn[memory.rank])
        reducer.start_reduce(index, more=index in turns[turn + 1 :])
        wholes[index] += nodes * drawn.sum(0)
    compute(reducer, expected)
    reducer.end_backward()
    for index, whole in enumerate(wholes):
        shard = reducer.shard(index)
        if sums:
            own = whole[shard.start : shard.stop]
            assert torch.equal(reducer.reduced_shard(index).float(), own)
            assert reducer.squares(index).parts.sum() == own.double().square().sum()
    compute(reducer, expected)  # as a caller that saves or evaluates between the norm and the update
    if update:
        for index, whole in enumerate(wholes):
            expected[index] += whole
        reducer.update([AddingUpdate(len(reducer.shard(index))) for index in range(len(reducer.specs))])  # type: ignore[misc]


def steps(
    memory: SimulatedMemory, stage: int, sent: torch.dtype = torch.float32, inter_node: EqualNode | None = None
) -> None:
    """Run a step without earlier sums and one without an update; publish other parameters before the last step."""
    nodes = 1 if inter_node is None else 2
    name = f"reducer of stage {stage}, {sent}, {nodes} nodes"
    reducer = current(direct_module).DirectReducer(specs(memory.world, sent), stage, memory, name, inter_node)
    expected = [torch.zeros(spec.size) for spec in reducer.specs]
    for step, (update, sums) in enumerate([(True, False), (False, True)]):
        one_step(reducer, memory, step, expected, update, sums, nodes)
    compute(reducer, expected)
    for index, spec in enumerate(reducer.specs):
        shard = reducer.shard(index)
        reducer.values(index)[shard.start : shard.stop] = 7.0
        expected[index] = torch.full((spec.size,), 7.0)
    reducer.publish()
    one_step(reducer, memory, 9, expected, True, True, nodes)
    if stage == 2:
        one_step(reducer, memory, 11, expected, True, False, nodes, turns=(0, 1, 2, 3, 0, 2, 2, 3, 1, 1))


def rounds(memory: SimulatedMemory, stage: int) -> Iterator[object]:
    """Run steps with an update; the second of two takes the first one's back, so that parameters are what they were."""
    reducer = current(direct_module).DirectReducer(specs(memory.world, torch.float32), stage, memory, "reducer")
    expected = [torch.zeros(spec.size) for spec in reducer.specs]
    for step in range(6):
        one_step(reducer, memory, 0, expected, True, True, sign=(-1) ** step)
        yield (reducer._steps, reducer._buckets_before), step % 2


def late(memory: SimulatedMemory, stage: int) -> None:
    """Rank 0 does not take part in the sums; after a reset, a step from the same parameters is right."""
    made = specs(memory.world, torch.float32)
    reducer = current(direct_module).DirectReducer(made, stage, memory, f"reducer of stage {stage}")
    expected = [torch.zeros(spec.size) for spec in reducer.specs]
    one_step(reducer, memory, 0, expected, True, True)
    with pytest.raises(PeerTimeout):
        reducer.begin()
        for index in range(len(reducer.specs)):
            reducer.gradient_buffer(index).fill_(1.0)
            if memory.rank == 0 and index == 1:
                with memory.guard("elsewhere"):
                    memory.barrier("elsewhere")
            reducer.start_reduce(index)
        reducer.end_backward()
        for index in range(len(reducer.specs)):
            reducer.reduced_shard(index)
    memory.reset()
    one_step(reducer, memory, 2, expected, True, True)
    one_step(reducer, memory, 3, expected, True, False)


REDUCER = direct_module.DirectReducer
STALE = {"old": "self._buckets_before + turn + 1", "by": "self._buckets_before + turn"}
OLDER = {"old": "self._buckets_before + index + 1", "by": "self._buckets_before + index"}


class TestDirectReducer(ProtocolSuite):
    modules = (direct_module,)
    needed = (direct_module,)
    unneeded: ClassVar = {
        (
            REDUCER._sum_whole_buckets,
            'self._set_counter("steps_done", self._steps)',
        ): "it sets the counter early; `begin` sets it otherwise"
    }
    worlds = ((2, 1), (3, 1), (1, 1))
    all_worlds = ()  # too many for all stages one after another; stage 1 has a test of its own below

    def program(self, memory: SimulatedMemory) -> None:
        """Run all stages one after another, and stage 1 with a second node."""
        self.short_program(memory)
        steps(memory, 1, inter_node=EqualNode())

    def short_program(self, memory: SimulatedMemory) -> None:
        for stage in STAGES:
            steps(memory, stage)

    def late_program(self, memory: SimulatedMemory) -> None:
        for stage in STAGES:
            late(memory, stage)


FAULTS = {  # the stages that show each fault
    Fault("one gradient buffer", replace(REDUCER._rank_gradients, "len(self._gradient_buffers)", by="1")): (2,),
    Fault(
        "a buffer before its readers are done",
        replace(REDUCER.gradient_buffer, "self._wait_until_read(turn - count)", by="None"),
    ): (2,),
    Fault("an older reader", replace(REDUCER._wait_until_read, call="_wait_for_peers", **STALE)): (2,),
    Fault("an older bucket's signal", replace(REDUCER._sum_part, call="_wait_for_peers", **STALE)): STAGES,
    Fault("an older sum's signal", replace(REDUCER._sum_whole_buckets, call="_wait_for_peer", **OLDER)): (0,),
    Fault("the next rank's shard", replace(REDUCER._node_shard, "self.memory.rank", by="0")): STAGES,
    Fault("one rank is left out", replace(REDUCER._wait_for_peers, "self._others", by="self._others[1:]")): STAGES,
    Fault(
        "a step is not ended",
        replace(REDUCER.begin, "self._counters.steps_done != self._steps", by="False"),
    ): (1,),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
def test_planted_faults_are_found_at_each_stage(stage: int) -> None:
    mutants = [fault.mutant() for fault, stages in FAULTS.items() if stage in stages]
    program = partial(steps, stage=stage)
    assert not surviving(lambda _: program, [direct_module], 2, mutants=mutants, schedules=[Sequential()])


@pytest.mark.exhaustive
def test_no_execution_of_any_number_of_steps_of_stage_1_has_a_fault() -> None:
    report = explore_all(lambda memory: rounds(memory, 1), 2, seconds=600)
    assert report.exhausted and report.grows == ""


def test_faults_can_be_planted() -> None:
    for fault in FAULTS:
        fault.mutant()


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (2, 2), *exhaustive((1, 3), (2, 3))])
def test_no_alarm_with_another_node(stage: int, world: int) -> None:
    explore(lambda memory: steps(memory, stage, inter_node=EqualNode()), world, seeds=range(1))


@pytest.mark.parametrize("count", [1, *exhaustive(2)])
def test_no_alarm_with_fewer_buckets_than_buffers_that_are_reduced_again(count: int) -> None:
    def program(memory: SimulatedMemory) -> None:
        few = specs(memory.world, torch.float32)[:count]
        reducer = direct_module.DirectReducer(few, 2, memory, "reducer")
        expected = [torch.zeros(spec.size) for spec in few]
        for step in range(2):
            one_step(reducer, memory, step, expected, True, step == 1, turns=(*range(count),) * 3)

    explore(program, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
def test_no_alarm_with_gradients_of_another_dtype(stage: int) -> None:
    explore(lambda memory: steps(memory, stage, torch.float16), 3, seeds=range(1))


def test_unequal_buffers_do_not_overlap() -> None:
    """The buffers of all buckets and stages do not overlap, on every rank."""

    def program(memory: SimulatedMemory) -> None:
        for stage in STAGES:
            reducer = direct_module.DirectReducer(specs(2, torch.float16), stage, memory, f"reducer {stage}")
            buffers: list[Any] = (
                [reducer.gradient_buffer(0)] if stage == 2 else [reducer.gradient_buffer(i) for i in range(4)]
            )
            spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in [*buffers, *map(reducer.values, range(4))])
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    explore(program, 2)
