"""Split reductions: the number of parts, and their sum in order with the epilogue of the product.

With fewer tiles than multiprocessors a product leaves some of them idle, so that its reduction is cut into `splits`
parts of whole blocks. Each part writes float32 partial sums of its own; this kernel adds part 0, 1, 2, … and finishes
the tile. It uses no atomics: results are the same in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.activations import GATED
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.gemm_tiles import load_tile, store_result
from tpfuse.kernels.launch import cdiv, launch, multiprocessors
from tpfuse.kernels.product_calls import term_strides

# Blocks of the reduction in one part: with fewer, filling and draining the pipeline costs more than it gains.
_LEAST_BLOCKS = 4
_MOST_SPLITS = 16  # partial sums are float32: their traffic grows with the number of parts


def split_reduction(tiles: int, size: int, block: int, device: torch.device) -> tuple[int, int]:
    """Return (parts, elements in each) of a reduction over `size` elements in blocks of `block`, for `tiles` tiles.

    Every part has at least one element; there is one part if there are enough tiles for every multiprocessor.
    """
    blocks = cdiv(size, block)
    wanted = min(multiprocessors(device) // max(tiles, 1), blocks // _LEAST_BLOCKS, _MOST_SPLITS)
    if wanted <= 1:
        return 1, max(size, 1)
    each = cdiv(blocks, wanted)
    return cdiv(blocks, each), each * block


@triton.jit
def sum_partials_kernel(
    partials_ptr,  # [splits, M, N] float32, [splits, M, 2 N] gated, read
    bias_ptr,  # [N] bf16, [2 N] gated, read; or None
    residual_ptr,  # [M, N] bf16 or float32, read; or None
    preactivation_ptr,  # [M, N] bf16, [M, 2 N] gated, written; or None
    out_ptr,  # [M, N] bf16 or float32, written
    splits,
    M,
    N,
    width,  # columns of partials; an argument, since offsets that loads and stores share would stay in registers
    stride_bias,
    stride_rm,
    stride_rn,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION == "swiglu" or ACTIVATION == "geglu"
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = tl.program_id(0) // tiles_n * BLOCK_M
    first_n = tl.program_id(0) % tiles_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in range(splits):
        part_ptr = partials_ptr + tl.cast(split, tl.int64) * M * width
        acc += load_tile(part_ptr, (first_m, first_n), (M, N), (width, 1), (BLOCK_M, BLOCK_N), False)
        if GATED:
            up += load_tile(part_ptr, (first_m, N + first_n), (M, width), (width, 1), (BLOCK_M, BLOCK_N), False)
    terms = ((bias_ptr, stride_bias), (residual_ptr, stride_rm, stride_rn), preactivation_ptr)
    store_result((acc, up), terms, out_ptr, (first_m, first_n), (M, N), ACTIVATION, 1)


def sum_partials(
    partials: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    preactivation: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Set out to act(Σ partials + bias) + residual, the parts added in order; arguments as in `gemm_forward`.

    partials: [splits, M, N] float32; out: [M, N]; both contiguous.
    """
    m, n = out.shape
    assert partials.shape[1:] == (m, 2 * n if activation in GATED else n)
    row = choose_configuration("gemm_sum_partials", out.device, torch.float32, N=n)
    launch(
        sum_partials_kernel,
        (cdiv(m, row.blocks["BLOCK_M"]) * cdiv(n, row.blocks["BLOCK_N"]),),
        partials_ptr=partials,
        bias_ptr=bias,
        residual_ptr=residual,
        preactivation_ptr=preactivation,
        out_ptr=out,
        splits=len(partials),
        M=m,
        N=n,
        width=partials.shape[2],
        ACTIVATION=activation or "none",
        **term_strides(bias, residual),
        **row.options,
    )
