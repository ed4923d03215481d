"""Products on Hopper in Gluon: while one group of warps multiplies, the other one finishes its tile.

`gemm_ping_pong` and `all_gather_gemm_ping_pong` run a product with `run_warps`, each with a loading warp of its own. In
`gemm_forward_kernel` all warps stop multiplying to finish a tile. Here a program has a loading warp and two groups,
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

**Chunks.** The rows of a gather are WORLD chunks of M rows each. A program goes through the tiles of one chunk after
another, and squares beyond the end of a chunk are moved out of the matrix, where TMA loads 0 and stores nothing.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tpfuse.kernels.activations import GATED, activate, activation_gradient
from tpfuse.kernels.gemm_weight import weight_layout
from tpfuse.kernels.launch import cdiv
from tpfuse.kernels.tiles import grouped_tile

SIDE = gl.constexpr(64)  # rows and columns of a square
_PARTS = gl.constexpr(3)  # sums of a tile
_SLOTS = gl.constexpr(4)  # of a group
_SQUARE_BYTES = gl.constexpr(64 * 64 * 2)
_OUTSIDE = gl.constexpr(1 << 30)  # a row that no matrix has
_STAGES = 4  # with the slots they take 229 of 232 thousand bytes of shared memory
_GROUP_M = 8

# Triton 3.9 has renamed the copies.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _following(stage, parity, STAGES: gl.constexpr):
    """Return the next stage of the ring, and the parity of its phase, which changes with each round."""
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, parity ^ 1, parity)


@gluon.jit
def _row(first_m, part: gl.constexpr, end_m, WORLD: gl.constexpr):
    """Return the row of a square of a tile. Of several chunks, a square beyond the end of its own is in no matrix."""
    row = first_m + part * SIDE
    if WORLD > 1:
        row = gl.where(row < end_m, row, _OUTSIDE)
    return row


@gluon.jit
def load_tiles(
    x,
    begin_m,  # the first of the M rows
    end_m,  # with several chunks: squares from this row on are loaded as 0
    first,
    stage,
    parity,
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
    WORLD: gl.constexpr,
):
    """Fill the ring from a stage on for the tiles first, first + programs, … of M rows of x.

    Return the first tile of the rows that follow, the next stage, and the parity of its phase.
    """
    WIDTH: gl.constexpr = SIDE if GATED else 2 * SIDE  # columns of a tile of the result
    AXIS: gl.constexpr = 0 if K_ADJACENT else 1  # along which the two squares of the weight lie
    tiles_m, tiles_n = gl.cdiv(M, _PARTS * SIDE), gl.cdiv(N, WIDTH)
    tiles, programs = tiles_m * tiles_n, gl.num_programs(0)
    for index in range(first, tiles, programs):
        pid_m, pid_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = begin_m + pid_m * (_PARTS * SIDE), pid_n * WIDTH
        second_n = first_n + (WIDTH - SIDE)  # in weight_up, which begins at the up projection
        for k in range(0, K, SIDE):
            mbarrier.wait(empty.index(stage), parity)
            ready = full.index(stage)
            mbarrier.expect(ready, (_PARTS + 2) * _SQUARE_BYTES)
            for part in gl.static_range(_PARTS):
                _load(x, [_row(first_m, part, end_m, WORLD), k], ready, x_ring.index(stage * _PARTS + part))
            left = weight_ring.index(stage).slice(0, SIDE, AXIS)
            right = weight_ring.index(stage).slice(SIDE, SIDE, AXIS)
            _load(weight, [first_n, k] if K_ADJACENT else [k, first_n], ready, left)
            _load(weight_up, [second_n, k] if K_ADJACENT else [k, second_n], ready, right)
            stage, parity = _following(stage, parity, STAGES)
    following = first + gl.cdiv(gl.maximum(tiles - first, 0), programs) * programs - tiles
    return following, stage, parity


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
    top = gl.zeros((SIDE, 2 * SIDE), gl.float32, layout)
    middle = gl.zeros((SIDE, 2 * SIDE), gl.float32, layout)
    bottom = gl.zeros((SIDE, 2 * SIDE), gl.float32, layout)
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
    left, right = gl.split(gl.permute(gl.reshape(sums, (SIDE, 2, SIDE)), (0, 2, 1)))
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def _bias(bias_ptr, first, N, layout: gl.constexpr):
    columns = first + gl.arange(0, SIDE, layout=gl.SliceLayout(0, layout))
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
    place = [first_m + piece % _PARTS * SIDE, first_n + piece // _PARTS * SIDE]
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
    end_m,
    piece: gl.constexpr,
    PIECES: gl.constexpr,
    SENT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BESIDE: gl.constexpr,
    GATED: gl.constexpr,
    WORLD: gl.constexpr,
    layout: gl.constexpr,
):
    """Store a piece: its pre-activation where it is kept, then its result."""
    AHEAD: gl.constexpr = _SLOTS // SENT  # pieces whose results have slots at the same time
    row, column = _row(first_m, piece % _PARTS, end_m, WORLD), first_n + piece // _PARTS * SIDE
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
def _place(index, tiles_m, tiles_n, rank, GROUP_M: gl.constexpr, WORLD: gl.constexpr):
    """Return the chunk of a tile, and the tile's place in it. This rank's chunk comes first, then that of rank + 1."""
    chunk = gl.to_tensor(0)
    if WORLD > 1:
        tiles = tiles_m * tiles_n
        chunk = (rank + index // tiles) % WORLD
        index = index % tiles
    pid_m, pid_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
    return chunk, pid_m, pid_n


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
    rank,
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
    WORLD: gl.constexpr,
):
    """Multiply every second tile of the program, and finish its pieces, squares of the result."""
    WIDTH: gl.constexpr = SIDE if GATED else 2 * SIDE
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * SIDE, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIDE, 16])
    PIECES: gl.constexpr = _PARTS if GATED else 2 * _PARTS
    SENT: gl.constexpr = (3 if GATED else 2) if KEEP else 1  # stores of a piece
    tiles_m, tiles_n = gl.cdiv(M, _PARTS * SIDE), gl.cdiv(N, WIDTH)
    tiles = WORLD * tiles_m * tiles_n
    tile = me
    for index in range(gl.program_id(0) + me * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        chunk, pid_m, pid_n = _place(index, tiles_m, tiles_n, rank, GROUP_M, WORLD)
        first_m, first_n = chunk * M + pid_m * (_PARTS * SIDE), pid_n * WIDTH
        end_m = chunk * M + M
        tma.store_wait(0)  # the rotation of the slots begins again
        if BESIDE != "none":
            for piece in gl.static_range(_SLOTS // SENT):
                _fetch(beside, slots, arrived, first_m, first_n, piece, SENT)
        top, middle, bottom = _multiply(
            me, tile, gl.cdiv(K, SIDE), x_ring, weight_ring, full, empty, turn, K_ADJACENT, STAGES, whole
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
                    bias = _bias(bias_ptr, first_n + piece // _PARTS * SIDE, N, half)
                    bias_up = _bias(bias_ptr + N, first_n, N, half) if GATED else bias
                value += bias
                if GATED:
                    up += bias_up
            _finish(
                value, up, tile, slots, arrived, beside, kept, kept_up, out, first_m, first_n, end_m,
                piece, PIECES, SENT, ACTIVATION, BESIDE, GATED, WORLD, half,
            )  # fmt: skip
        tile += 2
    tma.store_wait(0)  # shared memory must not end before they have read it


@gluon.jit
def matrix(pointer, rows, columns, stride):
    """Return a descriptor, whose copies move a square: 0 is loaded outside the matrix, and nothing is stored there."""
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], pointer.dtype.element_ty)
    return tma.make_tensor_descriptor(pointer, [rows, columns], [stride, 1], [SIDE, SIDE], square)


@gluon.jit
def _weight_matrix(weight_ptr, N, K, stride, K_ADJACENT: gl.constexpr):
    if K_ADJACENT:
        return matrix(weight_ptr, N, K, stride)
    else:
        return matrix(weight_ptr, K, N, stride)


@gluon.jit
def _mbarriers(number: gl.constexpr):
    """Return mbarriers, each of whose phases one thread's arrival ends."""
    made = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def _call(function: gl.constexpr, source, rest):
    """Call a function: `warp_specialize` takes no function that is an argument."""
    function(*source, rest)


