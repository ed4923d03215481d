"""all_gather_linear: act(all_gather(x) Wᵀ + bias), the entry of a sequence-parallel block.

Forward gathers the sequence shards and multiplies. Backward runs two communications behind two products: x
is gathered again (only this rank's shard was kept, arXiv:2205.05198) while dX = dY W is computed, and dX is
reduce-scattered while dW = dYᵀ X is. Triton's products apply the activation in their last pass, and its derivative
in the first of backward's; beside torch's it is an operator of its own.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm import collectives
from tpfuse.kernel_choice import use_triton
from tpfuse.ops.activation import activation as apply_activation
from tpfuse.ops.autograd import apply, autocast, once_differentiable
from tpfuse.ops.gemm import gemm, input_gradient, product, weight_gradient


class _AllGatherLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
        activation: str | None,
    ) -> Tensor:
        ctx.group, ctx.activation = group, activation
        keep = activation is not None and any(ctx.needs_input_grad)
        out, preactivation = product(collectives.all_gather(x, group), weight, bias, activation, keep)
        ctx.save_for_backward(x, weight, preactivation)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, preactivation = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        factor = (preactivation, ctx.activation)
        grad_x = grad_weight = grad_bias = None
        if needs_weight or needs_bias:
            gathered, gather_handle = collectives.start_all_gather(x, ctx.group)
        if needs_x:
            partial = input_gradient(grad, weight, *factor)
            grad_x, scatter_handle = collectives.start_reduce_scatter(partial, ctx.group)
        if needs_weight or needs_bias:
            gather_handle.wait()
            grad_weight, grad_bias = weight_gradient(grad, gathered, *factor, with_bias=needs_bias)
        if needs_x:
            scatter_handle.wait()
        return grad_x, grad_weight if needs_weight else None, grad_bias, None, None


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
        return gemm(x, weight, bias, activation=activation)
    own = autocast(x, weight, bias)
    if use_triton(x):
        return apply(_AllGatherLinear, *own, group, activation)
    return apply_activation(apply(_AllGatherLinear, *own, group, None), activation)
