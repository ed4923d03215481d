"""gemm_reduce_scatter on Hopper in Gluon: the product of `ping_pong`, whose groups push tiles and add the partial sums.

The protocol is that of `gemm_reduce_scatter`: who owns which rows, which program has which tiles, in which order, what
the words of the flags mean, and who may write when. All ranks must run the same one of the two kernels, whose tiles
differ. So the choice follows from what all ranks share, and not from a rank's K or strides.

The loading warp loads the tiles of rank + 1 first, this rank's last. The groups store the tiles of other owners in
their slots, by ordinary stores, since a signal orders those. To write rows of 128 bytes, a group exchanges a square
among its threads through its own slots of shared memory. Of this rank's tiles it adds the partial sums of the other
ranks, under the products of the other group.

One more warp, the messenger, gives and awaits all signals, and records the trace. Two kinds of mbarriers are added;
each has one phase. The messenger's release has the system's scope and comes after its wait at `stored`: it covers what
the groups have stored for a peer. Its acquire precedes its arrival at `parts`: it covers what the groups then load (PTX
ISA 8.7, "Causality order": synchronisation is transitive).

| mbarrier     | arrives                                                     | waits                                   |
|--------------|-------------------------------------------------------------|-----------------------------------------|
| stored[step] | both groups, when they have stored their tiles of an owner  | the messenger, before its signal        |
| parts        | the messenger, when the other ranks have signalled this one | the groups, before they read parts      |

A group that waits at parts has issued its products and given the turn away. So the other group goes on, and stores and
arrives for the last of the other owners, even if its own next tile waits too.

**Abort.** The messenger of a wait that was cut short lets the groups go on, and tells them by `complete`, a word of
shared memory, to add nothing. The epoch does not end.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tpfuse.kernels.endpoint import Endpoint, slot
from tpfuse.kernels.gemm_tiles import allows_tma
from tpfuse.kernels.gemm_weight import weight_layout
from tpfuse.kernels.launch import Launch, cdiv, family, planned
from tpfuse.kernels.ping_pong import (
    PARTS,
    SIDE,
    SLOTS,
    load_tiles,
    matrix,
    mbarriers,
    multiply,
    product_arguments,
    product_tiles,
    ring,
    weight_matrix,
)
from tpfuse.kernels.product_calls import ScatterPlan, check_scatter, term_strides
from tpfuse.kernels.signals import advance, begin, peer_pointer, signal, wait_signal
from tpfuse.kernels.tiles import first_tile, grouped_tile
from tpfuse.kernels.trace import COMPUTING, now, record


@gluon.jit
def _load_owners(x, chunk, tiles, rank, WORLD: gl.constexpr, rest):
    """Run the loading warp: fill the ring for the program's tiles of each owner's rows."""
    stage = 0
    parity = 1  # of the phase before the first one, as for the plain product
    for step in range(1, WORLD + 1):
        owner = (rank + step) % WORLD
        first = first_tile(owner, tiles)
        _, stage, parity = load_tiles(x, owner * chunk, 0, first, stage, parity, *rest)


@gluon.jit
def _exchange(
    flags_ptr, state_ptr, abort_ptr, trace_ptr, epoch, running, rank, stored, parts, complete, WORLD: gl.constexpr
):
    """Run the messenger: signal each owner when its tiles are stored, then wait for the other ranks' signals."""
    if running:
        word = gl.program_id(0) * WORLD
        since = now(trace_ptr)
        for step in range(1, WORLD):
            owner = (rank + step) % WORLD
            mbarrier.wait(stored.index(step - 1), 0)
            record(trace_ptr, COMPUTING, owner, since)
            signal(peer_pointer(flags_ptr, owner, gl.int32) + word + rank, epoch)
            since = now(trace_ptr)
        here = running
        for step in range(1, WORLD):
            source = (rank + WORLD - step) % WORLD  # in the order in which they signal
            word_ptr = peer_pointer(flags_ptr, rank, gl.int32) + word + source
            here = wait_signal(word_ptr, epoch, abort_ptr, None, trace_ptr, source) & here
        word_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        complete.store(gl.full((1,), here.to(gl.int32), gl.int32, word_layout))
        mbarrier.arrive(parts.index(0))
        since = now(trace_ptr)
        mbarrier.wait(stored.index(WORLD - 1), 0)
        if here:
            record(trace_ptr, COMPUTING, rank, since)
            advance(state_ptr, epoch)


@gluon.jit
def _partial_sums(own, part_ptrs, source: gl.constexpr, rank, mask):
    """Return a rank's partial sums of a square, those of this rank from `own`: its part of the half is not read."""
    part = gl.load(part_ptrs, mask=mask & (source != rank), other=0.0)
    return gl.where(source == rank, own, part).to(gl.float32)


