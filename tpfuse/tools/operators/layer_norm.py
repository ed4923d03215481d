"""layer_norm: small comparisons for `tpfuse verify`, and launches that reach every row of its tables."""

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.layer_norm import layer_norm_forward
from tpfuse.kernels.layer_norm_backward import layer_norm_backward
from tpfuse.ops.layer_norm import add_layer_norm, layer_norm
from tpfuse.testing.inputs import normal
from tpfuse.tools.operator import Case, Operator

# Heads, GPT-2's widths, those of 7B and 70B models, and one that is more than a block.
WIDTHS = (128, 768, 1600, 4096, 8192, 16384)


def _function(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    if residual is None:
        return layer_norm(x, weight, bias, 1e-5)
    return torch.cat(add_layer_norm(x, residual, weight, bias, 1e-5))


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    if residual is None:
        return reference.layer_norm(x, weight, bias, 1e-5)
    return torch.cat([reference.layer_norm(x + residual, weight, bias, 1e-5), x + residual])


def inputs(rows: int, columns: int, dtype: torch.dtype, *names: str, offset: float = 0.0) -> dict[str, Tensor]:
    """x [rows, columns] around `offset`, weight, and those of bias and residual that are named."""
    x = normal(1, rows, columns, dtype=dtype) + offset
    shapes = {"weight": (columns,), "bias": (columns,), "residual": (rows, columns)}
    rest = {name: normal(seed, *shapes[name], dtype=dtype) for seed, name in enumerate(("weight", *names), 2)}
    return {"x": x, **rest}


CASES = (
    Case("bias", _function, _reference, lambda dtype: inputs(63, 100, dtype, "bias")),
    Case("no bias", _function, _reference, lambda dtype: inputs(33, 64, dtype)),
    Case("residual", _function, _reference, lambda dtype: inputs(33, 257, dtype, "bias", "residual")),
    Case("large mean", _function, _reference, lambda dtype: inputs(16, 63, dtype, "bias", offset=300)),
)


def launches(dtype: torch.dtype) -> None:
    """Every width with a residual and a bias, one of GPT-2's also without."""
    for columns, with_residual in [(c, True) for c in WIDTHS] + [(768, False)]:
        x = torch.empty(8192, columns, dtype=dtype, device="meta")
        weight = torch.empty(columns, dtype=dtype, device="meta")
        residual, bias = (x, weight) if with_residual else (None, None)
        _, _, mean, rstd = layer_norm_forward(x, weight, bias, 1e-5, residual=residual)
        layer_norm_backward(x, x, weight, mean, rstd, grad_summed=residual, with_bias=bias is not None)


OPERATOR = Operator("layer_norm", launches, CASES)
