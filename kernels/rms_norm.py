"""rms_norm: y = x / sqrt(mean(x²) + eps) * weight over rows (arXiv:1910.07467): the kernels of layer_norm without mean.

The weight multiplies in float32, before the result is rounded, as in torch.nn.functional.rms_norm.
"""

from torch import Tensor

from tpfuse.kernels.layer_norm import norm_forward
from tpfuse.kernels.layer_norm_backward import norm_backward


def rms_norm_forward(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns (out, summed, rstd): as `layer_norm_forward`, with rstd = 1 / sqrt(mean(x²) + eps)."""
    out, summed, _, rstd = norm_forward("rms_norm", x, weight, None, eps, residual, centered=False)
    return out, summed, rstd


def rms_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, grad_summed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (dx, dweight): as `layer_norm_backward`."""
    dx, dweight, _ = norm_backward(
        "rms_norm_backward", grad_out, x, weight, None, rstd, grad_summed=grad_summed, with_bias=False
    )
    return dx, dweight
