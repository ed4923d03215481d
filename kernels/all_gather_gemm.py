"""all_gather_gemm: act(all_gather(x) Wᵀ + bias), one persistent program that multiplies what is here while more comes.

Each rank's x is a chunk of rows. The first programs of the grid, the copiers, move chunks. Copier p stages its share of
x in this rank's slot and signals copier p of every rank. Then, for rank + 1, rank + 2, …, it waits for that rank's
copier p and copies its share of that rank's slot into `gathered`. The other programs multiply: they compute the tiles
of this rank's chunk first, then those of rank + 1, …. Before they read a chunk they wait until each copier has said, in
a word of `ready`, that its share is there. So links and tensor cores are busy at the same time, whichever of them is
slower, and not all ranks read from one rank at once.

No program waits for a later program of its grid: a copier waits for the same copier of a peer, which has signalled its
share before it waits itself, and products wait for copiers. All programs of a grid must run at once, as in every kernel
that waits for peers.

Who may write what when. This rank's slot has a half for epoch e, which is written in epoch e, and again in e + 2, as in
`kernels/endpoint.py`: at least copier 0 has waited for all signals of e + 1 in between, also where there is nothing to
multiply or to gather. `gathered` and `ready` belong to this rank alone, and its launches use them one after another on
one stream. A word of ready says the epoch in which its share has come, and later values are always later epochs; so
launches with different numbers of copiers share these words. An aborted launch leaves words of ready set; they are
zeroed with the signals.

With `copied`, copy engines write the chunks, and all programs multiply: `kernels/engine_gather.py` describes that
protocol. Where a row of the table says PING_PONG, `all_gather_gemm_ping_pong` computes such a product if it can.

Ordinary loads read x and what copiers have written, because a signal orders ordinary loads; the weight is read by TMA
where its layout permits. A reduction is never split and runs in the order of k, so that results are those of `gemm`
with the same tiles.

Multiplying chunks as they arrive is described by Wang et al., ASPLOS 2023 (overlap by decomposition), and Flux,
arXiv:2406.06858.
"""

import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.activations import GATED
from tpfuse.kernels.configurations import Configuration, choose_configuration
from tpfuse.kernels.endpoint import Endpoint, slot
from tpfuse.kernels.gemm_tiles import load_tile, store_result
from tpfuse.kernels.gemm_weight import load_weight, weight_layout, weight_matrix
from tpfuse.kernels.launch import Launch, cdiv, planned
from tpfuse.kernels.product_calls import GatherPlan, check_gather, programs_beside_copies, run_gather
from tpfuse.kernels.signals import advance, arrive, begin, peer_pointer, signal, wait_signal
from tpfuse.kernels.tiles import dot, grouped_tile
from tpfuse.kernels.trace import COMPUTING, COPYING, now, record


