"""attention_forward: the forms of attention that have no gradient of their own, for `tpfuse verify`.

The launches reach every row of the tables for the forward pass and the merge.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.kernels.attention_merge import attention_merge
from tpfuse.testing.inputs import normal
from tpfuse.tools.operator import (
    CallCost,
    Draw,
    Given,
    Launchers,
    Operator,
    Outputs,
    Shape,
    Tensors,
    seeded_draw,
    without_gradient,
)


@dataclass(frozen=True)
class MergeShape(Shape):
    """The merge of attention to two sets of keys: outputs [2, H, T, D], log-sum-exps [2, H, T]."""

    name: str
    H: int
    T: int
    D: int

    def inputs(self, draw: Draw) -> Tensors:
        outs = {f"out_{x}": draw.normal(2, self.H, self.T, self.D) for x in "ab"}
        return outs | {f"lse_{x}": draw.normal(2, self.H, self.T, dtype=torch.float32) for x in "ab"}

    def costs(self) -> dict[str, CallCost]:
        return {"forward": CallCost(0.0, 3 * 2 * 2 * self.H * self.T * self.D)}

    def drawn(self, device: torch.device, dtype: torch.dtype) -> Tensors:
        return self.inputs(seeded_draw(device, dtype))

    def launch(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Outputs:
        return attention_merge(out_a, lse_a, out_b, lse_b)

    def plain(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Outputs:
        out, lse = reference.attention_merge(out_a, lse_a, out_b, lse_b)
        return out.to(out_a.dtype), lse

    def launchers(self) -> Launchers:
        return {"forward": (self.launch, self.plain)}


def _case(name: str, function: Callable[..., Tensor], tq: int, tk: int, size: int, **options: Any) -> Given:
    """Return a case that compares `function` with the reference, for two heads that share one of keys and values."""

    def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
        shapes = {"q": (1, 2, tq, size), "k": (1, 1, tk, size), "v": (1, 1, tk, size)}
        return {name: normal(seed, *shape, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items(), 1)}

    compared, expected = (without_gradient(partial(each, **options)) for each in (function, _reference))
    return Given(name, compared, expected, inputs)


def _reference(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return reference.attention(q, k, v, **options)[0]


def _whole(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention_forward(q, k, v, **options)[0]


def _merged(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    half = k.shape[2] // 2
    out, lse = attention_forward(q, k[:, :, :half], v[:, :, :half], **options)
    others = attention_forward(q, k[:, :, half:], v[:, :, half:], k_offset=half, **options)
    return attention_merge(out.float(), lse, *others, in_place=True)[0].to(q.dtype)


CASES = (
    _case("queries behind the keys", _whole, 33, 70, 40, q_offset=37),
    _case("window on both sides", _whole, 63, 63, 64, causal=False, window=20),
    _case("merge of two halves", _merged, 63, 63, 16, causal=False),
)


def launches(dtype: torch.dtype) -> None:
    """Launch each head size alone and with every option at once, and merges into both kinds of sums."""
    for size in (64, 128, 256):
        _launch(dtype, size)
        _launch(dtype, size, documents=8, window=256, dropout_p=0.1)
    _launch(dtype, 80, causal=False)
    q = empty_heads(32, 256, dtype)
    lse = torch.empty(1, 32, q.shape[2], device="meta")
    for out in (q, q.float()):
        attention_merge(out, lse, q, lse)


def empty_heads(heads: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return 8192 positions of these heads on the meta device, in the memory order of a projection."""
    return torch.empty(1, 8192, heads, size, dtype=dtype, device="meta").transpose(1, 2)


def launch_options(documents: int, dropout_p: float) -> dict[str, Any]:
    """Return the options of 8192 positions with 32 heads of queries, on meta tensors."""
    cu_seqlens = torch.empty(documents + 1, dtype=torch.int32, device="meta") if documents else None
    options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 2048 if documents else None}
    key, head_rows = (torch.empty(x, dtype=torch.int64, device="meta") for x in ((), (max(documents, 1), 32)))
    return options | ({"dropout_p": dropout_p, "dropout_key": key, "head_rows": head_rows} if dropout_p else {})


def _launch(dtype: torch.dtype, size: int, documents: int = 0, dropout_p: float = 0.0, **options: Any) -> None:
    """Launch 32 heads of queries, and 8 of keys and values."""
    q, k, v = (empty_heads(heads, size, dtype) for heads in (32, 8, 8))
    attention_forward(q, k, v, **launch_options(documents, dropout_p), **options)


OPERATOR = Operator(
    name="attention_forward",
    launches=launches,
    cases=CASES,
    models=(MergeShape("16 heads of 64", 16, 4096, 64), MergeShape("16 heads of 128", 16, 4096, 128)),
    tiny=(MergeShape("tiny", 2, 6, 16),),
)
