"""cross_entropy: -log softmax(logits)[target] where each rank holds a slice of the vocabulary.

loss = log Σ exp(logit - m) + m - logit[target], with the maximum m, the sum and the target's logit reduced
over ranks: two small all-reduces instead of a gather of the logits (arXiv:1909.08053, section 3). Backward
needs no communication: softmax - one_hot on each slice.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm import collectives
from tpfuse.comm.mesh import rank_and_size, shard_range
from tpfuse.ops.autograd import apply, once_differentiable

IGNORE = -1  # the target of a position that has no loss


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int, group: dist.ProcessGroup) -> Tensor:
        rows, width = logits.shape
        maximum = logits.amax(dim=-1) if width else logits.new_full((rows,), float("-inf"))
        maximum = collectives.all_reduce_max(maximum, group)
        exponentials = torch.exp(logits - maximum.unsqueeze(-1))
        own = (target >= start) & (target < start + width)
        column = torch.where(own, target - start, 0)
        sums = logits.new_zeros(2, rows)
        sums[0] = exponentials.sum(dim=-1)
        if width:
            picked = logits.gather(1, column.unsqueeze(1)).squeeze(1) - maximum
            sums[1] = torch.where(own, picked, 0)
        total, target_logit = collectives.all_reduce(sums, group)
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, column, own, target)
        return torch.where(target == IGNORE, 0, torch.log(total) - target_logit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, column, own, target = ctx.saved_tensors
        grad = torch.where(target == IGNORE, 0, grad).unsqueeze(-1)
        grad_logits = softmax * grad
        if softmax.shape[-1]:
            grad_logits.scatter_add_(1, column.unsqueeze(1), torch.where(own.unsqueeze(-1), -grad, 0))
        return grad_logits, None, None, None


def cross_entropy(logits: Tensor, target: Tensor, vocabulary: int, group: dist.ProcessGroup | None) -> Tensor:
    """Loss of each position, in nats.

    logits: [M, this rank's slice of the vocabulary], float32 or float64 (half types are upcast to float32);
    target: [M] int64 global token numbers, -1 where there is no loss. Returns [M], equal on all ranks, in the
    dtype that was computed in. Raises ValueError where the logits are not this rank's slice and, on CPU (on
    CUDA that check would stop the stream), for a target outside the vocabulary.
    """
    rank, world = rank_and_size(group)
    start, stop = shard_range(vocabulary, rank, world)
    if logits.ndim != 2 or logits.shape[1] != stop - start:
        raise ValueError(f"logits {tuple(logits.shape)}: expected [M, {stop - start}] on rank {rank}")
    if target.device.type == "cpu" and target.numel():
        lowest, highest = int(target.min()), int(target.max())
        if lowest < IGNORE or highest >= vocabulary:
            raise ValueError(f"targets from {lowest} to {highest}: expected 0 to {vocabulary - 1}, or {IGNORE}")
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if group is None:
        return F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")
    return apply(_VocabParallelCrossEntropy, logits, target, start, group)
