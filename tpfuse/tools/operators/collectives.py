"""collectives: one rank alone, with its signals, for `tpfuse verify`, and launches of eight ranks, also of messages."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels.all_gather import all_gather_forward
from tpfuse.kernels.all_reduce import all_reduce_forward
from tpfuse.kernels.all_to_all import all_to_all_forward
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.reduce_scatter import reduce_scatter_forward
from tpfuse.kernels.send_message import send_message
from tpfuse.ops.autograd import apply
from tpfuse.testing.inputs import normal
from tpfuse.tools.endpoints import EPOCHS, of_one_rank, on_meta
from tpfuse.tools.operator import Given, Operator


class _OutOfPlace(torch.autograd.Function):
    """A collective in a group of one rank. The collective and its gradient only move x through a slot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Callable[[Tensor, Endpoint], Tensor]) -> Tensor:
        ctx.move = move
        endpoint, memory = of_one_rank(x.device, programs=3)
        for _ in range(EPOCHS):
            out = move(x, endpoint)
        del memory  # freed in the order of the stream, or at once if kernels are interpreted
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return apply(_OutOfPlace, grad.contiguous(), ctx.move), None


def _all_gather(x: Tensor, endpoint: Endpoint) -> Tensor:
    out = torch.empty_like(x)
    all_gather_forward(x, out.view(1, -1), endpoint)
    return out


def _reduce_scatter(x: Tensor, endpoint: Endpoint) -> Tensor:
    out = torch.empty_like(x)
    reduce_scatter_forward(x.view(1, -1), out, endpoint)
    return out


def _all_reduce(x: Tensor, endpoint: Endpoint, two_shot: bool) -> Tensor:
    out = torch.empty_like(x)
    all_reduce_forward(x, out, endpoint, two_shot=two_shot)
    return out


def _all_to_all(x: Tensor, endpoint: Endpoint) -> Tensor:
    out = torch.empty_like(x)
    all_to_all_forward(x.view(1, -1), out.view(1, -1), endpoint)
    return out


def _case(name: str, move: Callable[[Tensor, Endpoint], Tensor]) -> Given:
    return Given(
        f"{name}, one rank",
        lambda x: apply(_OutOfPlace, x, move),
        lambda x: x.clone(),
        lambda dtype: {"x": normal(1, 1003, dtype=dtype)},
    )


CASES = (
    _case("all_gather", _all_gather),
    _case("reduce_scatter", _reduce_scatter),
    _case("all_reduce in one shot", partial(_all_reduce, two_shot=False)),
    _case("all_reduce in two shots", partial(_all_reduce, two_shot=True)),
    _case("all_to_all", _all_to_all),
)


def launches(dtype: torch.dtype, world: int = 8, n: int = 1 << 20) -> None:
    """Launch the last rank of `world` with n elements in a row, on meta tensors."""
    endpoint = on_meta(world, flags=4096, programs=64)
    row, rows = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((n,), (world, n)))
    all_gather_forward(row, rows, endpoint)
    all_to_all_forward(rows, rows, endpoint)
    reduce_scatter_forward(rows, row, endpoint)
    for two_shot in (False, True):
        all_reduce_forward(row, row, endpoint, two_shot=two_shot)
    send_message(row, endpoint, target=0, slot=1, full=0, free=1, epoch=1)


OPERATOR = Operator("collectives", launches, CASES)
