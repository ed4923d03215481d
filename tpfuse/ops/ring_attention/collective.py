"""Ring attention by torch.distributed, for ranks that share no memory: blocks are sent as messages.

Schedule ring sends a block to the next rank while this rank attends to it, so that a rank holds two blocks at a time
(arXiv:2310.01889). Schedule all_gather gathers all blocks at once, while a rank attends to its own (arXiv:2407.21783,
section 3.3.2). Backward moves the blocks again. Behind each block goes, in float32, the sum of what the queries of the
ranks that it has passed contribute to its gradients: its owner adds its own contribution last. The order of a sum is
that of the ring, the same in every run, and no rank holds the contributions to more than one block.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import collectives
from tpfuse.comm.collectives.collective import DONE, Handle, TorchCollectives
from tpfuse.comm.sum_order import summed_dtype
from tpfuse.comm.trace import operator
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.triton_blocks import block_backward, block_forward


class CollectiveRing:
    """Attention of one group's ranks, on any device (see `Ring`)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._by = group, TorchCollectives(group)

    @operator("ring_attention", "collective")
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor]:
        collectives.compare(call.described("ring_attention", q, k), k.device, self._group, by=self._by)
        block = block_forward(q, call)
        for source, keys, values in self._blocks(k, v, call):
            block.add(source, keys, values)
        return block.result()

    @operator("ring_attention backward", "collective")
    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RingCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        block = block_backward(grad_out, q, out, lse, call)
        own = k.new_zeros(2, *k.shape, dtype=summed_dtype(k.dtype))
        total: Tensor | None = None
        handle: Handle = DONE
        for source, keys, values in self._blocks(k, v, call):
            part = own if source == call.rank else torch.zeros_like(own)
            block.add(source, keys, values, part)
            if source == call.rank:
                continue
            handle.wait()
            total, handle = collectives.start_shift(part if total is None else total.add_(part), self._group)
        handle.wait()
        dk, dv = (own if total is None else own.add_(total)).to(k.dtype).unbind()
        return block.dq(), dk, dv

    def _blocks(self, k: Tensor, v: Tensor, call: RingCall) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (rank, its keys, its values), this rank's own first; the next block arrives while one is used."""
        block = torch.stack((k, v))
        if not call.ring:
            gathered, handle = collectives.start_all_gather(block, self._group, by=self._by)
            yield call.rank, k, v
            handle.wait()
            blocks = gathered.view(self._group.size(), *block.shape)
            for source in reversed(call.sources):  # the order of the ring, in which sums travel
                yield source, blocks[source, 0], blocks[source, 1]
            return
        for source in (call.rank, *call.sources):
            last = source == call.sources[-1]
            if not last:
                arriving, handle = collectives.start_shift(block, self._group)
            yield source, block[0], block[1]
            if not last:
                handle.wait()
                block = arriving
