"""collectives: one rank alone, with its signals, for `tpfuse verify`, and launches of eight ranks, also of messages."""

from collections.abc import Callable
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
from tpfuse.tools.operator import Given, Operator

_SLOT_BYTES = 1 << 16
_EPOCHS = 3


def _alone(device: torch.device) -> tuple[Endpoint, list[Tensor]]:
    """Return the endpoint of a group of one rank, and the memory at its addresses."""
    slots = torch.empty(2, _SLOT_BYTES, dtype=torch.uint8, device=device)
    flags, state, abort = (torch.zeros(n, dtype=torch.int32, device=device) for n in (256, 2, 1))
    addresses = [torch.tensor([x.data_ptr()], device=device) for x in (slots, flags)]
    endpoint = Endpoint(0, 1, addresses[0], _SLOT_BYTES, addresses[1], len(flags), state, abort, programs=3)
    return endpoint, [slots, flags]


class _OutOfPlace(torch.autograd.Function):
    """A collective in a group of one rank. The collective and its gradient only move x through a slot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Callable[[Tensor, Endpoint], Tensor]) -> Tensor:
        ctx.move = move
        endpoint, memory = _alone(x.device)
        for _ in range(_EPOCHS):
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


def _one_shot(x: Tensor, endpoint: Endpoint) -> Tensor:
    out = torch.empty_like(x)
    all_reduce_forward(x, out, endpoint, two_shot=False)
    return out


def _two_shot(x: Tensor, endpoint: Endpoint) -> Tensor:
    out = torch.empty_like(x)
    all_reduce_forward(x, out, endpoint, two_shot=True)
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
    _case("all_reduce in one shot", _one_shot),
    _case("all_reduce in two shots", _two_shot),
    _case("all_to_all", _all_to_all),
)


def launches(dtype: torch.dtype, world: int = 8, n: int = 1 << 20) -> None:
    """Launch the last rank of `world` with n elements in a row, on meta tensors."""
    tables = [torch.empty(world, dtype=torch.int64, device="meta") for _ in range(2)]
    state, abort = (torch.empty(words, dtype=torch.int32, device="meta") for words in (2, 1))
    endpoint = Endpoint(world - 1, world, tables[0], 1 << 30, tables[1], 4096, state, abort, programs=64)
    row, rows = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((n,), (world, n)))
    all_gather_forward(row, rows, endpoint)
    all_to_all_forward(rows, rows, endpoint)
    reduce_scatter_forward(rows, row, endpoint)
    for two_shot in (False, True):
        all_reduce_forward(row, row, endpoint, two_shot=two_shot)
    send_message(row, endpoint, target=0, slot=1, full=0, free=1, epoch=1)


OPERATOR = Operator("collectives", launches, CASES)
