"""rms_norm: small comparisons for `tpfuse verify`, and launches that reach every row of its tables."""

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from tpfuse.ops.rms_norm import add_rms_norm, rms_norm
from tpfuse.tools.operator import Case, Operator
from tpfuse.tools.operators.layer_norm import WIDTHS, inputs


def _function(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    return rms_norm(x, weight, 1e-5) if residual is None else torch.cat(add_rms_norm(x, residual, weight, 1e-5))


def _reference(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    if residual is None:
        return reference.rms_norm(x, weight, 1e-5)
    return torch.cat([reference.rms_norm(x + residual, weight, 1e-5), x + residual])


CASES = (
    Case("one block", _function, _reference, lambda dtype: inputs(33, 64, dtype)),
    Case("several blocks", _function, _reference, lambda dtype: inputs(63, 257, dtype)),
    Case("residual", _function, _reference, lambda dtype: inputs(33, 100, dtype, "residual")),
)


def launches(dtype: torch.dtype) -> None:
    """Every width without a residual, one of a 7B model also with."""
    for columns, with_residual in [(c, False) for c in WIDTHS] + [(4096, True)]:
        x = torch.empty(8192, columns, dtype=dtype, device="meta")
        weight = torch.empty(columns, dtype=dtype, device="meta")
        residual = x if with_residual else None
        _, _, rstd = rms_norm_forward(x, weight, 1e-5, residual=residual)
        rms_norm_backward(x, x, weight, rstd, grad_summed=residual)


OPERATOR = Operator("rms_norm", launches, CASES)
