"""gemm_reduce_scatter: of one rank alone for `tpfuse verify`, signals included; launches that reach every row."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.activations import GATED
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.gemm_reduce_scatter import gemm_reduce_scatter_forward
from tpfuse.kernels.gemm_weight_gradient import gemm_weight_gradient
from tpfuse.ops.autograd import apply
from tpfuse.profile.case import Case
from tpfuse.testing.inputs import normal

_SLOT_BYTES = 1 << 16
_EPOCHS = 3


def _alone(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """The product of a group of one rank, several times over."""
    slots = torch.empty(2, _SLOT_BYTES, dtype=torch.uint8, device=x.device)
    flags, state, abort, counts = (torch.zeros(n, dtype=torch.int32, device=x.device) for n in (1, 2, 1, 1))
    addresses = [torch.tensor([memory.data_ptr()], device=x.device) for memory in (slots, flags)]
    endpoint = Endpoint(0, 1, addresses[0], _SLOT_BYTES, addresses[1], len(flags), state, abort, programs=3)
    for _ in range(_EPOCHS):
        out = gemm_reduce_scatter_forward(x, weight, endpoint, counts, **options)
    return out


class _Linear(torch.autograd.Function):
    """Without an activation forward and the gradient of x are of the kernel, with one the gradient of x alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None
    ) -> Tensor:
        preactivation = None
        if activation is None:
            out = _alone(x, weight, bias=bias, residual=residual)
        else:
            out, preactivation = gemm_forward(x, weight, bias, residual, activation=activation, keep_preactivation=True)
        ctx.save_for_backward(x, weight, preactivation)
        ctx.activation = activation
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, preactivation = ctx.saved_tensors
        grad_x = _alone(grad, weight.t(), preactivation=preactivation, activation=ctx.activation)
        into, bias_into = gemm_weight_gradient(
            grad, x, preactivation, activation=ctx.activation, with_bias=ctx.needs_input_grad[2]
        )
        return grad_x, into, bias_into, grad if ctx.needs_input_grad[3] else None, None


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, activation: str | None
) -> Tensor:
    return apply(_Linear, x, weight, bias, residual, activation)


def _inputs(names: str, dtype: torch.dtype) -> dict[str, Tensor]:
    m, n, k = 100, 96, 80
    tensors = {
        "x": normal(1, m, k, dtype=dtype),
        "weight": normal(2, n, k, dtype=dtype) / k**0.5,
        "bias": normal(3, n, dtype=dtype),
        "residual": normal(4, m, n, dtype=dtype),
    }
    return {name: tensors[name] for name in names.split()}


def _case(name: str, inputs: str, activation: str | None) -> Case:
    return Case(
        "gemm_reduce_scatter",
        f"{name}, one rank",
        partial(_linear, activation=activation),
        partial(reference.linear, activation_name=activation),
        partial(_inputs, inputs),
    )


CASES = (
    _case("bias, residual", "x weight bias residual", None),
    _case("gradient of gelu", "x weight", "gelu"),
    _case("gradient of swiglu", "x weight bias", "swiglu"),
)


def launches(dtype: torch.dtype) -> None:
    """On meta tensors: forward of a row-parallel layer and gradients of column-parallel ones, in groups of any size."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def run(world: int, x: Tensor, weight: Tensor, **options: Any) -> None:
        slots, flags = (torch.empty(world, dtype=torch.int64, device="meta") for _ in range(2))
        state, abort, counts = (torch.empty(words, dtype=torch.int32, device="meta") for words in (2, 1, world))
        endpoint = Endpoint(world - 1, world, slots, 1 << 30, flags, world, state, abort, programs=64)
        gemm_reduce_scatter_forward(x, weight, endpoint, counts, **options)

    m, n, k = 8192, 4096, 2048
    run(8, empty(m, k), empty(n, k), bias=empty(n), residual=empty(m // 8, n))
    run(8, empty(m, k), empty(k, n).t())
    for activation in ("gelu", "gelu_tanh", "swiglu", "geglu"):
        width = 2 * k if activation in GATED else k
        run(8, empty(m, k), empty(width, n).t(), preactivation=empty(m, width), activation=activation)
    run(8, empty(256, k), empty(n, k))  # few rows of each owner
    run(8, empty(256, k), empty(2 * k, n).t(), preactivation=empty(256, 2 * k), activation="geglu")
    odd = k + 1  # rows that TMA cannot read
    run(3, empty(m, odd), empty(n, odd))
    run(3, empty(m, odd), empty(odd, n).t(), preactivation=empty(m, odd), activation="gelu_tanh")
    run(2, empty(m, odd), empty(2 * odd, n).t(), preactivation=empty(m, 2 * odd), activation="geglu")
