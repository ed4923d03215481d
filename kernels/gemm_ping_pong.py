"""gemm on Hopper in Gluon: while one group of warps multiplies, the other one finishes its tile.

In `gemm_forward_kernel` all warps stop multiplying to finish a tile. Here a program has a loading warp and two groups,
0 and 1, of four warps, which take turns at the tensor cores: one's epilogue (bias, activation, residual, stores) runs
under the other's products. CUTLASS calls this design "ping-pong". The program's tiles go to the groups in turn.

A tile has 192 x 128 elements, in three sums of 64 rows, since Triton's tensors have powers of two as sizes. All copies
are TMA's, of squares of 64 x 64 elements, whose rows of 128 bytes are the widest that TMA swizzles. A gated pair has
tiles of 64 columns: one product computes 64 columns of the gate and 64 of the up projection, in the same threads.

**The ring.** STAGES stages of shared memory hold the operands of one step of 64 along K: 3 squares of x and 2 of the
weight. The loading warp fills stage after stage for all tiles of the program in order. **The slots.** Each group has
four squares of its own, through which it stores what it has computed, in rotation. The residual, or the pre-activation
at which a gradient is taken, is loaded into the very slot in which the result then replaces it.

These mbarriers order the accesses. A phase ends when all have arrived who are named in the second column, and, for full
and arrived, when all expected bytes are there too. Waits name the parity of the phase that must have ended.

| mbarrier       | arrives                                                  | waits                                    |
|----------------|----------------------------------------------------------|------------------------------------------|
| full[stage]    | the loading warp, before its copies into the stage        | the group in turn, before it multiplies |
| empty[stage]   | the group, when its products have read the stage          | the loading warp, before its copies     |
| turn[group]    | the other group, when it has issued a tile's products     | the group, before its tile's products   |
| arrived[slot]  | the group, before its copy into the slot                  | the group, before it reads the slot     |

A wait cannot tell a phase from the second one after it. The waits are right because nobody can be two phases late:
the loading warp waits at empty before each phase of full, and the turns alternate. A group may wait at full only during
its turn: otherwise the ring could have passed on under it.

A copy from a slot to global memory reads it until `store_wait(n)` has ended, where n stores begun later may still read.
Then the slot may be written again. No peer reads the results: a program needs no wait until they have been written.
`fence_async_shared` makes what threads have written to a slot visible to TMA. Triton adds the barriers of a group's
warps: before a copy of what they have written, after `store_wait`, and before arrivals.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tpfuse.kernels.activations import GATED, activate, activation_gradient
from tpfuse.kernels.checks import check_shape
from tpfuse.kernels.gemm import check_product
from tpfuse.kernels.gemm_tiles import allows_tma
from tpfuse.kernels.gemm_weight import weight_layout
from tpfuse.kernels.launch import Launch, cdiv, family, multiprocessors, planned
from tpfuse.kernels.tiles import grouped_tile

_SIDE = gl.constexpr(64)  # rows and columns of a square
_PARTS = gl.constexpr(3)  # sums of a tile
_SLOTS = gl.constexpr(4)  # of a group
_SQUARE_BYTES = gl.constexpr(64 * 64 * 2)

# Triton 3.9 has renamed the copies.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _following(stage, parity, STAGES: gl.constexpr):
    """Return the next stage of the ring, and the parity of its phase, which changes with each round."""
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, parity ^ 1, parity)


@gluon.jit
def _load_tiles(
    x,
    weight,
    weight_up,
    x_ring,
    weight_ring,
    full,
    empty,
    M,
    N,
    K,
    GATED: gl.constexpr,
    K_ADJACENT: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: fill the ring for all tiles of the program."""
    WIDTH: gl.constexpr = _SIDE if GATED else 2 * _SIDE  # columns of a tile of the result
    AXIS: gl.constexpr = 0 if K_ADJACENT else 1  # along which the two squares of the weight lie
    tiles_m, tiles_n = gl.cdiv(M, _PARTS * _SIDE), gl.cdiv(N, WIDTH)
    stage = 0
    parity = 1  # of the phase before the first one, which counts as ended: all stages are empty
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = pid_m * (_PARTS * _SIDE), pid_n * WIDTH
        second_n = first_n + (WIDTH - _SIDE)  # in weight_up, which begins at the up projection
        for k in range(0, K, _SIDE):
            mbarrier.wait(empty.index(stage), parity)
            ready = full.index(stage)
            mbarrier.expect(ready, (_PARTS + 2) * _SQUARE_BYTES)
            for part in gl.static_range(_PARTS):
                _load(x, [first_m + part * _SIDE, k], ready, x_ring.index(stage * _PARTS + part))
            left = weight_ring.index(stage).slice(0, _SIDE, AXIS)
            right = weight_ring.index(stage).slice(_SIDE, _SIDE, AXIS)
            _load(weight, [first_n, k] if K_ADJACENT else [k, first_n], ready, left)
            _load(weight_up, [second_n, k] if K_ADJACENT else [k, second_n], ready, right)
            stage, parity = _following(stage, parity, STAGES)


