"""Products on Hopper in Gluon: while one group of warps multiplies, the other one finishes its tile.

In `gemm_forward_kernel` all warps stop multiplying to finish a tile. Here a program has a loading warp and two groups,
0 and 1, of four warps, which take turns at the tensor cores: one's epilogue (bias, activation, residual, stores) runs
under the other's products. CUTLASS calls this design "ping-pong". The program's tiles go to the groups in turn. This
file has the operands and the products. `ping_pong_epilogue` finishes the tiles of `gemm_ping_pong` and
`all_gather_gemm_ping_pong`, and `gemm_reduce_scatter_ping_pong` its own.

A tile has 192 x 128 elements, in three sums of 64 rows, since Triton's tensors have powers of two as sizes. Operands
are loaded by TMA, in squares of 64 x 64 elements, whose rows of 128 bytes are the widest that TMA swizzles. A gated
pair has tiles of 64 columns: one product computes 64 columns of the gate and 64 of the up projection, in the same
threads.

**The ring.** STAGES stages of shared memory hold the operands of one step of 64 along K: 3 squares of x and 2 of the
weight. The loading warp fills stage after stage for all tiles of the program in order. **The slots.** Each group has
four squares of its own, through which it stores what it has computed, in rotation.

These mbarriers order the accesses. A phase ends when all have arrived who are named in the second column, and, for
full, when all expected bytes are there too. Waits name the parity of the phase that must have ended.

| mbarrier       | arrives                                                  | waits                                    |
|----------------|----------------------------------------------------------|------------------------------------------|
| full[stage]    | the loading warp, before its copies into the stage        | the group in turn, before it multiplies |
| empty[stage]   | the group, when its products have read the stage          | the loading warp, before its copies     |
| turn[group]    | the other group, when it has issued a tile's products     | the group, before its tile's products   |

A wait cannot tell a phase from the second one after it. The waits are right because nobody can be two phases late:
the loading warp waits at empty before each phase of full, and the turns alternate. A group may wait at full only during
its turn: otherwise the ring could have passed on under it.

**Chunks.** The rows of a gather are WORLD chunks of M rows each. A program goes through the tiles of one chunk after
another, and squares beyond the end of a chunk are moved out of the matrix, where TMA loads 0 and stores nothing.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tpfuse.kernels.activations import GATED
from tpfuse.kernels.gemm_weight import weight_layout
from tpfuse.kernels.launch import cdiv
from tpfuse.kernels.tiles import grouped_tile

SIDE = gl.constexpr(64)  # rows and columns of a square
PARTS = gl.constexpr(3)  # sums of a tile
SLOTS = gl.constexpr(4)  # of a group
SQUARE_BYTES = gl.constexpr(64 * 64 * 2)
_WHOLE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))  # of a sum
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))  # of a square
_OUTSIDE = gl.constexpr(1 << 30)  # a row that no matrix has
_STAGES = 4  # with the slots they take 229 of 232 thousand bytes of shared memory
_GROUP_M = 8

# Triton 3.9 has renamed the copy.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _following(stage, parity, STAGES: gl.constexpr):
    """Return the next stage of the ring, and the parity of its phase, which changes with each round."""
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, parity ^ 1, parity)


@gluon.jit
def row_of(first_m, part: gl.constexpr, end_m, WORLD: gl.constexpr):
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
    tiles_m, tiles_n = gl.cdiv(M, PARTS * SIDE), gl.cdiv(N, WIDTH)
    tiles, programs = tiles_m * tiles_n, gl.num_programs(0)
    for index in range(first, tiles, programs):
        pid_m, pid_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = begin_m + pid_m * (PARTS * SIDE), pid_n * WIDTH
        second_n = first_n + (WIDTH - SIDE)  # in weight_up, which begins at the up projection
        for k in range(0, K, SIDE):
            mbarrier.wait(empty.index(stage), parity)
            ready = full.index(stage)
            mbarrier.expect(ready, (PARTS + 2) * SQUARE_BYTES)
            for part in gl.static_range(PARTS):
                load(x, [row_of(first_m, part, end_m, WORLD), k], ready, x_ring.index(stage * PARTS + part))
            left = weight_ring.index(stage).slice(0, SIDE, AXIS)
            right = weight_ring.index(stage).slice(SIDE, SIDE, AXIS)
            load(weight, [first_n, k] if K_ADJACENT else [k, first_n], ready, left)
            load(weight_up, [second_n, k] if K_ADJACENT else [k, second_n], ready, right)
            stage, parity = _following(stage, parity, STAGES)
    following = first + gl.cdiv(gl.maximum(tiles - first, 0), programs) * programs - tiles
    return following, stage, parity


@gluon.jit
def multiply(
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
):
    """Return the six squares of a tile, column by column, when it is this group's turn."""
    mbarrier.wait(turn.index(me), (tile // 2 & 1) ^ (1 - me))  # group 0 begins
    stage = tile * steps % STAGES
    parity = tile * steps // STAGES & 1
    top = gl.zeros((SIDE, 2 * SIDE), gl.float32, _WHOLE)
    middle = gl.zeros((SIDE, 2 * SIDE), gl.float32, _WHOLE)
    bottom = gl.zeros((SIDE, 2 * SIDE), gl.float32, _WHOLE)
    for k in range(steps):
        mbarrier.wait(full.index(stage), parity)
        x = stage * PARTS
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
        top, middle, bottom = hopper.warpgroup_mma_wait(PARTS, deps=[one, two, three])
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1), pred=k > 0)
        stage, parity = _following(stage, parity, STAGES)
    top, middle, bottom = hopper.warpgroup_mma_wait(0, deps=[top, middle, bottom])
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1))
    top_left, top_right = _halves(top)
    middle_left, middle_right = _halves(middle)
    bottom_left, bottom_right = _halves(bottom)
    return top_left, middle_left, bottom_left, top_right, middle_right, bottom_right