@gluon.jit
def _sum(
    own,
    half_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    row,
    column,
    mask,
    chunk,
    N,
    rank,
    stride_bias,
    stride_rm,
    stride_rn,
    WORLD: gl.constexpr,
):
    """Add the partial sums of a square, rank 0 first, then bias and residual, and store it. own: this rank's."""
    offsets = row * N + column
    total = _partial_sums(own, half_ptr + offsets, 0, rank, mask)
    for source in gl.static_range(1, WORLD):
        total += _partial_sums(own, half_ptr + source * chunk * N + offsets, source, rank, mask)
    if bias_ptr is not None:
        total += gl.load(bias_ptr + column * stride_bias, mask=column < N, other=0.0).to(gl.float32)
    if residual_ptr is not None:
        place = row.to(gl.int64) * stride_rm + column.to(gl.int64) * stride_rn
        total += gl.load(residual_ptr + place, mask=mask, other=0.0).to(gl.float32)
    gl.store(out_ptr + offsets, total.to(own.dtype), mask=mask)


@gluon.jit
def _run_group(
    me: gl.constexpr,
    x_ring,
    weight_ring,
    full,
    empty,
    turn,
    slots,
    stored,
    parts,
    complete,
    bias_ptr,
    residual_ptr,
    out_ptr,
    slots_ptr,
    slot_bytes,
    epoch,
    rank,
    tiles,
    chunk,
    N,
    K,
    stride_bias,
    stride_rm,
    stride_rn,
    K_ADJACENT: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    WORLD: gl.constexpr,
):
    """Multiply every second tile of the program, and push its squares to their owner or add partial sums to them."""
    line: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # 16 bytes of a row are a thread's
    word_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = slots.dtype
    tiles_m, tiles_n = gl.cdiv(chunk, PARTS * SIDE), gl.cdiv(N, 2 * SIDE)
    programs = gl.num_programs(0)
    half_ptr = slot(slots_ptr, rank, epoch, slot_bytes, dtype)
    before = gl.to_tensor(0)  # the program's tiles of the owners before
    for step in range(1, WORLD + 1):
        owner = (rank + step) % WORLD
        first = first_tile(owner, tiles)
        part_ptr = slot(slots_ptr, owner, epoch, slot_bytes, dtype) + rank * chunk * N
        tile = before + (before + me) % 2  # group 0 has the even ones
        for index in range(first + (before + me) % 2 * programs, tiles, 2 * programs):
            pid_m, pid_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
            squares = multiply(me, tile, gl.cdiv(K, SIDE), x_ring, weight_ring, full, empty, turn, K_ADJACENT, STAGES)
            adds = False
            if owner == rank:
                mbarrier.wait(parts.index(0), 0)
                adds = gl.max(complete.load(word_layout), 0) != 0
            for piece in gl.static_range(2 * PARTS):
                # As many squares as there are slots leave the registers first: the sums need these.
                if piece % SLOTS == 0:
                    for ahead in gl.static_range(SLOTS if piece == 0 else 2 * PARTS - SLOTS):
                        slots.index(ahead).store(squares[piece + ahead].to(dtype))
                own = slots.index(piece % SLOTS).load(line)
                row = pid_m * (PARTS * SIDE) + piece % PARTS * SIDE + gl.arange(0, SIDE, gl.SliceLayout(1, line))
                column = pid_n * (2 * SIDE) + piece // PARTS * SIDE + gl.arange(0, SIDE, gl.SliceLayout(0, line))
                mask = (row < chunk)[:, None] & (column < N)[None, :]
                if owner != rank:
                    gl.store(part_ptr + row[:, None] * N + column[None, :], own, mask=mask)
                elif adds:
                    _sum(
                        own, half_ptr, bias_ptr, residual_ptr, out_ptr, row[:, None], column[None, :], mask, chunk, N,
                        rank, stride_bias, stride_rm, stride_rn, WORLD,
                    )  # fmt: skip
            tile += 2
        mbarrier.arrive(stored.index(step - 1))
        before += gl.cdiv(gl.maximum(tiles - first, 0), programs)


