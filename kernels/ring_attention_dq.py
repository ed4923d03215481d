"""ring_attention_dq: the gradient of a rank's queries, from blocks of keys and values of all ranks as they come.

    p = exp(scale q kᵀ - lse)        ds = p * (grad_out vᵀ - delta)        dq = scale ds k

A program holds a tile of queries of one head, of one run of positions, and loops over the blocks in the order in which
they arrive; its sum stays in float32 in registers through all of them. Formulas and tiles are those of
`attention_backward`; the keys of a run that a query sees are an interval of indices (`ring_attention_visibility`).
"""

import triton
import triton.language as tl

from tpfuse.kernels.attention_backward import sliced_product, store_tile
from tpfuse.kernels.attention_backward_delta import LOG2_E, PADDING, load_tile
from tpfuse.kernels.attention_scores import multiple_of_8
from tpfuse.kernels.block_exchange import await_block, block_in_slot, copy_blocks
from tpfuse.kernels.dropout import hashed_rows, kept
from tpfuse.kernels.ring_attention_visibility import first_index, index_range, last_index
from tpfuse.kernels.sequence_runs import run_start
from tpfuse.kernels.signals import advance, begin
from tpfuse.kernels.tiles import accurate_dot, rounded
from tpfuse.kernels.trace import COMPUTING, now, record

# Numbers that change from call to call: Triton compiles no separate kernel for 1 and multiples of 16.
_CHANGING = ["tiles", "run_count", "run_size", "run_unit", "run_step", "source_first", "source_step", "steps", "rank"]
_CHANGING += ["dropout_threshold", "words", "queries_start", "queries_words", "block_words"]