@gluon.jit
def run_warps(
    load: gl.constexpr,  # runs the loading warp: a function of `source` and of the last arguments of `load_tiles`
    source,  # a tuple
    weight_ptr,
    weight_up_ptr,
    bias_ptr,
    beside_ptr,
    preactivation_ptr,
    out_ptr,
    rank,
    M,  # rows of a chunk; chunks follow one another in the result
    N,
    K,
    stride_weight,
    stride_beside,
    ACTIVATION: gl.constexpr,
    GRADIENT: gl.constexpr,
    K_ADJACENT: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    WORLD: gl.constexpr,  # chunks
):
    """Run a program: its loading warp and its two groups. The other arguments are those of `gemm_ping_pong_kernel`."""
    GATED: gl.constexpr = weight_up_ptr is not None
    BIAS: gl.constexpr = bias_ptr is not None
    KEEP: gl.constexpr = preactivation_ptr is not None
    BESIDE: gl.constexpr = "none" if beside_ptr is None else "gradient" if GRADIENT else "residual"
    gl.static_assert(not (GATED and BESIDE != "none"))
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], dtype)
    PAIR: gl.constexpr = [2 * SIDE, SIDE] if K_ADJACENT else [SIDE, 2 * SIDE]
    weight = _weight_matrix(weight_ptr, N, K, stride_weight, K_ADJACENT)
    weight_up = _weight_matrix(weight_up_ptr, N, K, stride_weight, K_ADJACENT) if GATED else weight
    rows = WORLD * M
    out = matrix(out_ptr, rows, N, N)
    beside = matrix(beside_ptr, rows, N, stride_beside) if BESIDE != "none" else out
    width = 2 * N if GATED else N
    kept = matrix(preactivation_ptr, rows, N, width) if KEEP else out
    # Two matrices of one pre-activation: what a tile of gate has beyond its columns must not be written to up.
    kept_up = matrix(preactivation_ptr + N, rows, N, width) if KEEP and GATED else out
    x_ring = gl.allocate_shared_memory(dtype, [STAGES * _PARTS, SIDE, SIDE], square)
    weight_ring = gl.allocate_shared_memory(
        dtype, [STAGES, PAIR[0], PAIR[1]], gl.NVMMASharedLayout.get_default_for(PAIR, dtype)
    )
    slots_0 = gl.allocate_shared_memory(dtype, [_SLOTS, SIDE, SIDE], square)
    slots_1 = gl.allocate_shared_memory(dtype, [_SLOTS, SIDE, SIDE], square)
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
                rank, M, N, K, ACTIVATION, BIAS, BESIDE, KEEP, GATED, K_ADJACENT, GROUP_M, STAGES, WORLD,
            )),
            (_run_group, (
                one, x_ring, weight_ring, full, empty, turn, slots_1, arrived_1, bias_ptr, beside, kept, kept_up, out,
                rank, M, N, K, ACTIVATION, BIAS, BESIDE, KEEP, GATED, K_ADJACENT, GROUP_M, STAGES, WORLD,
            )),
            (_call, (load, source, (
                weight, weight_up, x_ring, weight_ring, full, empty, M, N, K,
                GATED, K_ADJACENT, GROUP_M, STAGES, WORLD,
            ))),
        ],
        [4, 1],  # warps of group 1 and of the loading warp; group 0 has the launch's four
        # Registers of a thread. The loading warp counts as four: 8 x 32 x 240 + 4 x 32 x 24 <= 65,536.
        [240, 24],
    )  # fmt: skip


def product_tiles(m: int, width: int, activation: str | None) -> int:
    """Return how many tiles m rows of a result have."""
    return cdiv(m, _PARTS.value * SIDE.value) * cdiv(width, SIDE.value * (1 if activation in GATED else 2))


def product_arguments(x: Tensor, weight: Tensor, width: int, activation: str | None) -> dict[str, Any]:
    """Return the arguments that a kernel with `run_warps` takes of the rows x and the weight."""
    k_adjacent, _ = weight_layout(weight, None)
    return {
        "M": len(x),
        "N": width,
        "K": x.shape[1],
        "stride_xm": x.stride(0),
        "stride_weight": weight.stride(0 if k_adjacent else 1),
        "ACTIVATION": activation or "none",
        "K_ADJACENT": k_adjacent,
        "GROUP_M": _GROUP_M,
        "STAGES": _STAGES,
    }
