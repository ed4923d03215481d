"""linear_all_reduce: all_reduce(x Wᵀ) + bias + residual, the row-parallel product without sequence parallelism.

On each rank, with M rows:

    x [M, K], this rank's features    W [N, K], this rank's columns    bias [N], residual and out [M, N], equal on all

    forward    out = all_reduce(x Wᵀ) + bias + residual    all-reduce of x Wᵀ
    dgrad      dx = dout W [M, K]                          none: all ranks have the same dout
    wgrad      dW = doutᵀ x [N, K], this rank's            none
    dbias      column sums of dout [N], equal on all       none

`tpfuse.ops.linear.dispatch` chooses the implementation.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm.mesh import check_group
from tpfuse.ops.autograd import apply, autocast, no_view, once_differentiable, refuse_tangents, wanted_gradients
from tpfuse.ops.checks import check_linear, check_residual
from tpfuse.ops.gemm import flat, gemm, weight_gradient
from tpfuse.ops.linear.dispatch import products
from tpfuse.ops.linear.parallel_linear import ParallelLinear


class _LinearAllReduce(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, chosen: ParallelLinear
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return no_view(chosen.all_reduce(x, weight, bias, residual))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual, _ = wanted_gradients(ctx)
        grad_x = torch.matmul(grad, weight) if needs_x else None
        grad_weight = weight_gradient(grad, x) if needs_weight else None
        grad_bias = flat(grad).sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, grad if needs_residual else None, None


def linear_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None, *, residual: Tensor | None = None
) -> Tensor:
    """Return all_reduce(x Wᵀ) + bias + residual [..., N], equal on all ranks.

    x: [..., K], this rank's slice of the features; weight: [N, K], this rank's columns; bias: [N] and residual:
    [..., N], equal on all ranks. The residual is added in the last pass if it has x's dtype. Raise ValueError for
    shapes, dtypes or devices that do not fit, and if those of the result differ between ranks.
    """
    operator = "linear_all_reduce"
    check_group(operator, group)
    if group is None:
        return gemm(x, weight, bias, residual=residual)
    check_linear(operator, x, weight, bias)
    check_residual(operator, x, residual, (*x.shape[:-1], len(weight)))
    x_, weight_, bias_ = autocast(x, weight, bias)
    if residual is not None and residual.dtype != x_.dtype:
        return linear_all_reduce(x, weight, bias, group) + residual
    chosen = products(x_, group)
    if torch.is_grad_enabled():
        return apply(_LinearAllReduce, x_, weight_, bias_, residual, chosen)
    refuse_tangents(operator, x_, weight_, bias_, residual)
    return chosen.all_reduce(x_, weight_, bias_, residual)
