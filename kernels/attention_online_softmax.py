"""The loop of a tile of queries over keys with the online softmax, which the forward kernels of attention share.

The loop updates a state (output, maximum, sum) of the keys seen so far (Milakov and Gimelshein 2018, arXiv:1805.02867;
flash attention, arXiv:2205.14135 and 2307.08691), so that no score leaves the chip. Powers are of two, with scale
log2(e) folded into one multiply-add for each score. Blocks of keys that no query of the tile sees are skipped. Only the
blocks that are partly seen, and the block at the end of the keys, are masked: up to three loops over one body.
"""

import triton
import triton.language as tl

from tpfuse.kernels.attention_scores import key_range, multiple_of_8, visible
from tpfuse.kernels.dropout import kept
from tpfuse.kernels.tiles import accurate_dot, rounded

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def rows_of(ptr, stop, stride, columns, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Return the source that `load_rows` reads: the pointer itself, or a descriptor of tiles [BLOCK_ROWS, BLOCK_D]."""
    if TMA:
        return tl.make_tensor_descriptor(ptr, [stop, columns], [stride, 1], [BLOCK_ROWS, BLOCK_D])
    else:
        return ptr


@triton.jit
def load_rows(
    source, first, offs, stop, stride, columns, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr
):
    """Load rows first + offs of a matrix [stop, columns] as a tile [len(offs), BLOCK_D]; MASKED: 0 from row `stop` on.

    source: made by `rows_of`; its pointer is aligned to 16 bytes and stride is a multiple of 8
    (`attention_scores.aligned`).
    """
    offs_d = tl.arange(0, BLOCK_D)
    if TMA:
        return source.load([first, 0])
    else:
        stride = multiple_of_8(stride)
        ptrs = source + tl.cast(first, tl.int64) * stride + (offs[:, None] * stride + offs_d[None, :])
        if MASKED:
            return tl.load(ptrs, mask=(first + offs < stop)[:, None] & (offs_d < columns)[None, :], other=0.0)
        elif columns < BLOCK_D:
            return tl.load(ptrs, mask=(offs_d < columns)[None, :], other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def scores_in_parts(source, k_ptr, first, offs_n, tk, stride_kt, HEAD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return q kᵀ, computed from 64 elements of the head size at a time, which are read again for each block of keys.

    It is for large float32 heads: as six bfloat16 products, whole heads do not fit into the registers.
    """
    q_ptr, q_first, length_q, stride_qt = source
    scores = tl.zeros((BLOCK_M, offs_n.shape[0]), tl.float32)
    for part in tl.range(0, HEAD_SIZE, 64):
        left = HEAD_SIZE - part
        q = load_rows(q_ptr + part, q_first, tl.arange(0, BLOCK_M), length_q, stride_qt, left, 64, True, False)
        k = load_rows(k_ptr + part, first, offs_n, tk, stride_kt, left, 64, True, False)
        scores = accurate_dot(q, tl.trans(k), scores)
    return scores


@triton.jit
def attend_blocks(
    state,
    q,
    source,
    keys,
    visible_range,
    dropout,
    scale,
    start,
    stop,
    MASKED: tl.constexpr,  # whether some queries do not see all keys of these blocks
    HEAD_SIZE: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return the state after the keys from start to stop; for the tuples see `attend_range`."""
    acc, row_max, row_sum = state
    k_rows, v_rows, tk, stride_kt, stride_vt = keys
    q_pos, k_offset, ahead, behind = visible_range
    dropout_row, dropout_threshold, dropout_step = dropout
    offs_n = tl.arange(0, BLOCK_N)
    scale_log2 = scale * _LOG2_E
    for first in tl.range(start, stop, BLOCK_N):
        k_pos = k_offset + first + offs_n
        if q.dtype == tl.float32 and q.shape[1] > 128:
            scores = scores_in_parts(source, k_rows, first, offs_n, tk, stride_kt, HEAD_SIZE, q.shape[0])
        else:
            k = load_rows(k_rows, first, offs_n, tk, stride_kt, HEAD_SIZE, q.shape[1], MASKED, TMA)
            scores = accurate_dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        if MASKED:
            mask = visible(q_pos[:, None], k_pos[None, :], k_offset + tk, ahead, behind, HAS_AHEAD, HAS_BEHIND)
            scores = tl.where(mask, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        subtracted = tl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)
        p = tl.exp2(scores * scale_log2 - subtracted[:, None])
        shrink = tl.exp2(row_max * scale_log2 - subtracted)
        row_sum = row_sum * shrink + tl.sum(p, axis=1)
        row_max = new_max
        if DROPOUT:
            p = tl.where(kept(dropout_row[:, None], k_pos[None, :] * dropout_step, dropout_threshold), p, 0.0)
        v = load_rows(v_rows, first, offs_n, tk, stride_vt, HEAD_SIZE, q.shape[1], MASKED, TMA)
        acc = accurate_dot(rounded(p, v.dtype), v, acc * shrink[:, None])
    return acc, row_max, row_sum


@triton.jit
def attend_range(
    state,
    q,  # [BLOCK_M, BLOCK_D]
    source,
    keys,
    visible_range,
    dropout,
    scale,
    indices,
    HEAD_SIZE: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return the state (acc, row_max of the unscaled scores, row_sum) of the queries after one more set of keys.

    source: where q was loaded from, (q_ptr, first row, number of rows, stride_qt); keys: (`rows_of` k and v, their
    number, stride_kt, stride_vt); visible_range: (q_pos, k_offset, ahead, behind), the last one a number, or one for
    each query [BLOCK_M, 1]; dropout: (the result of `dropout_rows`, threshold, columns from one key to the next);
    indices: (start, full_start, full_stop, stop) of the keys that the queries see, as from
    `attention_scores.key_range`.
    """
    start, full_start, full_stop, stop = indices
    # fmt: off
    if HAS_BEHIND:
        state = attend_blocks(state, q, source, keys, visible_range, dropout, scale, start, full_start, True,
                              HEAD_SIZE, HAS_AHEAD, HAS_BEHIND, DROPOUT, BLOCK_N, TMA)
    state = attend_blocks(state, q, source, keys, visible_range, dropout, scale, full_start, full_stop, False,
                          HEAD_SIZE, HAS_AHEAD, HAS_BEHIND, DROPOUT, BLOCK_N, TMA)
    return attend_blocks(state, q, source, keys, visible_range, dropout, scale, full_stop, stop, True,
                         HEAD_SIZE, HAS_AHEAD, HAS_BEHIND, DROPOUT, BLOCK_N, TMA)
    # fmt: on


@triton.jit
def attend(
    state,
    q,  # [BLOCK_M, BLOCK_D], the queries at positions q_first to q_last, both included
    q_first,
    q_last,
    source,
    keys,
    visible_range,
    dropout,
    scale,
    HEAD_SIZE: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):
    """Call `attend_range` for the keys at positions k_offset, k_offset + 1, ….

    dropout: (the result of `dropout_rows`, threshold).
    """
    _, k_offset, ahead, behind = visible_range
    dropout_row, dropout_threshold = dropout
    indices = key_range(q_first, q_last, k_offset, keys[2], ahead, behind, HAS_AHEAD, HAS_BEHIND, BLOCK_N)
    # fmt: off
    return attend_range(state, q, source, keys, visible_range, (dropout_row, dropout_threshold, 1), scale, indices,
                        HEAD_SIZE, HAS_AHEAD, HAS_BEHIND, DROPOUT, BLOCK_N, TMA)
    # fmt: on


@triton.jit
def initial_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the state of `attend` before any key."""
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    return acc, tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)


@triton.jit
def finish(
    state,
    out_ptr,  # [Tq, H, D] bf16, written: the rows from q_first on, of one head
    lse_ptr,  # [Tq] fp32, written: the rows from q_first on
    heads,
    q_first,
    length_q,
    scale,
    dropout_scale,
    HEAD_SIZE: tl.constexpr,
):
    """Store the output and log-sum-exp that follow from a state of `attend`; 0 and -inf where a query saw no key.

    The comparison of rows is written differently from that in `load_rows`: one comparison for both would stay in
    registers between them.
    """
    acc, row_max, row_sum = state
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc * (dropout_scale / row_sum)[:, None]
    offs_m = tl.arange(0, acc.shape[0])
    offs_d = tl.arange(0, acc.shape[1])
    mask_m = offs_m < length_q - q_first
    out_ptr += tl.cast(q_first, tl.int64) * heads * HEAD_SIZE
    out_ptrs = out_ptr + ((offs_m * heads * HEAD_SIZE)[:, None] + offs_d[None, :])
    tl.store(out_ptrs, rounded(out, out_ptr.dtype.element_ty), mask=mask_m[:, None] & (offs_d < HEAD_SIZE)[None, :])
    tl.store(lse_ptr + q_first + offs_m, row_max * scale + tl.log(row_sum), mask=mask_m)
