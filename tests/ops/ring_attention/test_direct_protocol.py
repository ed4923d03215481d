"""Ring attention on shared memory, rank by rank in one process: signals order every access, under many schedules."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.channels import epochs_of
from tpfuse.comm import channel
from tpfuse.comm.errors import PeerTimeout
from tpfuse.explore import SimulatedMemory
from tpfuse.explore.suite import Fault, ProtocolSuite, current, replace
from tpfuse.ops.ring_attention import direct as direct_ring
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.torch_blocks import BlockBackward, BlockForward

D = 2


def _call(rank: int, world: int, n: int, ring: bool = True) -> RingCall:
    runs = SequenceLayout(world * n, world, "contiguous").runs
    return RingCall(runs, rank, causal=False, window=None, scale=1.0, ring=ring)


def _whole(x: Tensor) -> Tensor:
    """Return x [world, 1, H, n, D] as [1, H, world * n, D]."""
    return x.movedim(0, 2).flatten(2, 3)


def _check(ring: direct_ring.DirectRing, rank: int, world: int, n: int, in_order: bool) -> None:
    """Compare with one rank that has all tokens."""
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


FORWARD, BACKWARD = direct_ring.DirectRing.forward, direct_ring.DirectRing.backward
STAGE, SIGNAL = "_stage(slots[own], k[:, heads], v[:, heads])", "epoch = channel.signal()"
LATE = f"{STAGE}\n{SIGNAL}", f"{SIGNAL}\n{STAGE}"
BLOCKS = "_blocks(channel, k[:, heads], wide, self.memory.world)"
ADD = "block.add(source, slots[{0}][0], slots[{0}][1], sums[own][source])"
SUM = "_sum({}, [{}], gradients[:, :, heads])"
EVERY, FIRST = "call.visible_keys(own, rank) for rank in range(len(parts))", "call.visible_keys(own, 0)"


class TestDirectRing(ProtocolSuite):
    modules = (channel, direct_ring)
    needed = (channel, direct_ring)
    worlds = ((3, 1), (2, 1))
    faults = (
        Fault("keys that are staged after their signal", replace(FORWARD, LATE[0], by=LATE[1])),
        Fault("keys of backward that are staged after their signal", replace(BACKWARD, LATE[0], by=LATE[1])),
        Fault(
            "partial sums that are written before the half is free",
            replace(BACKWARD, "_empty(k[:, heads], wide)", by=f"{BLOCKS}[own][own]"),
        ),
        Fault("the first block again in backward", replace(BACKWARD, ADD.format("source"), by=ADD.format("own"))),
        Fault(
            "sums of one rank alone", replace(BACKWARD, SUM.format("parts", EVERY), by=SUM.format("parts[:1]", FIRST))
        ),
        Fault("sums of another's block", replace(BACKWARD, "part[own]", by="part[rank]")),
    )

    def program(self, memory: SimulatedMemory) -> None:
        """Run several calls, of one round and of a round for each head."""
        rank, world = memory.rank, memory.world
        # Slots have space for forward of two tokens with all heads at once.
        ring = current(direct_ring).DirectRing(memory, 8 * 2 * world * 2 * D)
        for n, in_order in ((2, True), (1, False), (2, False)):
            _check(ring, rank, world, n, in_order)
        _check(ring, rank, world, 1, True)

    def short_program(self, memory: SimulatedMemory) -> Iterator[object]:
        rank, world = memory.rank, memory.world
        ring = current(direct_ring).DirectRing(memory, 8 * 2 * world * 2 * D)
        for _ in range(4):
            _check(ring, rank, world, 2, True)
            _check(ring, rank, world, 1, False)
            yield epochs_of(memory)

    def late_program(self, memory: SimulatedMemory) -> None:
        rank, world = memory.rank, memory.world
        ring = current(direct_ring).DirectRing(memory)
        _check(ring, rank, world, 2, True)
        with pytest.raises(PeerTimeout):
            if rank == 0:
                memory.barrier("elsewhere")
            else:
                _check(ring, rank, world, 2, True)
        memory.reset()
        _check(ring, rank, world, 2, True)
