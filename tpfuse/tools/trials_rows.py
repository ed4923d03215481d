"""Trials of the kernels that pass over rows: they move memory."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tpfuse.backend import kernels
from tpfuse.kernels import reference
from tpfuse.kernels.adamw import adamw_
from tpfuse.kernels.attention_merge import attention_merge
from tpfuse.kernels.cross_entropy import cross_entropy_backward, cross_entropy_combine, cross_entropy_forward
from tpfuse.kernels.dropout import dropout_forward
from tpfuse.kernels.layer_norm import layer_norm_forward
from tpfuse.kernels.layer_norm_backward import layer_norm_backward
from tpfuse.kernels.rope import rope_forward
from tpfuse.ops.dropout import dropout
from tpfuse.tools.trial import Outputs, Trial, gradients, normal


@dataclass(frozen=True)
class Norm:
    """layer_norm of [M, C]."""

    name: str
    M: int
    C: int

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        x = normal(device, dtype, self.M, self.C)
        wide = x.float()
        rstd = (wide.var(1, correction=0) + 1e-5).rsqrt()
        names = ("weight", "bias")
        vectors = {name: normal(device, dtype, self.C) for name in names}
        return {"x": x, "grad": normal(device, dtype, self.M, self.C), "mean": wide.mean(1), "rstd": rstd} | vectors

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
        return (layer_norm_forward(x, weight, bias, 1e-5)[0],)

    def plain_forward(self, x: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
        return (reference.layer_norm(x, weight, bias, 1e-5),)

    def backward(self, x: Tensor, grad: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, **_: Tensor) -> Outputs:
        dx, dweight, dbias = layer_norm_backward(grad, x, weight, mean, rstd, with_bias=True)
        assert dbias is not None
        return dx, dweight, dbias

    def plain_backward(self, x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
        return gradients(partial(reference.layer_norm, eps=1e-5), {"x": x, "weight": weight, "bias": bias}, grad)

    def trials(self) -> list[Trial]:
        size = 2.0 * self.M * self.C
        return [
            Trial(self.name, self.inputs, self.forward, self.plain_forward, 2 * size, "TB/s"),
            Trial(f"{self.name} backward", self.inputs, self.backward, self.plain_backward, 3 * size, "TB/s"),
        ]


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of logits [M, V] and its gradient."""

    name: str
    M: int
    V: int

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        logits = normal(device, dtype, self.M, self.V, scale=3.0)
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
        return gradients(lambda x: reference.cross_entropy(_at_least_float(x), target), {"x": logits}, grad)

    def trials(self) -> list[Trial]:
        size = 2.0 * self.M * self.V
        return [
            Trial(self.name, self.inputs, self.forward, self.plain_forward, size, "TB/s"),
            Trial(f"{self.name} backward", self.inputs, self.backward, self.plain_backward, 2 * size, "TB/s"),
        ]


@dataclass(frozen=True)
class Rope:
    """Rotation of q [2, T, H, D] and k [2, T, Hk, D]."""

    name: str
    T: int
    H: int
    Hk: int
    D: int

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        angles = torch.rand(self.T, self.D // 2, device=device)
        tables = {"cos": angles.cos(), "sin": angles.sin(), "positions": torch.arange(self.T, device=device)}
        return {x: normal(device, dtype, 2, self.T, h, self.D) for x, h in (("q", self.H), ("k", self.Hk))} | tables

    def run(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Outputs:
        q_out, k_out = rope_forward(q, k, cos, sin, positions)
        assert k_out is not None
        return q_out, k_out

    def plain(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Outputs:
        return reference.rope(q, cos, sin, positions), reference.rope(k, cos, sin, positions)

    def trials(self) -> list[Trial]:
        moved = 2 * 2 * 2.0 * self.T * (self.H + self.Hk) * self.D
        return [Trial(self.name, self.inputs, self.run, self.plain, moved, "TB/s")]


@dataclass(frozen=True)
class Merge:
    """Attention to two sets of keys as one: outputs [2, H, T, D], log-sum-exps [2, H, T]."""

    name: str
    H: int
    T: int
    D: int

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        outs = {f"out_{x}": normal(device, dtype, 2, self.H, self.T, self.D) for x in "ab"}
        return outs | {f"lse_{x}": torch.randn(2, self.H, self.T, device=device) for x in "ab"}

    def run(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Outputs:
        return attention_merge(out_a, lse_a, out_b, lse_b)

    def plain(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Outputs:
        out, lse = reference.attention_merge(out_a, lse_a, out_b, lse_b)
        return out.to(out_a.dtype), lse

    def trials(self) -> list[Trial]:
        moved = 3 * 2 * 2.0 * self.H * self.T * self.D
        return [Trial(self.name, self.inputs, self.run, self.plain, moved, "TB/s")]


@dataclass(frozen=True)
class Dropout:
    """A mask by position on [M, C]."""

    name: str
    M: int
    C: int

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        key = torch.full((1,), 12345, dtype=torch.int64, device=device)
        return {"x": normal(device, dtype, self.M, self.C), "rows": torch.arange(self.M, device=device), "key": key}

    def run(self, x: Tensor, rows: Tensor, key: Tensor) -> Outputs:
        return (dropout_forward(x, 0.1, rows, key),)

    def plain(self, x: Tensor, rows: Tensor, key: Tensor) -> Outputs:
        with kernels("torch"):
            return (dropout(x, 0.1, rows, key),)

    def trials(self) -> list[Trial]:
        return [Trial(self.name, self.inputs, self.run, self.plain, 4.0 * self.M * self.C, "TB/s")]


_RATES = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class AdamW:
    """Update 3 of a shard [n]: bf16 gradient and parameter, float32 state."""

    name: str
    n: int

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        state = {name: torch.randn(self.n, device=device) for name in ("master", "exp_avg", "exp_avg_sq")}
        state["exp_avg_sq"] = state["exp_avg_sq"].square()
        rate, step = (torch.full((), value, device=device) for value in (1e-3, 3.0))
        halves = {name: normal(device, dtype, self.n) for name in ("gradient", "parameter")}
        return state | halves | {"lr": rate, "step": step}

    def run(self, **inputs: Tensor) -> Outputs:
        adamw_(**inputs, **_RATES)  # type: ignore[arg-type]
        return inputs["master"], inputs["exp_avg"], inputs["exp_avg_sq"], inputs["parameter"]

    def plain(self, master: Tensor, gradient: Tensor, parameter: Tensor, step: Tensor, **state: Tensor) -> Outputs:
        after = reference.adamw(master, gradient.to(master.dtype), **state, step=3, **_RATES)  # type: ignore[arg-type]
        return *after, after[0].to(parameter.dtype)

    def trials(self) -> list[Trial]:
        return [Trial(self.name, self.inputs, self.run, self.plain, 28.0 * self.n, "TB/s")]


def _at_least_float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
