"""ring_attention_dkdv: the gradients of a rank's keys and values, from the queries of all ranks.

    p = exp(scale q kᵀ - lse)        ds = p * (grad_out vᵀ - delta)
    dv = pᵀ grad_out                 dk = scale dsᵀ q

A program holds a tile of keys from one run of positions and loops over the queries that see it: rank 0's, 1's, 2's, …,
on every rank in this order, in all heads that share the keys. So each gradient is one sum in float32 in registers,
complete at its owner and in the same order in every run; no partial sums travel. Formulas and tiles are those of
`attention_backward`, scores are [keys, queries].

With an exchange the queries of all ranks are in this rank's slot: the previous launch on its stream, of
`ring_attention_dq`, has copied them there, and its epoch is the one in `state`. No program writes there before that
stream's launch after the next. If the previous launch was aborted, this one reads what an earlier launch left at the
same addresses, and no caller receives the result. This launch waits for nothing.
"""

import triton
import triton.language as tl

from tpfuse.kernels.attention_backward import sliced_product, store_tile
from tpfuse.kernels.attention_backward_delta import LOG2_E, PADDING, load_tile
from tpfuse.kernels.attention_scores import multiple_of_8
from tpfuse.kernels.block_exchange import block_in_slot
from tpfuse.kernels.dropout import hashed_rows, kept
from tpfuse.kernels.ring_attention_visibility import first_index, index_range, last_index
from tpfuse.kernels.sequence_runs import run_start
from tpfuse.kernels.tiles import accurate_dot, rounded

# Numbers that change from call to call: Triton compiles no separate kernel for 1 and multiples of 16.
_CHANGING = ["batch", "run_count", "run_size", "run_unit", "run_step", "source_first", "source_step", "steps", "rank"]
_CHANGING += ["dropout_threshold", "queries_start", "block_words"]


