"""adamw: a small comparison for `tpfuse verify`, and launches of every combination of dtypes that is trained with."""

from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import adamw, reference
from tpfuse.ops.adamw import adamw_
from tpfuse.testing.inputs import normal
from tpfuse.tools.operator import Case, Operator

_OPTIONS: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_STEPS = 3


def _function(gradient: Tensor) -> Tensor:
    """The parameter after some updates; as an operator that has no gradient, its own input takes none."""
    master, parameter = normal(2, len(gradient)).to(gradient.device), torch.empty_like(gradient, requires_grad=False)
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    with torch.no_grad():
        for step in range(1, _STEPS + 1):
            update = [master], [gradient * step], [exp_avg], [exp_avg_sq], [parameter]
            adamw_(*update, step=torch.tensor(float(step), device=master.device), **_OPTIONS)
    return parameter + 0 * gradient


def _reference(gradient: Tensor) -> Tensor:
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    parameter = normal(2, len(gradient)).to(gradient.device, dtype)
    moments = [torch.zeros_like(parameter) for _ in range(2)]
    for step in range(1, _STEPS + 1):
        update = (gradient * step).detach().to(dtype)
        parameter, *moments = reference.adamw(parameter, update, *moments, step=step, **_OPTIONS)
    return parameter.to(gradient.dtype) + 0 * gradient


CASES = (Case("three updates", _function, _reference, lambda dtype: {"gradient": normal(1, 1000, dtype=dtype)}),)


def launches(dtype: torch.dtype) -> None:
    """Float32 and half gradients into a half parameter; float32 alone."""
    master, exp_avg, exp_avg_sq = (torch.empty(1 << 22, device="meta") for _ in range(3))
    scalar = torch.empty((), device="meta")
    parameter = None if dtype == torch.float32 else torch.empty(1 << 22, dtype=dtype, device="meta")
    for gradient_dtype in {dtype, torch.float32}:
        gradient = torch.empty(1 << 22, dtype=gradient_dtype, device="meta")
        for factor in (None, scalar):
            rates = _OPTIONS | {"lr": scalar, "step": scalar, "scale": factor, "clip": factor}
            adamw.adamw_(master, gradient, exp_avg, exp_avg_sq, parameter, **rates)


OPERATOR = Operator("adamw", launches, CASES)
