"""rms_norm: x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv:1910.07467); also of x + residual."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfuse.ops.collectives import replicate
from tpfuse.ops.layer_norm import check_norm, normalize
from tpfuse.switches import use_triton


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, sum_gradients_over: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the RMS norm of x, in x's shape and dtype. x: [..., C]; weight: [C], None for 1.

    sum_gradients_over and errors: as in `layer_norm`.
    """
    check_norm("rms_norm", x, weight, None)
    weight = None if weight is None else replicate(weight, sum_gradients_over)
    if use_triton(x):
        weight = x.new_ones(x.shape[-1]) if weight is None else weight
        return normalize(x, None, weight, None, eps, centered=False)[0]
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, sum_gradients_over: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(summed), summed) with summed = x + residual, in one pass, also in backward; residual: like x."""
    check_norm("add_rms_norm", x, weight, None, residual)
    weight = replicate(weight, sum_gradients_over)
    if use_triton(x):
        return normalize(x, residual, weight, None, eps, centered=False)
    summed = x + residual
    return F.rms_norm(summed, (x.shape[-1],), weight, eps), summed
