"""Attention by torch's own operators: `tpfuse.ops.attention` runs it where no Triton kernel runs.

It is scaled_dot_product_attention or, if that cannot express the call, the definition, with all scores in memory. A
query that sees no key is computed as if it saw all, and its result is replaced: softmax has no gradient for such a row.
On CPUs the documents of self-attention are computed one by one, so that no scores between them are held.
"""

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpfuse.comm.layout import is_traced
from tpfuse.comm.sum_order import summed_dtype
from tpfuse.ops.autograd import without_autocast
from tpfuse.ops.dropout import keep_mask


@dataclass(frozen=True)
class AttentionCall:
    """The options of one call of `tpfuse.ops.attention.attention`, all of which have values."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    head_rows: Tensor | None
    dropout_key: Tensor | None
    causal: bool
    window: int | None
    q_offset: int
    k_offset: int
    scale: float | None
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    dropout_width: int

    @property
    def tensors(self) -> list[Tensor | None]:
        """Return the tensors, which are positional arguments of an operator of torch.library."""
        return [getattr(self, name) for name in _NAMES[:4]]

    @property
    def scalars(self) -> dict[str, Any]:
        """Return the other options, by name."""
        return {name: getattr(self, name) for name in _NAMES[4:]}

    def plain(self, q: Tensor, k: Tensor) -> dict[str, Any] | None:
        """Return the options with which scaled_dot_product_attention computes the call; None where it cannot.

        It can with no mask, or with a square causal one. It returns no log-sum-exp, and its dropout has other masks
        than ours.
        """
        if self.dropout_p or self.cu_seqlens_q is not None or self.window is not None:
            return None
        if not q.numel() or not k.numel():
            return None
        sees_all = not self.causal or self.q_offset >= self.k_offset + k.shape[2] - 1
        if not sees_all and (q.shape[2] != k.shape[2] or self.q_offset != self.k_offset):
            return None
        return {"is_causal": not sees_all, "scale": self.scale, "enable_gqa": q.shape[1] != k.shape[1]}


_NAMES = [field.name for field in fields(AttentionCall)]  # torch.compile of torch 2.11 refuses vars() of an instance


def flash_obstacle(q: Tensor) -> str:
    """Return why cuDNN or flash attention should not compute with queries like q [B, H, Tq, D]; "" if they should.

    Their gradients differ from run to run, and torch refuses cuDNN when deterministic algorithms are requested.
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        return "cuDNN and flash attention take half types alone"
    if q.shape[3] % 8 or q.shape[3] > 128:
        return "cuDNN has gradients only for heads of at most 128 in multiples of 8"
    return "deterministic algorithms are requested" if torch.are_deterministic_algorithms_enabled() else ""


@without_autocast
def dense_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of `tpfuse.ops.attention.attention`, which checks the arguments; lse is empty if unasked."""
    tq, tk = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    plain = None if return_lse else call.plain(q, k)
    if plain is not None:
        out = F.scaled_dot_product_attention(q, k, v, **plain)
        return out, out.new_empty(0)
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    if cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_k and q.device.type == "cpu" and not is_traced(q):
        return _by_document(q, k, v, cu_seqlens_q.tolist(), call, return_lse)
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    dtype = q.dtype  # products of half types would round the scores, and take longer on CPUs
    q, k, v = (x.to(summed_dtype(dtype)) for x in (q, k, v))
    scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5 if call.scale is None else call.scale)
    document_q, q_pos = _positions(tq, call.q_offset, cu_seqlens_q, q.device)
    document_k, k_pos = _positions(tk, call.k_offset, cu_seqlens_k, q.device)
    hidden = _hidden(q_pos.unsqueeze(1), k_pos, call.causal, call.window)
    if cu_seqlens_q is not None:
        documents = len(cu_seqlens_q) - 1
        hidden |= (document_q.unsqueeze(1) != document_k) | (document_k == documents)
    blind = hidden.all(dim=-1, keepdim=True)
    scores = scores.masked_fill(hidden & ~blind, float("-inf"))
    probabilities = scores.softmax(dim=-1)
    if call.dropout_p:
        assert call.head_rows is not None and call.dropout_key is not None
        heads = call.head_rows.unsqueeze(-1)
        if cu_seqlens_q is not None:  # those of each query's document, arbitrary after the last one
            heads = call.head_rows[document_q.clamp(max=len(call.head_rows) - 1)].t().unsqueeze(0)
        keep = keep_mask(
            heads * call.dropout_width + q_pos, call.dropout_width, call.dropout_p, call.dropout_key, k_pos
        )
        probabilities = probabilities * (keep.to(q.dtype) / (1.0 - call.dropout_p))
    out = torch.matmul(probabilities, v).masked_fill(blind, 0.0).to(dtype)
    if not return_lse:
        return out, out.new_empty(0)
    return out, scores.logsumexp(dim=-1).masked_fill(blind.squeeze(-1), float("-inf"))


def _by_document(
    q: Tensor, k: Tensor, v: Tensor, ends: list[int], call: AttentionCall, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Return what `dense_attention` does. ends: the first row of each document, and the end of the last one."""
    outs, lses = [], []
    for index, (start, end) in enumerate(pairwise(ends)):
        if start == end:
            continue
        rows = None if call.head_rows is None else call.head_rows[index : index + 1]
        document = replace(call, cu_seqlens_q=None, cu_seqlens_k=None, head_rows=rows)
        one_q, one_k, one_v = (x[:, :, start:end] for x in (q, k, v))
        out, lse = dense_attention(one_q, one_k, one_v, document, return_lse=return_lse)
        outs.append(out)
        lses.append(lse)
    rest = q[:, :, ends[-1] :]
    nothing = torch.zeros_like(rest)
    # If all documents are empty, the result is 0 and still belongs to the graph of q, k and v.
    outs.append(nothing if outs else nothing + sum(x[:, :, :0].sum() for x in (q, k, v)))
    if not return_lse:
        return torch.cat(outs, 2), q.new_empty(0)
    lses.append((lses[0] if lses else rest).new_full(rest.shape[:3], float("-inf")))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _positions(length: int, offset: int, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each row's document and its position in it, [length] each.

    For rows after the last document the former is the number of documents.
    """
    rows = torch.arange(length, device=device)
    if cu_seqlens is None:
        return torch.zeros_like(rows), rows + offset
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
    return document, rows - cu_seqlens[document] + offset


def _hidden(q_pos: Tensor, k_pos: Tensor, causal: bool, window: int | None) -> Tensor:
    """Return for each query and key whether the query does not see the key."""
    distance = q_pos - k_pos
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    return hidden if window is None else hidden | (distance.abs() >= window)
