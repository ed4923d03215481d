"""ring_attention_backward under many schedules: no alarm, no line too many, no endless wait, no block for another."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.sequence import SequenceLayout
from tpfuse.kernels import (
    block_exchange,
    endpoint,
    ring_attention_backward,
    ring_attention_dkdv,
    ring_attention_dq,
    signals,
)
from tpfuse.kernels.configurations import TABLE, override, read_table
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.ops.sight import sights
from tpfuse.testing.explore import PCT, RoundRobin, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.testing.inputs import normal

MODULES = [signals, endpoint, block_exchange, ring_attention_dq, ring_attention_dkdv, ring_attention_backward]
CALLS = (("striped", True, 3), ("striped", False, 5), ("contiguous", True, 4))  # balance, causal, tokens of a rank
SLOT_BYTES = 16384
TINY = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_COPY": 128}


@pytest.fixture(autouse=True)
def tiny_tiles() -> Iterator[None]:
    """Two copiers, each with a share of every part, and two programs that attend."""
    rows = [row for row in read_table(TABLE) if row.family == "interpreted"]
    rows = [row for row in rows if row.operator in ("ring_attention_dq", "ring_attention_dkdv")]
    with override(*(replace(row, blocks=row.blocks | {x: TINY[x] for x in TINY.keys() & row.blocks}) for row in rows)):
        yield


@cache
def whole(call: int, world: int) -> tuple[SequenceLayout, bool, dict[str, Tensor], dict[str, Tensor]]:
    """A layout, whether it is causal, what attention had and gave of the whole sequence, and its gradients."""
    balance, causal, tokens = CALLS[call % len(CALLS)]
    layout = SequenceLayout(world * tokens - 1, world, balance)  # one token is padding
    names = ("q", "k", "v", "grad_out")
    tensors = {name: normal(10 * call + seed, 1, 1, layout.length, 16) for seed, name in enumerate(names)}
    q, k, v = (tensors[name].clone().requires_grad_() for name in "qkv")
    position = torch.arange(layout.length)
    scores = (q @ k.transpose(2, 3) / 4).masked_fill((position.unsqueeze(1) < position) & causal, -torch.inf)
    out = scores.softmax(3) @ v
    gradients = torch.autograd.grad(out, (q, k, v), tensors["grad_out"])
    tensors |= {"out": out.detach(), "lse": scores.logsumexp(3).detach()}
    return layout, causal, tensors, dict(zip("qkv", gradients, strict=True))


class Group:
    """What the launches of one rank are given."""

    def __init__(self, memory: SimulatedMemory, ring: bool) -> None:
        world = memory.world
        flag_count = 4 * max(world - 1, 1) * world  # of two parts and two copiers
        slots, flags = memory.buffer("slots", (2, SLOT_BYTES), torch.uint8), memory.signals("flags", flag_count)
        self.rank, self.world = memory.rank, world
        self.ready = memory.signals("ready", 4 * world).local
        self.end = Endpoint(
            rank=memory.rank,
            world=world,
            slots=slots.addresses,
            slot_bytes=SLOT_BYTES,
            flags=flags.addresses,
            flag_count=flag_count,
            state=memory.signals("state", 2).local,
            abort=memory.abort,
            programs=4,
        )
        module = importlib.import_module("tpfuse.kernels.block_exchange")  # where mutants are tried another one
        self.exchange = module.BlockExchange(self.end, self.ready, ring)

    def backward(self, call: int) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's gradients."""
        layout, causal, tensors, _ = whole(call, self.world)
        own = {name: layout.shard(x, self.rank, 2) for name, x in tensors.items() if name != "lse"}
        lse = layout.shard(tensors["lse"], self.rank, 2, -torch.inf)
        seen, seen_by = sights(layout.positions(self.rank), layout.length, causal, None, None)
        module = importlib.import_module("tpfuse.kernels.ring_attention_backward")
        gradients: tuple[Tensor, Tensor, Tensor] = module.ring_attention_backward(
            **own, lse=lse, runs=layout.runs, rank=self.rank, seen=seen, seen_by=seen_by, exchange=self.exchange
        )
        return gradients

    def check(self, call: int) -> None:
        """They are those of the whole sequence."""
        layout, _, _, gradients = whole(call, self.world)
        for (name, expected), actual in zip(gradients.items(), self.backward(call), strict=True):
            own = layout.shard(expected, self.rank, 2)
            torch.testing.assert_close(actual, own, atol=1e-4, rtol=1e-4, msg=f"d{name} of call {call}")


