"""Exchanging heads for tokens and back: every element reaches its destination, and accesses to memory are ordered."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm import channel
from tpfuse.comm.dispatch import choose_implementation
from tpfuse.explore import PCT, SimulatedMemory, explore
from tpfuse.explore.mutants import mutants_of, surviving
from tpfuse.ops.ring_attention import ulysses
from tpfuse.ops.ring_attention.layout import BALANCES, Balance, SequenceLayout
from tpfuse.ops.ring_attention.ulysses import HeadExchange, find_token_slices
from tpfuse.switches import use
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks


@pytest.mark.parametrize("name", ["direct", "collective"])
@pytest.mark.parametrize("balance", BALANCES)
@on_ranks(3)
def test_every_element_reaches_its_destination(name: Implementation, balance: Balance) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout(world * 6 - 1, world, balance)
    token_slices = find_token_slices(torch.stack([layout.positions(r) for r in range(world)]))
    x, y = (integers(seed, 2, heads, layout.padded_length, 3) for seed, heads in ((1, 2 * world), (2, world)))
    own = layout.positions(rank)
    shards = [z.index_select(2, own) for z in (x, y)]
    with use(implementation=name):
        memory = choose_implementation(x.device, x.dtype, dist.group.WORLD).memory
        exchange = HeadExchange(token_slices, dist.group.WORLD, memory, world, (dist.group.WORLD,))
        found = exchange.to_heads("", *shards)
        assert torch.equal(found[0], x[:, 2 * rank : 2 * rank + 2]) and torch.equal(found[1], y[:, rank : rank + 1])
        back = exchange.to_tokens("", *found)
    assert all(torch.equal(*pair) for pair in zip(back, shards, strict=True))


def _program_of(channel: ModuleType, ulysses: ModuleType) -> Callable[[SimulatedMemory], None]:
    def program(memory: SimulatedMemory) -> None:
        rank, world = memory.rank, memory.world
        token_slices = ulysses.find_token_slices(
            torch.arange(2 * world).view(2, world).T
        )  # tokens dealt out one by one
        for turn in range(4):
            x = integers(turn, 1, 2 * world, world, 2)
            own = x[:, rank::world].contiguous()
            out = torch.empty(1, 2 * world, 1, 2)
            ulysses._through_slots(memory, "", [own], [out], [(1, 2, 1, 2)], token_slices, True)
            assert torch.equal(out, x[:, :, rank : rank + 1])
            back = torch.empty_like(own)
            ulysses._through_slots(memory, "", [out], [back], [(1, 2, 1, 2)], token_slices, False)
            assert torch.equal(back, own)

    return program


@pytest.mark.parametrize("world", [2, *exhaustive(3)])
def test_the_explorer_finds_no_error(world: int) -> None:
    explore(_program_of(channel, ulysses), world, schedules=map(PCT, range(10)))


def test_every_synchronising_line_is_needed() -> None:
    targets = [channel, ulysses._through_slots]
    assert mutants_of(*targets)
    left = surviving(_program_of, targets, 3)
    assert not left, "\n".join(map(str, left))
