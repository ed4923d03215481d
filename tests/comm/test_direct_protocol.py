"""Collectives by torch operations, rank by rank in one process: what orders every access, under many schedules."""

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from tpfuse.comm import channel, direct
from tpfuse.comm.errors import PeerTimeout
from tpfuse.testing.explore import PCT, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.testing.inputs import integers

Program = Callable[[SimulatedMemory], None]


def program_of(channel: ModuleType, direct: ModuleType) -> Program:
    """Every collective, several epochs of each, in slots of three or four elements a row; then some under way."""

    def program(memory: SimulatedMemory) -> None:
        direct.ONE_SHOT_BYTES = 12
        rank, world = memory.rank, memory.world
        collectives = direct.DirectCollectives(memory, 16 * world, 32 * world)
        for n in (5, 1, 11):
            whole = integers(n, world, world, n)
            mine = whole[rank].clone()
            gathered, turned = torch.empty(world, n), torch.empty(world, n)
            part, total, top = torch.empty(n), torch.empty(world * n), torch.empty(world * n)
            collectives.all_gather(mine[0], gathered)
            assert torch.equal(gathered, whole[:, 0])
            collectives.all_to_all(mine, turned)
            assert torch.equal(turned, whole[:, rank])
            collectives.reduce_scatter(mine, part)
            assert torch.equal(part, whole.sum(0)[rank])
            collectives.all_reduce(mine.view(-1), total)
            assert torch.equal(total, whole.sum(0).view(-1))
            collectives.all_reduce_max(mine.view(-1), top)
            assert torch.equal(top, whole.amax(0).view(-1))
        first, second = torch.empty(world, 11), torch.empty(world, 11)
        handles = [collectives.all_gather(mine[0], out, later=True) for out in (first, second)]
        for handle in handles:
            handle.wait()
        assert torch.equal(first, whole[:, 0]) and torch.equal(second, first)

    return program


@pytest.mark.parametrize("world", [1, 2, 3])
def test_no_alarm(world: int) -> None:
    explore(program_of(channel, direct), world)


def test_no_alarm_in_fifty_seeds() -> None:
    explore(program_of(channel, direct), 2, schedules=map(PCT, range(50)))


@pytest.mark.parametrize("world", [2, 3])
def test_every_line_is_needed(world: int) -> None:
    """World 3 takes two shots, two ranks one."""
    mutants = mutants_of(channel, direct)
    assert len(mutants) >= 8
    mutants = [mutant for mutant in mutants if world == 3 or "all_reduce_two_shot" not in _function(mutant)]
    left = surviving(program_of, [channel, direct], world, mutants=mutants)
    assert not left, "\n".join(map(str, left))


def _function(mutant: Mutant) -> str:
    """The text of the function that the mutant changes."""
    lines = mutant.source.splitlines()[: mutant.lines[0]]
    return next(line for line in reversed(lines) if line.lstrip().startswith("def "))


FAULTS = {
    "one half": (channel, "self.next_epoch % 2", "0"),
    "an epoch too old": (channel, "rank, 0, epoch, op=op", "rank, 0, epoch - 1, op=op"),
    "what is under way is not finished first": (direct, "            self._finish_pending()\n", ""),
    "signalled before it is staged": (
        direct,
        "            slots[own].copy_(piece)\n            epoch = channel.signal()\n            yield\n"
        "            _wait_for_all",
        "            epoch = channel.signal()\n            slots[own].copy_(piece)\n            yield\n"
        "            _wait_for_all",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_are_no_deletion(fault: str) -> None:
    module, before, after = FAULTS[fault]
    source = inspect.getsource(module)
    assert source.count(before) == 1
    mutant = Mutant(module.__name__, str(module.__file__), (1, 1), fault, "", source.replace(before, after))
    assert not surviving(program_of, [channel, direct], 2, mutants=[mutant])


def test_waits_end_and_the_next_step_is_right() -> None:
    def program(memory: SimulatedMemory) -> None:
        collectives = direct.DirectCollectives(memory, 64, 64)
        whole, out = integers(1, memory.world, 20), torch.empty(20)
        under_way = collectives.all_reduce(whole[memory.rank], torch.empty(20), later=True)
        if memory.rank == 0:
            with pytest.raises(PeerTimeout), memory.guard("elsewhere"):
                memory.barrier("elsewhere")
        else:
            with pytest.raises(PeerTimeout):
                collectives.all_reduce(whole[memory.rank], out)
        memory.reset()
        if not under_way.done:
            with pytest.raises(PeerTimeout, match="begun before a reset"):
                under_way.wait()
        collectives.all_reduce(whole[memory.rank], out)
        assert torch.equal(out, whole.sum(0))

    explore(program, 3, timeouts=True)