def program(ring: bool, count: int = 3) -> Callable[[SimulatedMemory], None]:
    """Calls one after another, with other data each."""

    def calls(memory: SimulatedMemory) -> None:
        group = Group(memory, ring)
        for call in range(count):
            group.check(call)
        assert group.end.state.tolist() == [count, 0]

    return calls


@pytest.mark.parametrize(("world", "resident", "ring"), [(2, 1, False), (3, 2, True), (3, 1, False)])
def test_no_alarm(world: int, resident: int, ring: bool) -> None:
    explore(program(ring), world, resident=resident, schedules=[RoundRobin(), PCT(world)])


@pytest.mark.parametrize("ring", [True, False])
def test_no_alarm_in_twenty_seeds(ring: bool) -> None:
    explore(program(ring), 2, resident=2, schedules=map(PCT, range(10 * ring, 10 * ring + 10)))


def left_by(mutants: list[Mutant], ring: bool = True) -> list[Mutant]:
    """Those that are not failed. What is called is looked up while it runs, and so mutated."""
    return surviving(lambda *copies: program(ring), MODULES, 2, mutants=mutants, resident=2)


def test_every_line_is_needed() -> None:
    mutants = [mutant for mutant in mutants_of(*MODULES) if mutant.module == ring_attention_dq.__name__]
    assert len(mutants) == 2
    left = left_by(mutants)
    assert not left, "\n".join(map(str, left))


FAULTS = (
    ("the own keys again", ring_attention_dq, "blocks_ptr if step == 0 else", "blocks_ptr if step < WORLD else"),
    ("others' blocks are not awaited", ring_attention_dq, "here = 1 if", "here = WORLD if"),
    (
        "keys alone are brought",
        ring_attention_dq,
        "if missing == WORLD:",
        "missing -= WORLD\n                if missing == 1:",
    ),
    ("second parts in the first ones' place", ring_attention_dq, "abort_ptr, start,", "abort_ptr, 0,"),
    ("one part's flags for both", block_exchange, "(PART * HOPS * COPIERS + copier)", "copier"),
    ("a stale half", ring_attention_dkdv, "tl.load(state_ptr), slot_bytes", "tl.load(state_ptr) + 1, slot_bytes"),
    ("the own queries again", ring_attention_dkdv, "rank, source, block_words", "rank, rank, block_words"),
    ("a rank left out", ring_attention_dkdv, "for index in range(steps)", "for index in range(steps - 1)"),
    ("one half", endpoint, "(epoch & 1) * slot_bytes", "0 * slot_bytes"),
)


def mutant_of(fault: str, module: ModuleType, before: str, after: str) -> Mutant:
    source = inspect.getsource(module)
    assert source.count(before) == 1, before
    return Mutant(module.__name__, str(module.__file__), (1, 1), before, fault, source.replace(before, after))


def test_faults_that_are_no_deletion() -> None:
    left = left_by([mutant_of(*fault) for fault in FAULTS])
    assert not left, [mutant.change for mutant in left]


def late(memory: SimulatedMemory) -> None:
    """Rank 0 does not come: the others' launches end, and after a reset everything is as new."""
    group = Group(memory, ring=True)
    for _ in range(2):
        group.check(0)
        with pytest.raises(PeerTimeout), memory.guard("ring_attention_backward"):
            if memory.rank == 0:
                memory.barrier("elsewhere")
            for _ in range(2):
                group.backward(1)
                assert group.end.state[0] == 1, "the epoch is not over"
        memory.reset()
        memory.barrier()
        assert group.end.state.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:invalid value")  # gradients of what did not come
def test_waits_end() -> None:
    explore(late, 2, resident=2, timeouts=True)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_done_after_an_abort_is_seen() -> None:
    mutants = [mutant_of("an epoch of parts", ring_attention_dq, "if missing == 0:", "if missing < 4:")]
    options: dict[str, Any] = {"resident": 4, "timeouts": True, "schedules": [RoundRobin()]}
    assert not surviving(lambda *copies: late, MODULES, 2, mutants=mutants, **options)
