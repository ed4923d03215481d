"""gemm: a linear layer with bias, activation and residual."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.activation_backward import activation_backward
from tpfuse.kernels.activations import ACTIVATIONS, GATED
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.launch import family
from tpfuse.ops.gemm import gemm
from tpfuse.tools.operator import (
    META,
    CallCost,
    Draw,
    Launchers,
    Operator,
    Outputs,
    Shape,
    Tensors,
    gradients,
    seeded_draw,
)


@dataclass(frozen=True)
class GemmShape(Shape):
    """The product of x [M, K] and weight [N, K], with some of the terms bias [N] and residual."""

    name: str
    M: int
    N: int
    K: int
    activation: str | None
    terms: tuple[str, ...] = ("bias",)

    @property
    def width(self) -> int:
        """Return the number of columns of the result."""
        return self.N // 2 if self.activation in GATED else self.N

    def inputs(self, draw: Draw) -> Tensors:
        tensors = {"x": draw.normal(self.M, self.K), "weight": draw.normal(self.N, self.K, scale=self.K**-0.5)}
        shapes = {"bias": (self.N,), "residual": (self.M, self.width)}
        return tensors | {name: draw.normal(*shapes[name]) for name in self.terms}

    def function(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        return gemm(x, weight, bias, activation=self.activation, residual=residual)

    def reference(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        return reference.linear(x, weight, bias, self.activation, residual)

    def gradient(self, draw: Draw) -> Tensor:
        return draw.normal(self.M, self.width)

    def costs(self) -> dict[str, CallCost]:
        flops, weights = 2 * self.M * self.N * self.K, self.N * self.K + self.N * ("bias" in self.terms)
        kept = self.M * self.N if self.activation else 0  # the pre-activation
        x, out = self.M * self.K, self.M * self.width
        return {
            "inference": CallCost(flops, 2 * (x + weights + out)),
            "forward": CallCost(flops, 2 * (x + weights + out + kept)),
            "backward": CallCost(2 * flops, 2 * (out + kept + 2 * x + 2 * weights)),
            "activation backward": CallCost(0, 2 * (out + 2 * kept)),
        }

    def saved(self, inputs: Tensors) -> Tensors:
        x = inputs["x"]
        return {"preactivation": seeded_draw(x.device, x.dtype, seed=2).normal(self.M, self.N)}

    def launch(self, x: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
        keep = self.activation is not None
        out, kept = gemm_forward(x, weight, bias, activation=self.activation, keep_preactivation=keep)
        return (out,) if kept is None else (out, kept)

    def plain_launch(self, x: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
        preactivation = reference.linear(x, weight, bias)
        out = reference.activation(preactivation, self.activation)
        return (out,) if self.activation is None else (out, preactivation)

    def activation_backward(self, grad: Tensor, preactivation: Tensor, **_: Tensor) -> Outputs:
        assert self.activation is not None
        out, sums = activation_backward(grad, preactivation, self.activation, with_sums=True)
        assert sums is not None
        return out, sums

    def plain_activation_backward(self, grad: Tensor, preactivation: Tensor, **_: Tensor) -> Outputs:
        out = gradients(lambda x: reference.activation(x, self.activation), {"x": preactivation}, grad)[0]
        return out, out.sum(0)

    def launchers(self) -> Launchers:
        both: Launchers = {"forward": (self.launch, self.plain_launch)}
        if self.activation is not None:
            both["activation backward"] = self.activation_backward, self.plain_activation_backward
        return both


def _small(activation: str | None, *terms: str) -> GemmShape:
    return GemmShape(", ".join([activation or "no activation", *terms]), 100, 96, 80, activation, terms)


def launches(dtype: torch.dtype) -> None:
    """Launch every activation forward and backward, with few and many rows, aligned for TMA or not, on meta tensors."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    m, n, k = 8192, 16384, 4096
    for activation in ACTIVATIONS:
        width = n // 2 if activation in GATED else n
        keep = activation is not None
        gemm_forward(
            empty(m, k), empty(n, k), empty(n), empty(m, width), activation=activation, keep_preactivation=keep
        )
        if activation is not None:
            activation_backward(empty(m, width), empty(m, n), activation, with_sums=True)
    for activation in ("gelu", "geglu"):
        gemm_forward(empty(16, k), empty(n, k), activation=activation)  # one token of 16 sequences
        gemm_forward(empty(m, k + 1), empty(n, k + 1), activation=activation)  # rows that TMA cannot read
    for activation in (None, "gelu_tanh"):  # wide tiles would leave multiprocessors idle
        gemm_forward(empty(4096, k), empty(1280, k), activation=activation, residual=empty(4096, 1280))
    activation_backward(empty(m, n), empty(m, n), "gelu_tanh")
    # K is split, since there are few tiles.
    gemm_forward(empty(16, n), empty(768, n), empty(768), empty(16, 768), activation="gelu")
    if family(META) == "sm_90" and dtype.itemsize == 2:
        _ping_pong_launches(empty)


def _ping_pong_launches(empty: Callable[..., Tensor]) -> None:
    """Launch what models need of `gemm_ping_pong`; it is not in `gemm_forward`'s place before a row says PING_PONG."""
    from tpfuse.kernels.gemm_ping_pong import gemm_ping_pong, gemm_ping_pong_gradient

    m, n, k = 8192, 16384, 4096
    x, weight = empty(m, k), empty(n, k)
    gemm_ping_pong(x, weight, empty(n), empty(m, n))
    gemm_ping_pong(x, weight, activation="swiglu", keep_preactivation=True)
    for activation in ("gelu", "gelu_tanh", "silu", "relu2"):
        gemm_ping_pong(x, weight, empty(n), activation=activation, keep_preactivation=True)
    for activation in ("gelu_tanh", "silu", "relu2"):
        gemm_ping_pong_gradient(x, weight.t().contiguous(), empty(m, n), activation)


_SMALL = (
    _small(None, "bias", "residual"),
    _small("gelu", "bias", "residual"),
    _small("gelu_tanh"),
    _small("relu2", "bias"),
    _small("swiglu"),
    _small("geglu", "bias"),
)

OPERATOR = Operator(
    name="gemm",
    launches=launches,
    cases=_SMALL,
    models=(
        GemmShape("7b tp4 up", 8192, 5504, 4096, "swiglu"),
        GemmShape("1558m tp1 up", 8192, 6400, 1600, "gelu_tanh"),
        GemmShape("124m tp1 up", 8192, 3072, 768, "gelu_tanh"),
        GemmShape("7b tp1 proj", 8192, 4096, 4096, None),
        GemmShape("70b tp8 down", 8192, 8192, 3584, None),
        GemmShape("7b tp1 proj of 16 tokens", 16, 4096, 4096, None),
        GemmShape("unaligned", 8192, 4096, 1001, None),
    ),
    tiny=(GemmShape("tiny", 20, 32, 16, "gelu_tanh"), GemmShape("tiny gated", 20, 32, 16, "swiglu")),
)
