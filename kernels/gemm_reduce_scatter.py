"""gemm_reduce_scatter: this rank's rows of Σ over ranks of x Wᵀ, + bias + residual, by pushing finished tiles.

Rank r owns rows [r c, (r + 1) c) of the result, c = cdiv(M, world). An epoch is two launches on each rank:

1. The product, one persistent program per multiprocessor. It takes the tiles of rank + 1 first, then those of rank + 2,
   …, its own last, so that partial sums travel while others are computed and no owner is sent to by all at once. A
   finished tile is stored in its owner's slot, in the place of this rank, in x's dtype. A program counts itself for an
   owner when it has stored its tiles of the next owner too: the fence in front of the count waits for stores to a peer,
   and by then those of the owner have arrived. The program that completes the count of the grid signals the owner: one
   flag from each rank to each, however many tiles. Nothing here waits for a peer.
2. The sum. It waits for every rank's signal and adds the partial sums of rank 0, 1, 2, … in float32 with bias and
   residual, rounded once: in absolute order, so that results do not depend on who was first, nor on the owner's rank.

Who may write when. A half of an owner's slot, [world, c, N], is written by the products of epoch e, by each rank its
own part, and read by the owner's sum of epoch e, once that has seen all signals of e. It is written again in e + 2, by
products that follow their rank's sum of e + 1 in the stream; that has waited for the owner's signal of e + 1, which the
owner gave in a product behind its sum of e. So launches without a tile signal and wait too. Word r of a rank's flags is
written by rank r, as in `signals.barrier`: a channel may be shared with collectives.

A launch that finds the abort word set does nothing. Where that happens between the programs of a product, those that
still ran have counted themselves, no owner without all of its tiles is signalled, and the sum behind it does nothing
either; the counts are zeroed with the signals.

Its warps have no roles (WARP_SPECIALIZE of other products): for sm_90 Triton 3.7 puts all that surrounds the loop into
each role, where several count their program and none signals.

Tiles of other owners first: Flux, arXiv:2406.06858, which signals tile by tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_device, check_floats, check_integers, check_shape
from tpfuse.kernels.configurations import choose
from tpfuse.kernels.endpoint import Endpoint, slot
from tpfuse.kernels.gemm_tiles import allows_tma, column_parts, load_tile, matrix, store_columns, store_tile
from tpfuse.kernels.gemm_weight import load_weight, weight_layout, weight_matrix
from tpfuse.kernels.launch import cdiv, launch, multiprocessors
from tpfuse.kernels.signals import advance, begin, peer_pointer, put, wait
from tpfuse.kernels.tiles import dot, grouped_tile


@triton.jit
def _signal_when_stored(counts_ptr, flags_ptr, owner, epoch, rank):
    """Counts this program; the last one of the grid signals the owner, and leaves the count as it was."""
    tl.debug_barrier()
    stored = tl.atomic_add(counts_ptr + owner, 1, sem="acq_rel", scope="sys") + 1
    if stored == tl.num_programs(0):
        tl.store(counts_ptr + owner, 0)
        put(peer_pointer(flags_ptr, owner, tl.int32) + rank, epoch)


@triton.jit(do_not_specialize=["rank"])
def gemm_reduce_scatter_forward_kernel(
    x_ptr,  # [M, K] bf16, read
    weight_ptr,  # [N, K] bf16, read
    counts_ptr,  # [WORLD] int32, 0 between launches
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes; of a half [WORLD, chunk, N] bf16, written
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32, read
    abort_ptr,  # [1] int32, read
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
    WORLD: tl.constexpr,
    K_ADJACENT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
):
    WIDTH: tl.constexpr = BLOCK_N // EPILOGUE_PARTS
    x = matrix(x_ptr, M, K, stride_xm, BLOCK_M, BLOCK_K, TMA)
    w = weight_matrix(weight_ptr, N, K, stride_wn, stride_wk, BLOCK_N, BLOCK_K, K_ADJACENT, TMA)
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        programs, tiles_n = tl.num_programs(0), tl.cdiv(N, BLOCK_N)
        first = tl.program_id(0)  # counted on from owner to owner, so that no program has two tiles more than another
        for step in range(1, WORLD + 1):
            owner = (rank + step) % WORLD
            rows = min(max(M - owner * chunk, 0), chunk)
            tiles_m = tl.cdiv(rows, BLOCK_M)
            tiles = tiles_m * tiles_n
            part_ptr = slot(slots_ptr, owner, epoch, slot_bytes, x_ptr.dtype.element_ty) + rank * chunk * N
            for index in range(first, tiles, programs):
                pid_m, pid_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
                first_m, first_n = pid_m * BLOCK_M, pid_n * BLOCK_N
                first_row = owner * chunk + first_m
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for k in range(0, K, BLOCK_K):
                    a = load_tile(x, first_row, k, M, K, stride_xm, stride_xk, BLOCK_M, BLOCK_K, TMA)
                    b = load_weight(w, k, first_n, N, K, stride_wn, stride_wk, BLOCK_N, BLOCK_K, K_ADJACENT, TMA)
                    acc = dot(a, b, acc)
                parts = column_parts(acc, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
                for part in tl.static_range(EPILOGUE_PARTS):
                    store_tile(parts[part], part_ptr, first_m, first_n + part * WIDTH, rows, N, N, 1, BLOCK_M, WIDTH)
            first += tl.cdiv(tiles - first, programs) * programs - tiles
            if step > 1:
                _signal_when_stored(counts_ptr, flags_ptr, (rank + step - 1) % WORLD, epoch, rank)
        _signal_when_stored(counts_ptr, flags_ptr, rank, epoch, rank)


@triton.jit(do_not_specialize=["rank"])
def gemm_reduce_scatter_sum_kernel(
    bias_ptr,  # [N] bf16, read; or None
    residual_ptr,  # [M, N] bf16, read; or None
    out_ptr,  # [M, N] bf16, written
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes; of its own half [WORLD, chunk, N] bf16, read
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    M,
    N,
    chunk,
    slot_bytes,
    rank,
    stride_bias,
    stride_rm,
    stride_rn,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    sources = tl.arange(0, triton.next_power_of_2(WORLD))
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        words_ptr = peer_pointer(flags_ptr, rank, tl.int32)
        if wait(words_ptr + sources, epoch, abort_ptr, sources < WORLD):
            half_ptr = slot(slots_ptr, rank, epoch, slot_bytes, out_ptr.dtype.element_ty)
            tiles_n = tl.cdiv(N, BLOCK_N)
            for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_n, tl.num_programs(0)):
                first_m, first_n = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
                total = load_tile(half_ptr, first_m, first_n, M, N, N, 1, BLOCK_M, BLOCK_N, False).to(tl.float32)
                for source in tl.static_range(1, WORLD):
                    part_ptr = half_ptr + source * chunk * N
                    part = load_tile(part_ptr, first_m, first_n, M, N, N, 1, BLOCK_M, BLOCK_N, False)
                    total += part.to(tl.float32)
                store_columns(
                    total, total, bias_ptr, residual_ptr, None, out_ptr, first_m, first_n, M, N,
                    stride_bias, stride_rm, stride_rn, N, 1, "none", BLOCK_M, BLOCK_N,
                )  # fmt: skip
            advance(state_ptr, epoch)


def gemm_reduce_scatter_forward(
    x: Tensor,
    weight: Tensor,
    endpoint: Endpoint,
    counts: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """This rank's rows of Σ over ranks of x Wᵀ, + bias + residual, once all ranks have called this; in stream order.

    x: [M, K]; weight: [N, K]; bias: [N] and residual: [rows, N], added by this rank alone to its own rows, of which it
    has min(c, M - rank c) or none, c = cdiv(M, world). All of one dtype of float32, float16, bfloat16, any strides, any
    size from 0 up. counts: int32, at least [world], contiguous, this rank's alone: zeroed with the signals, and nobody
    else touches them. All ranks bring the same M, N and dtype.

    Returns [rows, N], contiguous, in that dtype; partial sums are rounded to it too, before they are sent. Raises
    ValueError for other shapes, dtypes or devices, where world c rows of N are more than a slot holds, and where the
    channel has too few flags.
    """
    operator = "gemm_reduce_scatter"
    if x.ndim != 2:
        raise ValueError(f"{operator}: x has shape {tuple(x.shape)}: expected [M, K]")
    chunk = cdiv(x.shape[0], endpoint.world)
    rows = min(max(x.shape[0] - endpoint.rank * chunk, 0), chunk)
    _check(operator, x, weight, endpoint, counts, bias, residual, rows)
    out = torch.empty(rows, weight.shape[0], dtype=x.dtype, device=x.device)
    row = choose("gemm_reduce_scatter_sum", x.device, x.dtype)
    tiles = cdiv(rows, row.blocks["BLOCK_M"]) * cdiv(out.shape[1], row.blocks["BLOCK_N"])
    nbytes = endpoint.world * chunk * out.shape[1] * x.element_size()
    endpoint.grid(operator, nbytes, tiles)  # whether slots and flags are enough
    _launch_product(operator, x, weight, endpoint, counts, chunk)
    launch(
        gemm_reduce_scatter_sum_kernel,
        (max(1, min(endpoint.programs, tiles)),),  # without rows too it waits, and advances the epoch
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        bias_ptr=bias,
        residual_ptr=residual,
        out_ptr=out,
        M=rows,
        N=out.shape[1],
        chunk=chunk,
        stride_bias=bias.stride(0) if bias is not None else 0,
        stride_rm=residual.stride(0) if residual is not None else 0,
        stride_rn=residual.stride(1) if residual is not None else 0,
        **row.blocks,
        **endpoint.arguments(),
    )
    return out


def _launch_product(operator: str, x: Tensor, weight: Tensor, endpoint: Endpoint, counts: Tensor, chunk: int) -> None:
    """Partial sums of all owners' rows into their slots, and a signal to each owner."""
    (m, k), n = x.shape, weight.shape[0]
    k_adjacent, weight_aligned = weight_layout(weight, None)
    aligned = weight_aligned and allows_tma(x)
    programs = multiprocessors(x.device)
    row = choose(
        operator, x.device, x.dtype,
        M=chunk, N=n, K=k, chunks=endpoint.world, programs=programs, unaligned=int(not aligned),
    )  # fmt: skip
    blocks = dict(row.blocks) | {"TMA": aligned and row.blocks["TMA"]}
    tiles = endpoint.world * cdiv(chunk, blocks["BLOCK_M"]) * cdiv(n, blocks["BLOCK_N"])
    launch(
        gemm_reduce_scatter_forward_kernel,
        (max(1, min(tiles, programs)),),  # without a tile too it signals
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        x_ptr=x,
        weight_ptr=weight,
        counts_ptr=counts,
        M=m,
        N=n,
        K=k,
        chunk=chunk,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        stride_wn=weight.stride(0),
        stride_wk=weight.stride(1),
        K_ADJACENT=k_adjacent,
        **blocks,
        **endpoint.arguments(),
    )


def _check(
    operator: str,
    x: Tensor,
    weight: Tensor,
    endpoint: Endpoint,
    counts: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rows: int,
) -> None:
    check_floats(operator, x=x, weight=weight, bias=bias, residual=residual)
    for name, tensor in (("x", x), ("counts", counts)):
        check_device(operator, "the channel", endpoint.slots, name, tensor)
    check_integers(operator, "counts", counts, (torch.int32,))
    n = weight.shape[0] if weight.ndim else 0
    check_shape(operator, "weight", weight, (n, x.shape[1]))
    if bias is not None:
        check_shape(operator, "bias", bias, (n,))
    if residual is not None:
        check_shape(operator, "residual", residual, (rows, n))
    if counts.ndim != 1 or len(counts) < endpoint.world or not counts.is_contiguous():
        shape = f"{tuple(counts.shape)} and strides {counts.stride()}"
        raise ValueError(f"{operator}: counts has shape {shape}: expected contiguous, at least ({endpoint.world},)")