@gluon.jit(do_not_specialize=["rank"])
def gemm_reduce_scatter_ping_pong_kernel(
    x_ptr,  # [WORLD chunk, K] bf16, read
    weight_ptr,  # [N, K] bf16, read
    bias_ptr,  # [N] bf16, read; or None
    residual_ptr,  # [chunk, N] bf16, read; or None
    out_ptr,  # [chunk, N] bf16, written
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes; of a half [WORLD, chunk, N] bf16, written and read
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    chunk,
    N,
    K,
    slot_bytes,
    rank,
    stride_xm,
    stride_weight,
    stride_bias,
    stride_rm,
    stride_rn,
    WORLD: gl.constexpr,
    K_ADJACENT: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    x = matrix(x_ptr, WORLD * chunk, K, stride_xm)
    weight = weight_matrix(weight_ptr, N, K, stride_weight, K_ADJACENT)
    epoch, running = begin(state_ptr, abort_ptr)
    rows = gl.where(running, chunk, 0)  # a launch that finds the abort word set has no tiles
    tiles = gl.cdiv(rows, PARTS * SIDE) * gl.cdiv(N, 2 * SIDE)
    x_ring, weight_ring, full, empty, turn, slots_0, slots_1 = ring(dtype, K_ADJACENT, STAGES)
    stored, parts = mbarriers(WORLD, 2), mbarriers(1)
    complete = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    hopper.fence_async_shared()  # as in `run_warps`: Triton 3.6 builds descriptors in the memory of the rings
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_run_group, (
                zero, x_ring, weight_ring, full, empty, turn, slots_0, stored, parts, complete, bias_ptr, residual_ptr,
                out_ptr, slots_ptr, slot_bytes, epoch, rank, tiles, chunk, N, K, stride_bias, stride_rm, stride_rn,
                K_ADJACENT, GROUP_M, STAGES, WORLD,
            )),
            (_run_group, (
                one, x_ring, weight_ring, full, empty, turn, slots_1, stored, parts, complete, bias_ptr, residual_ptr,
                out_ptr, slots_ptr, slot_bytes, epoch, rank, tiles, chunk, N, K, stride_bias, stride_rm, stride_rn,
                K_ADJACENT, GROUP_M, STAGES, WORLD,
            )),
            (_load_owners, (x, chunk, tiles, rank, WORLD, (
                weight, weight, x_ring, weight_ring, full, empty, rows, N, K, False, K_ADJACENT, GROUP_M, STAGES, 1,
            ))),
            (_exchange, (
                flags_ptr, state_ptr, abort_ptr, trace_ptr, epoch, running, rank, stored, parts, complete, WORLD,
            )),
        ],
        [4, 1, 1],  # warps of group 1, of the loading warp and of the messenger; group 0 has the launch's four
        [240, 24, 24],  # registers of a thread; the two warps count as four
    )  # fmt: skip


def gemm_reduce_scatter_ping_pong(
    x: Tensor, weight: Tensor, endpoint: Endpoint, *, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return this rank's rows of Σ over ranks of x Wᵀ, + bias + residual, as `gemm_reduce_scatter_forward` does.

    The tensors are those of `gemm_reduce_scatter_forward`, of bfloat16 or float16, on H100s or H200s. The ranks' number
    divides M, and 8 divides N; neither is 0. Operands that TMA cannot read are copied. Raise ValueError for all else.
    """
    x, weight = _aligned(x, weight)
    plan = _plan(x, weight, endpoint, bias, residual)
    out = torch.empty(plan.rows, plan.columns, dtype=x.dtype, device=x.device)
    plan.product.run(x_ptr=x, weight_ptr=weight, bias_ptr=bias, residual_ptr=residual, out_ptr=out)
    return out


def _aligned(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return operands that TMA can read: copies, if need be, in which zeros pad K to a multiple of 8."""
    if x.ndim != 2 or weight.ndim != 2 or (weight_layout(weight, None)[1] and allows_tma(x)):
        return x, weight
    columns = max(1, cdiv(x.shape[1], 8)) * 8 - x.shape[1]
    return pad(x, (0, columns)).contiguous(), pad(weight, (0, columns)).contiguous()


@planned
def _plan(x: Tensor, weight: Tensor, endpoint: Endpoint, bias: Tensor | None, residual: Tensor | None) -> ScatterPlan:
    operator = "gemm_reduce_scatter_ping_pong"
    m, _, n, chunk = check_scatter(operator, x, weight, endpoint, bias, residual)
    problem = scatter_ping_pong_problem(x, weight, endpoint)
    if problem:
        raise ValueError(f"{operator}: {problem}")
    tiles = endpoint.world * product_tiles(chunk, n, None)
    grid = endpoint.grid(operator, m * n * x.element_size(), tiles)
    arguments: dict[str, Any] = product_arguments(x, weight, n, None) | endpoint.arguments()
    del arguments["M"], arguments["ACTIVATION"]
    arguments |= {"chunk": chunk} | term_strides(bias, residual)
    product = Launch(gemm_reduce_scatter_ping_pong_kernel, grid, arguments, num_warps=4, num_stages=1)
    return ScatterPlan(chunk, n, product, None)


def scatter_ping_pong_problem(x: Tensor, weight: Tensor, endpoint: Endpoint) -> str:
    """Return why the kernel cannot compute a product of `check_scatter`, or "" if it can: the same on every rank."""
    m, n = len(x), len(weight)
    if family(x.device) != "sm_90":
        return f"the tensors are on {x.device}: expected a GPU of compute capability 9.0"
    if x.element_size() != 2:
        return f"x is {x.dtype}: expected bfloat16 or float16"
    if m == 0 or m % endpoint.world:
        return f"x has {m} rows: expected a multiple of the {endpoint.world} ranks, and at least one for each"
    if n == 0 or n % 8:
        return f"weight has {n} rows: expected a multiple of 8"
    return ""
