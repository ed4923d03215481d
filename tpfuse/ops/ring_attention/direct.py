"""Ring attention of CPU ranks on memory that they share: peers attend to blocks in place.

Forward: a rank copies its keys and values into its slot, signals, attends to its own block, and then to the blocks in
the slots of the others. Backward: a rank does the same. It also computes, in a slot of its own, what its queries
contribute to the gradients of every block, signals again, and sums all ranks' contributions to its block in rank order.
So only data that is read moves, and no rank waits for a neighbour's neighbour; `ring` and `all_gather` differ only in
the order of reading.

Blocks are in slots in the layout that models have, [B, n, Hk, D], so that all copies are of contiguous memory. Blocks
that do not fit a slot are processed in rounds of some heads each. `tpfuse.comm.channel` has the protocol.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from tpfuse.comm.channel import Channel, slot_size
from tpfuse.comm.sum_order import sum_in_rank_order, summed_dtype
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.comm.trace import span
from tpfuse.ops.ring_attention.call import RingCall, joined_heads
from tpfuse.ops.ring_attention.torch_blocks import BlockBackward, BlockForward

ROUND_BYTES = 2**24  # the size of a slot's half; a head that needs more has a larger slot


class DirectRing:
    """Attention of one group's ranks. Tensors are on the CPU, of any float dtype and strides."""

    def __init__(self, memory: SymmetricMemory, round_bytes: int = ROUND_BYTES) -> None:
        """Prepare attention on `memory`. All ranks create the object together."""
        self.memory, self._round_bytes = memory, round_bytes

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor]:
        op, own = "ring_attention", self.memory.rank
        parts = []
        with self.memory.guard(call.described(op, q, k)):
            for channel, heads, q_heads in self._rounds(q, k, 2 * k.element_size()):
                slots = _blocks(channel, k[:, heads], k.dtype)
                _stage(slots[own], k[:, heads], v[:, heads])
                epoch = channel.signal()
                block = BlockForward(q[:, q_heads], call.heads(q_heads))
                block.add(own, slots[own][0], slots[own][1])
                for source in call.sources:
                    channel.wait_for(source, epoch, op)
                    block.add(source, slots[source][0], slots[source][1])
                parts.append(block.result())
        return joined_heads([out for out, _ in parts]), joined_heads([lse for _, lse in parts])

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RingCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        op, own, wide = "ring_attention backward", self.memory.rank, summed_dtype(k.dtype)
        dqs, gradients = [], _empty(k, k.dtype)
        with self.memory.guard(call.described(op, q, k)):
            for channel, heads, q_heads in self._rounds(q, k, 2 * self.memory.world * wide.itemsize):
                slots = _blocks(channel, k[:, heads], k.dtype)
                _stage(slots[own], k[:, heads], v[:, heads])
                epoch = channel.signal()
                block = BlockBackward(
                    grad_out[:, q_heads], q[:, q_heads], out[:, q_heads], lse[:, q_heads], call.heads(q_heads)
                )
                own_part = _empty(k[:, heads], wide)
                block.add(own, slots[own][0], slots[own][1], own_part)
                for source in channel.others:
                    # They have read the other half of this rank's slot, which is written next.
                    channel.wait_for(source, epoch, op)
                sums = _blocks(channel, k[:, heads], wide, self.memory.world)
                for source in call.sources:
                    block.add(source, slots[source][0], slots[source][1], sums[own][source])
                epoch = channel.signal()
                for source in channel.others:
                    channel.wait_for(source, epoch, op)
                parts = [own_part if rank == own else part[own] for rank, part in enumerate(sums)]
                _sum(parts, [call.visible_keys(own, rank) for rank in range(len(parts))], gradients[:, :, heads])
                dqs.append(block.dq())
        return joined_heads(dqs), gradients[0], gradients[1]

    def _rounds(self, q: Tensor, k: Tensor, element_bytes: int) -> Iterator[tuple[Channel, slice, slice]]:
        """Yield the channel of each round, and the round's heads of k and of q.

        element_bytes: the bytes that a slot holds for an element of k.
        """
        heads, group = k.shape[1], q.shape[1] // max(k.shape[1], 1)
        head_bytes = k[:, :1].numel() * element_bytes
        nbytes = self._round_bytes if head_bytes <= self._round_bytes else slot_size(head_bytes)
        channel = self.memory.channel(Channel, "direct ring", nbytes)
        most = min(nbytes // max(head_bytes, 1), max(heads, 1))
        for start in range(0, max(heads, 1), most):
            yield channel, slice(start, start + most), slice(start * group, (start + most) * group)


def _blocks(channel: Channel, k: Tensor, dtype: torch.dtype, *counts: int) -> list[Tensor]:
    """Return every rank's slot of the next epoch as [*counts, 2, B, Hk, n, D] with k's sizes."""
    batch, heads, length, size = k.shape
    shape = *counts, 2, batch, length, heads, size
    return [slot.transpose(-3, -2) for slot in channel.next_slots(dtype, *shape)]


def _empty(k: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor [2, B, Hk, n, D] of k's sizes, in the layout of the slots."""
    batch, heads, length, size = k.shape
    return k.new_empty(2, batch, length, heads, size, dtype=dtype).transpose(2, 3)


def _stage(slot: Tensor, k: Tensor, v: Tensor) -> None:
    with span("communication", "stage"):
        slot[0].copy_(k)
        slot[1].copy_(v)


def _sum(parts: list[Tensor], spans: list[tuple[int, int]], out: Tensor) -> None:
    """Write out [2, B, some heads, n, D] = Σ parts in rank order, rounded once.

    A part is written only in the keys [first, stop) of its span, and counts as 0 elsewhere.
    """
    ends = sorted({0, out.shape[3], *(end for span in spans for end in span)})
    for first, stop in pairwise(ends):
        keys = slice(first, stop)
        written = [part[:, :, :, keys] for part, span in zip(parts, spans, strict=True) if span[0] <= first < span[1]]
        target = out[:, :, :, keys]
        if not written:
            target.zero_()
        elif target.dtype == written[0].dtype:
            sum_in_rank_order(written, target)
        else:
            total = torch.empty_like(written[0])
            sum_in_rank_order(written, total)
            target.copy_(total)
