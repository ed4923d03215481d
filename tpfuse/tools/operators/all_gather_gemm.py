"""all_gather_gemm: the product after an all-gather, and launches that reach every row."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.activations import ACTIVATIONS, GATED
from tpfuse.kernels.all_gather_gemm import all_gather_gemm_forward
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.engine_gather import close_copies, open_copies
from tpfuse.kernels.launch import family, multiprocessors
from tpfuse.tools.operator import (
    META,
    CallCost,
    Draw,
    Launchers,
    OneRank,
    Operator,
    Outputs,
    Shape,
    Tensors,
    on_meta,
    seeded_draw,
)


@dataclass(frozen=True)
class AllGatherGemmShape(Shape):
    """The product after an all-gather, with all chunks present: `world` chunks [m, K], weight [N, K].

    bias: whether a bias [N] is added.
    """

    name: str
    world: int
    m: int
    N: int
    K: int
    activation: str | None
    bias: bool = False

    @property
    def width(self) -> int:
        """Return the number of columns of the result."""
        return self.N // 2 if self.activation in GATED else self.N

    def inputs(self, draw: Draw) -> Tensors:
        words = partial(torch.zeros, dtype=torch.int32, device=draw.device)
        # These are the addresses of slots and flags, which no kernel reads.
        addresses = torch.zeros(self.world, dtype=torch.int64, device=draw.device)
        tensors = {
            "gathered": draw.normal(self.world, self.m, self.K),
            "weight": draw.normal(self.N, self.K, scale=self.K**-0.5),
        }
        if self.bias:
            tensors["bias"] = draw.normal(self.N)
        signals = {"addresses": addresses, "ready": words(self.world) + 1, "state": words(2), "abort": words(1)}
        return tensors | signals

    def costs(self) -> dict[str, CallCost]:
        rows = self.world * self.m
        moved = 2 * (rows * self.K + self.N * self.K + rows * self.width)
        return {"forward": CallCost(2 * rows * self.N * self.K, moved)}

    def drawn(self, device: torch.device, dtype: torch.dtype) -> Tensors:
        return self.inputs(seeded_draw(device, dtype))

    def launch(
        self,
        gathered: Tensor,
        weight: Tensor,
        addresses: Tensor,
        ready: Tensor,
        state: Tensor,
        abort: Tensor,
        bias: Tensor | None = None,
    ) -> Outputs:
        state.zero_()  # the first epoch again, in which all chunks are ready
        programs = multiprocessors(gathered.device)
        endpoint = Endpoint(
            0, self.world, addresses, 16, addresses, programs * self.world, state, abort, programs=programs
        )
        return (
            all_gather_gemm_forward(
                gathered[0], weight, bias, gathered, ready, endpoint, activation=self.activation, copied=True
            )[0],
        )

    def plain(self, gathered: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Tensor) -> Outputs:
        return (reference.linear(gathered.flatten(0, 1), weight, bias, self.activation),)

    def launchers(self) -> Launchers:
        return {"forward": (self.launch, self.plain)}


def launches(dtype: torch.dtype) -> None:
    """Launch column-parallel layers and gradients of a row-parallel one, in groups of several sizes (meta tensors)."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def run(
        world: int,
        m: int,
        weight: Tensor,
        bias: Tensor | None = None,
        launcher: Callable[..., object] = all_gather_gemm_forward,
        **options: Any,
    ) -> None:
        endpoint = on_meta(world, flags=8 * world, programs=108)
        stamp, ready = (torch.empty(n, dtype=torch.int32, device="meta") for n in (1, 8 * world))
        x, gathered = empty(m, weight.shape[1]), empty(world, m, weight.shape[1])
        if options.get("copied"):
            open_copies(endpoint, stamp)
            close_copies(endpoint)
        launcher(x, weight, bias, gathered, ready, endpoint, **options)

    m, n, k = 1024, 4096, 8192
    for activation in ACTIVATIONS:
        keep = activation is not None
        run(8, m, empty(n, k), empty(n), activation=activation, keep_preactivation=keep, keep_own=True)
    for activation in ("gelu", "geglu"):
        run(4, 64, empty(n, k), activation=activation)  # few rows
        run(3, m, empty(n, k + 1), activation=activation)  # rows that TMA cannot read
    for activation in (None, "gelu_tanh"):  # wide tiles would leave multiprocessors idle
        run(8, m, empty(1024, k), activation=activation, keep_own=True)
    run(2, m, empty(k, n).t(), keep_own=True)
    run(2, m, empty(n, k), empty(n), activation="gelu", keep_preactivation=True, copied=True)
    if family(META) == "sm_90" and dtype.itemsize == 2:
        from tpfuse.kernels.all_gather_gemm_ping_pong import all_gather_gemm_ping_pong

        # It is not in the other one's place before a row says PING_PONG.
        ping_pong = partial(run, launcher=all_gather_gemm_ping_pong)
        ping_pong(4, m, empty(n, k), empty(n))
        ping_pong(4, m, empty(k, n).t())  # the gradient of a row-parallel layer
        for activation in ("gelu", "gelu_tanh", "silu", "relu2", "swiglu"):
            ping_pong(8, m, empty(n, k), empty(n), activation=activation, keep_preactivation=True)


OPERATOR = Operator(
    name="all_gather_gemm",
    launches=launches,
    cases=(OneRank("all_gather_gemm"),),
    models=(
        AllGatherGemmShape("70b tp8 up", 8, 1024, 7168, 8192, "swiglu"),
        AllGatherGemmShape("70b tp8 qkv", 8, 1024, 1280, 8192, None),
        AllGatherGemmShape("7b tp4 qkv", 4, 2048, 3072, 4096, None),
    ),
    tiny=(AllGatherGemmShape("tiny", 2, 10, 32, 16, "swiglu"),),
)
