"""The time of a product of matrices by its shape: a roofline of the tiles that multiprocessors compute in waves.

A multiprocessor computes a tile of 128 x 128 results at a time; the last wave takes as long as a full one, also if few
tiles are left. No product is faster than its matrices move through memory.
"""

from functools import cache
from math import ceil

from tpfuse.cost.hardware import Gpu
from tpfuse.cost.work import Product

TILE = 128
_HALF = 2


@cache
def product_seconds(product: Product, gpu: Gpu) -> float:
    """Return the seconds of all `product.count` products on 16-bit numbers, without their launch."""
    rate = gpu.half_rate * gpu.product_share
    rows, columns, inner, count = product.rows, product.columns, product.inner, product.count
    compute = product.flops / rate
    if gpu.multiprocessors:
        tiles = ceil(rows / TILE) * ceil(columns / TILE) * count
        # With fewer tiles than multiprocessors a product is split along `inner` too.
        waves = tiles / gpu.multiprocessors
        compute *= ceil(waves) / waves if waves > 1 else 1.0
    moved = _HALF * count * (rows * inner + inner * columns + rows * columns)
    return max(compute, moved / gpu.bandwidth)
