"""The end of a tile in a group of `ping_pong`: bias, activation, residual or gradient, and stores by TMA.

`run_warps` runs a program of `gemm_ping_pong` or `all_gather_gemm_ping_pong`, each with a loading warp of its own. The
residual, or the pre-activation at which a gradient is taken, is loaded into the very slot in which the result then
replaces it. An mbarrier orders that beside those of `ping_pong`; a phase ends when all bytes are there too:

| mbarrier       | arrives                                                  | waits                                    |
|----------------|----------------------------------------------------------|------------------------------------------|
| arrived[slot]  | the group, before its copy into the slot                  | the group, before it reads the slot     |

A copy from a slot to global memory reads it until `store_wait(n)` has ended, where n stores begun later may still read.
Then the slot may be written again. No peer reads the results: a program needs no wait until they have been written.
`fence_async_shared` makes what threads have written to a slot visible to TMA. Triton adds the barriers of a group's
warps: before a copy of what they have written, after `store_wait`, and before arrivals.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tpfuse.kernels.activations import activate, activation_gradient
from tpfuse.kernels.ping_pong import (
    HALF,
    PARTS,
    SIDE,
    SLOTS,
    SQUARE_BYTES,
    load,
    matrix,
    mbarriers,
    multiply,
    ring,
    row_of,
    weight_matrix,
)
from tpfuse.kernels.tiles import grouped_tile

# Triton 3.9 has renamed the copy.
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _bias(bias_ptr, first, N):
    columns = first + gl.arange(0, SIDE, layout=gl.SliceLayout(0, HALF))
    return gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _slot(slots, piece: gl.constexpr, sent: gl.constexpr, SENT: gl.constexpr):
    """Return the slot of a piece's store number `sent`. Each piece has SENT stores, the result's is the last."""
    return slots.index((piece * SENT + sent) % SLOTS)


@gluon.jit
def _fetch(beside, slots, arrived, first_m, first_n, piece: gl.constexpr, SENT: gl.constexpr):
    """Begin to load what the epilogue of a piece reads, into the slot of its result."""
    there = arrived.index(piece % (SLOTS // SENT))
    mbarrier.expect(there, SQUARE_BYTES)
    place = [first_m + piece % PARTS * SIDE, first_n + piece // PARTS * SIDE]
    load(beside, place, there, _slot(slots, piece, SENT - 1, SENT))


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
):
    """Store a piece: its pre-activation where it is kept, then its result."""
    AHEAD: gl.constexpr = SLOTS // SENT  # pieces whose results have slots at the same time
    row, column = row_of(first_m, piece % PARTS, end_m, WORLD), first_n + piece // PARTS * SIDE
    if SENT > 1:
        tma.store_wait(SLOTS - 1)  # the last store but three was from this slot
        _send(value, _slot(slots, piece, 0, SENT), kept, row, column)
        if GATED:
            tma.store_wait(SLOTS - 1)
            _send(up, _slot(slots, piece, 1, SENT), kept_up, row, column)
    slot = _slot(slots, piece, SENT - 1, SENT)
    if BESIDE == "none":
        tma.store_wait(SLOTS - 1)
        value = activate(value, ACTIVATION, slot.dtype)
        if GATED:
            value *= up
    else:
        PHASES: gl.constexpr = (PIECES - piece % AHEAD + AHEAD - 1) // AHEAD  # of this mbarrier, in a tile
        mbarrier.wait(arrived.index(piece % AHEAD), (tile // 2 * PHASES + piece // AHEAD) & 1)
        given = slot.load(HALF).to(gl.float32)
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
    PIECES: gl.constexpr = PARTS if GATED else 2 * PARTS
    SENT: gl.constexpr = (3 if GATED else 2) if KEEP else 1  # stores of a piece
    tiles_m, tiles_n = gl.cdiv(M, PARTS * SIDE), gl.cdiv(N, WIDTH)
    tiles = WORLD * tiles_m * tiles_n
    tile = me
    for index in range(gl.program_id(0) + me * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        chunk, pid_m, pid_n = _place(index, tiles_m, tiles_n, rank, GROUP_M, WORLD)
        first_m, first_n = chunk * M + pid_m * (PARTS * SIDE), pid_n * WIDTH
        end_m = chunk * M + M
        tma.store_wait(0)  # the rotation of the slots begins again
        if BESIDE != "none":
            for piece in gl.static_range(SLOTS // SENT):
                _fetch(beside, slots, arrived, first_m, first_n, piece, SENT)
        # A column's bias is loaded once. Of a gated pair, the right halves are up.
        squares = multiply(me, tile, gl.cdiv(K, SIDE), x_ring, weight_ring, full, empty, turn, K_ADJACENT, STAGES)
        for piece in gl.static_range(PIECES):
            value = squares[piece]
            up = squares[(piece + PARTS) % (2 * PARTS)]
            if BIAS:
                if piece % PARTS == 0:
                    bias = _bias(bias_ptr, first_n + piece // PARTS * SIDE, N)
                    bias_up = _bias(bias_ptr + N, first_n, N) if GATED else bias
                value += bias
                if GATED:
                    up += bias_up
            _finish(
                value, up, tile, slots, arrived, beside, kept, kept_up, out, first_m, first_n, end_m,
                piece, PIECES, SENT, ACTIVATION, BESIDE, GATED, WORLD,
            )  # fmt: skip
        tile += 2
    tma.store_wait(0)  # shared memory must not end before they have read it


@gluon.jit
def _call(function: gl.constexpr, source, rest):
    """Call a function: `warp_specialize` takes no function that is an argument."""
    function(*source, rest)


@gluon.jit
def run_warps(
    load_all: gl.constexpr,  # runs the loading warp: it takes `source` and the last arguments of `load_tiles`
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
    weight = weight_matrix(weight_ptr, N, K, stride_weight, K_ADJACENT)
    weight_up = weight_matrix(weight_up_ptr, N, K, stride_weight, K_ADJACENT) if GATED else weight
    rows = WORLD * M
    out = matrix(out_ptr, rows, N, N)
    beside = matrix(beside_ptr, rows, N, stride_beside) if BESIDE != "none" else out
    width = 2 * N if GATED else N
    kept = matrix(preactivation_ptr, rows, N, width) if KEEP else out
    # Two matrices of one pre-activation: what a tile of gate has beyond its columns must not be written to up.
    kept_up = matrix(preactivation_ptr + N, rows, N, width) if KEEP and GATED else out
    x_ring, weight_ring, full, empty, turn, slots_0, slots_1 = ring(dtype, K_ADJACENT, STAGES)
    arrived_0 = mbarriers(SLOTS) if BESIDE != "none" else turn
    arrived_1 = mbarriers(SLOTS) if BESIDE != "none" else turn
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
            (_call, (load_all, source, (
                weight, weight_up, x_ring, weight_ring, full, empty, M, N, K,
                GATED, K_ADJACENT, GROUP_M, STAGES, WORLD,
            ))),
        ],
        [4, 1],  # warps of group 1 and of the loading warp; group 0 has the launch's four
        # Registers of a thread. The loading warp counts as four: 8 x 32 x 240 + 4 x 32 x 24 <= 65,536.
        [240, 24],
    )  # fmt: skip
