"""attention_forward: out = dropout(softmax(mask(q kᵀ scale))) v, and the log-sum-exp of the scores, in one pass.

A program holds one tile of queries of one head and loops over the keys that it sees (`attention_online_softmax`). Where
the mask gives later tiles more work, they start first. Heads are computed one after another, so that a head's keys stay
in the L2 cache. Tiles are loaded by TMA where the configuration requests it, by masked pointers otherwise. out is
stored as [B, Tq, H, D], so that the projection that follows reads contiguous memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.attention_online_softmax import attend, finish, initial_state, load_rows, rows_of
from tpfuse.kernels.attention_scores import aligned, document, dropout_rows, multiple_of_8, score_arguments
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.gemm_tiles import tile_options
from tpfuse.kernels.launch import cdiv, launch

# Arguments that change from call to call and for whose values a separate compilation gains nothing.
NOT_SPECIALIZED = ["tq", "tk", "chunks", "tiles_m", "q_offset", "k_offset", "ahead", "behind"]
NOT_SPECIALIZED += ["dropout_width", "dropout_threshold"]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_forward_kernel(
    q_ptr,  # [B, H, Tq, D] bf16, read
    k_ptr,  # [B, Hk, Tk, D] bf16, read
    v_ptr,  # [B, Hk, Tk, D] bf16, read
    out_ptr,  # [B, Tq, H, D] bf16, written
    lse_ptr,  # [B, H, Tq] fp32, written
    cu_seqlens_q_ptr,  # [S + 1] int32, read
    cu_seqlens_k_ptr,  # [S + 1] int32, read
    head_rows_ptr,  # [B or S, H] int64, read
    dropout_key_ptr,  # [] int64, read
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
    TMA: tl.constexpr,
):
    pid_m = tiles_m - 1 - tl.program_id(0) % tiles_m
    sequence_head = tl.program_id(0) // tiles_m
    sequence = sequence_head // heads
    head = (sequence_head % heads).to(tl.int64)
    batch = tl.full((), 0, tl.int64) if VARLEN else sequence.to(tl.int64)
    document_q, length_q = document(cu_seqlens_q_ptr, sequence, tq, VARLEN)
    document_k, length_k = document(cu_seqlens_k_ptr, sequence, tk, VARLEN)
    if VARLEN and pid_m * BLOCK_M >= length_q:
        return
    q_ptr += multiple_of_8(batch * stride_qb + head * stride_qh + document_q * stride_qt)
    k_ptr += multiple_of_8(batch * stride_kb + head // group * stride_kh + document_k * stride_kt)
    v_ptr += multiple_of_8(batch * stride_vb + head // group * stride_vh + document_k * stride_vt)

    q_first = pid_m * BLOCK_M
    offs_m = q_first + tl.arange(0, BLOCK_M)
    q_rows = rows_of(q_ptr, length_q, stride_qt, HEAD_SIZE, BLOCK_M, BLOCK_D, TMA)
    q = load_rows(q_rows, q_first, tl.arange(0, BLOCK_M), length_q, stride_qt, HEAD_SIZE, BLOCK_D, True, TMA)
    k_rows = rows_of(k_ptr, length_k, stride_kt, HEAD_SIZE, BLOCK_N, BLOCK_D, TMA)
    v_rows = rows_of(v_ptr, length_k, stride_vt, HEAD_SIZE, BLOCK_N, BLOCK_D, TMA)
    q_pos = q_offset + offs_m
    dropout_row = q_pos
    if DROPOUT:
        dropout_row = dropout_rows(
            tl.load(head_rows_ptr + sequence_head), q_pos, dropout_width, tl.load(dropout_key_ptr)
        )
    state = attend(
        initial_state(BLOCK_M, BLOCK_D),
        q,
        q_offset + q_first,
        q_offset + min(q_first + BLOCK_M, length_q) - 1,
        (q_ptr, q_first, length_q, stride_qt),
        (k_rows, v_rows, length_k, stride_kt, stride_vt),
        (q_pos, k_offset, ahead, behind),
        (dropout_row, dropout_threshold),
        scale,
        HEAD_SIZE,
        HAS_AHEAD,
        HAS_BEHIND,
        DROPOUT,
        BLOCK_N,
        TMA,
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
    dropout_key: Tensor | None = None,
    head_rows: Tensor | None = None,
    dropout_width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(q kᵀ scale) v over the keys that each query sees, and the natural log-sum-exp of its scores.

    q: [B, H, Tq, D]; k, v: [B, Hk, Tk, D], H a multiple of Hk, head h of q using head h // (H / Hk); D a multiple of 8
    from 16 to 256; float32, float16 or bfloat16, any strides (copied where `aligned` has to). Query i has position
    q_offset + i, key j has k_offset + j. causal: a query does not see keys after its position; window: it does not see
    keys at a distance of window or more. scale: positive, default 1 / sqrt(D).

    cu_seqlens_q, cu_seqlens_k: [S + 1] int32 on the device, from 0 to the number of rows, where the rows of one batch
    element are S concatenated documents; each document sees only itself and counts positions from its own start.
    max_seqlen_q: the length of the longest document in q, or more. Rows after the last document have 0 and -inf.

    dropout_p, dropout_key: dropout of the probabilities, by `tpfuse.ops.dropout`'s mask of row head_rows *
    dropout_width + query position and column key position; dropout_key: [] int64; head_rows: [B, H] ([S, H] with
    documents) int64; dropout_width: default Tk.

    Return out, in q's dtype and shape and a view of [B, Tq, H, D], and lse [B, H, Tq] float32, without dropout. A
    query that sees no key (or none with a score above -inf) has 0 and -inf. Values of keys in a block that is only
    partly seen must be finite even where they are hidden: they are multiplied by 0, as in torch. Raise ValueError that
    names the argument, what was received and what is accepted.
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
    if cu_seqlens_q is not None:  # no program writes the rows after the last document
        out.zero_()
        lse.fill_(float("-inf"))
    row = choose_configuration(name, q.device, q.dtype, D=arguments["BLOCK_D"], DROPOUT=int(dropout_p > 0.0))
    tiles_m = cdiv(longest, row.blocks["BLOCK_M"])
    # TMA needs rows that do not overlap.
    options = tile_options(row, all(x.numel() > 0 and x.stride(2) >= x.shape[3] for x in (q, k, v)))
    launch(
        attention_forward_kernel,
        (sequences * heads * tiles_m,),
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
        **options,
    )
    return out.transpose(1, 2), lse


def strides(name: str, x: Tensor) -> dict[str, int]:
    """Return the strides of x [B, H, T, D] by the kernels' argument names: stride_<name>b, …h and …t."""
    return {f"stride_{name}{letter}": x.stride(dim) for dim, letter in enumerate("bht")}
