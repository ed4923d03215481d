"""attention_backward: attention's gradients, from what forward saves: the output and the scores' log-sum-exp.

    p = exp(scale q kᵀ - lse)        delta = rowsum(grad_out * out) - grad_lse
    dv = pᵀ grad_out                 ds = p * (grad_out vᵀ - delta)
    dk = scale dsᵀ q                 dq = scale ds k

The kernels compute the probabilities again tile by tile (FlashAttention-2, arXiv:2307.08691). With dropout's mask m, 0
or 1 / (1 - p), the p of dv is m p, and the grad_out vᵀ of ds is m (grad_out vᵀ). The gradient of the log-sum-exp itself
reaches the scores as p * grad_lse; it is not zero where partial results are merged, as in ring attention.

There are two kernels. A program of the first holds a tile of keys and loops over the queries that see it, in all heads
that share the keys. A program of the second holds a tile of queries and loops over the keys that it sees. So the scores
are computed twice, but no program adds to what another program writes: the kernels need no atomics, every run gives the
same bits, and sums stay in float32 in registers. The kernel of dk and dv holds scores as [keys, queries], so that they
go from one product into the next without a transpose.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.attention_backward_delta import LOG2_E, PADDING, attention_backward_delta, load_tile, query_row
from tpfuse.kernels.attention_forward import strides
from tpfuse.kernels.attention_scores import (
    aligned,
    document,
    dropout_rows,
    key_range,
    multiple_of_8,
    score_arguments,
    visible,
)
from tpfuse.kernels.checks import check_floats, check_shape, check_tensor
from tpfuse.kernels.configurations import Configuration, choose_configuration
from tpfuse.kernels.dropout import kept
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.tiles import accurate_dot, rounded

_OPERATOR = "attention_backward"
# Numbers that change from call to call: Triton compiles no separate kernel for 1 and multiples of 16.
_CHANGING = ["tq", "tk", "tiles", "documents", "q_offset", "k_offset", "ahead", "behind", "dropout_width"]
_CHANGING += ["dropout_threshold"]


@triton.jit
def sliced_product(a_rows, b_rows, HEAD_SIZE: tl.constexpr, SLICE_D: tl.constexpr):
    """Return a bᵀ, computed in slices of the head size that are loaded when they are needed.

    A float32 product as six bfloat16 products keeps three parts of each operand in registers; those of wide heads would
    not fit.
    """
    acc = tl.zeros((a_rows[2].shape[0], b_rows[2].shape[0]), tl.float32)
    for first_d in tl.range(0, HEAD_SIZE, SLICE_D):
        a = load_tile(a_rows, first_d, HEAD_SIZE, SLICE_D)
        acc = accurate_dot(a, tl.trans(load_tile(b_rows, first_d, HEAD_SIZE, SLICE_D)), acc)
    return acc


@triton.jit
def store_tile(rows, tile, HEAD_SIZE: tl.constexpr):
    """Store `tile` [len(offs), BLOCK_D] as the rows (ptr, first, offs, stop, stride) of a matrix [stop, HEAD_SIZE].

    The comparison of rows is written differently from that in `load_tile`: one comparison for both would stay in
    registers between them.
    """
    ptr, first, offs, stop, stride = rows
    offs_d = tl.arange(0, tile.shape[1])
    ptrs = ptr + tl.cast(first, tl.int64) * stride + (offs[:, None] * stride + offs_d[None, :])
    mask = (offs < stop - first)[:, None] & (offs_d < HEAD_SIZE)[None, :]
    tl.store(ptrs, rounded(tile, ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_CHANGING)
def attention_backward_dkdv_kernel(
    grad_out_ptr,  # [B, H, Tq, D] bf16, read
    q_ptr,  # [B, H, Tq, D] bf16, read
    k_ptr,  # [B, Hk, Tk, D] bf16, read
    v_ptr,  # [B, Hk, Tk, D] bf16, read
    log2_sum_ptr,  # [B, H, Tq + documents * padding] fp32, read
    delta_ptr,  # [B, H, Tq + documents * padding] fp32, read
    dk_ptr,  # [B, Tk, Hk, D] bf16 or fp32, written
    dv_ptr,  # [B, Tk, Hk, D] bf16 or fp32, written
    cu_seqlens_q_ptr,  # [S + 1] int32, read
    cu_seqlens_k_ptr,  # [S + 1] int32, read
    head_rows_ptr,  # [B or S, H] int64, read
    dropout_key_ptr,  # [] int64, read
    heads,
    group,
    tq,
    tk,
    documents,
    tiles,
    stride_gb,
    stride_gh,
    stride_gt,
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
    SLICE_D: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    SLICED: tl.constexpr = SLICE_D < BLOCK_D
    kv_heads = heads // group
    first_n = tl.program_id(0) % tiles * BLOCK_N
    kv_head = (tl.program_id(0) // tiles % kv_heads).to(tl.int64)
    sequence = tl.program_id(0) // tiles // kv_heads
    batch = tl.full((), 0, tl.int64) if VARLEN else sequence.to(tl.int64)
    first_q, length_q = document(cu_seqlens_q_ptr, sequence, tq, VARLEN)
    first_k, length_k = document(cu_seqlens_k_ptr, sequence, tk, VARLEN)
    if first_n >= length_k:
        return
    tile_m = tl.arange(0, BLOCK_M)
    tile_n = tl.arange(0, BLOCK_N)
    k_ptr += multiple_of_8(batch * stride_kb + kv_head * stride_kh + first_k * stride_kt)
    v_ptr += multiple_of_8(batch * stride_vb + kv_head * stride_vh + first_k * stride_vt)
    q_ptr += multiple_of_8(batch * stride_qb + first_q * stride_qt)
    grad_out_ptr += multiple_of_8(batch * stride_gb + first_q * stride_gt)
    keys = (k_ptr, first_n, tile_n, length_k, stride_kt)
    values = (v_ptr, first_n, tile_n, length_k, stride_vt)
    if not SLICED:
        k = load_tile(keys, 0, HEAD_SIZE, BLOCK_D)
        v = load_tile(values, 0, HEAD_SIZE, BLOCK_D) if DK else k
    k_first = k_offset + first_n
    k_last = k_offset + min(first_n + BLOCK_N, length_k) - 1
    k_pos = k_first + tile_n
    # For the queries that see a key, ahead and behind are exchanged.
    start, full_start, full_stop, stop = key_range(
        k_first, k_last, q_offset, length_q, behind, ahead, HAS_BEHIND, HAS_AHEAD, BLOCK_M
    )
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    blocks = tl.cdiv(stop - start, BLOCK_M)
    # One loop goes over all heads' blocks, so that the next head's loads overlap the last block of this head.
    for step in tl.range(0, group * blocks):
        head = kv_head * group + step // blocks
        first_m = start + step % blocks * BLOCK_M
        offs_m = first_m + tile_m
        queries = (q_ptr + head * multiple_of_8(stride_qh), first_m, tile_m, length_q, stride_qt)
        grads = (grad_out_ptr + head * multiple_of_8(stride_gh), first_m, tile_m, length_q, stride_gt)
        if SLICED:
            scores = sliced_product(keys, queries, HEAD_SIZE, SLICE_D)
        else:
            q = load_tile(queries, 0, HEAD_SIZE, BLOCK_D)
            scores = accurate_dot(k, tl.trans(q), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        if (first_m < full_start) | (first_m >= full_stop):
            q_pos = q_offset + offs_m
            mask = visible(q_pos[None, :], k_pos[:, None], k_offset + length_k, ahead, behind, HAS_AHEAD, HAS_BEHIND)
            scores = tl.where(mask, scores, float("-inf"))
        row = query_row(batch, head, heads, sequence, first_q, tq, documents, VARLEN)
        p = tl.exp2(scores * (scale * LOG2_E) - tl.load(log2_sum_ptr + row + offs_m)[None, :])
        if DROPOUT:
            head_row = tl.load(head_rows_ptr + sequence * heads + head)
            hashed = dropout_rows(head_row, q_offset + offs_m, dropout_width, tl.load(dropout_key_ptr))
            keep = kept(hashed[None, :], k_pos[:, None], dropout_threshold)
        grad_out = load_tile(grads, 0, HEAD_SIZE, BLOCK_D)
        if DK:
            if SLICED:
                dp = sliced_product(values, grads, HEAD_SIZE, SLICE_D)
                q = load_tile(queries, 0, HEAD_SIZE, BLOCK_D)
            else:
                dp = accurate_dot(v, tl.trans(grad_out), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        if DV:
            dropped = tl.where(keep, p, 0.0) if DROPOUT else p
            dv = accurate_dot(rounded(dropped, grad_out.dtype), grad_out, dv)
        if DK:
            if DROPOUT:
                dp = tl.where(keep, dp * dropout_scale, 0.0)
            ds = p * (dp - tl.load(delta_ptr + row + offs_m)[None, :])
            dk = accurate_dot(rounded(ds, q.dtype), q, dk)
    start = ((batch * tk + first_k) * kv_heads + kv_head) * HEAD_SIZE
    stride = kv_heads * HEAD_SIZE
    if DK:
        store_tile((dk_ptr + start, first_n, tile_n, length_k, stride), dk * scale, HEAD_SIZE)
    if DV:
        store_tile((dv_ptr + start, first_n, tile_n, length_k, stride), dv * dropout_scale, HEAD_SIZE)


@triton.jit(do_not_specialize=_CHANGING)
def attention_backward_dq_kernel(
    grad_out_ptr,  # [B, H, Tq, D] bf16, read
    q_ptr,  # [B, H, Tq, D] bf16, read
    k_ptr,  # [B, Hk, Tk, D] bf16, read
    v_ptr,  # [B, Hk, Tk, D] bf16, read
    log2_sum_ptr,  # [B, H, Tq + documents * padding] fp32, read
    delta_ptr,  # [B, H, Tq + documents * padding] fp32, read
    dq_ptr,  # [B, Tq, H, D] bf16 or fp32, written
    cu_seqlens_q_ptr,  # [S + 1] int32, read
    cu_seqlens_k_ptr,  # [S + 1] int32, read
    head_rows_ptr,  # [B or S, H] int64, read
    dropout_key_ptr,  # [] int64, read
    heads,
    group,
    tq,
    tk,
    documents,
    tiles,
    stride_gb,
    stride_gh,
    stride_gt,
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
    SLICE_D: tl.constexpr,
):
    SLICED: tl.constexpr = SLICE_D < BLOCK_D
    first_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    sequence_head = tl.program_id(0) // tiles
    sequence = sequence_head // heads
    head = (sequence_head % heads).to(tl.int64)
    batch = tl.full((), 0, tl.int64) if VARLEN else sequence.to(tl.int64)
    first_q, length_q = document(cu_seqlens_q_ptr, sequence, tq, VARLEN)
    first_k, length_k = document(cu_seqlens_k_ptr, sequence, tk, VARLEN)
    if first_m >= length_q:
        return
    tile_m = tl.arange(0, BLOCK_M)
    tile_n = tl.arange(0, BLOCK_N)
    offs_m = first_m + tile_m
    q_ptr += multiple_of_8(batch * stride_qb + head * stride_qh + first_q * stride_qt)
    grad_out_ptr += multiple_of_8(batch * stride_gb + head * stride_gh + first_q * stride_gt)
    k_ptr += multiple_of_8(batch * stride_kb + head // group * stride_kh + first_k * stride_kt)
    v_ptr += multiple_of_8(batch * stride_vb + head // group * stride_vh + first_k * stride_vt)
    queries = (q_ptr, first_m, tile_m, length_q, stride_qt)
    grads = (grad_out_ptr, first_m, tile_m, length_q, stride_gt)
    if not SLICED:
        q = load_tile(queries, 0, HEAD_SIZE, BLOCK_D)
        grad_out = load_tile(grads, 0, HEAD_SIZE, BLOCK_D)
    row = query_row(batch, head, heads, sequence, first_q, tq, documents, VARLEN)
    log2_sum = tl.load(log2_sum_ptr + row + offs_m)
    delta = tl.load(delta_ptr + row + offs_m)
    q_pos = q_offset + offs_m
    if DROPOUT:
        head_row = tl.load(head_rows_ptr + sequence_head)
        hashed = dropout_rows(head_row, q_pos, dropout_width, tl.load(dropout_key_ptr))
    q_last = q_offset + min(first_m + BLOCK_M, length_q) - 1
    start, full_start, full_stop, stop = key_range(
        q_offset + first_m, q_last, k_offset, length_k, ahead, behind, HAS_AHEAD, HAS_BEHIND, BLOCK_N
    )
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first_n in tl.range(start, stop, BLOCK_N):
        k_pos = k_offset + first_n + tile_n
        keys = (k_ptr, first_n, tile_n, length_k, stride_kt)
        values = (v_ptr, first_n, tile_n, length_k, stride_vt)
        if SLICED:
            scores = sliced_product(queries, keys, HEAD_SIZE, SLICE_D)
            dp = sliced_product(grads, values, HEAD_SIZE, SLICE_D)
            k = load_tile(keys, 0, HEAD_SIZE, BLOCK_D)
        else:
            k = load_tile(keys, 0, HEAD_SIZE, BLOCK_D)
            scores = accurate_dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
            v = load_tile(values, 0, HEAD_SIZE, BLOCK_D)
            dp = accurate_dot(grad_out, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        if (first_n < full_start) | (first_n >= full_stop):
            mask = visible(q_pos[:, None], k_pos[None, :], k_offset + length_k, ahead, behind, HAS_AHEAD, HAS_BEHIND)
            scores = tl.where(mask, scores, float("-inf"))
        p = tl.exp2(scores * (scale * LOG2_E) - log2_sum[:, None])
        if DROPOUT:
            dp = tl.where(kept(hashed[:, None], k_pos[None, :], dropout_threshold), dp * dropout_scale, 0.0)
        dq = accurate_dot(rounded(p * (dp - delta[:, None]), k.dtype), k, dq)
    dq_ptr += ((batch * tq + first_q) * heads + head) * HEAD_SIZE
    store_tile((dq_ptr, first_m, tile_m, length_q, heads * HEAD_SIZE), dq * scale, HEAD_SIZE)


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    dropout_key: Tensor | None = None,
    head_rows: Tensor | None = None,
    dropout_width: int | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `attention_forward`'s q, k and v; see there for q, k, v and the options.

    out: [B, H, Tq, D] in q's dtype; lse: [B, H, Tq] float32. They belong to these keys, or to more keys where out is
    the merged output of several sets of keys: the result is then this set's part. grad_out: out's shape and dtype;
    grad_lse: lse's, None for zero. max_seqlen_q, max_seqlen_k: the lengths of the longest documents, or more; needed
    with cu_seqlens.

    Return dq, dk, dv in the shapes of q, k, v, as views of [B, T, H, D]; rows after the last document are 0. A query
    that sees no key (lse -inf) adds nothing. Deterministic. Raise ValueError that names the argument, what was
    received and what is accepted.
    """
    # fmt: off
    arguments = score_arguments(
        _OPERATOR, q, k, v, causal=causal, window=window, q_offset=q_offset, k_offset=k_offset, scale=scale,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, dropout_p=dropout_p, dropout_key=dropout_key,
        head_rows=head_rows, dropout_width=dropout_width,
    )
    # fmt: on
    _check(grad_out, q, out, lse, grad_lse)
    documents = cu_seqlens_q is not None
    if documents and (max_seqlen_q is None or max_seqlen_k is None):
        missing = "max_seqlen_q" if max_seqlen_q is None else "max_seqlen_k"
        raise ValueError(f"{_OPERATOR}: {missing} is None: expected the longest document's length")
    q, k, v, grad_out, out = (aligned(x) for x in (q, k, v, grad_out, out))
    dq, dk, dv = (_gradient(x, zero=documents) for x in (q, k, v))
    sequences = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    longest_q = q.shape[2] if max_seqlen_q is None else max_seqlen_q
    longest_k = k.shape[2] if max_seqlen_k is None else max_seqlen_k
    arguments |= {"documents": sequences if documents else 1, "dropout_scale": 1.0 / (1.0 - dropout_p)}
    arguments |= {"grad_out_ptr": grad_out, "q_ptr": q, "k_ptr": k, "v_ptr": v}
    arguments |= strides("g", grad_out) | strides("q", q) | strides("k", k) | strides("v", v)
    arguments |= attention_backward_delta(
        grad_out, out, lse, grad_lse, arguments["cu_seqlens_q_ptr"], sequences, longest_q
    )
    _launch_dkdv(arguments, sequences * k.shape[1], longest_k, dk, dv)
    _launch_dq(arguments, sequences * q.shape[1], longest_q, dq)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _check(grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None) -> None:
    """Raise ValueError unless the results of forward and their gradients fit q."""
    check_floats(_OPERATOR, q=q, out=out, grad_out=grad_out)
    check_shape(_OPERATOR, "out", out, tuple(q.shape))
    check_shape(_OPERATOR, "grad_out", grad_out, tuple(q.shape))
    for name, x in (("lse", lse), ("grad_lse", grad_lse)):
        check_tensor(_OPERATOR, name, x, tuple(q.shape[:3]), (torch.float32,), ("q", q))


