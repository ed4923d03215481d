"""Device functions that every kernel shares: products and roundings that are right when interpreted too.

Triton's interpreter multiplies bfloat16 as raw bits, truncates in conversions to bfloat16, and converts 0 to a
denormal. When interpreted, these functions therefore upcast operands and round results to the nearest even number in
integer arithmetic; when compiled, the same is one instruction.
"""

import triton
import triton.language as tl

from tpfuse.kernels.interpreter import INTERPRETED as _INTERPRETED

INTERPRETED: tl.constexpr = tl.constexpr(_INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """Return acc + a b in float32; float32 operands as three tf32 products, which keep 21 of their 24 bits."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    elif a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def accurate_dot(a, b, acc):
    """Return acc + a b in float32; float32 operands as six bfloat16 products, which keep all of their 24 bits.

    Attention needs them: its gradients are differences of products. `dot` is faster for large products, and exact
    enough for them.
    """
    if INTERPRETED or a.dtype != tl.float32:
        return dot(a, b, acc)
    else:
        return tl.dot(a, b, acc, input_precision="bf16x6")


@triton.jit
def product(a, b):
    """Return the product of two tiles in float32, for a sum over their columns (axis 1).

    Triton (3.6 to 3.9) fuses a product with the first addition over lanes. Each of two lanes then adds its own exact
    product to the other one's rounded product, so that their sums are not the same. That makes no difference to
    products of 16-bit numbers, which are exact, and to 1024 columns: each thread, of at most 512, first adds its own.
    """
    exact: tl.constexpr = a.dtype.primitive_bitwidth == 16 and b.dtype.primitive_bitwidth == 16
    x, y = a.to(tl.float32), b.to(tl.float32)
    if exact or a.shape[1] >= 1024:
        return x * y
    return tl.fma(x, y, 0.0)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Convert float32 x to `dtype`, rounded to the nearest, ties to even; NaN stays NaN."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, nearest, bits)
        # The interpreter's own conversion makes 0 a denormal.
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)

    else:
        return x.to(dtype)


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return (pid_m, pid_n) of the `tile`-th tile, in the order of groups of GROUP_M rows, column by column.

    Neighbouring programs then share operands in the L2 cache.
    """
    group_size = GROUP_M * tiles_n
    first_m = tile // group_size * GROUP_M
    height = min(tiles_m - first_m, GROUP_M)
    pid_m = first_m + tile % group_size % height
    pid_n = tile % group_size // height
    return pid_m, pid_n


@triton.jit
def first_tile(owner, tiles):
    """Return this program's first tile of an owner.

    tiles: the number of tiles of each owner except the last ones, which may have fewer.
    """
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - owner * tiles % programs) % programs
