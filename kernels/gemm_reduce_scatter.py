"""gemm_reduce_scatter: this rank's rows of Σ over ranks of x Wᵀ, + bias + residual, by pushing finished tiles.

Rank r owns rows [r c, (r + 1) c) of the result, c = cdiv(M, world). One persistent program per multiprocessor takes the
tiles of rank + 1 first, then those of rank + 2, …, its own last, so that partial sums travel while others are computed
and not all ranks send to one owner at once. A finished tile of another owner is stored in its slot, in the part of this
rank, rounded to x's dtype. A tile of this rank stays in registers: its epilogue adds the partial sums of rank 0, 1, 2,
… in float32, its own one rounded like the others, with bias and residual, and rounds once. The order is absolute, so
that results depend neither on which rank was first nor on the owner's rank.

A tile of an owner belongs to the same program on every rank: tiles are dealt to programs in the order of owners 0, 1,
2, …, continuing from one owner to the next, independently of the order in which a rank computes them. So no program has
two tiles more than another, and program p waits only for program p of the other ranks: there is one flag from each
program to the same program of each other rank, however many tiles there are. No program waits for a later program of
its grid, neither on its rank nor through other ranks, so that not all programs of a grid need to run at once: where
other kernels hold multiprocessors, its last programs begin when its first have ended. Grid and tiles must be the same
on all ranks: they follow from M, N, the dtype and the channel, not from K or from how a rank's tensors are aligned.

A program signals an owner when it has stored its tiles of the next owner too: the fence before the signal waits for
stores to a peer, and by then those to the owner have arrived. The last one is signalled after the product of this
rank's first tile, before the program waits for the other ranks: otherwise each would wait for the next one.

Who may write when. A half of an owner's slot, [world, c, N], is written in epoch e, by each other rank its own part,
and read by the owner in epoch e. It is written again in e + 2, by launches that follow their rank's launch of e + 1 in
the stream; that launch has waited for the owner's signals of e + 1, which the owner gave after its launch of e. So
programs without a tile signal and wait too, and there is always at least one program. Word p world + r of a rank's
flags is written by rank r, as in `signals.arrive`: a channel may be shared with collectives.

Copy engines can copy the partial sums to their owners instead (`gemm_for_copies`). Then this product stores the tiles
of all owners in its own rank's memory, signals this rank alone, and ends. `tpfuse.kernels.engine_scatter` describes
that protocol.

A launch that finds the abort word set does nothing. Programs whose wait is cut short sum nothing, and the epoch does
not end; the tiles that they have signalled are stored.

Where a row of the table says PING_PONG, `gemm_reduce_scatter_ping_pong` computes the products of which it can.

Computing the tiles of other owners first is due to Flux, arXiv:2406.06858, which signals tile by tile.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_shape
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.endpoint import Endpoint, slot
from tpfuse.kernels.gemm_tiles import allows_tma, column_parts, load_tile, matrix, store_result, store_tile
from tpfuse.kernels.gemm_weight import load_weight, weight_layout, weight_matrix
from tpfuse.kernels.launch import Launch, cdiv, planned
from tpfuse.kernels.product_calls import ScatterPlan, check_scatter, own_rows, term_strides
from tpfuse.kernels.signals import advance, begin, peer_pointer, signal, wait_signal
from tpfuse.kernels.tiles import dot, first_tile, grouped_tile, rounded
from tpfuse.kernels.trace import COMPUTING, now, record


@triton.jit
def _signal(flags_ptr, owner, epoch, rank, WORLD: tl.constexpr):
    """Signal the same program of an owner that this program has stored its tiles there."""
    signal(peer_pointer(flags_ptr, owner, tl.int32) + tl.program_id(0) * WORLD + rank, epoch)


@triton.jit
def _signal_copies(stored_ptr, owner, epoch, WORLD: tl.constexpr):
    """Signal the copies to an owner that this program has stored its tiles of the owner's rows."""
    signal(stored_ptr + tl.program_id(0) * WORLD + owner, epoch)


@triton.jit
def _destination(stored_ptr, slots_ptr, owner, epoch, rank, chunk, N, slot_bytes, dtype: tl.constexpr):
    """Return where the tiles of an owner's rows are stored: in its slot, or in this rank's, whence engines copy them.

    The second half of this rank's slot is for the other owners' rows.
    """
    if stored_ptr is None:
        return slot(slots_ptr, owner, epoch, slot_bytes, dtype) + rank * chunk * N
    else:
        return slot(slots_ptr, rank, (owner != rank).to(tl.int32), slot_bytes, dtype) + owner * chunk * N


