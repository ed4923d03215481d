"""Ring attention under many schedules: no alarm, no unneeded line, no endless wait, no wrong block."""

from collections.abc import Iterator
from functools import cache
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tests.support.channels import connect
from tpfuse.explore import SimulatedMemory
from tpfuse.explore.suite import Fault, ProtocolSuite, current, replace, without_rank_0
from tpfuse.kernels import (
    block_exchange,
    endpoint,
    ring_attention_backward,
    ring_attention_dkdv,
    ring_attention_dq,
    ring_attention_forward,
    signals,
)
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.visibility import visible_ranges
from tpfuse.testing.inputs import normal

TILES = {  # two copiers, each with a share of every part, and two programs that attend
    "ring_attention_forward": {"BLOCK_M": 16, "BLOCK_N": 16, "COPIERS": 2, "BLOCK_COPY": 64},
    "ring_attention_dq": {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_COPY": 128},
    "ring_attention_dkdv": {"BLOCK_M": 16, "BLOCK_N": 16},
}
# Tokens of a rank, tokens of padding, heads, balance, whether it is causal. Forward: a block has two shares, one, two,
# three; programs have one tile, then one has two.
FORWARD = ((4, 0, 1, "contiguous", True), (1, 0, 1, "striped", True), (4, 0, 1, "contiguous", True))
FORWARD += ((6, 0, 3, "striped", True),)
BACKWARD = ((3, 1, 1, "striped", True), (5, 1, 1, "striped", False), (4, 1, 1, "contiguous", True))
CALLS = (*FORWARD, *BACKWARD)

pytestmark = [
    pytest.mark.usefixtures("tiny_tiles"),
    pytest.mark.filterwarnings("ignore:invalid value"),  # gradients of blocks that did not come
]


@cache
def whole(call: int, world: int) -> tuple[SequenceLayout, bool, dict[str, Tensor], tuple[Tensor, ...]]:
    """Return a layout, whether it is causal, attention's inputs and results for the whole sequence, its gradients."""
    tokens, padding, heads, balance, causal = CALLS[call]
    layout = SequenceLayout(world * tokens - padding, world, balance)
    counts = {"q": heads, "k": 1, "v": 1, "grad_out": heads}
    tensors = {
        name: normal(10 * call + seed, 1, count, layout.length, 16) for seed, (name, count) in enumerate(counts.items())
    }
    q, k, v, grad_out = (x.double() for x in tensors.values())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    position = torch.arange(layout.length)
    scores = (q @ k.transpose(2, 3) / 4).masked_fill((position.unsqueeze(1) < position) & causal, -torch.inf)
    out = scores.softmax(3) @ v
    gradients = torch.autograd.grad(out, leaves, grad_out)
    tensors |= {"out": out.detach().float(), "lse": scores.logsumexp(3).detach().float()}
    return layout, causal, tensors, tuple(x.float() for x in gradients)


class Group:
    """The arguments of one rank's launches."""

    def __init__(self, memory: SimulatedMemory, ring: bool) -> None:
        self.rank, self.world = memory.rank, memory.world
        # The flags are enough for two parts and two copiers.
        self.end = connect(memory, slot_bytes=16384, flag_count=4 * self.world**2, programs=4)
        ready = memory.signals("ready", 4 * self.world).local
        self.exchange = current(block_exchange).BlockExchange(self.end, ready, ring)

    def run(self, call: int) -> tuple[Tensor, ...]:
        """Return this rank's result of a call of FORWARD, or its gradients of a call of BACKWARD."""
        layout, causal, tensors, _ = whole(call, self.world)
        padding = {"lse": -torch.inf}
        shards = {name: layout.shard(x, self.rank, 2, padding.get(name, 0)) for name, x in tensors.items()}
        visible_keys, visible_queries = visible_ranges(layout.positions(self.rank), layout.length, causal, None, None)
        where = {"runs": layout.runs, "rank": self.rank, "visible_keys": visible_keys, "exchange": self.exchange}
        if call < len(FORWARD):
            blocks = torch.stack([shards["k"], shards["v"]])
            out, _ = current(ring_attention_forward).ring_attention_forward(shards["q"], blocks, **where)
            return (out,)
        gradients: tuple[Tensor, ...] = current(ring_attention_backward).ring_attention_backward(
            **shards, **where, visible_queries=visible_queries
        )
        return gradients

    def check(self, call: int) -> None:
        """Check that this rank's results are those of the whole sequence."""
        layout, _, tensors, gradients = whole(call, self.world)
        expected = (tensors["out"],) if call < len(FORWARD) else gradients
        tolerance = 1e-5 if call < len(FORWARD) else 1e-4
        for x, actual in zip(expected, self.run(call), strict=True):
            shard = layout.shard(x, self.rank, 2)
            torch.testing.assert_close(actual, shard, atol=tolerance, rtol=tolerance, msg=f"call {call}")


class RingSuite(ProtocolSuite):
    """The suite of one route of the blocks: around the ring, or from their owners.

    late_calls: the one that all ranks make, and the one that rank 0 does not make.
    """

    ring: ClassVar[bool]
    calls: ClassVar[range]
    late_calls: ClassVar[tuple[int, int]]

    def program(self, memory: SimulatedMemory) -> None:
        """Make calls one after another, with other data each."""
        group = Group(memory, self.ring)
        for call in self.calls:
            group.check(call)
        assert group.end.state.tolist() == [len(self.calls), 0]

    def short_program(self, memory: SimulatedMemory) -> Iterator[tuple[int, int]]:
        group = Group(memory, self.ring)
        for epoch in range(4):
            group.check(self.calls[epoch % 2])
            yield epoch + 1, epoch % 2

    def late_program(self, memory: SimulatedMemory) -> None:
        group, (before, call) = Group(memory, self.ring), self.late_calls
        for _ in range(2):
            group.check(before)
            without_rank_0(memory, "ring_attention", group.end.state, lambda: group.run(call))


class ForwardSuite(RingSuite):
    calls = range(len(FORWARD))
    late_calls = (2, 2)
    modules = (signals, endpoint, block_exchange, ring_attention_forward)
    needed = (block_exchange, ring_attention_forward)


COPY_BLOCKS, AWAIT = block_exchange.copy_blocks, block_exchange.await_block
KERNEL, TILE = ring_attention_forward.ring_attention_forward_kernel, ring_attention_forward._attend_tile
HERE = {(KERNEL, "_attend_tile"): "all blocks are here: nothing is awaited"}
THERE = "the copier's words are those of the other way"
SENDER = "block_in_slot(slots_ptr, epoch, slot_bytes, sender, {}, block_words)"
READY = "signal(ready_ptr + (PART * WORLD + source) * COPIERS + copier, {})"
ONE_HALF = Fault("one half", replace(endpoint.slot, "(epoch & 1) * slot_bytes", by="0 * slot_bytes"))


class TestForwardRing(ForwardSuite):
    ring = True
    unneeded: ClassVar = {(COPY_BLOCKS, "arrive"): THERE, **HERE}
    worlds = ((3, 2), (2, 1))
    faults = (
        ONE_HALF,
        Fault("an epoch too far", replace(signals.begin, "tl.load(state_ptr) + 1", by="tl.load(state_ptr) + 2")),
        Fault("a neighbour on the other side", replace(COPY_BLOCKS, "(rank + 1) % WORLD", by="(rank + 2) % WORLD")),
        Fault("the neighbour's own block", replace(COPY_BLOCKS, SENDER.format("source"), by=SENDER.format("sender"))),
        Fault(
            "the previous step is signalled",
            replace(COPY_BLOCKS, "step * COPIERS * WORLD", by="(step - 1) * COPIERS * WORLD"),
        ),
        Fault(
            "ready of another source",
            replace(COPY_BLOCKS, "PART * WORLD + source", by="PART * WORLD + rank", call="signal"),
        ),
        Fault("ready for the next launch", replace(COPY_BLOCKS, READY.format("epoch"), by=READY.format("epoch + 1"))),
        Fault("one share is a block", replace(AWAIT, "COPIERS", by="1", call="where")),
        Fault("the first block is there", replace(AWAIT, "step > 0", by="step > 1", call="where")),
        Fault(
            "another copier's signal",
            replace(
                COPY_BLOCKS,
                "here + first + step_words + sender",
                by="here + (COPIERS - 1 - copier) * WORLD + step_words + sender",
            ),
        ),
        Fault("another block", replace(TILE, "source", by="rank", call="block_in_slot")),
        Fault("the other way around", replace(TILE, "step * sources[1]", by="step")),
    )
    late_faults = (Fault("an epoch of parts", replace(KERNEL, "aborted == 0", by="aborted < WORLD")),)


class TestForwardOwners(ForwardSuite):
    ring = False
    unneeded: ClassVar = {
        (COPY_BLOCKS, "signal(there + first + rank, epoch)"): THERE,
        (COPY_BLOCKS, "signal(there + first + step * COPIERS * WORLD + rank, epoch)"): THERE,
        **HERE,
    }
    worlds = ((2, 2), (3, 2))


class BackwardSuite(RingSuite):
    calls = range(len(FORWARD), len(CALLS))
    late_calls = (4, 5)
    modules = (signals, endpoint, block_exchange, ring_attention_dq, ring_attention_dkdv, ring_attention_backward)
    needed = (ring_attention_dq,)


DQ, DKDV = ring_attention_dq.ring_attention_dq_kernel, ring_attention_dkdv.ring_attention_dkdv_kernel
QUERIES_OF = ring_attention_dkdv._queries_of
EPOCH = "tl.load(state_ptr)"


class TestBackwardRing(BackwardSuite):
    ring = True
    worlds = ((2, 2), (3, 2))
    faults = (
        Fault("this rank's keys again", replace(ring_attention_dq._walk, "step == 0", by="step < WORLD")),
        Fault(
            "others' blocks are not awaited",
            replace(DQ, "1 if COPIERS > 0 else steps", by="WORLD if COPIERS > 0 else steps"),
        ),
        Fault(  # the block is counted all the same
            "keys alone are copied",
            replace(DQ, "missing == WORLD", by="missing == 1"),
            replace(DQ, "missing = 2 * WORLD", by="missing = WORLD"),
        ),
        Fault("second parts over the first parts", replace(DQ, "start", by="0", call="copy_blocks")),
        Fault("one part's flags for both", replace(COPY_BLOCKS, "PART * STEPS * COPIERS + copier", by="copier")),
        Fault("a stale half", replace(QUERIES_OF, EPOCH, by=f"{EPOCH} + 1", call="block_in_slot")),
        Fault("this rank's queries again", replace(QUERIES_OF, "source", by="rank", call="block_in_slot")),
        Fault("a rank left out", replace(DKDV, "range(steps)", by="range(steps - 1)")),
        ONE_HALF,
    )
    late_faults = (Fault("an epoch of parts", replace(DQ, "missing == 0", by="missing < 4")),)


class TestBackwardOwners(BackwardSuite):
    ring = False
    worlds = ((2, 1), (3, 1))
