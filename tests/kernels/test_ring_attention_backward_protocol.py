"""ring_attention_backward under many schedules: no alarm, no unneeded line, no endless wait, no wrong block."""

from functools import cache
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tpfuse.comm.errors import PeerTimeout
from tpfuse.kernels import (
    block_exchange,
    endpoint,
    ring_attention_backward,
    ring_attention_dkdv,
    ring_attention_dq,
    signals,
)
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.visibility import visible_ranges
from tpfuse.testing.explore import SimulatedMemory
from tpfuse.testing.inputs import normal
from tpfuse.testing.protocol import Fault, ProtocolSuite, current, replace

CALLS = (("striped", True, 3), ("striped", False, 5), ("contiguous", True, 4))  # balance, causal, tokens of a rank
SLOT_BYTES = 16384
TILES = {  # two copiers, each with a share of every part, and two programs that attend
    "ring_attention_dq": {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_COPY": 128},
    "ring_attention_dkdv": {"BLOCK_M": 16, "BLOCK_N": 16},
}

pytestmark = [
    pytest.mark.usefixtures("tiny_tiles"),
    pytest.mark.filterwarnings("ignore:invalid value"),  # gradients of blocks that did not come
]


@cache
def whole(call: int, world: int) -> tuple[SequenceLayout, bool, dict[str, Tensor], dict[str, Tensor]]:
    """Returns a layout, whether it is causal, attention's inputs and results for the whole sequence, its gradients."""
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
    """The arguments of one rank's launches."""

    def __init__(self, memory: SimulatedMemory, ring: bool) -> None:
        world = memory.world
        flag_count = 4 * max(world - 1, 1) * world  # for two parts and two copiers
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
        self.exchange = current(block_exchange).BlockExchange(self.end, self.ready, ring)

    def backward(self, call: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this rank's gradients."""
        layout, causal, tensors, _ = whole(call, self.world)
        shards = {name: layout.shard(x, self.rank, 2) for name, x in tensors.items() if name != "lse"}
        lse = layout.shard(tensors["lse"], self.rank, 2, -torch.inf)
        seen, seen_by = visible_ranges(layout.positions(self.rank), layout.length, causal, None, None)
        gradients: tuple[Tensor, Tensor, Tensor] = current(ring_attention_backward).ring_attention_backward(
            **shards, lse=lse, runs=layout.runs, rank=self.rank, seen=seen, seen_by=seen_by, exchange=self.exchange
        )
        return gradients

    def check(self, call: int) -> None:
        """Checks that this rank's gradients are those of the whole sequence."""
        layout, _, _, gradients = whole(call, self.world)
        for (name, expected), actual in zip(gradients.items(), self.backward(call), strict=True):
            shard = layout.shard(expected, self.rank, 2)
            torch.testing.assert_close(actual, shard, atol=1e-4, rtol=1e-4, msg=f"d{name} of call {call}")


class BackwardSuite(ProtocolSuite):
    """The suite of one route of the blocks: around the ring, or from their owners."""

    ring: ClassVar[bool]
    modules = (signals, endpoint, block_exchange, ring_attention_dq, ring_attention_dkdv, ring_attention_backward)
    needed = (ring_attention_dq,)
    seeds = 10

    def program(self, memory: SimulatedMemory) -> None:
        """Makes calls one after another, with other data each."""
        group = Group(memory, self.ring)
        for call in range(3):
            group.check(call)
        assert group.end.state.tolist() == [3, 0]

    def late_program(self, memory: SimulatedMemory) -> None:
        group = Group(memory, self.ring)
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


COPY_BLOCKS = block_exchange.copy_blocks
KERNEL = ring_attention_dq.ring_attention_dq_kernel


class TestRing(BackwardSuite):
    ring = True
    worlds = ((2, 2), (3, 2))
    faults = (
        Fault("this rank's keys again", replace(ring_attention_dq._walk, "step == 0", by="step < WORLD")),
        Fault(
            "others' blocks are not awaited",
            replace(KERNEL, "1 if COPIERS > 0 else steps", by="WORLD if COPIERS > 0 else steps"),
        ),
        Fault(  # the block is counted all the same
            "keys alone are copied",
            replace(KERNEL, "missing == WORLD", by="missing == 1"),
            replace(KERNEL, "missing = 2 * WORLD", by="missing = WORLD"),
        ),
        Fault("second parts over the first parts", replace(KERNEL, "start", by="0", call="copy_blocks")),
        Fault("one part's flags for both", replace(COPY_BLOCKS, "PART * STEPS * COPIERS + copier", by="copier")),
        Fault(
            "a stale half",
            replace(
                ring_attention_dkdv._queries_of,
                "tl.load(state_ptr)",
                by="tl.load(state_ptr) + 1",
                call="block_in_slot",
            ),
        ),
        Fault(
            "this rank's queries again",
            replace(ring_attention_dkdv._queries_of, "source", by="rank", call="block_in_slot"),
        ),
        Fault(
            "a rank left out",
            replace(ring_attention_dkdv.ring_attention_dkdv_kernel, "range(steps)", by="range(steps - 1)"),
        ),
        Fault("one half", replace(endpoint.slot, "(epoch & 1) * slot_bytes", by="0 * slot_bytes")),
    )
    late_faults = (Fault("an epoch of parts", replace(KERNEL, "missing == 0", by="missing < 4")),)


class TestOwners(BackwardSuite):
    ring = False
    worlds = ((2, 1), (3, 1))
