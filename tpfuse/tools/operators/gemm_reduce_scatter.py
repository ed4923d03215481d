"""gemm_reduce_scatter: the product before a reduce-scatter, and launches that reach every row."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels.engine_scatter import await_part, sum_parts
from tpfuse.kernels.gemm_reduce_scatter import gemm_for_copies, gemm_reduce_scatter_forward
from tpfuse.kernels.launch import family, multiprocessors
from tpfuse.tools.operator import META, CallCost, Draw, OneRank, Operator, Shape, Tensors, on_meta


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
    if family(META) == "sm_90" and dtype.itemsize == 2:
        from tpfuse.kernels.gemm_reduce_scatter_ping_pong import gemm_reduce_scatter_ping_pong

        # It is not in the other one's place before a row says PING_PONG.
        for world in (4, 8):
            x, end = empty(m, k), on_meta(world, multiprocessors(META) * world, multiprocessors(META))
            gemm_reduce_scatter_ping_pong(x, empty(n, k), end, bias=empty(n), residual=empty(m // world, n))
            gemm_reduce_scatter_ping_pong(x, empty(k, n).t(), end)
    run(3, empty(150, odd), empty(n, odd))
    run(8, empty(m, odd), empty(1280, odd))


OPERATOR = Operator("gemm_reduce_scatter", launches, (OneRank("gemm_reduce_scatter"),))