@triton.jit
def _add_queries(
    dk,
    dv,
    key_tile,
    queries,
    first_head,
    first_row,
    indices,
    visible_range,
    dropout,
    group,
    n,
    run_size,
    scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICE_D: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    """Return (dk, dv) after the queries of one run, in the heads that share the keys; the kernel builds the tuples."""
    SLICED: tl.constexpr = SLICE_D < BLOCK_D
    keys, values, k, v, k_pos = key_tile
    q_ptr, grad_out_ptr, log2_sum_ptr, delta_ptr = queries
    start, full_start, full_stop, stop = indices
    first, last = visible_range[0][:, None], visible_range[1][:, None]
    counters_ptr, counters_start, dropout_key_ptr, dropout_threshold, dropout_scale = dropout
    tile_m = tl.arange(0, BLOCK_M)
    blocks = tl.cdiv(stop - start, BLOCK_M)
    # One loop goes over all heads' blocks, so that the next head's loads overlap the last block of this head.
    for index in tl.range(0, group * blocks):
        head = first_head + index // blocks
        first_m = start + index % blocks * BLOCK_M
        offs_m = first_m + tile_m
        row = head * n + first_row
        query_rows = (q_ptr + row * HEAD_SIZE, first_m, tile_m, run_size, HEAD_SIZE)
        grad_rows = (grad_out_ptr + row * HEAD_SIZE, first_m, tile_m, run_size, HEAD_SIZE)
        if SLICED:
            scores = sliced_product(keys, query_rows, HEAD_SIZE, SLICE_D)
        else:
            q = load_tile(query_rows, 0, HEAD_SIZE, BLOCK_D)
            scores = accurate_dot(k, tl.trans(q), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        if (first_m < full_start) | (first_m >= full_stop):
            scores = tl.where((offs_m[None, :] >= first) & (offs_m[None, :] <= last), scores, float("-inf"))
        padded = row + head * PADDING + offs_m
        p = tl.exp2(scores * (scale * LOG2_E) - tl.load(log2_sum_ptr + padded)[None, :])
        if DROPOUT:
            counter = tl.load(counters_ptr + counters_start + row + offs_m, mask=offs_m < run_size, other=0)
            hashed = hashed_rows(counter, 1, tl.load(dropout_key_ptr))
            keep = kept(hashed[None, :], k_pos[:, None], dropout_threshold)
        grad_out = load_tile(grad_rows, 0, HEAD_SIZE, BLOCK_D)
        if DK:
            if SLICED:
                dp = sliced_product(values, grad_rows, HEAD_SIZE, SLICE_D)
                q = load_tile(query_rows, 0, HEAD_SIZE, BLOCK_D)
            else:
                dp = accurate_dot(v, tl.trans(grad_out), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        if DV:
            dropped = tl.where(keep, p, 0.0) if DROPOUT else p
            dv = accurate_dot(rounded(dropped, grad_out.dtype), grad_out, dv)
        if DK:
            if DROPOUT:
                dp = tl.where(keep, dp * dropout_scale, 0.0)
            ds = p * (dp - tl.load(delta_ptr + padded)[None, :])
            dk = accurate_dot(rounded(ds, q.dtype), q, dk)
    return dk, dv


@triton.jit
def _queries_of(queries, exchange, source, batch, heads, n, HEAD_SIZE: tl.constexpr, EXCHANGE: tl.constexpr):
    """Return pointers to q, grad_out, log2_sum and delta of rank `source`.

    With an exchange they are concatenated in that rank's block in this rank's slot.
    """
    q_ptr, grad_out_ptr, log2_sum_ptr, delta_ptr = queries
    if EXCHANGE:
        slots_ptr, state_ptr, slot_bytes, block_words, queries_start, rank = exchange
        dtype: tl.constexpr = grad_out_ptr.dtype.element_ty
        rows = tl.cast(batch * heads, tl.int64) * n
        words = block_in_slot(slots_ptr, tl.load(state_ptr), slot_bytes, rank, source, block_words)
        q_ptr = (words + queries_start // 16 * 16).to(tl.pointer_type(dtype))
        grad_out_ptr = q_ptr + rows * HEAD_SIZE
        log2_sum_ptr = (grad_out_ptr + rows * HEAD_SIZE).to(tl.pointer_type(tl.float32))
        delta_ptr = log2_sum_ptr + rows + batch * heads * PADDING
    return q_ptr, grad_out_ptr, log2_sum_ptr, delta_ptr


@triton.jit(do_not_specialize=_CHANGING)
def ring_attention_dkdv_kernel(
    q_ptr,  # [B, H, n, D] bf16, read; with an exchange the next three are unused, and this one only gives its dtype
    grad_out_ptr,  # [B, H, n, D] bf16, read
    log2_sum_ptr,  # [B, H, n + padding] fp32, read
    delta_ptr,  # [B, H, n + padding] fp32, read
    blocks_ptr,  # [2, B, Hk, n, D] bf16, read: keys and values of `rank`
    dk_ptr,  # [B, Hk, n, D] bf16 or fp32, written
    dv_ptr,  # [B, Hk, n, D] bf16 or fp32, written
    first_ptr,  # [n] int32, read
    last_ptr,  # [n] int32, read
    counters_ptr,  # [B, H, n] int64, with an exchange [WORLD, B, H, n], read
    dropout_key_ptr,  # [] int64, read
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes: its own is read
    state_ptr,  # [2] int32, read
    batch,
    heads,
    group,
    run_count,
    run_size,
    run_unit,
    run_step,
    source_first,
    source_step,
    steps,
    stride_v,  # from the keys of a block to its values
    stride_b,  # of dk and dv
    stride_h,
    stride_t,
    queries_start,
    block_words,
    slot_bytes,
    rank,
    scale,
    dropout_threshold: tl.int64,
    dropout_scale,
    WORLD: tl.constexpr,
    EXCHANGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICE_D: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    n, kv_heads = run_count * run_size, heads // group
    tiles = run_count * tl.cdiv(run_size, BLOCK_N)
    run_of_keys = tl.program_id(0) % tiles // tl.cdiv(run_size, BLOCK_N)
    first_n = tl.program_id(0) % tl.cdiv(run_size, BLOCK_N) * BLOCK_N
    kv_head = tl.cast(tl.program_id(0) // tiles, tl.int64)  # index among the key heads of the whole batch
    tile_n = tl.arange(0, BLOCK_N)
    offs_n, first_row = first_n + tile_n, run_of_keys * run_size
    k_ptr = blocks_ptr + (kv_head * n + first_row) * HEAD_SIZE
    keys = (k_ptr, first_n, tile_n, run_size, HEAD_SIZE)
    values = (k_ptr + multiple_of_8(stride_v), first_n, tile_n, run_size, HEAD_SIZE)
    k, v = tile_n, tile_n
    if SLICE_D >= BLOCK_D:
        k = load_tile(keys, 0, HEAD_SIZE, BLOCK_D)
        v = load_tile(values, 0, HEAD_SIZE, BLOCK_D) if DK else k
    k_pos = run_start(rank, run_of_keys, run_unit, WORLD) + offs_n * run_step
    first = tl.load(first_ptr + first_row + offs_n, mask=offs_n < run_size, other=0)
    last = tl.load(last_ptr + first_row + offs_n, mask=offs_n < run_size, other=-1)
    tile_first, tile_last = first_row + first_n, first_row + min(first_n + BLOCK_N, run_size) - 1
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for index in range(steps):
        source = (source_first + index * source_step) % WORLD
        queries = _queries_of(
            (q_ptr, grad_out_ptr, log2_sum_ptr, delta_ptr),
            (slots_ptr, state_ptr, slot_bytes, block_words, queries_start, rank),
            source, batch, heads, n, HEAD_SIZE, EXCHANGE,
        )  # fmt: skip
        counters_start = tl.cast(source if EXCHANGE else 0, tl.int64) * (batch * heads) * n
        for run in range(run_count):
            start = run_start(source, run, run_unit, WORLD)
            dk, dv = _add_queries(
                dk, dv, (keys, values, k, v, k_pos), queries, kv_head * group, run * run_size,
                index_range(first_ptr, last_ptr, tile_first, tile_last, start, run_step, run_size, BLOCK_M),
                (first_index(first, start, run_step), last_index(last, start, run_step, run_size)),
                (counters_ptr, counters_start, dropout_key_ptr, dropout_threshold, dropout_scale), group, n, run_size,
                scale, HEAD_SIZE, BLOCK_D, DROPOUT, BLOCK_M, BLOCK_N, SLICE_D, DK, DV,
            )  # fmt: skip
    start = kv_head // kv_heads * stride_b + kv_head % kv_heads * stride_h + tl.cast(first_row, tl.int64) * stride_t
    if DK:
        store_tile((dk_ptr + start, first_n, tile_n, run_size, stride_t), dk * scale, HEAD_SIZE)
    if DV:
        store_tile((dv_ptr + start, first_n, tile_n, run_size, stride_t), dv * dropout_scale, HEAD_SIZE)