def _gradient(x: Tensor, zero: bool) -> Tensor:
    """Allocate x's gradient, [B, T, H, D].

    zero: start at 0, because no kernel writes the rows after the last document.
    """
    batch, heads, length, size = x.shape
    make = torch.zeros if zero else torch.empty
    return make((batch, length, heads, size), dtype=x.dtype, device=x.device)


def _launch_dkdv(arguments: dict[str, Any], heads: int, longest: int, dk: Tensor, dv: Tensor) -> None:
    """Compute dk and dv in one launch, or in one launch each if the sums of both do not fit in the registers."""
    row = backward_row(f"{_OPERATOR}_dkdv", arguments)
    blocks = {"BLOCK_M": row.blocks["BLOCK_M"], "BLOCK_N": row.blocks["BLOCK_N"]}
    tiles = cdiv(longest, blocks["BLOCK_N"])
    for wanted in ("DK DV",) if row.blocks["TOGETHER"] else ("DV", "DK"):
        launch(
            attention_backward_dkdv_kernel,
            (heads * tiles,),
            num_warps=row.num_warps,
            num_stages=row.num_stages,
            dk_ptr=dk,
            dv_ptr=dv,
            tiles=tiles,
            **arguments,
            **blocks,
            SLICE_D=min(row.blocks["SLICE_D"], arguments["BLOCK_D"]),
            DK="DK" in wanted,
            DV="DV" in wanted,
        )


def _launch_dq(arguments: dict[str, Any], heads: int, longest: int, dq: Tensor) -> None:
    """Compute dq in one launch."""
    row = backward_row(f"{_OPERATOR}_dq", arguments)
    tiles = cdiv(longest, row.blocks["BLOCK_M"])
    launch(
        attention_backward_dq_kernel,
        (heads * tiles,),
        dq_ptr=dq,
        tiles=tiles,
        **arguments,
        **{**row.options, "SLICE_D": min(row.blocks["SLICE_D"], arguments["BLOCK_D"])},
    )


def backward_row(operator: str, arguments: dict[str, Any]) -> Configuration:
    """Return the configuration of a kernel of dq, or of dk and dv, for these arguments."""
    q: Tensor = arguments["q_ptr"]
    sizes = {"D": arguments["BLOCK_D"], "DROPOUT": int(arguments["DROPOUT"])}
    row = choose_configuration(operator, q.device, q.dtype, **sizes)
    assert row.blocks["BLOCK_M"] <= PADDING.value, row
    return row
