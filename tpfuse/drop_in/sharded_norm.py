"""A root-mean-square norm over features that are sharded over the ranks, whose squares are summed in rank order."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm.mesh import rank_and_size
from tpfuse.comm.sum_order import summed_dtype
from tpfuse.ops.autograd import apply, once_differentiable
from tpfuse.ops.collectives import all_reduce


def sharded_rms_norm(x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's features of x / sqrt(mean(x²) + eps) * weight, in x's shape and dtype.

    x: [..., C / ranks], of C features over whose squares the mean is taken; weight: [C / ranks]. Half types are
    computed in float32. Forward sums a number for each row over the ranks, and backward another one.
    """
    return apply(_ShardedRMSNorm, x, weight, eps, group)


class _ShardedRMSNorm(Function):
    """x, weight and a number for each row are kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup | None) -> Tensor:
        wide = x.to(summed_dtype(x.dtype))
        features = x.shape[-1] * rank_and_size(group)[1]
        squares = all_reduce(wide.square().sum(-1, keepdim=True), group)
        scale = (squares / features + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        ctx.group, ctx.features = group, features
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = x * scale, grad.to(scale.dtype)
        weighted = grad * weight
        shared = all_reduce((weighted * normed).sum(-1, keepdim=True), ctx.group) / ctx.features
        of_weight = (grad * normed).flatten(0, -2).sum(0)
        return ((weighted - normed * shared) * scale).to(x.dtype), of_weight.to(weight.dtype), None, None
