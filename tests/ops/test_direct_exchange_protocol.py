"""Buckets on shared memory, rank by rank in one process: what orders every access, under many schedules."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.comm.errors import PeerTimeout
from tpfuse.ops import direct_exchange
from tpfuse.ops.bucket_exchange import BucketSpec, Exchange
from tpfuse.ops.shard_update import ShardUpdate
from tpfuse.testing.explore import PCT, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.testing.inputs import integers

Program = Callable[[SimulatedMemory], None]
ProgramOf = Callable[[ModuleType], Program]
STAGES = (0, 1, 2)


class Added:
    """In the place of AdamW: parameters grow by the sum of their gradients, in blocks of two sizes."""

    apply = ShardUpdate.apply

    def __init__(self, size: int) -> None:
        self._size = size

    def blocks(self) -> Iterator[tuple[int, int]]:
        cut = self._size // 3
        yield from ((0, cut), (cut, self._size))

    def block(self, a: int, b: int, gradient: Tensor, values: Tensor) -> None:
        values.add_(gradient)


def specs(world: int, sent: torch.dtype) -> list[BucketSpec]:
    return [BucketSpec(16 * world * n, torch.float32, sent) for n in (1, 2, 1, 1)]


def gradients(step: int, index: int, world: int, size: int) -> Tensor:
    """Of all ranks, [world, size]."""
    return integers(10 * step + index, world, size, low=-3, high=3)


def compute(exchange: Exchange, expected: list[Tensor]) -> None:
    """Reads all parameters, as forward and backward passes do."""
    for index, values in enumerate(expected):
        assert torch.equal(exchange.values(index), values)


class Twice:
    """In the place of `NodeHop`: another node has the same gradients, and no part of the shards."""

    nodes, node = 1, 0

    def reduce_scatter(self, part: Tensor, *_: object) -> Tensor:
        return part * 2

    def all_reduce(self, part: Tensor, *_: object) -> None:
        part.mul_(2)

    def all_gather(self, shard: Tensor, out: Tensor, _: object) -> None:
        assert shard.data_ptr() == out.data_ptr()
        assert shard.numel() == out.numel()


def one_step(
    exchange: Exchange,
    memory: SimulatedMemory,
    step: int,
    expected: list[Tensor],
    update: bool,
    sums: bool,
    nodes: int = 1,
) -> None:
    """Sends all gradients, looks at this rank's sums, and updates; nodes: with the same gradients."""
    world = memory.world
    compute(exchange, expected)
    exchange.begin()
    for index, spec in enumerate(exchange.specs):
        found = gradients(step, index, world, spec.size)
        exchange.room(index).copy_(found[memory.rank])
        exchange.send(index)
    compute(exchange, expected)
    exchange.end_backward()
    for index, spec in enumerate(exchange.specs):
        whole, shard = nodes * gradients(step, index, world, spec.size).sum(0), exchange.shard(index)
        if sums:
            own = whole[shard.start : shard.stop]
            assert torch.equal(exchange.sums(index).float(), own)
            assert exchange.squared_norm(index).item() == pytest.approx(own.square().sum().item(), rel=1e-6)
        if update:
            expected[index] += whole
    if update:
        exchange.update([Added(len(exchange.shard(index))) for index in range(len(exchange.specs))])  # type: ignore[misc]


def program_of(stage: int, sent: torch.dtype = torch.float32, hop: Twice | None = None) -> ProgramOf:
    """Steps with the sums first, with them on the way, without an update; then parameters that somebody else wrote."""
    nodes = 1 if hop is None else 2

    def of(module: ModuleType) -> Program:
        def program(memory: SimulatedMemory) -> None:
            exchange = module.DirectExchange(specs(memory.world, sent), stage, memory, "exchange", hop)
            expected = [torch.zeros(spec.size) for spec in exchange.specs]
            for step, (update, sums) in enumerate([(True, True), (True, False), (False, True), (True, True)]):
                one_step(exchange, memory, step, expected, update, sums, nodes)
            compute(exchange, expected)
            for index, spec in enumerate(exchange.specs):
                shard = exchange.shard(index)
                exchange.values(index)[shard.start : shard.stop] = 7.0
                expected[index] = torch.full((spec.size,), 7.0)
            exchange.publish()
            one_step(exchange, memory, 9, expected, True, True, nodes)

        return program

    return of


