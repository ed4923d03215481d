"""attention: small comparisons for `tpfuse verify`, and launches that reach every row of its gradients' tables."""

import itertools
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.attention_backward import attention_backward
from tpfuse.ops.attention import attention
from tpfuse.ops.dropout import keep_mask
from tpfuse.testing.inputs import normal
from tpfuse.tools.operator import Case, Operator

ENDS = [0, 25, 26, 60]  # of documents
DROPOUT = 0.3


def _inputs(dtype: torch.dtype, heads: int, length: int, size: int) -> dict[str, Tensor]:
    """For as many heads over one of keys and values."""
    shapes = {"q": (1, heads, length, size), "k": (1, 1, length, size), "v": (1, 1, length, size)}
    return {name: normal(seed, *shape, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items(), 1)}


def _case(name: str, heads: int, length: int, size: int, **options: Any) -> Case:
    return Case(
        name,
        lambda **inputs: attention(**inputs, **options),
        lambda **inputs: reference.attention(**inputs, **options)[0],
        lambda dtype: _inputs(dtype, heads, length, size),
    )


def _dropped(q: Tensor, k: Tensor, v: Tensor, head_rows: Tensor, key: Tensor) -> Tensor:
    length = q.shape[2]
    rows = head_rows.unsqueeze(-1) * length + torch.arange(length, device=q.device)
    mask = keep_mask(rows, length, DROPOUT, key).double() / (1 - DROPOUT)
    return reference.attention(q, k, v, dropout_mask=mask.to(q.dtype))[0]


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    documents = [slice(first, last) for first, last in itertools.pairwise(ENDS)]
    return torch.cat([reference.attention(*(x[:, :, rows] for x in (q, k, v)))[0] for rows in documents], dim=2)


def _with_documents(dtype: torch.dtype) -> dict[str, Tensor]:
    cu_seqlens = torch.tensor(ENDS, dtype=torch.int32)
    return _inputs(dtype, 1, ENDS[-1], 16) | {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}


CASES = (
    _case("causal", 1, 63, 64),
    _case("window, 2 heads on one of keys", 2, 70, 16, window=20),
    Case("documents", attention, _one_by_one, _with_documents),
    Case(
        "dropout",
        lambda **inputs: attention(**inputs, dropout_p=DROPOUT),
        _dropped,
        lambda dtype: _inputs(dtype, 2, 40, 16) | {"head_rows": torch.tensor([[3, 4]]), "key": torch.tensor(2**60 + 1)},
    ),
)


def launches(dtype: torch.dtype) -> None:
    """On meta tensors: each head size alone, and with everything at once."""
    for size in (64, 128, 256):
        _launch(dtype, size, causal=True)
        _launch(dtype, size, causal=True, window=256, dropout_p=0.1, documents=8)
    _launch(dtype, 80, causal=False)


def _launch(
    dtype: torch.dtype,
    size: int,
    *,
    causal: bool,
    window: int | None = None,
    dropout_p: float = 0.0,
    documents: int = 0,
) -> None:
    """The gradients of 8192 positions under 32 heads and 8 of keys and values."""

    def empty(heads: int) -> Tensor:
        return torch.empty(1, 8192, heads, size, dtype=dtype, device="meta").transpose(1, 2)

    cu_seqlens = torch.empty(documents + 1, dtype=torch.int32, device="meta") if documents else None
    lse = torch.empty(1, 32, 8192, device="meta")
    attention_backward(
        empty(32),
        empty(32),
        empty(8),
        empty(8),
        empty(32),
        lse,
        causal=causal,
        window=window,
        dropout_p=dropout_p,
        dropout_key=torch.empty((), dtype=torch.int64, device="meta") if dropout_p else None,
        head_rows=torch.empty(max(documents, 1), 32, dtype=torch.int64, device="meta") if dropout_p else None,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=2048 if documents else None,
        max_seqlen_k=2048 if documents else None,
        grad_lse=lse if documents else None,
    )


OPERATOR = Operator("attention", launches, CASES)