@gluon.jit
def _halves(sums):
    """Return the left and the right half of [64, 128]. The same threads have them: no data moves."""
    left, right = gl.split(gl.permute(gl.reshape(sums, (SIDE, 2, SIDE)), (0, 2, 1)))
    return gl.convert_layout(left, HALF), gl.convert_layout(right, HALF)


@gluon.jit
def matrix(pointer, rows, columns, stride):
    """Return a descriptor, whose copies move a square: 0 is loaded outside the matrix, and nothing is stored there."""
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], pointer.dtype.element_ty)
    return tma.make_tensor_descriptor(pointer, [rows, columns], [stride, 1], [SIDE, SIDE], square)


@gluon.jit
def weight_matrix(weight_ptr, N, K, stride, K_ADJACENT: gl.constexpr):
    if K_ADJACENT:
        return matrix(weight_ptr, N, K, stride)
    else:
        return matrix(weight_ptr, K, N, stride)


@gluon.jit
def mbarriers(number: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Return mbarriers, each of whose phases end with so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def ring(dtype: gl.constexpr, K_ADJACENT: gl.constexpr, STAGES: gl.constexpr):
    """Return the ring's squares of x and of the weight, its mbarriers full, empty and turn, and the groups' slots."""
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], dtype)
    PAIR: gl.constexpr = [2 * SIDE, SIDE] if K_ADJACENT else [SIDE, 2 * SIDE]
    x_ring = gl.allocate_shared_memory(dtype, [STAGES * PARTS, SIDE, SIDE], square)
    weight_ring = gl.allocate_shared_memory(
        dtype, [STAGES, PAIR[0], PAIR[1]], gl.NVMMASharedLayout.get_default_for(PAIR, dtype)
    )
    slots_0 = gl.allocate_shared_memory(dtype, [SLOTS, SIDE, SIDE], square)
    slots_1 = gl.allocate_shared_memory(dtype, [SLOTS, SIDE, SIDE], square)
    full, empty, turn = mbarriers(STAGES), mbarriers(STAGES), mbarriers(2)
    return x_ring, weight_ring, full, empty, turn, slots_0, slots_1


def product_tiles(m: int, width: int, activation: str | None) -> int:
    """Return how many tiles m rows of a result have."""
    return cdiv(m, PARTS.value * SIDE.value) * cdiv(width, SIDE.value * (1 if activation in GATED else 2))


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
