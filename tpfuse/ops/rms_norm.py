"""rms_norm: x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv:1910.07467)."""

import torch.distributed as dist
from torch import Tensor

from tpfuse.ops.layer_norm import norm


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, sum_gradients_over: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the RMS norm of x, in x's shape and dtype. x: [..., C]; weight: [C], None for 1.

    sum_gradients_over and errors: as in `layer_norm`.
    """
    return norm("rms_norm", x, weight, None, eps, sum_gradients_over, centered=False)[0]