@pytest.mark.parametrize("sent", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_no_alarm(stage: int, world: int, sent: torch.dtype) -> None:
    explore(program_of(stage, sent)(direct_exchange), world)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_no_alarm_with_another_node(stage: int, world: int) -> None:
    explore(program_of(stage, hop=Twice())(direct_exchange), world)


@pytest.mark.parametrize("stage", STAGES)
def test_no_alarm_in_thirty_seeds(stage: int) -> None:
    explore(program_of(stage)(direct_exchange), 2, schedules=map(PCT, range(30)))


def _left(mutants: Sequence[Mutant], programs: Sequence[ProgramOf], world: int = 2) -> list[str]:
    """Those that none of these programs fails."""
    left = list(mutants)
    for program in programs:
        left = surviving(program, [direct_exchange], world, mutants=left)
    return [str(mutant) for mutant in left]


def test_every_line_is_needed() -> None:
    mutants = mutants_of(direct_exchange)
    assert len(mutants) >= 12
    left = _left(mutants, [*map(program_of, STAGES), program_of(1, hop=Twice())])
    assert [text.partition(".py:")[2].partition(": ")[2] for text in left] == [
        "self._say(ENDED, self._said[DONE]): deleted"
    ], "that of stage 0 alone, which comes early; otherwise `begin` says it\n" + "\n".join(left)


OWN_PART = "return self._part_of(index, self.memory.rank)"
WAITS = "for rank in self._others:\n            self.memory.wait"
FAULTS: dict[str, tuple[str, str, Sequence[int]]] = {
    "one room": ("% len(self._rooms)", "% 1", (2,)),
    "the room before its readers are done": ("if index >= ROOMS:", "if False:", (2,)),
    "an older reader": ("SUMMED, self._first + index + 1, op)", "SUMMED, self._first + index, op)", (2,)),
    "an older bucket's signal": ("SENT, self._first + index + 1, op", "SENT, self._first + index, op", STAGES),
    "an older sum's": ("SUMMED, self._first + index + 1, op=op", "SUMMED, self._first + index, op=op", (0,)),
    "the next rank's shard": (OWN_PART, "return self._part_of(index, 0)", STAGES),
    "one rank is left out": (WAITS, WAITS.replace("_others", "_others[1:]"), STAGES),
    "a step is not ended": ("self._said[ENDED] != self._said[DONE]", "False", (1,)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_are_no_deletion(fault: str) -> None:
    before, after, stages = FAULTS[fault]
    source = inspect.getsource(direct_exchange)
    assert source.count(before) == 1
    mutant = Mutant(
        direct_exchange.__name__, str(direct_exchange.__file__), (1, 1), fault, "", source.replace(before, after)
    )
    for stage in stages:
        assert not _left([mutant], [program_of(stage)]), f"stage {stage}"


@pytest.mark.parametrize("stage", STAGES)
def test_waits_end_and_the_next_step_is_right(stage: int) -> None:
    """Rank 0 does not come to the sums; after a reset a step from the parameters of before is right."""

    def program(memory: SimulatedMemory) -> None:
        exchange = direct_exchange.DirectExchange(specs(memory.world, torch.float32), stage, memory, "exchange")
        expected = [torch.zeros(spec.size) for spec in exchange.specs]
        one_step(exchange, memory, 0, expected, True, True)
        with pytest.raises(PeerTimeout):
            exchange.begin()
            for index in range(len(exchange.specs)):
                exchange.room(index).fill_(1.0)
                if memory.rank == 0 and index == 1:
                    with memory.guard("elsewhere"):
                        memory.barrier("elsewhere")
                exchange.send(index)
            exchange.end_backward()
            for index in range(len(exchange.specs)):
                exchange.sums(index)
        memory.reset()
        one_step(exchange, memory, 2, expected, True, True)
        one_step(exchange, memory, 3, expected, True, False)

    explore(program, 2, timeouts=True)


def test_unequal_rooms_do_not_meet() -> None:
    """All buckets of all stages lie apart, on every rank."""

    def program(memory: SimulatedMemory) -> None:
        for stage in STAGES:
            exchange = direct_exchange.DirectExchange(specs(2, torch.float16), stage, memory, f"exchange {stage}")
            rooms: list[Any] = [exchange.room(0)] if stage == 2 else [exchange.room(i) for i in range(4)]
            spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in [*rooms, *map(exchange.values, range(4))])
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    explore(program, 2)
