"""Ring attention on shared memory, rank by rank in one process: what orders every access, under many schedules."""

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tpfuse.comm import channel, row_channel
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.sequence import SequenceLayout
from tpfuse.ops import direct_ring
from tpfuse.ops.block_attention import BlockBackward, BlockForward
from tpfuse.ops.ring_call import RingCall
from tpfuse.testing.explore import PCT, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving

D = 2
Program = Callable[[SimulatedMemory], None]


def _call(rank: int, world: int, n: int, ring: bool = True) -> RingCall:
    runs = SequenceLayout(world * n, world, "contiguous").runs
    return RingCall(runs, rank, causal=False, window=None, scale=1.0, ring=ring)


def _whole(x: Tensor) -> Tensor:
    """[world, 1, H, n, D] -> [1, H, world * n, D]."""
    return x.movedim(0, 2).flatten(2, 3)


def _check(ring: direct_ring.DirectRing, rank: int, world: int, n: int, in_order: bool) -> None:
    """Against one rank that has everything."""
    generator = torch.Generator().manual_seed(n)
    q, k, v, grad = (torch.randn(world, 1, 2, n, D, dtype=torch.float64, generator=generator) for _ in range(4))
    call = _call(rank, world, n, in_order)
    out, lse = ring.forward(q[rank], k[rank], v[rank], call)
    gradients = ring.backward(grad[rank], q[rank], k[rank], v[rank], out, lse, call)

    alone, alone_call = BlockForward(_whole(q), _call(0, 1, world * n)), _call(0, 1, world * n)
    alone.add(0, _whole(k), _whole(v))
    whole_out, whole_lse = alone.result()
    backward = BlockBackward(_whole(grad), _whole(q), whole_out, whole_lse, alone_call)
    parts = torch.empty(2, *_whole(k).shape, dtype=torch.float64)
    backward.add(0, _whole(k), _whole(v), parts)
    own = slice(rank * n, (rank + 1) * n)
    for found, expected in zip((out, *gradients), (whole_out, backward.dq(), parts[0], parts[1]), strict=True):
        torch.testing.assert_close(found, expected[:, :, own], rtol=1e-12, atol=1e-12)


def program_of(channel: ModuleType, row_channel: ModuleType, direct_ring: ModuleType) -> Program:
    """Several calls behind each other, of one piece and of a piece for each head; then of ranks that disagree."""

    def program(memory: SimulatedMemory) -> None:
        rank, world = memory.rank, memory.world
        ring = direct_ring.DirectRing(memory, 8 * 2 * world * 2 * D)  # forward of two tokens: all heads at once
        for n, in_order in ((2, True), (1, False), (2, False)):
            _check(ring, rank, world, n, in_order)
        if world > 1:
            x = torch.ones(1, 1, 2 if rank == world - 1 else 1, D)
            with pytest.raises(ValueError, match="all ranks must have equally many"):
                ring.forward(x, x, x, _call(rank, world, x.shape[2]))
        _check(ring, rank, world, 1, True)

    return program


@pytest.mark.parametrize("world", [2, 3])
def test_no_alarm(world: int) -> None:
    explore(program_of(channel, row_channel, direct_ring), world)


def test_no_alarm_in_thirty_seeds() -> None:
    explore(program_of(channel, row_channel, direct_ring), 2, schedules=map(PCT, range(30)))


def test_every_line_is_needed() -> None:
    mutants = mutants_of(channel, row_channel, direct_ring)
    assert len(mutants) >= 8
    left = surviving(program_of, [channel, row_channel, direct_ring], 3, mutants=mutants)
    assert not left, "\n".join(map(str, left))


_STAGE = "                _stage(slots[own], k[:, heads], v[:, heads])\n"
_SIGNAL = "                epoch = channel.signal_rows(length)\n"
_OTHERS = "slots[source][0], slots[source][1], sums"
FAULTS = {
    "keys that are staged behind their signal": [(_STAGE + _SIGNAL, _SIGNAL + _STAGE)],
    "partial sums that are written before the half is free": [
        ("_empty(k[:, heads], wide)", "_blocks(channel, k[:, heads], wide, self.memory.world)[own][own]")
    ],
    "the first block again in backward": [(_OTHERS, _OTHERS.replace("source", "own"))],
    "sums of one rank alone": [("_sum(parts, [", "_sum(parts[:1], [")],
    "sums of another's block": [("part[own] for rank", "part[rank] for rank")],
}


def _mutant(fault: str) -> Mutant:
    source = inspect.getsource(direct_ring)
    for before, after in FAULTS[fault]:
        assert before in source, before
        source = source.replace(before, after)
    return Mutant(direct_ring.__name__, str(direct_ring.__file__), (1, 1), fault, "", source)


def test_faults_that_are_no_deletion() -> None:
    modules = [channel, row_channel, direct_ring]
    left = surviving(program_of, modules, 3, mutants=map(_mutant, FAULTS))
    assert not left, "\n".join(map(str, left))


def test_waits_end_and_the_next_call_is_right() -> None:
    def program(memory: SimulatedMemory) -> None:
        rank, world = memory.rank, memory.world
        ring = direct_ring.DirectRing(memory)
        _check(ring, rank, world, 2, True)
        with pytest.raises(PeerTimeout):
            if rank == 0:
                memory.barrier("elsewhere")
            else:
                _check(ring, rank, world, 2, True)
        memory.reset()
        _check(ring, rank, world, 2, True)

    explore(program, 3, timeouts=True)
