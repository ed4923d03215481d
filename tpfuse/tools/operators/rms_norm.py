"""rms_norm: the norm of each row without a mean."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.layer_norm import norm_forward
from tpfuse.kernels.layer_norm_backward import norm_backward
from tpfuse.ops.rms_norm import rms_norm
from tpfuse.tools.operator import Operator
from tpfuse.tools.operators.layer_norm import EPS, WIDTHS, NormShape


@dataclass(frozen=True)
class RmsNormShape(NormShape):
    """The norm that does not subtract the mean of each row."""

    def function(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, EPS)

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        return reference.rms_norm(x, weight, EPS)


def launches(dtype: torch.dtype) -> None:
    """Launch every width, and that of a 7B model also for dx or dweight alone."""
    for columns in WIDTHS:
        x = torch.empty(8192, columns, dtype=dtype, device="meta")
        weight = torch.empty(columns, dtype=dtype, device="meta")
        *_, rstd = norm_forward(x, weight, None, EPS, centered=False)
        norm_backward(x, x, weight, None, rstd, with_bias=False)
        if columns == 4096:
            norm_backward(x, x, weight, None, rstd, with_bias=False, with_weight=False)
            norm_backward(x, x, weight, None, rstd, with_bias=False, with_x=False)


_SMALL = (
    RmsNormShape("one block", 33, 64),
    RmsNormShape("several blocks", 63, 257),
)

OPERATOR = Operator("rms_norm", launches, _SMALL)
