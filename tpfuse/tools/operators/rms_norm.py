"""rms_norm: the norm of each row without a mean, with or without a residual that is added before it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.layer_norm import norm_forward
from tpfuse.kernels.layer_norm_backward import norm_backward
from tpfuse.ops.rms_norm import add_rms_norm, rms_norm
from tpfuse.tools.operator import Operator
from tpfuse.tools.operators.layer_norm import EPS, WIDTHS, NormShape


@dataclass(frozen=True)
class RmsNormShape(NormShape):
    """The norm that does not subtract the mean of each row."""

    def function(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        return rms_norm(x, weight, EPS) if residual is None else torch.cat(add_rms_norm(x, residual, weight, EPS))

    def reference(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return reference.rms_norm(x, weight, EPS)
        return torch.cat([reference.rms_norm(x + residual, weight, EPS), x + residual])


def launches(dtype: torch.dtype) -> None:
    """Launch every width without a residual, and that of a 7B model also with one, for dx or dweight alone too."""
    for columns, with_residual in [(c, False) for c in WIDTHS] + [(4096, True)]:
        x = torch.empty(8192, columns, dtype=dtype, device="meta")
        weight = torch.empty(columns, dtype=dtype, device="meta")
        residual = x if with_residual else None
        *_, rstd = norm_forward(x, weight, None, EPS, residual, centered=False)
        norm_backward(x, x, weight, None, rstd, grad_summed=residual, with_bias=False)
        if with_residual:
            norm_backward(x, x, weight, None, rstd, grad_summed=residual, with_bias=False, with_weight=False)
            norm_backward(x, x, weight, None, rstd, with_bias=False, with_x=False)


_SMALL = (
    RmsNormShape("one block", 33, 64),
    RmsNormShape("several blocks", 63, 257),
    RmsNormShape("residual", 33, 100, ("residual",)),
)

OPERATOR = Operator("rms_norm", launches, _SMALL)
