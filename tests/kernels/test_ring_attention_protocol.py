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
from tpfuse.testing.explore import PCT, RoundRobin, Sequential, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.testing.inputs import normal

MODULES = [signals, endpoint, block_exchange, ring_attention_forward]
SIZE = 16
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16, "COPIERS": 2, "BLOCK_COPY": 64}
# Tokens of a rank, heads, balance: two shares of a block, one, two, three; one tile, at last two for one program.
EPOCHS = ((4, 1, "contiguous"), (1, 1, "striped"), (4, 1, "contiguous"), (6, 3, "striped"))


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
    tokens, heads, balance = EPOCHS[epoch]
    length = tokens * world
    layout = SequenceLayout(length, world, balance)
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


def attending(memory: SimulatedMemory, ring: bool = True, epochs: int = len(EPOCHS)) -> None:
    """Every epoch, one after another."""
    group = Group(memory, ring)
    for epoch in range(epochs):
        got, expected = group.attend(epoch)
        torch.testing.assert_close(got, expected, msg=f"epoch {epoch + 1}")


PROGRAMS: dict[str, Callable[..., None]] = {"ring": attending, "owners": partial(attending, ring=False)}


@pytest.mark.parametrize(("name", "world", "resident"), [("ring", 2, 1), ("ring", 3, 2), ("owners", 3, 2)])
def test_no_alarm(name: str, world: int, resident: int) -> None:
    explore(PROGRAMS[name], world, resident=resident, schedules=[RoundRobin(), PCT(0)])


@pytest.mark.parametrize(("name", "world"), [("ring", 3), ("owners", 2)])
def test_no_alarm_in_twenty_seeds(name: str, world: int) -> None:
    explore(partial(PROGRAMS[name], epochs=3), world, resident=2, schedules=map(PCT, range(20)))


def left_by(name: str, world: int, mutants: list[Mutant]) -> list[Mutant]:
    """Those that a program does not fail. What it calls is looked up while it runs, and so mutated."""
    schedules = [Sequential(), RoundRobin(), PCT(0)]
    program = partial(PROGRAMS[name], epochs=3)
    return surviving(lambda *copies: program, MODULES, world, mutants=mutants, resident=2, schedules=schedules)


@pytest.mark.parametrize(("name", "world"), [("ring", 3), ("owners", 2)])
def test_every_line_is_needed(name: str, world: int) -> None:
    """Those that are not run excepted: of the other way of blocks, and the walk over blocks that are here."""
    other = ("arrive(flags_ptr" if name == "ring" else "put(there", "_attend_tile(")
    found = mutants_of(*MODULES)
    own = [mutant for mutant in found if mutant.module in (block_exchange.__name__, ring_attention_forward.__name__)]
    assert len(own) == 9
    left = left_by(name, world, [mutant for mutant in own if not mutant.text.startswith(other)])
    assert not left, "\n".join(map(str, left))


FAULTS = (
    ("one half", endpoint, "(epoch & 1) * slot_bytes", "0 * slot_bytes"),
    ("an epoch too far", signals, "epoch = tl.load(state_ptr) + 1", "epoch = tl.load(state_ptr) + 2"),
    ("a neighbour on the other side", block_exchange, "% WORLD, (rank + 1) %", "% WORLD, (rank + 2) %"),
    ("the neighbour's own block", block_exchange, "sender, source, block_words)", "sender, sender, block_words)"),
    ("told of the hop before", block_exchange, "there + first + step *", "there + first + (step - 1) *"),
    ("ready of another source", block_exchange, "source) * COPIERS + copier, epoch", "rank) * COPIERS + copier, epoch"),
    ("ready for the next launch", block_exchange, "COPIERS + copier, epoch)", "COPIERS + copier, epoch + 1)"),
    ("one share is a block", block_exchange, "(step > 0, COPIERS, 0)", "(step > 0, 1, 0)"),
    ("the first block is there", block_exchange, "(step > 0, COPIERS, 0)", "(step > 1, COPIERS, 0)"),
    (
        "another copier's signal",
        block_exchange,
        "wait(here + first + hop",
        "wait(here + (COPIERS - 1 - copier) * WORLD + hop",
    ),
    ("another block", ring_attention_forward, "rank, source, block_words)", "rank, rank, block_words)"),
    ("the other way around", ring_attention_forward, "sources[0] + step * sources[1]", "sources[0] + step"),
)


def mutant_of(fault: str, module: ModuleType, before: str, after: str) -> Mutant:
    source = inspect.getsource(module)
    assert source.count(before) == 1, before
    return Mutant(module.__name__, str(module.__file__), (1, 1), before, fault, source.replace(before, after))


def test_faults_that_are_no_deletion() -> None:
    left = left_by("ring", 3, [mutant_of(*fault) for fault in FAULTS])
    assert not left, [mutant.change for mutant in left]


def late(memory: SimulatedMemory, ring: bool) -> None:
    """Rank 0 does not come: the others' launches end, and after a reset everything is as new."""
    group = Group(memory, ring)
    for _ in range(2):
        torch.testing.assert_close(*group.attend(2))
        with pytest.raises(PeerTimeout), memory.guard("ring_attention"):
            if memory.rank == 0:
                memory.barrier("elsewhere")
            for _ in range(2):
                group.attend(2)
                assert group.end.state[0] == 1, "the epoch is not over"
        memory.reset()
        memory.barrier()
        assert group.end.state.tolist() == [0, 0]


@pytest.mark.parametrize(("ring", "world"), [(True, 3), (False, 2)])
def test_waits_end(ring: bool, world: int) -> None:
    explore(partial(late, ring=ring), world, resident=2, timeouts=True, schedules=[RoundRobin(), PCT(0)])


def test_what_is_done_after_an_abort_is_seen() -> None:
    mutants = [mutant_of("an epoch of parts", ring_attention_forward, "if aborted == 0:", "if aborted < WORLD:")]
    options: dict[str, Any] = {"resident": 4, "timeouts": True, "schedules": [RoundRobin()]}
    program = partial(late, ring=True)
    left = surviving(lambda *copies: program, MODULES, 3, mutants=mutants, **options)
    assert not left, [mutant.change for mutant in left]