@triton.jit
def _add_keys(
    dq,
    queries,
    grads,
    sums,
    keys,
    indices,
    visible_range,
    dropout,
    scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICE_D: tl.constexpr,
):
    """Return dq after the keys of one run; for the tuples see `_walk`."""
    SLICED: tl.constexpr = SLICE_D < BLOCK_D
    query_rows, q = queries
    grad_rows, grad_out = grads
    log2_sum, delta = sums
    k_ptr, v_ptr, k_first, step, size = keys
    start, full_start, full_stop, stop = indices
    first, last = visible_range[0][:, None], visible_range[1][:, None]
    hashed, dropout_threshold, dropout_scale = dropout
    tile_n = tl.arange(0, BLOCK_N)
    for first_n in tl.range(start, stop, BLOCK_N):
        offs_n = first_n + tile_n
        key_rows = (k_ptr, first_n, tile_n, size, HEAD_SIZE)
        value_rows = (v_ptr, first_n, tile_n, size, HEAD_SIZE)
        if SLICED:
            scores = sliced_product(query_rows, key_rows, HEAD_SIZE, SLICE_D)
            dp = sliced_product(grad_rows, value_rows, HEAD_SIZE, SLICE_D)
            k = load_tile(key_rows, 0, HEAD_SIZE, BLOCK_D)
        else:
            k = load_tile(key_rows, 0, HEAD_SIZE, BLOCK_D)
            scores = accurate_dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
            v = load_tile(value_rows, 0, HEAD_SIZE, BLOCK_D)
            dp = accurate_dot(grad_out, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        if (first_n < full_start) | (first_n >= full_stop):
            scores = tl.where((offs_n[None, :] >= first) & (offs_n[None, :] <= last), scores, float("-inf"))
        p = tl.exp2(scores * (scale * LOG2_E) - log2_sum[:, None])
        if DROPOUT:
            k_pos = k_first + offs_n * step
            dp = tl.where(kept(hashed[:, None], k_pos[None, :], dropout_threshold), dp * dropout_scale, 0.0)
        dq = accurate_dot(rounded(p * (dp - delta[:, None]), k.dtype), k, dq)
    return dq


@triton.jit
def _walk(
    queries,
    grads,
    sums,
    tile,
    visible_range,
    dropout,
    blocks,
    sources,
    runs,
    channel,
    here,
    scale,
    WORLD: tl.constexpr,
    COPIERS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICE_D: tl.constexpr,
):
    """Return (dq of a tile, how many blocks are known to be here, how many were not when the wait for them ended).

    It waits only for blocks that a query of the tile sees; where a later block is here the earlier ones are, too.
    """
    first_ptr, last_ptr, tile_first, tile_last = tile
    blocks_ptr, keys_start, stride_v = blocks
    source_first, source_step, steps = sources
    run_count, run_size, run_unit, run_step = runs
    ready_ptr, slots_ptr, abort_ptr, trace_ptr, block_words, slot_bytes, epoch, rank = channel
    element: tl.constexpr = blocks_ptr.dtype
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    missing = 0
    for step in range(steps):
        source = (source_first + step * source_step) % WORLD
        if COPIERS > 0:
            received_ptr = block_in_slot(slots_ptr, epoch, slot_bytes, rank, source, block_words)
            block_ptr = blocks_ptr if step == 0 else received_ptr.to(element)
        else:
            block_ptr = blocks_ptr + tl.cast(step, tl.int64) * 2 * stride_v
        for run in range(run_count):
            start = run_start(source, run, run_unit, WORLD)
            indices = index_range(first_ptr, last_ptr, tile_first, tile_last, start, run_step, run_size, BLOCK_N)
            there = indices[0] < indices[3]
            if COPIERS > 0:
                if there & (step >= here):
                    if await_block(ready_ptr, abort_ptr, trace_ptr, step, epoch, rank, WORLD, COPIERS, 0):
                        here = step + 1
                    else:
                        missing += 1
            if there & (step < here):
                since = now(trace_ptr)
                k_ptr = block_ptr + multiple_of_8(keys_start + tl.cast(run * run_size, tl.int64) * HEAD_SIZE)
                keys = (k_ptr, k_ptr + multiple_of_8(stride_v), start, run_step, run_size)
                interval = (
                    first_index(visible_range[0], start, run_step),
                    last_index(visible_range[1], start, run_step, run_size),
                )
                dq = _add_keys(
                    dq, queries, grads, sums, keys, indices, interval, dropout, scale,
                    HEAD_SIZE, BLOCK_D, DROPOUT, BLOCK_M, BLOCK_N, SLICE_D,
                )  # fmt: skip
                record(trace_ptr, COMPUTING, source, since)
    return dq, here, missing


@triton.jit
def _dq_of_tile(
    tile,
    queries,
    visible_ranges,
    dropout,
    blocks,
    sources,
    runs,
    channel,
    dq_ptr,
    heads,
    group,
    here,
    scale,
    WORLD: tl.constexpr,
    COPIERS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICE_D: tl.constexpr,
):
    """Store dq of a tile of one run and one head; return the two counts of `_walk`."""
    q_ptr, grad_out_ptr, log2_sum_ptr, delta_ptr = queries
    first_ptr, last_ptr = visible_ranges
    counters_ptr, dropout_key_ptr, dropout_threshold, dropout_scale = dropout
    blocks_ptr, stride_v = blocks
    run_count, run_size, _, _ = runs
    tiles = tl.cdiv(run_size, BLOCK_M)
    reversed_tile = run_count * tiles - 1 - tile % (run_count * tiles)  # later tiles, which mostly see more, come first
    first_row, first_m = reversed_tile // tiles * run_size, reversed_tile % tiles * BLOCK_M
    head = tl.cast(tile // (run_count * tiles), tl.int64)  # index among the heads of the whole batch
    row = head * run_count * run_size + first_row
    tile_m = tl.arange(0, BLOCK_M)
    offs_m = first_m + tile_m
    query_rows = (q_ptr + row * HEAD_SIZE, first_m, tile_m, run_size, HEAD_SIZE)
    grad_rows = (grad_out_ptr + row * HEAD_SIZE, first_m, tile_m, run_size, HEAD_SIZE)
    q, grad_out = tile_m, tile_m
    if SLICE_D >= BLOCK_D:
        q = load_tile(query_rows, 0, HEAD_SIZE, BLOCK_D)
        grad_out = load_tile(grad_rows, 0, HEAD_SIZE, BLOCK_D)
    padded = row + head * PADDING + offs_m
    sums = (tl.load(log2_sum_ptr + padded), tl.load(delta_ptr + padded))
    mask_m = offs_m < run_size
    first = tl.load(first_ptr + first_row + offs_m, mask=mask_m, other=0)
    last = tl.load(last_ptr + first_row + offs_m, mask=mask_m, other=-1)
    hashed = tile_m
    if DROPOUT:
        hashed = hashed_rows(tl.load(counters_ptr + row + offs_m, mask=mask_m, other=0), 1, tl.load(dropout_key_ptr))
    keys_start = head // group * run_count * run_size * HEAD_SIZE
    dq, here, missing = _walk(
        (query_rows, q), (grad_rows, grad_out), sums,
        (first_ptr, last_ptr, first_row + first_m, first_row + min(first_m + BLOCK_M, run_size) - 1), (first, last),
        (hashed, dropout_threshold, dropout_scale), (blocks_ptr, keys_start, stride_v), sources, runs, channel,
        here, scale, WORLD, COPIERS, HEAD_SIZE, BLOCK_D, DROPOUT, BLOCK_M, BLOCK_N, SLICE_D,
    )  # fmt: skip
    stored = ((head // heads * run_count * run_size + first_row) * heads + head % heads) * HEAD_SIZE
    store_tile((dq_ptr + stored, first_m, tile_m, run_size, heads * HEAD_SIZE), dq * scale, HEAD_SIZE)
    return here, missing


@triton.jit(do_not_specialize=_CHANGING)
def ring_attention_dq_kernel(
    q_ptr,  # [B, H, n, D] bf16, read
    grad_out_ptr,  # [B, H, n, D] bf16, read
    log2_sum_ptr,  # [B, H, n + padding] fp32, read
    delta_ptr,  # [B, H, n + padding] fp32, read
    blocks_ptr,  # [2, B, Hk, n, D] bf16, read: keys and values of this rank; without copiers [steps, 2, B, Hk, n, D]
    words_ptr,  # the same as int32 words, read by copiers: the first part of this rank's block
    queries_ptr,  # int32 words, read by copiers: the second part
    dq_ptr,  # [B, n, H, D] bf16 or fp32, written
    first_ptr,  # [n] int32, read
    last_ptr,  # [n] int32, read
    counters_ptr,  # [B, H, n] int64, read
    dropout_key_ptr,  # [] int64, read
    ready_ptr,  # [2, WORLD, COPIERS] int32, written by copiers
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes: its own is written, all are read
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    tiles,
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
    words,
    queries_start,
    queries_words,
    block_words,
    slot_bytes,
    rank,
    scale,
    dropout_threshold: tl.int64,
    dropout_scale,
    WORLD: tl.constexpr,
    COPIERS: tl.constexpr,  # 0: all blocks are here
    RING: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICE_D: tl.constexpr,
    BLOCK_COPY: tl.constexpr,
):
    epoch, running = 0, True
    if COPIERS > 0:
        epoch, running = begin(state_ptr, abort_ptr)
    if running:
        missing = 0
        if COPIERS > 0:
            if tl.program_id(0) < COPIERS:
                start = queries_start // 16 * 16  # tells Triton that it is a multiple, to move 16 bytes at once
                missing = 2 * WORLD
                missing -= copy_blocks(
                    words_ptr, ready_ptr, slots_ptr, flags_ptr, abort_ptr, trace_ptr, 0, words, block_words, slot_bytes,
                    epoch, rank, WORLD, COPIERS, RING, 0, BLOCK_COPY,
                )  # fmt: skip
                if missing == WORLD:
                    missing -= copy_blocks(
                        queries_ptr, ready_ptr, slots_ptr, flags_ptr, abort_ptr, trace_ptr, start, queries_words,
                        block_words, slot_bytes, epoch, rank, WORLD, COPIERS, RING, 1, BLOCK_COPY,
                    )  # fmt: skip
        worker = tl.program_id(0) - COPIERS
        here = 1 if COPIERS > 0 else steps  # this rank's block needs no wait
        for tile in range(tl.where(worker < 0, tiles, worker), tiles, max(tl.num_programs(0) - COPIERS, 1)):
            here, late = _dq_of_tile(
                tile, (q_ptr, grad_out_ptr, log2_sum_ptr, delta_ptr), (first_ptr, last_ptr),
                (counters_ptr, dropout_key_ptr, dropout_threshold, dropout_scale), (blocks_ptr, stride_v),
                (source_first, source_step, steps), (run_count, run_size, run_unit, run_step),
                (ready_ptr, slots_ptr, abort_ptr, trace_ptr, block_words, slot_bytes, epoch, rank), dq_ptr, heads,
                group, here, scale, WORLD, COPIERS, HEAD_SIZE, BLOCK_D, DROPOUT, BLOCK_M, BLOCK_N, SLICE_D,
            )  # fmt: skip
            missing += late
        if COPIERS > 0:
            if missing == 0:
                advance(state_ptr, epoch)