@gluon.jit
def _multiply(
    me: gl.constexpr,
    tile,  # the number of the tile among the program's
    steps,
    x_ring,
    weight_ring,
    full,
    empty,
    turn,
    K_ADJACENT: gl.constexpr,
    STAGES: gl.constexpr,
    layout: gl.constexpr,
):
    """Return the three sums [64, 128] of a tile, when it is this group's turn."""
    mbarrier.wait(turn.index(me), (tile // 2 & 1) ^ (1 - me))  # group 0 begins
    stage = tile * steps % STAGES
    parity = tile * steps // STAGES & 1
    top = gl.zeros((_SIDE, 2 * _SIDE), gl.float32, layout)
    middle = gl.zeros((_SIDE, 2 * _SIDE), gl.float32, layout)
    bottom = gl.zeros((_SIDE, 2 * _SIDE), gl.float32, layout)
    for k in range(steps):
        mbarrier.wait(full.index(stage), parity)
        x = stage * _PARTS
        if K_ADJACENT:
            weight = weight_ring.index(stage).permute((1, 0))
        else:
            weight = weight_ring.index(stage)
        one = hopper.warpgroup_mma(x_ring.index(x), weight, top, use_acc=k > 0, is_async=True)
        two = hopper.warpgroup_mma(x_ring.index(x + 1), weight, middle, use_acc=k > 0, is_async=True)
        three = hopper.warpgroup_mma(x_ring.index(x + 2), weight, bottom, use_acc=k > 0, is_async=True)
        # The other group's products come behind these in the tensor cores' queue: no gap between two tiles.
        mbarrier.arrive(turn.index(1 - me), pred=k == steps - 1)
        # Only the products of this step still run: those of the step before have read their stage.
        top, middle, bottom = hopper.warpgroup_mma_wait(_PARTS, deps=[one, two, three])
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1), pred=k > 0)
        stage, parity = _following(stage, parity, STAGES)
    top, middle, bottom = hopper.warpgroup_mma_wait(0, deps=[top, middle, bottom])
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1))
    return top, middle, bottom


@gluon.jit
def _halves(sums, layout: gl.constexpr):
    """Return the left and the right half of [64, 128]. The same threads have them: no data moves."""
    left, right = gl.split(gl.permute(gl.reshape(sums, (_SIDE, 2, _SIDE)), (0, 2, 1)))
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def _bias(bias_ptr, first, N, layout: gl.constexpr):
    columns = first + gl.arange(0, _SIDE, layout=gl.SliceLayout(0, layout))
    return gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _slot(slots, piece: gl.constexpr, sent: gl.constexpr, SENT: gl.constexpr):
    """Return the slot of a piece's store number `sent`. Each piece has SENT stores, the result's is the last."""
    return slots.index((piece * SENT + sent) % _SLOTS)


