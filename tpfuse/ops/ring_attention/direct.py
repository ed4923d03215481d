"""Ring attention of CPU ranks on memory that they share: blocks stay where they are, and peers attend to them in place.

Forward: a rank copies its keys and values into its slot, signals, attends to its own, and then to those in the slots of
the others. Backward: the same, and each rank computes what its queries give to the gradients of every block, in a slot
of its own, signals again, and sums what all ranks have for its block in rank order. So nothing travels but what is
read, and nobody waits for a neighbour's neighbour; `ring` and `all_gather` differ in the order of reading alone.

Blocks lie in slots as models have them, [B, n, Hk, D]: then all copies are of contiguous memory. Blocks that do not fit
a slot pass in pieces of heads. `tpfuse.comm.channel` has the protocol.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from tpfuse.comm.channel import Channel
from tpfuse.comm.rank_order import sum_in_rank_order
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.ops.ring_attention.call import RingCall, computed
from tpfuse.ops.ring_attention.torch_blocks import BlockBackward, BlockForward

ROUND_BYTES = 2**24  # of a slot's half; one head that needs more has one of its own size


class DirectRing:
    """Attention of one group's ranks. Tensors are on the CPU, of any float dtype and strides."""

    def __init__(self, memory: SymmetricMemory, round_bytes: int = ROUND_BYTES) -> None:
        """Collective."""
        self.memory, self._piece_bytes = memory, piece_bytes

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        op, own = "ring_attention", self.memory.rank
        parts = []
        with self.memory.guard(call.described(op, k)):
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
        return _joined([out for out, _ in parts]), _joined([lse for _, lse in parts])

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RingCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""
        op, own, wide = "ring_attention backward", self.memory.rank, computed(k.dtype)
        dqs, gradients = [], _empty(k, k.dtype)
        with self.memory.guard(call.described(op, k)):
            for channel, heads, q_heads in self._rounds(q, k, 2 * self.memory.world * wide.itemsize):
                slots = _blocks(channel, k[:, heads], k.dtype)
                _stage(slots[own], k[:, heads], v[:, heads])
                epoch = channel.signal()
                block = BlockBackward(
                    grad_out[:, q_heads], q[:, q_heads], out[:, q_heads], lse[:, q_heads], call.heads(q_heads)
                )
                mine = _empty(k[:, heads], wide)
                block.add(own, slots[own][0], slots[own][1], mine)
                for source in channel.others:  # before the other half of the own slot is written, which they have read
                    channel.wait_for(source, epoch, op)
                sums = _blocks(channel, k[:, heads], wide, self.memory.world)
                for source in call.sources:
                    block.add(source, slots[source][0], slots[source][1], sums[own][source])
                epoch = channel.signal()
                for source in channel.others:
                    channel.wait_for(source, epoch, op)
                parts = [mine if rank == own else part[own] for rank, part in enumerate(sums)]
                _sum(parts, [call.visible_keys(own, rank) for rank in range(len(parts))], gradients[:, :, heads])
                dqs.append(block.dq())
        return _joined(dqs), gradients[0], gradients[1]

    def _rounds(self, q: Tensor, k: Tensor, element_bytes: int) -> Iterator[tuple[Channel, slice, slice]]:
        """What each round takes of the heads of k and of q; element_bytes: what a slot holds for an element of k."""
        heads, group = k.shape[1], q.shape[1] // max(k.shape[1], 1)
        head_bytes = k[:, :1].numel() * element_bytes
        nbytes = max(self._piece_bytes, head_bytes)
        channel = self.memory.channel(Channel, "direct ring", nbytes)
        most = min(nbytes // max(head_bytes, 1), max(heads, 1))
        for start in range(0, max(heads, 1), most):
            yield channel, slice(start, start + most), slice(start * group, (start + most) * group)


def _blocks(channel: Channel, k: Tensor, dtype: torch.dtype, *counts: int) -> list[Tensor]:
    """Every rank's slot of the next epoch as [*counts, 2, B, Hk, n, D] with k's sizes."""
    batch, heads, length, size = k.shape
    shape = *counts, 2, batch, length, heads, size
    return [slot.transpose(-3, -2) for slot in channel.next_slots(dtype, *shape)]


def _empty(k: Tensor, dtype: torch.dtype) -> Tensor:
    """[2, B, Hk, n, D], in memory as slots are."""
    batch, heads, length, size = k.shape
    return k.new_empty(2, batch, length, heads, size, dtype=dtype).transpose(2, 3)


def _stage(slot: Tensor, k: Tensor, v: Tensor) -> None:
    slot[0].copy_(k)
    slot[1].copy_(v)


def _sum(parts: list[Tensor], spans: list[tuple[int, int]], out: Tensor) -> None:
    """out [2, B, some heads, n, D] = Σ parts in rank order, rounded once; parts: written in the keys of their spans."""
    ends = sorted({0, out.shape[3], *(end for span in spans for end in span)})
    for first, stop in pairwise(ends):
        keys = slice(first, stop)
        there = [part[:, :, :, keys] for part, span in zip(parts, spans, strict=True) if span[0] <= first < span[1]]
        target = out[:, :, :, keys]
        if not there:
            target.zero_()
        elif target.dtype == there[0].dtype:
            sum_in_rank_order(there, target)
        else:
            total = torch.empty_like(there[0])
            sum_in_rank_order(there, total)
            target.copy_(total)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
