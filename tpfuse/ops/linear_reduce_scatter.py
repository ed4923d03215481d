"""linear_reduce_scatter: reduce_scatter(x Wᵀ) + bias + residual, the exit of a sequence-parallel block.

Every rank holds a slice of the features; the sum over ranks is scattered along dimension 0. Backward gathers
the output's gradient once and uses it for both products. The bias gradient is the column sum of the gathered
gradient, so it is whole on every rank without another communication.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm import collectives
from tpfuse.ops.autograd import apply, autocast, once_differentiable


class _LinearReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)
        out = collectives.reduce_scatter(F.linear(x, weight), group)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gathered = collectives.all_gather(grad, ctx.group)
        rows = gathered.flatten(0, -2)
        grad_x = gathered @ weight if needs_x else None
        grad_weight = torch.mm(rows.t(), x.flatten(0, -2)) if needs_weight else None
        grad_bias = rows.sum(0) if needs_bias and ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None


def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: dist.ProcessGroup | None,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """reduce_scatter(x Wᵀ) + bias + residual, scattered along dimension 0.

    x: [world * n, ..., K] with this rank's slice of the features; weight: [N, K] this rank's columns; bias:
    [N], equal on all ranks; residual: [n, ..., N], this rank's shard. Returns [n, ..., N]. Raises ValueError
    where the world does not divide the rows.
    """
    own = (x, weight, bias)
    out = F.linear(*own) if group is None else apply(_LinearReduceScatter, *autocast(*own), group)
    return out if residual is None else out + residual
