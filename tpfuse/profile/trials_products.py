"""Trials of the kernels that multiply matrices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.activations import GATED
from tpfuse.kernels.attention_backward import attention_backward
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.gemm_input_gradient import gemm_input_gradient
from tpfuse.kernels.gemm_weight_gradient import gemm_weight_gradient
from tpfuse.profile.trial import Outputs, Trial, gradients, normal


@dataclass(frozen=True)
class Gemm:
    """A linear layer's three products: x [M, K], weight [N, K]."""

    name: str
    M: int
    N: int
    K: int
    activation: str | None

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        draw = partial(normal, device, dtype)
        width = self.N // 2 if self.activation in GATED else self.N
        scale = self.K**-0.5
        return {
            "x": draw(self.M, self.K),
            "weight": draw(self.N, self.K, scale=scale),
            "bias": draw(self.N),
            "grad": draw(self.M, width),
            "preactivation": draw(self.M, self.N),
        }

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
        keep = self.activation is not None
        out, kept = gemm_forward(x, weight, bias, activation=self.activation, keep_preactivation=keep)
        return (out,) if kept is None else (out, kept)

    def plain_forward(self, x: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
        preactivation = reference.linear(x, weight, bias)
        out = reference.activation(preactivation, self.activation)
        return (out,) if self.activation is None else (out, preactivation)

    def _given(self, preactivation: Tensor) -> Tensor | None:
        return None if self.activation is None else preactivation

    def input_gradient(self, grad: Tensor, weight: Tensor, preactivation: Tensor, **_: Tensor) -> Outputs:
        return (gemm_input_gradient(grad, weight, self._given(preactivation), activation=self.activation),)

    def weight_gradient(self, grad: Tensor, x: Tensor, preactivation: Tensor, **_: Tensor) -> Outputs:
        given = self._given(preactivation)
        out, bias = gemm_weight_gradient(grad, x, given, activation=self.activation, with_bias=True)
        assert bias is not None
        return out, bias

    def _plain_factor(self, grad: Tensor, preactivation: Tensor) -> Tensor:
        if self.activation is None:
            return grad
        return gradients(partial(reference.activation, name=self.activation), {"x": preactivation}, grad)[0]

    def plain_input_gradient(self, grad: Tensor, weight: Tensor, preactivation: Tensor, **_: Tensor) -> Outputs:
        return (self._plain_factor(grad, preactivation) @ weight,)

    def plain_weight_gradient(self, grad: Tensor, x: Tensor, preactivation: Tensor, **_: Tensor) -> Outputs:
        factor = self._plain_factor(grad, preactivation)
        return factor.T @ x, factor.sum(0)

    def trials(self) -> list[Trial]:
        flops, unit = 2.0 * self.M * self.N * self.K, "TFLOP/s"
        pairs: dict[str, tuple[Callable[..., Outputs], Callable[..., Outputs]]] = {
            "": (self.forward, self.plain_forward),
            " input gradient": (self.input_gradient, self.plain_input_gradient),
            " weight gradient": (self.weight_gradient, self.plain_weight_gradient),
        }
        return [Trial(self.name + what, self.inputs, *pair, flops, unit) for what, pair in pairs.items()]


@dataclass(frozen=True)
class Attention:
    """Causal attention, q [1, H, T, D], k and v [1, Hk, T, D]."""

    name: str
    H: int
    Hk: int
    T: int
    D: int

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        draw = partial(normal, device, dtype, 1, self.T)
        q, k, v = (draw(heads, self.D).transpose(1, 2) for heads in (self.H, self.Hk, self.Hk))
        out, lse = reference.attention(q.float(), k.float(), v.float())
        grad = draw(self.H, self.D).transpose(1, 2)
        return {"grad_out": grad, "q": q, "k": k, "v": v, "out": out.to(dtype), "lse": lse}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Outputs:
        return (attention_forward(q, k, v)[0],)

    def plain_forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Outputs:
        return (reference.attention(q, k, v)[0],)

    def backward(self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Outputs:
        return attention_backward(grad_out, q, k, v, out, lse)

    def plain_backward(self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Outputs:
        return gradients(lambda **x: reference.attention(**x)[0], {"q": q, "k": k, "v": v}, grad_out)

    def trials(self) -> list[Trial]:
        flops = 2.0 * self.H * self.D * self.T**2
        return [
            Trial(self.name, self.inputs, self.forward, self.plain_forward, flops, "TFLOP/s"),
            Trial(f"{self.name} backward", self.inputs, self.backward, self.plain_backward, 2.5 * flops, "TFLOP/s"),
        ]