@triton.jit
def _copy_share(source_ptr, target_ptr, n, trace_ptr, owner, COPIERS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy this copier's tiles of the n elements of owner's chunk: the same tiles of every chunk, on every rank."""
    since = now(trace_ptr)
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), COPIERS):
        offs = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=offs < n), mask=offs < n)
    record(trace_ptr, COPYING, owner, since)


@triton.jit
def _gather_chunks(
    x_ptr,  # [n] bf16, read
    gathered_ptr,  # [WORLD, n] bf16, written
    ready_ptr,  # [WORLD, COPIERS] int32, written
    slots_ptr,
    flags_ptr,
    abort_ptr,
    trace_ptr,
    n,
    slot_bytes,
    epoch,
    rank,
    WORLD: tl.constexpr,
    COPIERS: tl.constexpr,
    KEEP_OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do a copier's work; return how many chunks have its share here: WORLD unless a wait was cut short."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    copier = tl.program_id(0)
    _copy_share(x_ptr, slot(slots_ptr, rank, epoch, slot_bytes, dtype), n, trace_ptr, rank, COPIERS, BLOCK)
    arrive(flags_ptr, epoch, rank, copier * WORLD, WORLD)
    here = peer_pointer(flags_ptr, rank, tl.int32) + copier * WORLD
    chunks = 1
    for step in range(1, WORLD):
        source = (rank + step) % WORLD
        if wait_signal(here + source, epoch, abort_ptr, None, trace_ptr, source):
            chunk_ptr = gathered_ptr + tl.cast(source, tl.int64) * n
            staged_ptr = slot(slots_ptr, source, epoch, slot_bytes, dtype)
            _copy_share(staged_ptr, chunk_ptr, n, trace_ptr, source, COPIERS, BLOCK)
            signal(ready_ptr + source * COPIERS + copier, epoch)
            chunks += 1
    if KEEP_OWN:
        _copy_share(x_ptr, gathered_ptr + tl.cast(rank, tl.int64) * n, n, trace_ptr, rank, COPIERS, BLOCK)
    return chunks


@triton.jit
def _multiply_chunk(
    chunk_ptr,  # [M, K] bf16, read
    w,  # made by `weight_matrix`, as is w_up
    w_up,
    terms,  # of `store_result`
    out_ptr,  # [M, N] bf16, written
    first,
    workers,
    M,
    N,
    K,
    stride_wn,
    stride_wk,
    ACTIVATION: tl.constexpr,
    K_ADJACENT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
):
    """Compute the tiles first, first + workers, … of a chunk's rows of the result."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in range(first, tiles_m * tiles_n, workers):
        pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            a = load_tile(chunk_ptr, (first_m, k), (M, K), (K, 1), (BLOCK_M, BLOCK_K), False)
            b = load_weight(w, k, first_n, N, K, stride_wn, stride_wk, BLOCK_N, BLOCK_K, K_ADJACENT, TMA)
            acc = dot(a, b, acc)
            if w_up is not None:
                b_up = load_weight(w_up, k, first_n, N, K, stride_wn, stride_wk, BLOCK_N, BLOCK_K, K_ADJACENT, TMA)
                up = dot(a, b_up, up)
        store_result((acc, up), terms, out_ptr, (first_m, first_n), (M, N), ACTIVATION, EPILOGUE_PARTS)


@triton.jit(do_not_specialize=["rank"])
def all_gather_gemm_forward_kernel(
    x_ptr,  # [M, K] bf16, read
    weight_ptr,  # [N, K] bf16, read
    weight_up_ptr,  # [N, K] bf16, read: the second half of a gated pair, or None
    bias_ptr,  # [N] bf16, [2 N] gated, read; or None
    preactivation_ptr,  # [WORLD M, N] bf16, [WORLD M, 2 N] gated, written; or None
    out_ptr,  # [WORLD M, N] bf16, written
    gathered_ptr,  # [WORLD, M, K] bf16, written by copiers or copy engines, and read
    ready_ptr,  # [WORLD, COPIERS] int32; with copy engines [WORLD]
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes: its own is written, all are read
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    M,
    N,
    K,
    stride_wn,
    stride_wk,
    stride_bias,
    slot_bytes,
    rank,
    WORLD: tl.constexpr,
    COPIERS: tl.constexpr,  # 0: copy engines copy
    KEEP_OWN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    K_ADJACENT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
    BLOCK_COPY: tl.constexpr,
):
    GATED: tl.constexpr = weight_up_ptr is not None
    SHARES: tl.constexpr = COPIERS if COPIERS > 0 else 1
    w = weight_matrix(weight_ptr, N, K, stride_wn, stride_wk, BLOCK_N, BLOCK_K, K_ADJACENT, TMA)
    w_up = (
        weight_matrix(weight_up_ptr, N, K, stride_wn, stride_wk, BLOCK_N, BLOCK_K, K_ADJACENT, TMA) if GATED else None
    )
    bias = (bias_ptr, stride_bias)
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        worker, workers = tl.program_id(0) - COPIERS, tl.num_programs(0) - COPIERS
        chunks = 0
        if COPIERS > 0:
            if worker < 0:
                chunks = _gather_chunks(
                    x_ptr, gathered_ptr, ready_ptr, slots_ptr, flags_ptr, abort_ptr, trace_ptr,
                    M * K, slot_bytes, epoch, rank, WORLD, COPIERS, KEEP_OWN, BLOCK_COPY,
                )  # fmt: skip
        if worker >= 0:
            shares = tl.arange(0, triton.next_power_of_2(SHARES))
            tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
            first = worker  # continues from chunk to chunk, so that no program has two tiles more than another
            for step in range(WORLD):
                source = tl.cast((rank + step) % WORLD, tl.int64)
                there = (shares < SHARES) & (step > 0)  # this rank's chunk needs no wait
                if wait_signal(ready_ptr + source * SHARES + shares, epoch, abort_ptr, there, trace_ptr, source):
                    since = now(trace_ptr)
                    chunk_ptr = x_ptr if step == 0 else gathered_ptr + source * M * K
                    kept = source * M * (2 * N if GATED else N)
                    terms = (bias, (None, 0, 0), None if preactivation_ptr is None else preactivation_ptr + kept)
                    _multiply_chunk(
                        chunk_ptr, w, w_up, terms, out_ptr + source * M * N,
                        first, workers, M, N, K, stride_wn, stride_wk,
                        ACTIVATION, K_ADJACENT, TMA, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EPILOGUE_PARTS,
                    )  # fmt: skip
                    record(trace_ptr, COMPUTING, source, since)
                    chunks += 1
                first += tl.cdiv(max(tiles - first, 0), workers) * workers - tiles
        if chunks == WORLD:
            advance(state_ptr, epoch)


def all_gather_gemm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gathered: Tensor,
    ready: Tensor,
    endpoint: Endpoint,
    *,
    activation: str | None = None,
    keep_preactivation: bool = False,
    keep_own: bool = False,
    copied: bool = False,
    other_tiles: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return act(X Wᵀ + bias) of all ranks' rows X, rank 0's first, and on request X Wᵀ + bias; in stream order.

    x: [m, K], this rank's rows, any strides; weight: [N, K], any strides; bias: [N]; for a gated activation weight and
    bias are [gate | up] of N / 2 each. All have one dtype of float32, float16, bfloat16 and any size from 0 up. All
    ranks pass the same m, K, N and dtype. gathered: [world, m, K], contiguous, in that dtype: the ranks' x are copied
    into it. It is complete after the launch except for this rank's rows, which are copied only with keep_own. ready:
    int32, contiguous, at least [world], with the same number of words on every rank, zeroed with the signals; a launch
    has no more copiers than ready has words for each rank (8 are enough). gathered and ready are used by this rank
    alone, and nothing else may write to ready.

    copied: copy engines of the other ranks write to gathered and then to ready, as in `engine_gather`: no program
    copies, and one multiprocessor is left free for the launch that precedes the copies. other_tiles: as in
    `choose_configuration`.

    Return (out [world m, N], or N / 2 gated, pre-activation [world m, N] or None), contiguous, in that dtype. Raise
    ValueError for other shapes, dtypes, devices or names of activations, where x is larger than a slot, where flags are
    too few, and for a channel of one program, which cannot both copy and multiply.
    """
    x = x.contiguous()
    plan = _plan(x, weight, bias, gathered, ready, endpoint, activation, keep_own, copied, other_tiles)
    return run_gather(plan, x, weight, bias, gathered, ready, activation, keep_preactivation)


@planned
def _plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gathered: Tensor,
    ready: Tensor,
    endpoint: Endpoint,
    activation: str | None,
    keep_own: bool,
    copied: bool,
    other_tiles: bool,
) -> GatherPlan:
    operator = "all_gather_gemm"
    m, k, n = check_gather(operator, x, weight, bias, gathered, ready, endpoint, activation)
    if copied and keep_own:
        raise ValueError(
            f"{operator}: keep_own is True: expected False with copied, where copy engines also copy this rank's chunk"
        )
    width = n // 2 if activation in GATED else n
    gate, up = (weight[:width], weight[width:]) if activation in GATED else (weight, None)
    k_adjacent, aligned = weight_layout(gate, up)
    row = choose_configuration(
        operator, x.device, x.dtype,
        M=m, N=width, K=k, chunks=endpoint.world, programs=max(endpoint.programs - 1, 1),
        gated=int(up is not None), unaligned=int(not aligned), other_tiles=other_tiles,
    )  # fmt: skip
    blocks = dict(row.blocks)
    if blocks.pop("PING_PONG", False) and copied:
        from tpfuse.kernels import all_gather_gemm_ping_pong  # it imports Gluon, as `gemm_ping_pong` does

        if not all_gather_gemm_ping_pong.gather_ping_pong_problem(x, weight, bias, gathered, activation):
            return all_gather_gemm_ping_pong.ping_pong_plan(x, weight, endpoint, activation)
    tiles = endpoint.world * cdiv(m, blocks["BLOCK_M"]) * cdiv(width, blocks["BLOCK_N"])
    copiers = 0 if copied else _copiers(operator, row, x, ready, endpoint)
    arguments = {
        "M": m,
        "N": width,
        "K": k,
        "stride_wn": weight.stride(0),
        "stride_wk": weight.stride(1),
        "stride_bias": bias.stride(0) if bias is not None else 0,
        "KEEP_OWN": keep_own,
        "ACTIVATION": activation or "none",
        "K_ADJACENT": k_adjacent,
        **blocks,
        "COPIERS": copiers,
        "TMA": aligned and blocks["TMA"],
        **endpoint.arguments(),
    }
    grid = _grid(operator, endpoint, tiles, copiers) if copiers else programs_beside_copies(tiles, endpoint)
    product = Launch(all_gather_gemm_forward_kernel, grid, arguments, row.num_warps, row.num_stages)
    return GatherPlan(endpoint.world * m, width, n, product)


def _copiers(operator: str, row: Configuration, x: Tensor, ready: Tensor, endpoint: Endpoint) -> int:
    """Return how many programs copy, at least one and at most one per share, flag and word of ready."""
    shares = cdiv(x.numel(), row.blocks["BLOCK_COPY"])
    wanted = min(row.blocks["COPIERS"], max(shares, 1), len(ready) // endpoint.world, max(endpoint.programs - 1, 1))
    return endpoint.grid(operator, x.nbytes, wanted)[0]


def _grid(operator: str, endpoint: Endpoint, tiles: int, copiers: int) -> tuple[int]:
    """Return the number of all programs. Without a tile copiers alone wait for all ranks and advance the epoch."""
    if tiles and endpoint.programs == copiers:
        raise ValueError(
            f"{operator}: a channel of 1 program: expected at least 2, one that copies, one that multiplies"
        )
    return (copiers + min(tiles, endpoint.programs - copiers),)