@gluon.jit
def _fetch(beside, slots, arrived, first_m, first_n, piece: gl.constexpr, SENT: gl.constexpr):
    """Begin to load what the epilogue of a piece reads, into the slot of its result."""
    there = arrived.index(piece % (_SLOTS // SENT))
    mbarrier.expect(there, _SQUARE_BYTES)
    place = [first_m + piece % _PARTS * _SIDE, first_n + piece // _PARTS * _SIDE]
    _load(beside, place, there, _slot(slots, piece, SENT - 1, SENT))


@gluon.jit
def _send(values, slot, matrix, row, column):
    """Begin to store a square, rounded. Triton's barrier precedes the copy, which one thread starts."""
    slot.store(values.to(slot.dtype))
    hopper.fence_async_shared()
    _store(matrix, [row, column], slot)


@gluon.jit
def _finish(
    value,
    up,  # the second half of a gated pair; not used otherwise
    tile,
    slots,
    arrived,
    beside,
    kept,
    kept_up,
    out,
    first_m,
    first_n,
    piece: gl.constexpr,
    PIECES: gl.constexpr,
    SENT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BESIDE: gl.constexpr,
    GATED: gl.constexpr,
    layout: gl.constexpr,
):
    """Store a piece: its pre-activation where it is kept, then its result."""
    AHEAD: gl.constexpr = _SLOTS // SENT  # pieces whose results have slots at the same time
    row, column = first_m + piece % _PARTS * _SIDE, first_n + piece // _PARTS * _SIDE
    if SENT > 1:
        tma.store_wait(_SLOTS - 1)  # the last store but three was from this slot
        _send(value, _slot(slots, piece, 0, SENT), kept, row, column)
        if GATED:
            tma.store_wait(_SLOTS - 1)
            _send(up, _slot(slots, piece, 1, SENT), kept_up, row, column)
    slot = _slot(slots, piece, SENT - 1, SENT)
    if BESIDE == "none":
        tma.store_wait(_SLOTS - 1)
        value = activate(value, ACTIVATION, slot.dtype)
        if GATED:
            value *= up
    else:
        PHASES: gl.constexpr = (PIECES - piece % AHEAD + AHEAD - 1) // AHEAD  # of this mbarrier, in a tile
        mbarrier.wait(arrived.index(piece % AHEAD), (tile // 2 * PHASES + piece // AHEAD) & 1)
        given = slot.load(layout).to(gl.float32)
        if BESIDE == "residual":
            value = activate(value, ACTIVATION, slot.dtype) + given
        else:
            value = activation_gradient(value, given, ACTIVATION, slot.dtype)
    _send(value, slot, out, row, column)
    if BESIDE != "none":
        if piece > 0:
            if piece - 1 + AHEAD < PIECES:
                tma.store_wait(SENT)  # the piece before has left its slot; this one's stores may still read theirs
                _fetch(beside, slots, arrived, first_m, first_n, piece - 1 + AHEAD, SENT)


@gluon.jit
def _run_group(
    me: gl.constexpr,
    x_ring,
    weight_ring,
    full,
    empty,
    turn,
    slots,
    arrived,
    bias_ptr,
    beside,
    kept,
    kept_up,
    out,
    M,
    N,
    K,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    BESIDE: gl.constexpr,
    KEEP: gl.constexpr,
    GATED: gl.constexpr,
    K_ADJACENT: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply every second tile of the program, and finish its pieces, squares of the result."""
    WIDTH: gl.constexpr = _SIDE if GATED else 2 * _SIDE
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * _SIDE, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, _SIDE, 16])
    PIECES: gl.constexpr = _PARTS if GATED else 2 * _PARTS
    SENT: gl.constexpr = (3 if GATED else 2) if KEEP else 1  # stores of a piece
    tiles_m, tiles_n = gl.cdiv(M, _PARTS * _SIDE), gl.cdiv(N, WIDTH)
    tile = me
    for index in range(gl.program_id(0) + me * gl.num_programs(0), tiles_m * tiles_n, 2 * gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = pid_m * (_PARTS * _SIDE), pid_n * WIDTH
        tma.store_wait(0)  # the rotation of the slots begins again
        if BESIDE != "none":
            for piece in gl.static_range(_SLOTS // SENT):
                _fetch(beside, slots, arrived, first_m, first_n, piece, SENT)
        top, middle, bottom = _multiply(
            me, tile, gl.cdiv(K, _SIDE), x_ring, weight_ring, full, empty, turn, K_ADJACENT, STAGES, whole
        )
        top_left, top_right = _halves(top, half)
        middle_left, middle_right = _halves(middle, half)
        bottom_left, bottom_right = _halves(bottom, half)
        # Column by column, so that a column's bias is loaded once. Of a gated pair, the right halves are up.
        squares = (top_left, middle_left, bottom_left, top_right, middle_right, bottom_right)
        for piece in gl.static_range(PIECES):
            value = squares[piece]
            up = squares[(piece + _PARTS) % (2 * _PARTS)]
            if BIAS:
                if piece % _PARTS == 0:
                    bias = _bias(bias_ptr, first_n + piece // _PARTS * _SIDE, N, half)
                    bias_up = _bias(bias_ptr + N, first_n, N, half) if GATED else bias
                value += bias
                if GATED:
                    up += bias_up
            _finish(
                value, up, tile, slots, arrived, beside, kept, kept_up, out, first_m, first_n,
                piece, PIECES, SENT, ACTIVATION, BESIDE, GATED, half,
            )  # fmt: skip
        tile += 2
    tma.store_wait(0)  # shared memory must not end before they have read it


@gluon.jit
def _matrix(pointer, rows, columns, stride, square: gl.constexpr):
    """Return a descriptor, whose copies move a square: 0 is loaded outside the matrix, and nothing is stored there."""
    return tma.make_tensor_descriptor(pointer, [rows, columns], [stride, 1], [_SIDE, _SIDE], square)


@gluon.jit
def _weight_matrix(weight_ptr, N, K, stride, square: gl.constexpr, K_ADJACENT: gl.constexpr):
    if K_ADJACENT:
        return _matrix(weight_ptr, N, K, stride, square)
    else:
        return _matrix(weight_ptr, K, N, stride, square)


@gluon.jit
def _mbarriers(number: gl.constexpr):
    """Return mbarriers, each of whose phases one thread's arrival ends."""
    made = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def gemm_ping_pong_kernel(
    x_ptr,  # [M, K] bf16, read
    weight_ptr,  # [N, K] bf16, read
    weight_up_ptr,  # [N, K] bf16, read: the second half of a gated pair, or None
    bias_ptr,  # [N] bf16, [2 N] gated, read; or None
    beside_ptr,  # [M, N] bf16, read: the residual, or with GRADIENT the pre-activation; or None
    preactivation_ptr,  # [M, N] bf16, [M, 2 N] gated, written; or None
    out_ptr,  # [M, N] bf16, written
    M,
    N,
    K,
    stride_xm,
    stride_weight,
    stride_beside,
    ACTIVATION: gl.constexpr,
    GRADIENT: gl.constexpr,
    K_ADJACENT: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    GATED: gl.constexpr = weight_up_ptr is not None
    BIAS: gl.constexpr = bias_ptr is not None
    KEEP: gl.constexpr = preactivation_ptr is not None
    BESIDE: gl.constexpr = "none" if beside_ptr is None else "gradient" if GRADIENT else "residual"
    gl.static_assert(not (GATED and BESIDE != "none"))
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_SIDE, _SIDE], dtype)
    PAIR: gl.constexpr = [2 * _SIDE, _SIDE] if K_ADJACENT else [_SIDE, 2 * _SIDE]
    x = _matrix(x_ptr, M, K, stride_xm, square)
    weight = _weight_matrix(weight_ptr, N, K, stride_weight, square, K_ADJACENT)
    weight_up = _weight_matrix(weight_up_ptr, N, K, stride_weight, square, K_ADJACENT) if GATED else weight
    out = _matrix(out_ptr, M, N, N, square)
    beside = _matrix(beside_ptr, M, N, stride_beside, square) if BESIDE != "none" else out
    width = 2 * N if GATED else N
    kept = _matrix(preactivation_ptr, M, N, width, square) if KEEP else out
    # Two matrices of one pre-activation: what a tile of gate has beyond its columns must not be written to up.
    kept_up = _matrix(preactivation_ptr + N, M, N, width, square) if KEEP and GATED else out
    x_ring = gl.allocate_shared_memory(dtype, [STAGES * _PARTS, _SIDE, _SIDE], square)
    weight_ring = gl.allocate_shared_memory(
        dtype, [STAGES, PAIR[0], PAIR[1]], gl.NVMMASharedLayout.get_default_for(PAIR, dtype)
    )
    slots_0 = gl.allocate_shared_memory(dtype, [_SLOTS, _SIDE, _SIDE], square)
    slots_1 = gl.allocate_shared_memory(dtype, [_SLOTS, _SIDE, _SIDE], square)
    full, empty, turn = _mbarriers(STAGES), _mbarriers(STAGES), _mbarriers(2)
    arrived_0 = _mbarriers(_SLOTS) if BESIDE != "none" else turn
    arrived_1 = _mbarriers(_SLOTS) if BESIDE != "none" else turn
    # Triton 3.6 builds descriptors in the memory of the rings, and does not order that before TMA writes there.
    hopper.fence_async_shared()
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_run_group, (
                zero, x_ring, weight_ring, full, empty, turn, slots_0, arrived_0, bias_ptr, beside, kept, kept_up, out,
                M, N, K, ACTIVATION, BIAS, BESIDE, KEEP, GATED, K_ADJACENT, GROUP_M, STAGES,
            )),
            (_run_group, (
                one, x_ring, weight_ring, full, empty, turn, slots_1, arrived_1, bias_ptr, beside, kept, kept_up, out,
                M, N, K, ACTIVATION, BIAS, BESIDE, KEEP, GATED, K_ADJACENT, GROUP_M, STAGES,
            )),
            (_load_tiles, (
                x, weight, weight_up, x_ring, weight_ring, full, empty, M, N, K, GATED, K_ADJACENT, GROUP_M, STAGES,
            )),
        ],
        [4, 1],  # warps of group 1 and of the loading warp; group 0 has the launch's four
        # Registers of a thread. The loading warp counts as four: 8 x 32 x 240 + 4 x 32 x 24 <= 65,536.
        [240, 24],
    )  # fmt: skip


_STAGES = 4  # with the slots they take 229 of 232 thousand bytes of shared memory
_GROUP_M = 8


def gemm_ping_pong(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
    keep_preactivation: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return act(x Wᵀ + bias) + residual and, on request, x Wᵀ + bias, as `gemm_forward` does.

    The tensors are those of `gemm_forward`, of bfloat16 or float16, on an H100 or H200. Rows or columns of the weight,
    and rows of the others, have adjacent elements and begin at multiples of 16 bytes; so a result has a multiple of 8
    columns. A gated activation takes no residual. Raise ValueError for all else.
    """
    plan = _plan("gemm_ping_pong", x, weight, bias, residual, activation, False)
    out = torch.empty(plan.rows, plan.width, dtype=x.dtype, device=x.device)
    preactivation = torch.empty(plan.rows, len(weight), dtype=x.dtype, device=x.device) if keep_preactivation else None
    plan.product.run(
        x_ptr=x,
        weight_ptr=weight,
        weight_up_ptr=weight[plan.width :] if activation in GATED else None,
        bias_ptr=bias,
        beside_ptr=residual,
        preactivation_ptr=preactivation,
        out_ptr=out,
    )
    return out, preactivation


def gemm_ping_pong_gradient(grad: Tensor, weight: Tensor, preactivation: Tensor, activation: str) -> Tensor:
    """Return (grad W) ⊙ act'(preactivation) [M, N], the gradient of the argument of the activation before a product.

    grad: [M, K], of the product's result; weight: [K, N], the product's; preactivation: [M, N]. The activation is not
    gated. Everything else is as for `gemm_ping_pong`.
    """
    plan = _plan("gemm_ping_pong_gradient", grad, weight.t(), None, preactivation, activation, True)
    out = torch.empty(plan.rows, plan.width, dtype=grad.dtype, device=grad.device)
    plan.product.run(
        x_ptr=grad,
        weight_ptr=weight,
        weight_up_ptr=None,
        bias_ptr=None,
        beside_ptr=preactivation,
        preactivation_ptr=None,
        out_ptr=out,
    )
    return out


class _PingPongPlan(NamedTuple):
    """The sizes and the launch of a call."""

    rows: int
    width: int
    product: Launch


@planned
def _plan(
    operator: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    beside: Tensor | None,
    activation: str | None,
    gradient: bool,
) -> _PingPongPlan:
    name = "preactivation" if gradient else "residual"
    m, k, n = check_product(operator, x, weight, bias, activation, **{name: beside})
    width = n // 2 if activation in GATED else n
    check_shape(operator, name, beside, (m, width))
    problem = ping_pong_problem(x, weight, bias, beside, activation)
    if problem:
        raise ValueError(f"{operator}: {problem}")
    k_adjacent, _ = weight_layout(weight, None)
    arguments = {
        "M": m,
        "N": width,
        "K": k,
        "stride_xm": x.stride(0),
        "stride_weight": weight.stride(0 if k_adjacent else 1),
        "stride_beside": beside.stride(0) if beside is not None else 0,
        "ACTIVATION": activation or "none",
        "GRADIENT": gradient,
        "K_ADJACENT": k_adjacent,
        "GROUP_M": _GROUP_M,
        "STAGES": _STAGES,
    }
    tiles = cdiv(m, _PARTS.value * _SIDE.value) * cdiv(width, _SIDE.value * (1 if activation in GATED else 2))
    grid = (min(tiles, multiprocessors(x.device)),)
    return _PingPongPlan(m, width, Launch(gemm_ping_pong_kernel, grid, arguments, num_warps=4, num_stages=1))


def ping_pong_problem(
    x: Tensor, weight: Tensor, bias: Tensor | None, beside: Tensor | None, activation: str | None
) -> str:
    """Return why the kernel cannot compute a product of `check_product`, or "" if it can."""
    gated = activation in GATED
    width = len(weight) // 2 if gated else len(weight)
    up = weight[width:] if gated else None
    if family(x.device) != "sm_90":
        return f"the tensors are on {x.device}: expected a GPU of compute capability 9.0"
    if x.element_size() != 2:
        return f"x is {x.dtype}: expected bfloat16 or float16"
    if gated and beside is not None:
        return f"{activation} is gated: expected no residual or pre-activation"
    if bias is not None and not bias.is_contiguous():
        return f"bias has strides {bias.stride()}: expected contiguous"
    if width % 8 or not weight_layout(weight[:width], up)[1] or not allows_tma(x, beside):
        return "a tensor is empty, or its rows are not of adjacent elements or do not begin at multiples of 16 bytes"
    return ""
