"""ring_attention_forward: attention of this rank's queries to the keys of all ranks, which arrive while it computes.

There is one launch. Its first programs copy the other ranks' blocks of keys and values (`block_exchange`). Each other
program holds a tile of queries and loops over the blocks in the order in which they come, this rank's block first, with
the state (output, maximum, sum) of `attention_online_softmax` in registers from the first block to the last: nothing is
merged, stored or rounded in between, so that the result has the error of one rank's attention, however long the ring.

The keys that a query sees are an interval of positions, whether by a causal mask, a window, documents or padding, and a
block is one or two runs of positions (`ring_attention_visibility`). Blocks of keys that no query of a tile sees are
skipped, and blocks that all its queries see completely are not masked. A tile's queries belong to one run. The later
tiles, which mostly see more, start first.

Where all blocks are already here the same kernel runs without copiers, one program for each tile.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.attention_forward import strides
from tpfuse.kernels.attention_online_softmax import attend_range, finish, initial_state, load_rows
from tpfuse.kernels.attention_scores import aligned, multiple_of_8
from tpfuse.kernels.block_exchange import BlockExchange, await_block, block_in_slot, copy_blocks
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.dropout import hashed_rows
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.ring_attention_arguments import ring_arguments, without_exchange
from tpfuse.kernels.ring_attention_visibility import first_index, index_range, last_index
from tpfuse.kernels.sequence_runs import SequenceRuns, run_start
from tpfuse.kernels.signals import advance, begin
from tpfuse.kernels.trace import COMPUTING, now, record

# Arguments that change from call to call and for whose values a separate compilation gains nothing.
_CHANGING = ["run_count", "run_size", "run_unit", "run_step", "tiles", "words", "block_words", "slot_bytes"]
_CHANGING += ["source_first", "source_step", "steps", "rank", "dropout_threshold"]


@triton.jit
def _attend_run(
    state,
    q,
    queries,  # `source` of `attend_range`
    keys,  # (k_ptr, v_ptr) of the run
    visible_ranges,  # (first_ptr, last_ptr)
    run,  # (start, step, size) of its positions
    dropout,  # (counters_ptr of the head, dropout_key_ptr, threshold)
    scale,
    HEAD_SIZE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the state after one run of keys, which are counted from its first.

    A query's position is the index of the last key that it sees, and `behind` the number of keys that it sees before
    that. The bounds of the queries are loaded again for each run, to save registers.
    """
    first_ptr, last_ptr = visible_ranges
    start, step, size = run
    counters_ptr, dropout_key_ptr, dropout_threshold = dropout
    _, q_first, q_stop, _ = queries
    offs_m = q_first + tl.arange(0, BLOCK_M)
    last = last_index(tl.load(last_ptr + offs_m, mask=offs_m < q_stop, other=-1), start, step, size)
    behind = last - first_index(tl.load(first_ptr + offs_m, mask=offs_m < q_stop, other=0), start, step)
    dropout_row = last
    if DROPOUT:
        counter = tl.load(counters_ptr + offs_m, mask=offs_m < q_stop, other=0)
        dropout_row = hashed_rows(counter + start, 1, tl.load(dropout_key_ptr))
    q_last = min(q_first + BLOCK_M, q_stop) - 1
    indices = index_range(first_ptr, last_ptr, q_first, q_last, start, step, size, BLOCK_N)
    return attend_range(
        state, q, queries, (keys[0], keys[1], size, HEAD_SIZE, HEAD_SIZE), (last, 0, 0, behind[:, None]),
        (dropout_row, dropout_threshold, step), scale, indices, HEAD_SIZE, True, True, DROPOUT, BLOCK_N, False,
    )  # fmt: skip


