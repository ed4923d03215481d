"""linear_reduce_scatter: reduce_scatter(x Wᵀ) + bias + residual, the exit of a sequence-parallel block.

Every rank holds a slice of the features; the sum over ranks is scattered along dimension 0. Backward gathers
the output's gradient once and uses it for both products. The bias gradient is the column sum of the gathered
gradient, so it is whole on every rank without another communication.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm import collectives
from tpfuse.ops.autograd import apply, autocast, once_differentiable
from tpfuse.ops.gemm import gemm, input_gradient, product, weight_gradient


class _LinearReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        partial, _ = product(x, weight, None, None, keep=False)
        out = collectives.reduce_scatter(partial, group)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gathered = collectives.all_gather(grad, ctx.group)
        grad_x = input_gradient(gathered, weight) if needs_x else None
        grad_weight = grad_bias = None
        if needs_weight:
            grad_weight, grad_bias = weight_gradient(gathered, x, with_bias=needs_bias)
        elif needs_bias:
            grad_bias = gathered.flatten(0, -2).sum(0)
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
    if group is None:
        return gemm(*own, residual=residual)
    out = apply(_LinearReduceScatter, *autocast(*own), group)
    return out if residual is None else out + residual
