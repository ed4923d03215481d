"""The time of a product of matrices by its shape: a roofline over tiles that multiprocessors compute in waves.

A multiprocessor computes a tile of results at a time, of 128 x 256, 128 x 128 or 64 x 128; a smaller tile reads its
factors more often and so reaches less of the rate. The last wave takes as long as a full one (NVIDIA, Matrix
Multiplication Background User's Guide, "Tile Quantization" and "Wave Quantization"). The tile that takes the least time
counts. Where tiles are fewer than multiprocessors, the product is also cut along `inner`. No product is faster than its
matrices move through memory.
"""

from functools import cache
from math import ceil

from tpfuse.cost.hardware import Gpu
from tpfuse.cost.work import HALF, Product

TILES = ((128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8))  # rows, columns, and the share of the rate
_ALIGNED = 16 // HALF  # elements of a 16-byte load
_LEAST_INNER = 256  # the least length of a cut along `inner`


@cache
def product_seconds(product: Product, gpu: Gpu, size: int = HALF) -> float:
    """Return the seconds of all products on numbers of `size` bytes, without their launch."""
    rows, columns, inner, count = product.rows, product.columns, product.inner, product.count
    rate = gpu.rate(size) * gpu.product_share
    if columns % _ALIGNED or inner % _ALIGNED or rows % _ALIGNED:
        rate *= gpu.unaligned_share
    compute = product.flops / rate
    if gpu.multiprocessors:
        compute *= min(_slowdown(product, gpu.multiprocessors, tile) for tile in TILES)
    matrices = rows * inner, inner * columns, rows * columns
    if gpu.is_host:
        # A core packs a matrix before it computes with it. Chunks of rows follow each other and have one weight, or its
        # gradient, which remains in the caches.
        moved = size * (count * sum(matrices) - (count - 1) * max(matrices))
        return compute + moved / (gpu.bandwidth * gpu.packing_share)
    return max(compute, size * count * sum(matrices) / gpu.bandwidth)


def _slowdown(product: Product, multiprocessors: int, tile: tuple[int, int, float]) -> float:
    """Return how many times longer a product takes in tiles than if all multiprocessors computed all the time."""
    rows, columns, share = tile
    across, down = ceil(product.rows / rows), ceil(product.columns / columns)
    tiles = across * down * product.count
    padded = across * rows * down * columns / (product.rows * product.columns)
    splits = max(1, min(multiprocessors // tiles, product.inner // _LEAST_INNER))
    waves = tiles * splits / multiprocessors
    return padded * ceil(waves) / waves / share
