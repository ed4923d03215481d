"""The time of a product follows its operations, its tiles and its bytes."""

from dataclasses import replace

import pytest

from tpfuse.cost.hardware import Gpu
from tpfuse.cost.products import TILES, product_seconds
from tpfuse.cost.work import Product

GPU = Gpu("toy", 80e9, 300e12, 150e12, 0.8, 0.5, 2e12, 100, 2e-6, 10e-6)


def test_a_large_product_reaches_the_share_of_the_rate() -> None:
    product = Product(128 * 100, 256 * 40, 8192)
    assert product_seconds(product, GPU) == pytest.approx(product.flops / (300e12 * 0.8), rel=1e-9)


def test_a_tile_beyond_a_full_wave_takes_another_wave() -> None:
    """100 multiprocessors compute 100 tiles in one wave; 101 tiles of the largest kind take two."""
    full, beyond = Product(128 * 100, 256, 8192), Product(128 * 101, 256, 8192)
    largest = min(TILES, key=lambda tile: -tile[0] * tile[1])
    assert largest[:2] == (128, 256)
    ratio = product_seconds(beyond, GPU) / product_seconds(full, GPU)
    assert 1.2 < ratio <= 2.0, "a smaller tile may fill the second wave better"
    free = replace(GPU, multiprocessors=0)
    assert product_seconds(beyond, free) / product_seconds(full, free) == pytest.approx(1.01)


def test_a_thin_product_takes_as_long_as_its_weight_moves() -> None:
    product, free = Product(8, 8192, 8192), replace(GPU, multiprocessors=0)
    assert product_seconds(product, free) == pytest.approx(2 * (8 * 8192 * 2 + 8192**2) / 2e12)


def test_unaligned_rows_lower_the_rate() -> None:
    gpu = replace(GPU, unaligned_share=0.25, multiprocessors=0)
    odd, even = (product_seconds(Product(4096, columns, 4096), gpu) for columns in (50257, 50264))
    assert odd / even == pytest.approx(4 * 50257 / 50264)
