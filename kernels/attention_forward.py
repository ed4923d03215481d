"""attention_forward: out = dropout(softmax(mask(q kᵀ scale))) v, and the log-sum-exp of the scores, in one pass.

A program holds one tile of queries of one head and walks over the keys it sees with the running maximum, sum and
output of the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; flash attention, arXiv:2205.14135 and
2307.08691), so that no score leaves the chip. Powers are of two, with scale log2(e) folded into one multiply-add per
score. Blocks of keys that no query of the tile sees are skipped, and only those at the border of what is seen, or at
the end of the keys, are masked: up to three loops over one body. Where the mask leaves later tiles more work, they
start first. Whole heads follow each other, so that their keys stay in the L2 cache.

out is stored as [B, Tq, H, D]: what the projection behind it reads is then contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.attention_scores import (
    aligned,
    document,
    dropout_rows,
    kept,
    key_range,
    multiple_of_8,
    score_arguments,
    visible,
)
from tpfuse.kernels.configurations import choose
from tpfuse.kernels.launch import launch
from tpfuse.kernels.tiles import dot, rounded

# Arguments that change from call to call and gain nothing from a compilation of their own.
NOT_SPECIALIZED = ["tq", "tk", "chunks", "tiles_m", "q_offset", "k_offset", "ahead", "behind"]
NOT_SPECIALIZED += ["dropout_width", "dropout_key", "dropout_threshold"]

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(ptr, first, offs, stop, stride, BLOCK_D: tl.constexpr, HEAD_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Rows first + offs of a matrix [stop, HEAD_SIZE] as a tile [len(offs), BLOCK_D]; MASKED: 0 from row `stop` on.

    ptr is aligned to 16 bytes and stride a multiple of 8 (`attention_scores.aligned`).
    """
    offs_d = tl.arange(0, BLOCK_D)
    stride = multiple_of_8(stride)
    ptrs = ptr + tl.cast(first, tl.int64) * stride + (offs[:, None] * stride + offs_d[None, :])
    if MASKED:
        return tl.load(ptrs, mask=(first + offs < stop)[:, None] & (offs_d < HEAD_SIZE)[None, :], other=0.0)
    elif HEAD_SIZE < BLOCK_D:
        return tl.load(ptrs, mask=(offs_d < HEAD_SIZE)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def attend_blocks(
    state,
    q,
    keys,
    sight,
    dropout,
    scale,
    start,
    stop,
    MASKED: tl.constexpr,  # whether some of these blocks are not seen whole by all queries
    HEAD_SIZE: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The state after the keys from start to stop; for the tuples see `attend`."""
    acc, row_max, row_sum = state
    k_ptr, v_ptr, tk, stride_kt, stride_vt = keys
    q_pos, k_offset, ahead, behind = sight
    dropout_row, dropout_threshold = dropout
    offs_n = tl.arange(0, BLOCK_N)
    scale_log2 = scale * _LOG2_E
    for first in tl.range(start, stop, BLOCK_N):
        k_pos = k_offset + first + offs_n
        k = load_rows(k_ptr, first, offs_n, tk, stride_kt, q.shape[1], HEAD_SIZE, MASKED)
        scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        if MASKED:
            seen = visible(q_pos[:, None], k_pos[None, :], k_offset + tk, ahead, behind, HAS_AHEAD, HAS_BEHIND)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        subtracted = tl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)
        p = tl.exp2(scores * scale_log2 - subtracted[:, None])
        shrink = tl.exp2(row_max * scale_log2 - subtracted)
        row_sum = row_sum * shrink + tl.sum(p, axis=1)
        row_max = new_max
        if DROPOUT:
            p = tl.where(kept(dropout_row[:, None], k_pos[None, :], dropout_threshold), p, 0.0)
        v = load_rows(v_ptr, first, offs_n, tk, stride_vt, q.shape[1], HEAD_SIZE, MASKED)
        acc = dot(rounded(p, v.dtype), v, acc * shrink[:, None])
    return acc, row_max, row_sum


@triton.jit
def attend(
    state,
    q,  # [BLOCK_M, BLOCK_D], the queries at positions q_first to q_last, both included
    q_first,
    q_last,
    keys,
    sight,
    dropout,
    scale,
    HEAD_SIZE: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The state (acc, row_max of the unscaled scores, row_sum) of the queries after one more set of keys.

    keys: (k_ptr, v_ptr, their number, stride_kt, stride_vt); sight: (q_pos, k_offset, ahead, behind); dropout: (of
    `dropout_rows`, threshold).
    """
    start, full_start, full_stop, stop = key_range(
        q_first, q_last, sight[1], keys[2], sight[2], sight[3], HAS_AHEAD, HAS_BEHIND, BLOCK_N
    )
    # fmt: off
    if HAS_BEHIND:
        state = attend_blocks(state, q, keys, sight, dropout, scale, start, full_start,
                              True, HEAD_SIZE, HAS_AHEAD, HAS_BEHIND, DROPOUT, BLOCK_N)
    state = attend_blocks(state, q, keys, sight, dropout, scale, full_start, full_stop,
                          False, HEAD_SIZE, HAS_AHEAD, HAS_BEHIND, DROPOUT, BLOCK_N)
    return attend_blocks(state, q, keys, sight, dropout, scale, full_stop, stop,
                         True, HEAD_SIZE, HAS_AHEAD, HAS_BEHIND, DROPOUT, BLOCK_N)
    # fmt: on


@triton.jit
def initial_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The state of `attend` before any key."""
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    return acc, tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)


@triton.jit
def finish(
    state,
    out_ptr,  # [Tq, H, D] bf16, written: rows q_first and behind, of one head
    lse_ptr,  # [Tq] fp32, written: likewise
    heads,
    q_first,
    length_q,
    scale,
    dropout_scale,
    HEAD_SIZE: tl.constexpr,
):
    """Stores what a state of `attend` comes to; 0 and -inf where a query saw no key."""
    acc, row_max, row_sum = state
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc * (dropout_scale / row_sum)[:, None]
    offs_m = q_first + tl.arange(0, acc.shape[0])
    offs_d = tl.arange(0, acc.shape[1])
    mask_m = offs_m < length_q
    out_ptrs = out_ptr + (offs_m.to(tl.int64) * heads * HEAD_SIZE)[:, None] + offs_d[None, :]
    tl.store(out_ptrs, rounded(out, out_ptr.dtype.element_ty), mask=mask_m[:, None] & (offs_d < HEAD_SIZE)[None, :])
    tl.store(lse_ptr + offs_m, row_max * scale + tl.log(row_sum), mask=mask_m)


@triton.jit(
    do_not_specialize=[
        "tq",
        "tk",
        "tiles_m",
        "q_offset",
        "k_offset",
        "ahead",
        "behind",
        "dropout_width",
        "dropout_key",
        "dropout_threshold",
    ]
)
def attention_forward_kernel(
    q_ptr,  # [B, H, Tq, D] bf16, read
    k_ptr,  # [B, Hk, Tk, D] bf16, read
    v_ptr,  # [B, Hk, Tk, D] bf16, read
    out_ptr,  # [B, Tq, H, D] bf16, written
    lse_ptr,  # [B, H, Tq] fp32, written
    cu_seqlens_q_ptr,  # [S + 1] int32, read
    cu_seqlens_k_ptr,  # [S + 1] int32, read
    head_rows_ptr,  # [B or S, H] int64, read
    heads,
    group,
    tq,
    tk,
    tiles_m,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    q_offset,
    k_offset,
    ahead,
    behind,
    scale,
    dropout_width,
    dropout_key: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
    VARLEN: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid_m = tiles_m - 1 - tl.program_id(0) % tiles_m
    sequence_head = tl.program_id(0) // tiles_m
    sequence = sequence_head // heads
    head = (sequence_head % heads).to(tl.int64)
    batch = tl.full((), 0, tl.int64) if VARLEN else sequence.to(tl.int64)
    document_q, length_q = document(cu_seqlens_q_ptr, sequence, tq, VARLEN)
    document_k, length_k = document(cu_seqlens_k_ptr, sequence, tk, VARLEN)
    if pid_m * BLOCK_M >= length_q:
        return
    q_ptr += multiple_of_8(batch * stride_qb + head * stride_qh + document_q * stride_qt)
    k_ptr += multiple_of_8(batch * stride_kb + head // group * stride_kh + document_k * stride_kt)
    v_ptr += multiple_of_8(batch * stride_vb + head // group * stride_vh + document_k * stride_vt)

    q_first = pid_m * BLOCK_M
    offs_m = q_first + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr, q_first, tl.arange(0, BLOCK_M), length_q, stride_qt, BLOCK_D, HEAD_SIZE, True)
    q_pos = q_offset + offs_m
    dropout_row = q_pos
    if DROPOUT:
        dropout_row = dropout_rows(tl.load(head_rows_ptr + sequence_head), q_pos, dropout_width, dropout_key)
    state = attend(
        initial_state(BLOCK_M, BLOCK_D),
        q,
        q_offset + q_first,
        q_offset + min(q_first + BLOCK_M, length_q) - 1,
        (k_ptr, v_ptr, length_k, stride_kt, stride_vt),
        (q_pos, k_offset, ahead, behind),
        (dropout_row, dropout_threshold),
        scale,
        HEAD_SIZE,
        HAS_AHEAD,
        HAS_BEHIND,
        DROPOUT,
        BLOCK_N,
    )
    out_ptr += ((batch * tq + document_q) * heads + head) * HEAD_SIZE
    lse_ptr += (batch * heads + head) * tq + document_q
    finish(state, out_ptr, lse_ptr, heads, q_first, length_q, scale, dropout_scale, HEAD_SIZE)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    dropout_p: float = 0.0,
    dropout_key: int = 0,
    head_rows: Tensor | None = None,
    dropout_width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ scale) v over the keys that each query sees, and the natural log-sum-exp of its scores.

    q: [B, H, Tq, D]; k, v: [B, Hk, Tk, D], H a multiple of Hk, head h of q using head h // (H / Hk); D a multiple of
    8 from 16 to 256; float32, float16 or bfloat16, any strides (copied where `aligned` has to).
    Query i has position q_offset + i, key j has k_offset + j. causal: keys behind the query's position are not seen;
    window: nor are those at a distance of window or more. scale: positive, default 1 / sqrt(D).

    cu_seqlens_q, cu_seqlens_k: [S + 1] int32 on the device, from 0 to the number of rows, where the rows of one batch
    element are S documents behind each other; each sees itself alone and has positions of its own. max_seqlen_q: the
    length of the longest in q, or more (rows behind it are not written).

    dropout_p, dropout_key: of the probabilities, `tpfuse.ops.dropout`'s mask of row head_rows * dropout_width +
    query position and column key position; head_rows: [B, H] ([S, H] with documents) int64; dropout_width: default Tk.

    Returns out, in q's dtype and shape and a view of [B, Tq, H, D], and lse [B, H, Tq] float32, without dropout. A
    query that sees no key (or none with a score above -inf) has 0 and -inf. Values in a block at the border of what is
    seen must be finite even where they are hidden: they are multiplied with 0, as torch does.
    Raises ValueError that names the argument, what was received and what is accepted.
    """
    name = "attention_forward"
    # fmt: off
    arguments = score_arguments(
        name, q, k, v, causal=causal, window=window, q_offset=q_offset, k_offset=k_offset, scale=scale,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, dropout_p=dropout_p, dropout_key=dropout_key,
        head_rows=head_rows, dropout_width=dropout_width,
    )
    # fmt: on
    batch, heads, tq, size = q.shape
    sequences = batch if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    longest = tq
    if cu_seqlens_q is not None:
        if max_seqlen_q is None:
            raise ValueError(f"{name}: max_seqlen_q is None: expected the longest document's length")
        longest = max_seqlen_q
    q, k, v = aligned(q), aligned(k), aligned(v)
    out = torch.empty((batch, tq, heads, size), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, tq), dtype=torch.float32, device=q.device)
    row = choose(name, q.device, q.dtype, D=arguments["BLOCK_D"], DROPOUT=int(dropout_p > 0.0))
    tiles_m = triton.cdiv(longest, row.blocks["BLOCK_M"])
    launch(
        attention_forward_kernel,
        (sequences * heads * tiles_m,),
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        out_ptr=out,
        lse_ptr=lse,
        tiles_m=tiles_m,
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        dropout_scale=1.0 / (1.0 - dropout_p),
        **arguments,
        **row.blocks,
    )
    return out.transpose(1, 2), lse


def strides(name: str, x: Tensor) -> dict[str, int]:
    """The strides of x [B, H, T, D] as kernels take them: stride_<name>b, …h and …t."""
    return {f"stride_{name}{letter}": x.stride(dim) for dim, letter in enumerate("bht")}
