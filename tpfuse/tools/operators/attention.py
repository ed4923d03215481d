"""attention: the whole operator. Its launches reach every row of the tables of the backward pass."""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.attention_backward import attention_backward
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.ops.attention import attention
from tpfuse.ops.dropout import keep_mask
from tpfuse.tools.operator import CallCost, Draw, Given, Launchers, Operator, Outputs, Shape, Tensors
from tpfuse.tools.operators.attention_forward import empty_heads, launch_options

ENDS = [0, 25, 26, 60]  # ends of documents, in tokens
DROPOUT = 0.3


@dataclass(frozen=True)
class AttentionShape(Shape):
    """Attention of q [B, H, T, D] to k and v [B, Hk, T, D], in the memory order of a projection: [B, T, H, D]."""

    name: str
    B: int
    H: int
    Hk: int
    T: int
    D: int
    causal: bool = True
    window: int | None = None

    def inputs(self, draw: Draw) -> Tensors:
        return {name: self._heads(draw, h) for name, h in (("q", self.H), ("k", self.Hk), ("v", self.Hk))}

    def _heads(self, draw: Draw, heads: int) -> Tensor:
        return draw.normal(self.B, self.T, heads, self.D).transpose(1, 2)

    def function(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=self.causal, window=self.window)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._with_lse(q, k, v)[0]

    def _with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention(q, k, v, causal=self.causal, window=self.window)

    def gradient(self, draw: Draw) -> Tensor:
        return self._heads(draw, self.H)

    def costs(self) -> dict[str, CallCost]:
        """Return the costs without a window: two products in the forward pass, five in the backward pass."""
        pairs = self.T * (self.T + 1) / 2 if self.causal else self.T**2
        flops, rows = 4 * self.B * self.H * self.D * pairs, self.B * self.T
        of_q, of_kv, of_lse = 2 * rows * self.H * self.D, 4 * rows * self.Hk * self.D, 4 * rows * self.H
        return {
            "forward": CallCost(flops, 2 * of_q + of_kv + of_lse),
            "backward": CallCost(2.5 * flops, 4 * of_q + 2 * of_kv + of_lse),
        }

    def saved(self, inputs: Tensors) -> Tensors:
        out, lse = self._with_lse(**{name: x.float() for name, x in inputs.items()})
        return {"out": out.to(inputs["q"].dtype), "lse": lse}

    def launch(self, q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Outputs:
        return (attention_forward(q, k, v, causal=self.causal, window=self.window)[0],)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Outputs:
        return attention_backward(grad, q, k, v, out, lse, causal=self.causal, window=self.window)

    def launchers(self) -> Launchers:
        return {"forward": (self.launch, self.plain_forward), "backward": (self.backward, self.plain_backward)}


def _dropped(q: Tensor, k: Tensor, v: Tensor, head_rows: Tensor, key: Tensor) -> Tensor:
    length = q.shape[2]
    rows = head_rows.unsqueeze(-1) * length + torch.arange(length, device=q.device)
    mask = keep_mask(rows, length, DROPOUT, key).double() / (1 - DROPOUT)
    return reference.attention(q, k, v, dropout_mask=mask.to(q.dtype))[0]


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    documents = [slice(first, last) for first, last in itertools.pairwise(ENDS)]
    return torch.cat([reference.attention(*(x[:, :, rows] for x in (q, k, v)))[0] for rows in documents], dim=2)


def _with_documents(dtype: torch.dtype) -> Tensors:
    cu_seqlens = torch.tensor(ENDS, dtype=torch.int32)
    inputs = AttentionShape("", 1, 1, 1, ENDS[-1], 16).seeded(dtype)
    return inputs | {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}


def _with_rows(dtype: torch.dtype) -> Tensors:
    inputs = AttentionShape("", 1, 2, 1, 40, 16).seeded(dtype)
    return inputs | {"head_rows": torch.tensor([[3, 4]]), "key": torch.tensor(2**60 + 1)}


CASES = (
    AttentionShape("causal", 1, 1, 1, 63, 64),
    AttentionShape("window, 2 heads on one of keys", 1, 2, 1, 70, 16, window=20),
    Given("documents", attention, _one_by_one, _with_documents),
    Given("dropout", partial(attention, dropout_p=DROPOUT), _dropped, _with_rows),
)


def launches(dtype: torch.dtype) -> None:
    """Launch each head size alone and with every option at once, on meta tensors."""
    for size in (64, 128, 256):
        _launch(dtype, size, causal=True)
        _launch(dtype, size, causal=True, window=256, dropout_p=0.1, documents=8)
    _launch(dtype, 80, causal=False)


def _launch(dtype: torch.dtype, size: int, documents: int = 0, dropout_p: float = 0.0, **options: Any) -> None:
    """Launch the backward pass of 8192 positions with 32 heads of queries, and 8 of keys and values."""
    q, k = (empty_heads(heads, size, dtype) for heads in (32, 8))
    lse = torch.empty(1, 32, 8192, device="meta")
    options |= launch_options(documents, dropout_p)
    options |= {"max_seqlen_k": 2048, "grad_lse": lse} if documents else {}
    attention_backward(q, q, k, k, q, lse, **options)


OPERATOR = Operator(
    name="attention",
    launches=launches,
    cases=CASES,
    models=(
        AttentionShape("heads of 64, 4096 positions", 1, 16, 16, 4096, 64),
        AttentionShape("heads of 128, 4096 positions", 1, 16, 16, 4096, 128),
        AttentionShape("heads of 256, 4096 positions", 1, 8, 8, 4096, 256),
        AttentionShape("70b tp4, 4096 positions", 1, 16, 2, 4096, 128),
    ),
    tiny=(AttentionShape("tiny", 1, 2, 1, 20, 16),),
)
