"""attention: softmax(q kᵀ / sqrt(D)) v, causal.

torch's scaled_dot_product_attention, except with dropout: its masks come from a generator and depend on how
heads and batch are laid out, ours are a function of the global position (see `dropout`), so that path forms
the probabilities.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tpfuse.ops.dropout import dropout


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    head_rows: Tensor | None = None,
    key: int = 0,
) -> Tensor:
    """Causal attention of the last Tq of Tk positions.

    q: [B, H, Tq, D]; k, v: [B, H, Tk, D], Tk >= Tq, the query at row i having position Tk - Tq + i (keys
    before it come from a cache). head_rows: [B, H] int64, the number of each (sequence, head) in the whole
    batch, for dropout of the probabilities under `key`. Returns [B, H, Tq, D] in q's dtype. Raises ValueError
    where there are fewer keys than queries, or dropout is asked for without head_rows.
    """
    tq, tk = q.shape[2], k.shape[2]
    if tk < tq:
        raise ValueError(f"attention of {tq} queries to {tk} keys: expected at least as many keys")
    if dropout_p == 0.0 and tq == tk:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if dropout_p == 0.0 and tq == 1:
        return F.scaled_dot_product_attention(q, k, v)
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    visible = torch.ones(tq, tk, dtype=torch.bool, device=q.device).tril(tk - tq)
    upcast = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    probabilities = upcast.masked_fill(~visible, float("-inf")).softmax(dim=-1).to(q.dtype)
    if dropout_p:
        if head_rows is None:
            raise ValueError("dropout in attention needs head_rows, the global number of each sequence and head")
        positions = torch.arange(tk - tq, tk, device=q.device)
        rows = head_rows.unsqueeze(-1) * tk + positions
        probabilities = dropout(probabilities, dropout_p, rows, key)
    return torch.matmul(probabilities, v)