@triton.jit
def _attend_tile(
    tile,
    aborted,
    workers,  # programs that attend; the tiles below this number are their first ones
    q_ptr,
    blocks_ptr,
    visible_ranges,  # (first_ptr, last_ptr)
    dropout,  # (counters_ptr, dropout_key_ptr, threshold, scale)
    out_ptr,
    lse_ptr,
    channel,  # (ready_ptr, slots_ptr, abort_ptr, trace_ptr, block_words, slot_bytes, epoch, rank)
    sources,  # (first, step, how many)
    runs,  # (count, size, unit, step)
    heads,
    group,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_v,
    scale,
    WORLD: tl.constexpr,
    COPIERS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one tile of queries from all blocks; return whether a wait was cut short, now or before (`aborted`).

    Only the first tile of a program waits for blocks. After a wait that was cut short no block is read.
    """
    element: tl.constexpr = q_ptr.dtype
    ready_ptr, slots_ptr, abort_ptr, trace_ptr, block_words, slot_bytes, epoch, rank = channel
    run_count, run_size, run_unit, run_step = runs
    counters_ptr, dropout_key_ptr, dropout_threshold, dropout_scale = dropout
    tokens = run_count * run_size
    tiles_m = tl.cdiv(run_size, BLOCK_M)
    index = tiles_m * run_count - 1 - tile % (tiles_m * run_count)
    batch_head = (tile // (tiles_m * run_count)).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    q_stop = (index // tiles_m + 1) * run_size
    q_first = index // tiles_m * run_size + index % tiles_m * BLOCK_M
    if DROPOUT:
        counters_ptr += batch_head * tokens
    q_ptr += multiple_of_8(batch * stride_qb + head * stride_qh)
    q = load_rows(q_ptr, q_first, tl.arange(0, BLOCK_M), q_stop, stride_qt, HEAD_SIZE, BLOCK_D, True, False)
    kv_head = (batch * (heads // group) + head // group) * tokens

    acc, row_max, row_sum = initial_state(BLOCK_M, BLOCK_D)
    for turn in range(sources[2] * run_count):
        step, run = turn // run_count, turn % run_count
        source = (sources[0] + step * sources[1]) % WORLD
        if COPIERS == 0:
            block_ptr = blocks_ptr + tl.cast(step, tl.int64) * multiple_of_8(2 * stride_v)
        else:
            received_ptr = block_in_slot(slots_ptr, epoch, slot_bytes, rank, source, block_words).to(element)
            block_ptr = tl.multiple_of(tl.where(step == 0, blocks_ptr, received_ptr), 16)
        awaited = tl.where((tile < workers) & (run == 0), step, 0)
        if (aborted == 0) & await_block(ready_ptr, abort_ptr, trace_ptr, awaited, epoch, rank, WORLD, COPIERS, 0):
            since = now(trace_ptr)
            k_ptr = block_ptr + (kv_head + run * run_size) * HEAD_SIZE
            acc, row_max, row_sum = _attend_run(
                (acc, row_max, row_sum), q, (q_ptr, q_first, q_stop, stride_qt),
                (k_ptr, k_ptr + multiple_of_8(stride_v)), visible_ranges,
                (run_start(source, run, run_unit, WORLD), run_step, run_size),
                (counters_ptr, dropout_key_ptr, dropout_threshold), scale,
                HEAD_SIZE, DROPOUT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            record(trace_ptr, COMPUTING, source, since)
        else:
            aborted = 1
    out_ptr += (batch * tokens * heads + head) * HEAD_SIZE
    lse_ptr += batch_head * tokens
    finish((acc, row_max, row_sum), out_ptr, lse_ptr, heads, q_first, q_stop, scale, dropout_scale, HEAD_SIZE)
    return aborted


@triton.jit(do_not_specialize=_CHANGING)
def ring_attention_forward_kernel(
    q_ptr,  # [B, H, n, D] bf16, read
    blocks_ptr,  # [2, B, Hk, n, D] bf16, read: this rank's keys and values; without copiers [steps, 2, B, Hk, n, D]
    words_ptr,  # the same as int32 words, read by copiers
    first_ptr,  # [n] int32, read
    last_ptr,  # [n] int32, read
    counters_ptr,  # [B, H, n] int64, read
    dropout_key_ptr,  # [] int64, read
    out_ptr,  # [B, n, H, D] bf16 or fp32, written
    lse_ptr,  # [B, H, n] fp32, written
    ready_ptr,  # [WORLD, COPIERS] int32, written by copiers
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes: its own is written, all are read
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    heads,
    group,
    run_count,
    run_size,
    run_unit,
    run_step,
    tiles,
    words,
    block_words,
    slot_bytes,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_v,  # from the keys of a block to its values
    source_first,
    source_step,
    steps,
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
    BLOCK_COPY: tl.constexpr,
):
    sources = (source_first, source_step, steps)
    runs = (run_count, run_size, run_unit, run_step)
    dropout = (counters_ptr, dropout_key_ptr, dropout_threshold, dropout_scale)
    worker, workers = tl.program_id(0) - COPIERS, max(tl.num_programs(0) - COPIERS, 1)
    if COPIERS == 0:  # without a loop, around which the compiler would keep addresses in registers
        _attend_tile(
            worker, tl.full((), 0, tl.int32), workers,
            q_ptr, blocks_ptr, (first_ptr, last_ptr), dropout, out_ptr, lse_ptr,
            (None, None, None, None, 0, 0, 0, rank), sources, runs, heads, group, stride_qb, stride_qh, stride_qt,
            stride_v, scale, WORLD, COPIERS, HEAD_SIZE, BLOCK_D, DROPOUT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        epoch, running = begin(state_ptr, abort_ptr)
        if running:
            aborted = 0
            if worker < 0:
                blocks = copy_blocks(
                    words_ptr, ready_ptr, slots_ptr, flags_ptr, abort_ptr, trace_ptr, 0, words, block_words, slot_bytes,
                    epoch, rank, WORLD, COPIERS, RING, 0, BLOCK_COPY,
                )  # fmt: skip
                aborted = WORLD - blocks
            for tile in range(tl.where(worker < 0, tiles, worker), tiles, workers):
                aborted = _attend_tile(
                    tile, aborted, workers, q_ptr, blocks_ptr, (first_ptr, last_ptr), dropout, out_ptr, lse_ptr,
                    (ready_ptr, slots_ptr, abort_ptr, trace_ptr, block_words, slot_bytes, epoch, rank), sources, runs,
                    heads, group, stride_qb, stride_qh, stride_qt, stride_v,
                    scale, WORLD, COPIERS, HEAD_SIZE, BLOCK_D, DROPOUT, BLOCK_M, BLOCK_N,
                )  # fmt: skip
            if aborted == 0:
                advance(state_ptr, epoch)


def ring_attention_forward(
    q: Tensor,
    blocks: Tensor,
    runs: SequenceRuns,
    rank: int,
    visible_keys: tuple[Tensor, Tensor],
    *,
    exchange: BlockExchange | None = None,
    sources: Sequence[int] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    counters: Tensor | None = None,
    dropout_key: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(q kᵀ scale) v over the keys of all ranks, or of some, that each query sees, and its log-sum-exp.

    q: [B, H, n, D], the queries of rank `rank`, whose positions are runs.positions(rank): any strides (copied where
    `aligned` has to). visible_keys: (first, last), int32 [n] each: the positions of the keys that a query sees, none
    where first > last; both never decrease, and last is less than the sequence's length. scale: positive, default 1 /
    sqrt(D).

    With exchange: blocks [2, B, Hk, n, D], contiguous: the keys and values of this rank; the other ranks' are copied
    here. All ranks of the channel call this, with the same shapes, dtype, runs, dropout_p and number of words of ready.
    With sources: blocks [S, 2, B, Hk, n, D], contiguous: those of the S ranks `sources`, which are equally far from
    each other (counted around the ring), and are taken in that order; nothing is communicated.

    dropout_p, counters, dropout_key: element (query, key) is kept by `tpfuse.ops.dropout`'s hash of counters[query] +
    the key's position; counters: int64 [B, H, n], dropout_key: [] int64. out_dtype: q's dtype, which is the default, or
    float32.

    H is a multiple of Hk, head h of q using head h // (H / Hk); D a multiple of 8 from 16 to 256; float32, float16 or
    bfloat16. Return out [B, H, n, D], a view of [B, n, H, D], and lse [B, H, n] float32, without dropout; 0 and -inf
    where a query sees no key. Values that are hidden must be finite, as in `attention_forward`. Raise ValueError that
    names the argument, what was received and what is accepted.
    """
    operator = "ring_attention_forward"
    q = aligned(q)
    # fmt: off
    arguments = ring_arguments(operator, q, blocks, runs, rank, visible_keys, exchange, sources, scale, dropout_p,
                               counters, dropout_key)
    # fmt: on
    dtype = q.dtype if out_dtype is None else out_dtype
    if dtype not in (q.dtype, torch.float32):
        raise ValueError(f"{operator}: out_dtype {dtype}: expected {q.dtype}, as q, or torch.float32")
    batch, heads, tokens, size = q.shape
    out = torch.empty((batch, tokens, heads, size), dtype=dtype, device=q.device)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    sizes = {"D": arguments["BLOCK_D"], "DROPOUT": int(dropout_p > 0.0), "EXCHANGE": int(exchange is not None)}
    row = choose_configuration(operator, q.device, q.dtype, **sizes)
    programs = tiles = batch * heads * runs.count * cdiv(runs.size, row.blocks["BLOCK_M"])
    copying = without_exchange(rank, runs)
    if exchange is not None:
        words = blocks.view(-1).view(torch.int32)
        copiers = exchange.copiers(operator, [len(words)], row.blocks["COPIERS"], row.blocks["BLOCK_COPY"])
        copying = {"words_ptr": words, "words": len(words), "COPIERS": copiers, **exchange.arguments([len(words)])}
        programs = exchange.programs(operator, copiers, tiles)
    launch(
        ring_attention_forward_kernel,
        (programs,),
        out_ptr=out,
        lse_ptr=lse,
        tiles=tiles,
        **strides("q", q),
        **arguments,
        **{**row.options, **copying},
    )
    return out.transpose(1, 2), lse
