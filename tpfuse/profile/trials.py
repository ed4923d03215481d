"""What `tpfuse tune` measures: launchers at the shapes of the models, each with its plain meaning to compare with.

A trial belongs to every row of configurations.toml that its launcher chooses at these sizes. GPT-2's shapes (124M,
1558M) and those of 7B and 70B models at some tensor-parallel sizes, 8192 tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.activations import GATED
from tpfuse.kernels.attention_backward import attention_backward
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.kernels.cross_entropy import cross_entropy_backward, cross_entropy_combine, cross_entropy_forward
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.gemm_input_gradient import gemm_input_gradient
from tpfuse.kernels.gemm_weight_gradient import gemm_weight_gradient
from tpfuse.kernels.layer_norm import layer_norm_forward
from tpfuse.kernels.layer_norm_backward import layer_norm_backward

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Trial:
    """name: what is measured. inputs: draws them, on "meta" too. run: the launcher, with all of them by keyword. plain:
    the same outputs by torch, in any dtype. work: operations or bytes of one call, `unit` is 1e12 of them a second."""

    name: str
    inputs: Callable[[torch.device, torch.dtype], dict[str, Tensor]]
    run: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    work: float
    unit: str


def _normal(device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


def _gradients(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad: Tensor) -> Outputs:
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    return torch.autograd.grad(function(**dict(zip(inputs, leaves, strict=True))), leaves, grad)


@dataclass(frozen=True)
class _Gemm:
    """A linear layer's three products: x [M, K], weight [N, K]."""

    name: str
    M: int
    N: int
    K: int
    activation: str | None

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        draw = partial(_normal, device, dtype)
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
        return _gradients(partial(reference.activation, name=self.activation), {"x": preactivation}, grad)[0]

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
class _Attention:
    """Causal attention, q [1, H, T, D], k and v [1, Hk, T, D]."""

    name: str
    H: int
    Hk: int
    T: int
    D: int

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        draw = partial(_normal, device, dtype, 1, self.T)
        q, k, v = (draw(heads, self.D).transpose(1, 2) for heads in (self.H, self.Hk, self.Hk))
        out, lse = reference.attention(q.float(), k.float(), v.float())
        grad = draw(self.H, self.D).transpose(1, 2)
        return {"grad_out": grad, "q": q, "k": k, "v": v, "out": out.to(dtype), "lse": lse}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Outputs:
        return (attention_forward(q, k, v)[0],)

    def plain_forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Outputs:
        return (reference.attention(q, k, v)[0],)

    def backward(self, **inputs: Tensor) -> Outputs:
        return tuple(attention_backward(**inputs))[:3]

    def plain_backward(self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Outputs:
        return _gradients(lambda **x: reference.attention(**x)[0], {"q": q, "k": k, "v": v}, grad_out)

    def trials(self) -> list[Trial]:
        flops = 2.0 * self.H * self.D * self.T**2
        return [
            Trial(self.name, self.inputs, self.forward, self.plain_forward, flops, "TFLOP/s"),
            Trial(f"{self.name} backward", self.inputs, self.backward, self.plain_backward, 2.5 * flops, "TFLOP/s"),
        ]


@dataclass(frozen=True)
class _Norm:
    """layer_norm of [M, C]."""

    name: str
    M: int
    C: int

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        x = _normal(device, dtype, self.M, self.C)
        wide = x.float()
        rstd = (wide.var(1, correction=0) + 1e-5).rsqrt()
        names = ("weight", "bias")
        vectors = {name: _normal(device, dtype, self.C) for name in names}
        return {"x": x, "grad": _normal(device, dtype, self.M, self.C), "mean": wide.mean(1), "rstd": rstd} | vectors

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
        return (layer_norm_forward(x, weight, bias, 1e-5)[0],)

    def plain_forward(self, x: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
        return (reference.layer_norm(x, weight, bias, 1e-5),)

    def backward(self, x: Tensor, grad: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, **_: Tensor) -> Outputs:
        dx, dweight, dbias = layer_norm_backward(grad, x, weight, mean, rstd, with_bias=True)
        assert dbias is not None
        return dx, dweight, dbias

    def plain_backward(self, x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
        return _gradients(partial(reference.layer_norm, eps=1e-5), {"x": x, "weight": weight, "bias": bias}, grad)

    def trials(self) -> list[Trial]:
        size = 2.0 * self.M * self.C
        return [
            Trial(self.name, self.inputs, self.forward, self.plain_forward, 2 * size, "TB/s"),
            Trial(f"{self.name} backward", self.inputs, self.backward, self.plain_backward, 3 * size, "TB/s"),
        ]


@dataclass(frozen=True)
class _CrossEntropy:
    """The loss of logits [M, V] and its gradient."""

    name: str
    M: int
    V: int

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        logits = _normal(device, dtype, self.M, self.V, scale=3.0)
        maximum = logits.float().amax(1)
        total = (logits.float() - maximum.unsqueeze(1)).exp().sum(1)
        target = torch.randint(self.V, (self.M,), device=device)
        return {"logits": logits, "target": target, "normalizer": torch.stack([maximum, total])}

    def forward(self, logits: Tensor, target: Tensor, **_: Tensor) -> Outputs:
        statistics = cross_entropy_forward(logits, target, 0)
        return (cross_entropy_combine(statistics.unsqueeze(0), target, self.V)[0],)

    def plain_forward(self, logits: Tensor, target: Tensor, **_: Tensor) -> Outputs:
        return (reference.cross_entropy(_at_least_float(logits), target),)

    def backward(self, logits: Tensor, target: Tensor, normalizer: Tensor) -> Outputs:
        return (cross_entropy_backward(logits, target, 0, normalizer),)

    def plain_backward(self, logits: Tensor, target: Tensor, **_: Tensor) -> Outputs:
        grad = torch.ones(len(target), dtype=_at_least_float(logits).dtype, device=logits.device)
        return _gradients(lambda x: reference.cross_entropy(_at_least_float(x), target), {"x": logits}, grad)

    def trials(self) -> list[Trial]:
        size = 2.0 * self.M * self.V
        return [
            Trial(self.name, self.inputs, self.forward, self.plain_forward, size, "TB/s"),
            Trial(f"{self.name} backward", self.inputs, self.backward, self.plain_backward, 2 * size, "TB/s"),
        ]


def _at_least_float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def trials() -> list[Trial]:
    """All of them."""
    tokens = 8192
    shapes: list[Any] = [
        _Gemm("7b tp4 up", tokens, 5504, 4096, "swiglu"),
        _Gemm("1558m tp1 up", tokens, 6400, 1600, "gelu_tanh"),
        _Gemm("124m tp1 up", tokens, 3072, 768, "gelu_tanh"),
        _Gemm("7b tp1 proj", tokens, 4096, 4096, None),
        _Gemm("70b tp8 down", tokens, 8192, 3584, None),
        _Gemm("7b tp1 proj of 16 tokens", 16, 4096, 4096, None),
        _Gemm("unaligned", tokens, 4096, 1001, None),
        _Attention("heads of 64, 4096 positions", 16, 16, 4096, 64),
        _Attention("heads of 128, 4096 positions", 16, 16, 4096, 128),
        _Attention("70b tp4, 4096 positions", 16, 2, 4096, 128),
        *(_Norm(f"width {width}", (1 << 26) // width, width) for width in (256, 768, 1600, 4096, 8192)),
        *(_CrossEntropy(f"vocabulary {size}", tokens, size) for size in (50257, 32000, 1000)),
    ]
    return [trial for shape in shapes for trial in shape.trials()]


def tiny_trials() -> list[Trial]:
    """One of each kind, small enough for the interpreter."""
    shapes: list[Any] = [
        _Gemm("tiny", 20, 32, 16, "gelu_tanh"),
        _Gemm("tiny gated", 20, 32, 16, "swiglu"),
        _Attention("tiny", 2, 1, 20, 16),
        _Norm("tiny", 12, 40),
        _CrossEntropy("tiny", 12, 40),
    ]
    return [trial for shape in shapes for trial in shape.trials()]
