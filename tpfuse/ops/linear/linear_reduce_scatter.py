"""linear_reduce_scatter: reduce_scatter(x Wᵀ) + bias + residual, the exit of a sequence-parallel block.

On each of R ranks, with M rows in all (dimensions after the first are rows too), G the gathered gradient of out:

    x [M, K], this rank's features    W [N, K], this rank's columns    bias [N], equal on all ranks
    residual and out [M / R, N], this rank's rows

    forward    out = reduce_scatter(x Wᵀ) + bias + residual             reduce-scatter of x Wᵀ
    dgrad      dx = G W [M, K]                                          all-gather of out's gradient [M / R, N]
    wgrad      dW = Gᵀ x [N, K], this rank's                            the same gather, unless another pass computes it
    dbias      column sums of G [N], complete and equal on all ranks    the same gather

The bias gradient is the same to the bit on every rank without another communication. `tpfuse.ops.linear.dispatch`
chooses the implementation.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm.collectives import refuse
from tpfuse.comm.mesh import check_group
from tpfuse.ops.autograd import apply, autocast, no_view, once_differentiable, refuse_tangents, wanted_gradients
from tpfuse.ops.checks import check_linear, check_residual
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear.dispatch import products
from tpfuse.ops.linear.parallel_linear import ParallelLinear


class _LinearReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, chosen: ParallelLinear
    ) -> Tensor:
        ctx.products = chosen
        ctx.save_for_backward(x, weight)
        return no_view(chosen.reduce_scatter(x, weight, bias, residual))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual, _ = wanted_gradients(ctx)
        needs, gradients = (needs_x, needs_weight, needs_bias), (None, None, None)
        if any(needs):  # the residual's gradient needs no communication
            gradients = ctx.products.reduce_scatter_backward(grad, x, weight, needs)
        return *gradients, grad if needs_residual else None, None


def linear_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None, *, residual: Tensor | None = None
) -> Tensor:
    """Return reduce_scatter(x Wᵀ) + bias + residual [n, ..., N], scattered along dimension 0.

    x: [world * n, ..., K] with this rank's slice of the features; weight: [N, K], this rank's columns; bias: [N], equal
    on all ranks; residual: [n, ..., N], this rank's shard, added in the last pass if it has x's dtype. Raise
    ValueError for shapes, dtypes or devices that do not fit, if the world does not divide the rows, and if shape or
    dtype of the result differ between ranks.
    """
    operator = "linear_reduce_scatter"
    check_group(operator, group)
    if group is None:
        return gemm(x, weight, bias, residual=residual)
    check_linear(operator, x, weight, bias)
    if x.ndim < 2:
        raise ValueError(f"{operator}: x has shape {tuple(x.shape)}: expected [world * n, ..., K]")
    x_, weight_, bias_ = autocast(x, weight, bias)
    if len(x) % group.size():
        shape, problem = (*x.shape[:-1], len(weight)), f"{len(x)} rows cannot be split among {group.size()} ranks"
        refuse(operator, x_, shape, group, problem)
    check_residual(operator, x, residual, (len(x) // group.size(), *x.shape[1:-1], len(weight)))
    if residual is not None and residual.dtype != x_.dtype:
        return linear_reduce_scatter(x, weight, bias, group) + residual
    chosen = products(x_, group)
    if torch.is_grad_enabled():
        return apply(_LinearReduceScatter, x_, weight_, bias_, residual, chosen)
    refuse_tangents(operator, x_, weight_, bias_, residual)
    return chosen.reduce_scatter(x_, weight_, bias_, residual)
