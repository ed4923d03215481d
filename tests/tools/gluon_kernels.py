"""A product in Gluon with specialized warps: one warp loads by TMA, and two groups multiply tiles in turn."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.9 renamed the copies.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
SIZE = gl.constexpr(64)  # rows and columns of all tiles
STAGES = gl.constexpr(3)


@gluon.jit
def _load(x, weight, x_ring, weight_ring, full, empty, across, tiles, steps):
    step = 0
    for tile in range(tiles):
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * SIZE * SIZE * 2)
            load(x, [tile // across * SIZE, k * SIZE], full.index(stage), x_ring.index(stage))
            load(weight, [tile % across * SIZE, k * SIZE], full.index(stage), weight_ring.index(stage))
            step += 1


@gluon.jit
def _multiply(me: gl.constexpr, out, x_ring, weight_ring, staged, full, empty, turn, across, tiles, steps):
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIZE, 16])
    for tile in range(me, tiles, 2):
        mbarrier.wait(turn.index(me), (tile // 2 & 1) ^ (1 - me))
        step = tile * steps
        sums = gl.zeros((SIZE, SIZE), gl.float32, layout)
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            right = weight_ring.index(stage).permute((1, 0))
            running = hopper.warpgroup_mma(x_ring.index(stage), right, sums, use_acc=k > 0, is_async=True)
            mbarrier.arrive(turn.index(1 - me), pred=k == steps - 1)
            sums = hopper.warpgroup_mma_wait(1, deps=[running])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        sums = hopper.warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        tma.store_wait(0)
        staged.store(sums.to(gl.bfloat16))
        hopper.fence_async_shared()
        store(out, [tile // across * SIZE, tile % across * SIZE], staged)
    tma.store_wait(0)


@gluon.jit
def product_kernel(x_ptr, weight_ptr, out_ptr, M, N, K):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, SIZE], gl.bfloat16)
    x = tma.make_tensor_descriptor(x_ptr, [M, K], [K, 1], [SIZE, SIZE], layout)
    weight = tma.make_tensor_descriptor(weight_ptr, [N, K], [K, 1], [SIZE, SIZE], layout)
    out = tma.make_tensor_descriptor(out_ptr, [M, N], [N, 1], [SIZE, SIZE], layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SIZE, SIZE], layout)
    weight_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SIZE, SIZE], layout)
    first = gl.allocate_shared_memory(gl.bfloat16, [SIZE, SIZE], layout)
    second = gl.allocate_shared_memory(gl.bfloat16, [SIZE, SIZE], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    hopper.fence_async_shared()  # Triton 3.6 makes tensor maps where the rings are, and adds no fence
    across, tiles, steps = gl.cdiv(N, SIZE), gl.cdiv(M, SIZE) * gl.cdiv(N, SIZE), gl.cdiv(K, SIZE)
    one: gl.constexpr = 0
    two: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply, (one, out, x_ring, weight_ring, first, full, empty, turn, across, tiles, steps)),
            (_multiply, (two, out, x_ring, weight_ring, second, full, empty, turn, across, tiles, steps)),
            (_load, (x, weight, x_ring, weight_ring, full, empty, across, tiles, steps)),
        ],
        [4, 1],
        [240, 24],
    )