@triton.jit
def _tell(stored_ptr, flags_ptr, step, epoch, rank, WORLD: tl.constexpr):
    """Signal after an owner's tiles: the copies to it, or the owner before, whose tiles have arrived by now."""
    if stored_ptr is not None:
        _signal_copies(stored_ptr, (rank + step) % WORLD, epoch, WORLD)
    elif step > 1:
        _signal(flags_ptr, (rank + step - 1) % WORLD, epoch, rank, WORLD)


@triton.jit
def _exchange(flags_ptr, abort_ptr, trace_ptr, epoch, rank, WORLD: tl.constexpr):
    """Signal the last of the other owners, and wait for the parts of the other ranks. Return 1, or 2 after an abort."""
    _signal(flags_ptr, (rank + WORLD - 1) % WORLD, epoch, rank, WORLD)
    sources = tl.arange(0, triton.next_power_of_2(WORLD))
    words_ptr = peer_pointer(flags_ptr, rank, tl.int32) + tl.program_id(0) * WORLD
    others = (sources < WORLD) & (sources != rank)
    return 2 - wait_signal(words_ptr + sources, epoch, abort_ptr, others, trace_ptr, sources).to(tl.int32)


@triton.jit
def _product(
    x,
    w,
    index,
    tiles_m,
    tiles_n,
    owner,
    chunk,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    K_ADJACENT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Return the owner's `index`-th tile of x Wᵀ in float32, and its first row of the owner's rows and column."""
    pid_m, pid_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
    first_m, first_n = pid_m * BLOCK_M, pid_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = load_tile(x, (owner * chunk + first_m, k), (M, K), (stride_xm, stride_xk), (BLOCK_M, BLOCK_K), TMA)
        b = load_weight(w, k, first_n, N, K, stride_wn, stride_wk, BLOCK_N, BLOCK_K, K_ADJACENT, TMA)
        acc = dot(a, b, acc)
    return acc, first_m, first_n


@triton.jit
def _partial_sums(
    own,
    half_ptr,
    source,
    rank,
    first,
    shape,
    chunk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return a rank's partial sums of a tile, those of this rank from `own` unless it is None."""
    part_ptr = half_ptr + source * chunk * shape[1]
    if own is None:
        return load_tile(part_ptr, first, shape, (shape[1], 1), (BLOCK_M, BLOCK_N), False).to(tl.float32)
    else:
        rows = tl.where(source == rank, 0, shape[0])  # this rank's part of the half is not read
        part = load_tile(part_ptr, first, (rows, shape[1]), (shape[1], 1), (BLOCK_M, BLOCK_N), False)
        return tl.where(source == rank, rounded(own, part.dtype), part).to(tl.float32)


@triton.jit
def sum_tile(
    own,  # [BLOCK_M, BLOCK_N] float32: this rank's partial sums; or None: they are in the half like the others
    half_ptr,  # [WORLD, chunk, N] bf16, read
    terms,  # of `store_result`
    out_ptr,
    first,  # (row, column)
    shape,  # (M, N)
    chunk,
    rank,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the partial sums of all ranks, rank 0 first, then bias and residual, and store the tile."""
    total = _partial_sums(own, half_ptr, 0, rank, first, shape, chunk, BLOCK_M, BLOCK_N)
    for source in tl.static_range(1, WORLD):
        total += _partial_sums(own, half_ptr, source, rank, first, shape, chunk, BLOCK_M, BLOCK_N)
    store_result((total, total), terms, out_ptr, first, shape, "none", 1)


@triton.jit(do_not_specialize=["rank"])
def gemm_reduce_scatter_forward_kernel(
    x_ptr,  # [M, K] bf16, read
    weight_ptr,  # [N, K] bf16, read
    bias_ptr,  # [N] bf16, read; or None
    residual_ptr,  # [rows, N] bf16, read; or None
    out_ptr,  # [rows, N] bf16, written; or None where copy engines copy the tiles to their owners
    stored_ptr,  # [programs, WORLD] int32, written; or None: the owners themselves are signalled
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes; of a half [WORLD, chunk, N] bf16, written and read
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    M,
    N,
    K,
    chunk,
    slot_bytes,
    rank,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_bias,
    stride_rm,
    stride_rn,
    WORLD: tl.constexpr,
    K_ADJACENT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
    SUM_WIDTH: tl.constexpr,  # columns of a tile that are summed at once, over all ranks
):
    WIDTH: tl.constexpr = BLOCK_N // EPILOGUE_PARTS
    COLUMNS: tl.constexpr = SUM_WIDTH if SUM_WIDTH < BLOCK_N else BLOCK_N
    OTHERS: tl.constexpr = WORLD if stored_ptr is None else WORLD + 1  # copy engines copy this rank's tiles last
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = matrix(x_ptr, M, K, stride_xm, BLOCK_M, BLOCK_K, TMA)
    w = weight_matrix(weight_ptr, N, K, stride_wn, stride_wk, BLOCK_N, BLOCK_K, K_ADJACENT, TMA)
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        programs, tiles_n = tl.num_programs(0), tl.cdiv(N, BLOCK_N)
        most = tl.cdiv(chunk, BLOCK_M) * tiles_n
        for step in range(1, OTHERS):
            since = now(trace_ptr)
            owner = (rank + step) % WORLD
            rows = min(max(M - owner * chunk, 0), chunk)
            tiles_m = tl.cdiv(rows, BLOCK_M)
            part_ptr = _destination(stored_ptr, slots_ptr, owner, epoch, rank, chunk, N, slot_bytes, dtype)
            for index in range(first_tile(owner, most), tiles_m * tiles_n, programs):
                acc, first_m, first_n = _product(
                    x, w, index, tiles_m, tiles_n, owner, chunk, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk,
                    K_ADJACENT, TMA, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
                )  # fmt: skip
                parts = column_parts(acc, EPILOGUE_PARTS)
                for part in tl.static_range(EPILOGUE_PARTS):
                    store_tile(parts[part], part_ptr, (first_m, first_n + part * WIDTH), (rows, N), N)
            record(trace_ptr, COMPUTING, owner, since)
            _tell(stored_ptr, flags_ptr, step, epoch, rank, WORLD)
        if stored_ptr is None:
            since = now(trace_ptr)
            exchanged = tl.full((), 0, tl.int32)  # then 1, or 2 after an abort
            half_ptr = slot(slots_ptr, rank, epoch, slot_bytes, dtype)
            terms = ((bias_ptr, stride_bias), (residual_ptr, stride_rm, stride_rn), None)
            rows = min(max(M - rank * chunk, 0), chunk)
            tiles_m = tl.cdiv(rows, BLOCK_M)
            for index in range(first_tile(rank, most), tiles_m * tiles_n, programs):
                acc, first_m, first_n = _product(
                    x, w, index, tiles_m, tiles_n, rank, chunk, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk,
                    K_ADJACENT, TMA, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
                )  # fmt: skip
                if exchanged == 0:
                    record(trace_ptr, COMPUTING, rank, since)
                    exchanged = _exchange(flags_ptr, abort_ptr, trace_ptr, epoch, rank, WORLD)
                    since = now(trace_ptr)
                if exchanged == 1:
                    parts = column_parts(acc, BLOCK_N // COLUMNS)
                    for part in tl.static_range(BLOCK_N // COLUMNS):
                        sum_tile(
                            parts[part], half_ptr, terms, out_ptr, (first_m, first_n + part * COLUMNS), (rows, N),
                            chunk, rank, WORLD, BLOCK_M, COLUMNS,
                        )  # fmt: skip
            if exchanged == 0:  # without a tile
                exchanged = _exchange(flags_ptr, abort_ptr, trace_ptr, epoch, rank, WORLD)
                since = now(trace_ptr)
            if exchanged == 1:
                record(trace_ptr, COMPUTING, rank, since)
                advance(state_ptr, epoch)


def gemm_reduce_scatter_forward(
    x: Tensor,
    weight: Tensor,
    endpoint: Endpoint,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    other_tiles: bool = False,
) -> Tensor:
    """Return this rank's rows of Σ over ranks of x Wᵀ, + bias + residual, once all have called this; in stream order.

    x: [M, K]; weight: [N, K]; bias: [N] and residual: [rows, N], added by this rank alone to its own rows. It has
    min(c, M - rank c) rows or none, c = cdiv(M, world). All have one dtype of float32, float16, bfloat16, any strides,
    any size from 0 up. other_tiles: as in `choose_configuration`. All ranks pass the same M, N, dtype and other_tiles;
    each rank may have its own K.

    Return [rows, N], contiguous, in that dtype; partial sums are rounded to it too, before they are sent. Raise
    ValueError for other shapes, dtypes or devices, where world c rows of N are larger than a slot, and where the
    channel has too few flags.
    """
    plan = _plan(x, weight, endpoint, bias, residual, other_tiles, False)
    if plan.ping_pong is not None:
        return plan.ping_pong(x, weight, endpoint, bias=bias, residual=residual)
    out = torch.empty(plan.rows, plan.columns, dtype=x.dtype, device=x.device)
    plan.product.run(x_ptr=x, weight_ptr=weight, bias_ptr=bias, residual_ptr=residual, out_ptr=out, stored_ptr=None)
    return out


def gemm_for_copies(
    x: Tensor, weight: Tensor, endpoint: Endpoint, stored: Tensor, *, other_tiles: bool = False
) -> None:
    """Store x Wᵀ, rounded to x's dtype, in this rank's slot, from where copy engines copy it; in stream order.

    x, weight, other_tiles: as for `gemm_reduce_scatter_forward`. The slot's halves are [world, c, N]: rows of this rank
    are stored in part `rank` of the first half, rows of another owner in part `owner` of the second one. stored: int32
    [endpoint.programs, world], zeroed with the signals; word [p, owner] becomes the epoch when program p has stored its
    tiles of that owner. The epoch stays open. Raise ValueError for other shapes, dtypes or devices, and where world c
    rows of N are larger than a slot.
    """
    plan = _plan(x, weight, endpoint, None, None, other_tiles, True)
    check_shape("gemm_for_copies", "stored", stored, (endpoint.programs, endpoint.world))
    plan.product.run(x_ptr=x, weight_ptr=weight, bias_ptr=None, residual_ptr=None, out_ptr=None, stored_ptr=stored)


@planned
def _plan(
    x: Tensor,
    weight: Tensor,
    endpoint: Endpoint,
    bias: Tensor | None,
    residual: Tensor | None,
    other_tiles: bool,
    copied: bool,
) -> ScatterPlan:
    """Check a call and plan its launch.

    copied: copy engines copy the tiles; then each of the channel's programs signals, with a tile or without.
    """
    operator = "gemm_reduce_scatter"
    m, k, n, chunk = check_scatter(operator, x, weight, endpoint, bias, residual)
    k_adjacent, weight_aligned = weight_layout(weight, None)
    aligned = weight_aligned and allows_tma(x)
    blocks, num_warps, num_stages = _configuration(operator, x, n, chunk, endpoint, aligned, other_tiles)
    ping_pong = _ping_pong(x, weight, endpoint) if blocks.pop("PING_PONG") and not copied else None
    tiles = endpoint.world * cdiv(chunk, blocks["BLOCK_M"]) * cdiv(n, blocks["BLOCK_N"])
    (programs,) = endpoint.grid(operator, endpoint.world * chunk * n * x.element_size(), tiles)
    arguments = {
        "M": m,
        "N": n,
        "K": k,
        "chunk": chunk,
        "stride_xm": x.stride(0),
        "stride_xk": x.stride(1),
        "stride_wn": weight.stride(0),
        "stride_wk": weight.stride(1),
        **term_strides(bias, residual),
        "K_ADJACENT": k_adjacent,
        **blocks,
        **endpoint.arguments(),
    }
    # A program without a tile also signals and waits, and advances the epoch.
    grid = (endpoint.programs if copied else programs,)
    product = Launch(gemm_reduce_scatter_forward_kernel, grid, arguments, num_warps, num_stages)
    return ScatterPlan(own_rows(m, endpoint), n, product, ping_pong)


def _ping_pong(x: Tensor, weight: Tensor, endpoint: Endpoint) -> Callable[..., Tensor] | None:
    from tpfuse.kernels import gemm_reduce_scatter_ping_pong  # it imports Gluon, as `gemm_ping_pong` does

    problem = gemm_reduce_scatter_ping_pong.scatter_ping_pong_problem(x, weight, endpoint)
    return None if problem else gemm_reduce_scatter_ping_pong.gemm_reduce_scatter_ping_pong


def _configuration(
    operator: str, x: Tensor, n: int, chunk: int, endpoint: Endpoint, aligned: bool, other_tiles: bool
) -> tuple[dict[str, Any], int, int]:
    """Return (blocks, num_warps, num_stages); tiles are those of aligned tensors, so that all ranks have the same."""
    sizes = {"M": chunk, "N": n, "chunks": endpoint.world, "programs": endpoint.programs}
    shared = choose_configuration(operator, x.device, x.dtype, other_tiles=other_tiles, **sizes, unaligned=0)
    row = (
        shared
        if aligned
        else choose_configuration(operator, x.device, x.dtype, other_tiles=False, **sizes, unaligned=1)
    )
    tile = {name: shared.blocks[name] for name in ("BLOCK_M", "BLOCK_N", "GROUP_M", "EPILOGUE_PARTS")}
    tile["PING_PONG"] = shared.blocks.get("PING_PONG", False)
    blocks = dict(row.blocks) | tile | {"TMA": aligned and row.blocks["TMA"]}
    return blocks, row.num_warps, row.num_stages
