"""Ring attention's exchange and forward pass under many schedules: no alarm, no unneeded line, no endless wait."""

from functools import cache
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tpfuse.comm.errors import PeerTimeout
from tpfuse.kernels import block_exchange, endpoint, ring_attention_forward, signals
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.visibility import visible_ranges
from tpfuse.testing.explore import SimulatedMemory
from tpfuse.testing.inputs import normal
from tpfuse.testing.protocol import Fault, ProtocolSuite, current, replace

SIZE = 16
TILES = {"ring_attention_forward": {"BLOCK_M": 16, "BLOCK_N": 16, "COPIERS": 2, "BLOCK_COPY": 64}}
# Tokens of a rank, heads, balance: a block has two shares, one, two, three; programs have one tile, then one has 2.
EPOCHS = ((4, 1, "contiguous"), (1, 1, "striped"), (4, 1, "contiguous"), (6, 3, "striped"))


pytestmark = pytest.mark.usefixtures("tiny_tiles")


@cache
def sequence(world: int, epoch: int) -> tuple[SequenceLayout, Tensor, Tensor, Tensor]:
    """Returns the causal whole sequence of an epoch: (how it is spread, q, keys and values, the result)."""
    tokens, heads, balance = EPOCHS[epoch]
    length = tokens * world
    layout = SequenceLayout(length, world, balance)
    q, kv = normal(epoch, 1, heads, length, SIZE), normal(10 + epoch, 2, 1, 1, length, SIZE)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q.double() @ kv[0].double().mT * SIZE**-0.5).masked_fill(hidden, -torch.inf)
    return layout, q, kv, (scores.softmax(-1) @ kv[1].double()).float()


class Group:
    """The arguments of one rank's launches."""

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
        self.exchange = current(block_exchange).BlockExchange(self.end, self.ready.local, ring)

    def attend(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's result and the expected one."""
        layout, q, kv, out = sequence(self.end.world, epoch)
        q, kv, out = (layout.shard(x, self.rank, x.ndim - 2) for x in (q, kv, out))
        positions = layout.positions(self.rank)
        seen, _ = visible_ranges(positions, layout.length, causal=True, window=None, cu_seqlens=None)
        got, _ = current(ring_attention_forward).ring_attention_forward(
            q, kv, layout.runs, self.rank, seen, exchange=self.exchange
        )
        return got, out


class RingSuite(ProtocolSuite):
    """The suite of one route of the blocks: around the ring, or from their owners."""

    ring: ClassVar[bool]
    modules = (signals, endpoint, block_exchange, ring_attention_forward)

    def attend(self, memory: SimulatedMemory, epochs: int) -> None:
        """Runs every epoch, one after another."""
        group = Group(memory, self.ring)
        for epoch in range(epochs):
            got, expected = group.attend(epoch)
            torch.testing.assert_close(got, expected, msg=f"epoch {epoch + 1}")

    def program(self, memory: SimulatedMemory) -> None:
        self.attend(memory, len(EPOCHS))

    def short_program(self, memory: SimulatedMemory) -> None:
        self.attend(memory, 3)

    def late_program(self, memory: SimulatedMemory) -> None:
        group = Group(memory, self.ring)
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


COPY_BLOCKS, AWAIT = block_exchange.copy_blocks, block_exchange.await_block
KERNEL, TILE = ring_attention_forward.ring_attention_forward_kernel, ring_attention_forward._attend_tile
HERE = {(KERNEL, "_attend_tile"): "all blocks are here: nothing is awaited"}
THERE = "the copier's words are those of the other way"


class TestRing(RingSuite):
    ring = True
    needed = (block_exchange, ring_attention_forward)
    unneeded: ClassVar = {(COPY_BLOCKS, "arrive"): THERE, **HERE}
    worlds = ((3, 2), (2, 1))
    faults = (
        Fault("one half", replace(endpoint.slot, "(epoch & 1) * slot_bytes", by="0 * slot_bytes")),
        Fault("an epoch too far", replace(signals.begin, "tl.load(state_ptr) + 1", by="tl.load(state_ptr) + 2")),
        Fault("a neighbour on the other side", replace(COPY_BLOCKS, "(rank + 1) % WORLD", by="(rank + 2) % WORLD")),
        Fault(
            "the neighbour's own block",
            replace(
                COPY_BLOCKS,
                "block_in_slot(slots_ptr, epoch, slot_bytes, sender, source, block_words)",
                by="block_in_slot(slots_ptr, epoch, slot_bytes, sender, sender, block_words)",
            ),
        ),
        Fault(
            "told of the step before", replace(COPY_BLOCKS, "step * COPIERS * WORLD", by="(step - 1) * COPIERS * WORLD")
        ),
        Fault(
            "ready of another source",
            replace(COPY_BLOCKS, "PART * WORLD + source", by="PART * WORLD + rank", call="signal"),
        ),
        Fault(
            "ready for the next launch",
            replace(
                COPY_BLOCKS,
                "signal(ready_ptr + (PART * WORLD + source) * COPIERS + copier, epoch)",
                by="signal(ready_ptr + (PART * WORLD + source) * COPIERS + copier, epoch + 1)",
            ),
        ),
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


class TestOwners(RingSuite):
    ring = False
    needed = (block_exchange, ring_attention_forward)
    unneeded: ClassVar = {
        (COPY_BLOCKS, "signal(there + first + rank, epoch)"): THERE,
        (COPY_BLOCKS, "signal(there + first + step * COPIERS * WORLD + rank, epoch)"): THERE,
        **HERE,
    }
    worlds = ((2, 2), (3, 2))
