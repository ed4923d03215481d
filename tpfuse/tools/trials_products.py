"""Trials of the kernels that multiply matrices."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.activation_backward import activation_backward
from tpfuse.kernels.activations import GATED
from tpfuse.kernels.all_gather_gemm import all_gather_gemm_forward
from tpfuse.kernels.attention_backward import attention_backward
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.launch import multiprocessors
from tpfuse.tools.trial import Outputs, Trial, gradients, normal


@dataclass(frozen=True)
class Gemm:
    """A linear layer with an epilogue, and what backward does in front of its products: x [M, K], weight [N, K]."""

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

    def activation_backward(self, grad: Tensor, preactivation: Tensor, **_: Tensor) -> Outputs:
        assert self.activation is not None
        out, sums = activation_backward(grad, preactivation, self.activation, with_sums=True)
        assert sums is not None
        return out, sums

    def plain_activation_backward(self, grad: Tensor, preactivation: Tensor, **_: Tensor) -> Outputs:
        out = gradients(partial(reference.activation, name=self.activation), {"x": preactivation}, grad)[0]
        return out, out.sum(0)

    def trials(self) -> list[Trial]:
        flops = 2.0 * self.M * self.N * self.K
        trials = [Trial(self.name, self.inputs, self.forward, self.plain_forward, flops, "TFLOP/s")]
        if self.activation is not None:
            pair = self.activation_backward, self.plain_activation_backward
            moved = 2.0 * self.M * self.N * (2.5 if self.activation in GATED else 3.0)
            trials.append(Trial(f"{self.name} activation backward", self.inputs, *pair, moved, "TB/s"))
        return trials


@dataclass(frozen=True)
class AllGatherGemm:
    """The product behind an all-gather, of chunks that are there: `world` chunks [m, K], weight [N, K]."""

    name: str
    world: int
    m: int
    N: int
    K: int
    activation: str | None

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        draw = partial(normal, device, dtype)
        words = partial(torch.zeros, dtype=torch.int32, device=device)
        addresses = torch.zeros(self.world, dtype=torch.int64, device=device)  # of slots and flags, which are not used
        return {
            "gathered": draw(self.world, self.m, self.K),
            "weight": draw(self.N, self.K, scale=self.K**-0.5),
            "addresses": addresses,
            "ready": words(self.world) + 1,
            "state": words(2),
            "abort": words(1),
        }

    def forward(
        self, gathered: Tensor, weight: Tensor, addresses: Tensor, ready: Tensor, state: Tensor, abort: Tensor
    ) -> Outputs:
        state.zero_()  # the first epoch again, for which all are ready
        programs = multiprocessors(gathered.device)
        endpoint = Endpoint(
            0, self.world, addresses, 16, addresses, programs * self.world, state, abort, programs=programs
        )
        return (
            all_gather_gemm_forward(
                gathered[0], weight, None, gathered, ready, endpoint, activation=self.activation, copied=True
            )[0],
        )

    def plain(self, gathered: Tensor, weight: Tensor, **_: Tensor) -> Outputs:
        return (reference.activation(reference.linear(gathered.flatten(0, 1), weight, None), self.activation),)

    def trials(self) -> list[Trial]:
        flops = 2.0 * self.world * self.m * self.N * self.K
        return [Trial(self.name, self.inputs, self.forward, self.plain, flops, "TFLOP/s")]


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
