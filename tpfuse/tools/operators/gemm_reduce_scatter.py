"""gemm_reduce_scatter: one rank alone, with its signals, for `tpfuse verify`, and launches that reach every row."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.engine_scatter import await_part, sum_parts
from tpfuse.kernels.gemm_reduce_scatter import gemm_for_copies, gemm_reduce_scatter_forward
from tpfuse.kernels.launch import multiprocessors
from tpfuse.ops.autograd import apply
from tpfuse.testing.inputs import normal
from tpfuse.tools.endpoints import EPOCHS, of_one_rank, on_meta
from tpfuse.tools.operator import CallCost, Draw, Given, Operator, Shape, Tensors


@dataclass(frozen=True)
class GemmReduceScatterShape(Shape):
    """The product before a reduce-scatter: x [M, K] of one rank and weight [N, K]. M is divisible by `world`."""

    name: str
    world: int
    M: int
    N: int
    K: int

    def inputs(self, draw: Draw) -> Tensors:
        return {"x": draw.normal(self.M, self.K), "weight": draw.normal(self.N, self.K, scale=self.K**-0.5)}

    def costs(self) -> dict[str, CallCost]:
        """Return the cost of the product alone."""
        moved = 2 * (self.M * self.K + self.N * self.K + self.M * self.N)
        return {"forward": CallCost(2 * self.M * self.N * self.K, moved)}


def _alone(x: Tensor, weight: Tensor, copied: bool = False, **options: Any) -> Tensor:
    """Multiply several times in a group of one rank. copied: whether to launch as if copy engines moved the tiles."""
    endpoint, memory = of_one_rank(x.device, programs=3)
    stored = torch.zeros(3, dtype=torch.int32, device=x.device)
    for _ in range(EPOCHS):
        if copied:
            gemm_for_copies(x, weight, endpoint, stored.view(3, 1))
            await_part(endpoint, stored.view(3, 1), endpoint.state[:1] + 1, 0)
            out = x.new_empty(len(x), len(weight))
            sum_parts(out, endpoint, stored, len(x), **options)
        else:
            out = gemm_reduce_scatter_forward(x, weight, endpoint, **options)
    del memory  # freed in the order of the stream, or at once if kernels are interpreted
    return out


class _ScatterLinear(torch.autograd.Function):
    """A linear layer. The kernel computes the output and the gradient of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, copied: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.copied = copied
        return _alone(x, weight, copied, bias=bias, residual=residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        grad_x = _alone(grad, weight.t(), ctx.copied)
        return grad_x, grad.t() @ x, grad_bias, grad if ctx.needs_input_grad[3] else None, None


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, copied: bool
) -> Tensor:
    return apply(_ScatterLinear, x, weight, bias, residual, copied)


def _inputs(names: str, dtype: torch.dtype) -> dict[str, Tensor]:
    m, n, k = 100, 96, 80
    tensors = {
        "x": normal(1, m, k, dtype=dtype),
        "weight": normal(2, n, k, dtype=dtype) / k**0.5,
        "bias": normal(3, n, dtype=dtype),
        "residual": normal(4, m, n, dtype=dtype),
    }
    return {name: tensors[name] for name in names.split()}


def _case(inputs: str, copied: bool = False) -> Given:
    terms = inputs.removeprefix("x weight").strip().replace(" ", ", ") or "no bias"
    name = f"{terms}, one rank{', as beside copy engines' if copied else ''}"
    linear = partial(_linear, copied=copied)
    return Given(name, linear, reference.linear, partial(_inputs, inputs))


CASES = (_case("x weight bias residual"), _case("x weight"), _case("x weight bias residual", copied=True))


def launches(dtype: torch.dtype) -> None:
    """Launch a row-parallel layer and gradients of a column-parallel one, in groups of several sizes (meta tensors)."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def run(world: int, x: Tensor, weight: Tensor, copied: bool = False, **options: Any) -> None:
        programs = multiprocessors(x.device)
        endpoint = on_meta(world, programs * world, programs)
        if copied:
            stored = torch.empty(programs, world, dtype=torch.int32, device="meta")
            gemm_for_copies(x, weight, endpoint, stored)
            await_part(endpoint, stored, endpoint.abort, 0)
            sum_parts(empty(len(x) // world, len(weight)), endpoint, stored.view(-1), len(x) // world, **options)
        else:
            gemm_reduce_scatter_forward(x, weight, endpoint, **options)

    m, n, k = 8192, 4096, 2048
    run(8, empty(m, k), empty(n, k), bias=empty(n), residual=empty(m // 8, n))
    run(8, empty(m, k), empty(k, n).t())
    run(8, empty(m, k), empty(n, k), copied=True, bias=empty(n), residual=empty(m // 8, n))
    run(8, empty(m, k), empty(k, n).t(), copied=True)
    run(8, empty(256, k), empty(n, k))  # few rows for each owner
    run(8, empty(m, k), empty(1280, k))  # wide tiles would leave multiprocessors idle
    odd = k + 1  # rows that TMA cannot read
    run(3, empty(m, odd), empty(n, odd))
    run(2, empty(m, odd), empty(odd, n).t())
    run(3, empty(150, odd), empty(n, odd))
    run(8, empty(m, odd), empty(1280, odd))


OPERATOR = Operator("gemm_reduce_scatter", launches, CASES)
