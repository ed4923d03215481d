"""Ring attention's exchange and forward pass under many schedules: no alarm, no line too many, no endless wait."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.sequence import SequenceLayout
from tpfuse.kernels import block_exchange, endpoint, ring_attention_forward, signals
from tpfuse.kernels.configurations import TABLE, override, read_table
from tpfuse.ops.sight import sights
from tpfuse.testing.explore import PCT, RoundRobin, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.testing.inputs import normal

MODULES = [signals, endpoint, block_exchange, ring_attention_forward]
SIZE = 16
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16, "COPIERS": 2, "BLOCK_COPY": 64}
# Tokens of the whole sequence, heads: one tile and several for a program, one share of a block and several.
LENGTHS = ((12, 1), (3, 3), (20, 2), (9, 1))


@pytest.fixture(autouse=True)
def tiny_tiles() -> Iterator[None]:
    """Two copiers and two that attend."""
    rows = [row for row in read_table(TABLE) if row.operator == "ring_attention_forward"]
    with override(*(replace(row, blocks=BLOCKS) for row in rows if row.family == "interpreted")):
        yield


def found(module: str, name: str) -> Any:
    """Looked up at each call: where mutants are tried it is another module's."""
    return getattr(importlib.import_module(f"tpfuse.kernels.{module}"), name)


@cache
def sequence(world: int, epoch: int) -> tuple[SequenceLayout, Tensor, Tensor, Tensor]:
    """(how it is spread, q, keys and values, the result) of the whole sequence of an epoch; causal."""
    length, heads = LENGTHS[epoch]
    layout = SequenceLayout(length, world, "zigzag" if epoch != 1 else "striped")
    q, kv = normal(epoch, 1, heads, length, SIZE), normal(10 + epoch, 2, 1, 1, length, SIZE)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q.double() @ kv[0].double().mT * SIZE**-0.5).masked_fill(hidden, -torch.inf)
    return layout, q, kv, (scores.softmax(-1) @ kv[1].double()).float()


class Group:
    """What the launches of one rank are given."""

    def __init__(self, memory: SimulatedMemory, ring: bool) -> None:
        world, self.rank = memory.world, memory.rank
        slot_bytes = world * 2048
        slots = memory.buffer("slots", (2, slot_bytes), torch.uint8)
        flags, state = memory.signals("flags", 2 * world * world), memory.signals("state", 2)
        self.ready = memory.signals("ready", 2 * world)
        self.end = endpoint.Endpoint(
            memory.rank,
            world,
            slots=slots.addresses,
            slot_bytes=slot_bytes,
            flags=flags.addresses,
            flag_count=2 * world * world,
            state=state.local,
            abort=memory.abort,
            programs=4,
        )
        self.exchange = block_exchange.BlockExchange(self.end, self.ready.local, ring)

    def attend(self, epoch: int) -> tuple[Tensor, Tensor]:
        """(what this rank's launch returns, what it should)."""
        layout, q, kv, out = sequence(self.end.world, epoch)
        q, kv, out = (layout.shard(x, self.rank, x.ndim - 2) for x in (q, kv, out))
        positions = layout.positions(self.rank)
        seen, _ = sights(positions, layout.length, causal=True, window=None, cu_seqlens=None)
        got, _ = found("ring_attention_forward", "ring_attention_forward")(
            q, kv, layout.runs, self.rank, seen, exchange=self.exchange
        )
        return got, out


def attending(memory: SimulatedMemory, ring: bool = True, epochs: int = len(LENGTHS)) -> None:
    """Every length, one after another."""
    group = Group(memory, ring)
    for epoch in range(epochs):
        got, expected = group.attend(epoch)
        torch.testing.assert_close(got, expected, msg=f"epoch {epoch + 1}")


PROGRAMS: dict[str, Callable[..., None]] = {"ring": attending, "owners": partial(attending, ring=False)}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("world", "resident"), [(2, 1), (3, 2)])
def test_no_alarm(name: str, world: int, resident: int) -> None:
    explore(PROGRAMS[name], world, resident=resident, seeds=range(2))


@pytest.mark.parametrize(("name", "world"), [("ring", 3), ("owners", 2)])
def test_no_alarm_in_twenty_seeds(name: str, world: int) -> None:
    explore(partial(PROGRAMS[name], epochs=3), world, resident=2, schedules=map(PCT, range(20)))
