"""all_gather_linear: act(all_gather(x) Wᵀ + bias), the entry of a sequence-parallel block.

Forward gathers the sequence shards and multiplies. Backward runs two communications behind two products: x
is gathered again (only this rank's shard was kept, arXiv:2205.05198) while dX = dY W is computed, and dX is
reduce-scattered while dW = dYᵀ X is.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm import collectives
from tpfuse.ops.activation import activation as apply_activation
from tpfuse.ops.autograd import apply, autocast, once_differentiable


class _AllGatherLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)
        return F.linear(collectives.all_gather(x, group), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_rows = grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if needs_weight:
            gathered, gather_handle = collectives.start_all_gather(x, ctx.group)
        if needs_x:
            grad_x, scatter_handle = collectives.start_reduce_scatter(grad @ weight, ctx.group)
        if needs_bias and ctx.has_bias:
            grad_bias = grad_rows.sum(0)
        if needs_weight:
            gather_handle.wait()
            grad_weight = torch.mm(grad_rows.t(), gathered.flatten(0, -2))
        if needs_x:
            scatter_handle.wait()
        return grad_x, grad_weight, grad_bias, None


def all_gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: dist.ProcessGroup | None,
    *,
    activation: str | None = None,
) -> Tensor:
    """act(all_gather(x) Wᵀ + bias), gathered along dimension 0.

    x: [n, ..., K] this rank's shard, equally long on all ranks; weight: [N, K] and bias: [N], this rank's
    rows, in x's dtype. Returns [world * n, ..., N], or N / 2 for the gated activations. In backward x's
    gradient is this rank's shard of the sum over ranks; the weight's and bias's are this rank's own.
    """
    if group is None:
        return apply_activation(F.linear(x, weight, bias), activation)
    return apply_activation(apply(_AllGatherLinear, *autocast(x, weight, bias), group), activation)
