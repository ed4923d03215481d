"""Functions that attention's kernels share: which scores count, and which probabilities dropout keeps.

Query i has position q_offset + i, key j position k_offset + j, within the document for variable lengths. The query at
position p sees the keys from p - behind to p + ahead. A causal mask is ahead = 0. A window w is behind = w - 1, and
also ahead = w - 1 where it is not causal. One pair of bounds serves every mask. With ahead and behind exchanged the
same bounds tell which queries see a key, so that forward and backward skip whole blocks by the same function.

Dropout is the mask of `kernels.dropout`, with row = head_row * width + query position and column = key position.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_contiguous, check_device, check_dtype, check_floats, check_shape, check_tensor
from tpfuse.kernels.dropout import hashed_rows, threshold

FAR = 2**31 // 512  # elements


@triton.jit
def visible(q_pos, k_pos, k_stop, ahead, behind, HAS_AHEAD: tl.constexpr, HAS_BEHIND: tl.constexpr):
    """Return whether the query at q_pos sees the key at k_pos (they broadcast); keys end before position k_stop."""
    last = k_stop - 1
    if HAS_AHEAD:
        last = tl.minimum(last, q_pos + ahead)
    mask = k_pos <= last
    if HAS_BEHIND:
        mask &= k_pos >= q_pos - behind
    return mask


@triton.jit
def key_range(
    q_first, q_last, k_offset, tk, ahead, behind, HAS_AHEAD: tl.constexpr, HAS_BEHIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Return indices (start, full_start, full_stop, stop) of the keys that the queries from q_first to q_last see.

    q_last is included. No query sees keys outside start to stop; each sees every key in the blocks, of BLOCK keys,
    from full_start to full_stop, so that only the blocks before and after those are masked. start,
    full_start and full_stop are multiples of BLOCK, except where full_start is stop. For the queries that see a range
    of keys, exchange the sides: pass key positions, q_offset, tq, behind as ahead and ahead as behind.
    """
    start = tl.full((), 0, tl.int32)
    full_start = tl.full((), 0, tl.int32)
    stop = tk
    full_stop = tk
    if HAS_BEHIND:
        start = max(q_first - behind - k_offset, 0) // BLOCK * BLOCK
        full_start = (max(q_last - behind - k_offset, 0) + BLOCK - 1) // BLOCK * BLOCK
    if HAS_AHEAD:
        stop = max(min(q_last + ahead - k_offset + 1, tk), 0)
        full_stop = max(min(q_first + ahead - k_offset + 1, tk), 0)
    stop = max(stop, start)
    full_start = min(full_start, stop)
    full_stop = min(max(full_stop // BLOCK * BLOCK, full_start), stop)
    return start, full_start, full_stop, stop


@triton.jit
def document(cu_seqlens_ptr, index, length, VARLEN: tl.constexpr):
    """Return (first row, int64, and length) of document `index`; 0 and `length` without variable lengths."""
    if VARLEN:
        first = tl.load(cu_seqlens_ptr + index)
        return first.to(tl.int64), tl.load(cu_seqlens_ptr + index + 1) - first
    else:
        return tl.full((), 0, tl.int64), length


@triton.jit
def dropout_rows(head_row, q_pos, width, key):
    """Return the rows' part of the hash of `dropout.kept`, uint64; head_row: int64, q_pos: any shape, key: 64 bits."""
    return hashed_rows(head_row * width + q_pos, width, key)


@triton.jit
def multiple_of_8(x):
    """Return x, a multiple of 8 (see `aligned`): Triton itself knows only whether an argument is a multiple of 16."""
    return x // 8 * 8


def bounds(causal: bool, window: int | None) -> tuple[int | None, int | None]:
    """Return (ahead, behind): how far a query sees in each direction; None without a limit."""
    if window is None:
        return (0 if causal else None), None
    return (0 if causal else window - 1), window - 1


def aligned(x: Tensor) -> Tensor:
    """Return x [..., T, D], or a copy, with contiguous rows of D elements that start at multiples of 16 bytes.

    Kernels may then load 16 bytes at once even where the strides are not the multiples of 16 that Triton requires. Rows
    are less than FAR elements apart, since kernels count the elements of a tile, of at most 512 rows, in 32 bits.
    """
    near = x.stride(-1) == 1 and x.stride(-2) < FAR
    if near and all(stride % 8 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def score_arguments(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None,
    q_offset: int,
    k_offset: int,
    scale: float | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    dropout_p: float,
    dropout_key: Tensor | None,
    head_rows: Tensor | None,
    dropout_width: int | None,
) -> dict[str, Any]:
    """Check the arguments that forward and backward share; return the kernels' arguments that follow from them.

    Cumulative lengths are clamped to the number of rows, so that no document ends outside the tensors. That is a small
    kernel of its own: in the attention kernels the same clamp costs registers, and dkdv of sm_80 would spill. Raise
    ValueError that names the argument, what was received and what is accepted.
    """
    sequences = check_heads(operator, q, k, v, cu_seqlens_q, cu_seqlens_k)
    check_scores(operator, q, sequences, window, scale, dropout_p, dropout_key, head_rows)
    ahead, behind = bounds(causal, window)
    return {
        "cu_seqlens_q_ptr": None if cu_seqlens_q is None else cu_seqlens_q.clamp(0, q.shape[2]),
        "cu_seqlens_k_ptr": None if cu_seqlens_k is None else cu_seqlens_k.clamp(0, k.shape[2]),
        "head_rows_ptr": None if head_rows is None or dropout_p == 0.0 else head_rows.contiguous(),
        "dropout_key_ptr": None if dropout_p == 0.0 else dropout_key,
        "heads": q.shape[1],
        "group": q.shape[1] // max(k.shape[1], 1),
        "tq": q.shape[2],
        "tk": k.shape[2],
        "q_offset": q_offset,
        "k_offset": k_offset,
        "ahead": ahead or 0,
        "behind": behind or 0,
        "scale": q.shape[3] ** -0.5 if scale is None else scale,
        "dropout_width": k.shape[2] if dropout_width is None else dropout_width,
        "dropout_threshold": threshold(dropout_p),
        "HEAD_SIZE": q.shape[3],
        "BLOCK_D": triton.next_power_of_2(q.shape[3]),
        "HAS_AHEAD": ahead is not None,
        "HAS_BEHIND": behind is not None,
        "VARLEN": cu_seqlens_q is not None,
        "DROPOUT": dropout_p > 0.0,
    }


def check_heads(
    operator: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> int:
    """Return the number of sequences. Raise ValueError unless the kernels can compute with these tensors."""
    check_floats(operator, q=q, k=k, v=v)
    sequences = check_sequences(operator, q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if not 16 <= q.shape[3] <= 256 or q.shape[3] % 8:
        raise ValueError(f"{operator}: q has head size {q.shape[3]}: expected a multiple of 8 from 16 to 256")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is not None:
            check_contiguous(operator, name, x)
    return sequences


def check_sequences(operator: str, q: Tensor, k: Tensor, v: Tensor, **cu_seqlens: Tensor | None) -> int:
    """Return the number of sequences. Raise ValueError unless q [B, H, Tq, D], k and v [B, Hk, Tk, D] fit each other.

    cu_seqlens: the cumulative lengths by the names of their arguments; all are None or none is.
    """
    if q.dim() != 4 or not q.is_floating_point():
        raise ValueError(f"{operator}: q is {q.dtype} {tuple(q.shape)}: expected floats [B, H, Tq, D]")
    batch, heads, _, size = q.shape
    if k.dim() != 4 or (k.shape[0], k.shape[3]) != (batch, size):
        raise ValueError(f"{operator}: k has shape {tuple(k.shape)}: expected [{batch}, Hk, Tk, {size}], as q")
    check_shape(operator, "v", v, tuple(k.shape))
    for name, x in (("k", k), ("v", v)):
        check_device(operator, "q", q, name, x)
        if x.dtype != q.dtype:
            raise ValueError(f"{operator}: {name} is {x.dtype}, q is {q.dtype}: expected one dtype")
    if heads % k.shape[1] if k.shape[1] else heads:
        raise ValueError(f"{operator}: k has {k.shape[1]} heads, q {heads}: expected a divisor of q's")
    given = {name: x for name, x in cu_seqlens.items() if x is not None}
    if not given:
        return batch
    if len(given) < len(cu_seqlens):
        missing = next(name for name in cu_seqlens if name not in given)
        raise ValueError(f"{operator}: {missing} is None: expected both cumulative lengths, or neither")
    if batch != 1:
        raise ValueError(f"{operator}: q has batch size {batch}: expected 1 with cu_seqlens: concatenate the documents")
    for name, x in given.items():
        check_dtype(operator, name, x, (torch.int32,))
        check_device(operator, "q", q, name, x)
        if x.dim() != 1 or not len(x):
            raise ValueError(f"{operator}: {name} has shape {tuple(x.shape)}: expected [S + 1]")
    sequences = len(next(iter(given.values()))) - 1
    for name, x in given.items():
        check_shape(operator, name, x, (sequences + 1,))
    return sequences


def check_scores(
    operator: str,
    q: Tensor,
    sequences: int,
    window: int | None,
    scale: float | None,
    dropout_p: float,
    dropout_key: Tensor | None,
    head_rows: Tensor | None,
    key_name: str = "dropout_key",
) -> None:
    """Raise ValueError for a window, a scale or dropout arguments that are not valid."""
    if window is not None and window < 1:
        raise ValueError(f"{operator}: window {window}: expected at least 1, or None")
    if scale is not None and not 0.0 < scale < math.inf:
        raise ValueError(f"{operator}: scale {scale}: expected a positive number, or None for 1 / sqrt(D)")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{operator}: dropout_p {dropout_p}: expected 0 <= dropout_p < 1")
    if dropout_p == 0.0:
        return
    if head_rows is None:
        raise ValueError(
            f"{operator}: head_rows is None: expected the number of each sequence and head, which dropout needs"
        )
    if dropout_key is None:
        raise ValueError(f"{operator}: {key_name} is None: expected one of tpfuse.ops.dropout.dropout_keys")
    shapes = {"head_rows": (sequences, q.shape[1]), key_name: ()}
    for name, x in (("head_rows", head_rows), (key_name, dropout_key)):
        check_tensor(operator, name, x, shapes[name], (torch.int64,), ("q", q))
