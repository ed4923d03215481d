"""Tiles of Wᵀ for products whose weight may have rows of adjacent elements, or columns, as in `weight.t()`.

TMA needs adjacent elements in a tile's last dimension, and pointers are fast along them. A constexpr K_ADJACENT says in
which of the weight's dimensions elements are adjacent; a tile with the other layout is transposed before the product.
"""

import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.gemm_tiles import allows_tma, load_tile, matrix


@triton.jit
def weight_matrix(
    weight_ptr,  # [N, K] any dtype, read
    N,
    K,
    stride_wn,
    stride_wk,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_ADJACENT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return the source that `load_weight` reads; it must not be called for None, which Triton 3.6 cannot return."""
    if K_ADJACENT:
        return matrix(weight_ptr, N, K, stride_wn, BLOCK_N, BLOCK_K, TMA)
    else:
        return matrix(weight_ptr, K, N, stride_wk, BLOCK_K, BLOCK_N, TMA)


@triton.jit
def load_weight(
    weight,  # made by `weight_matrix`
    k,
    first_n,
    N,
    K,
    stride_wn,
    stride_wk,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_ADJACENT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load the tile [BLOCK_K, BLOCK_N] of Wᵀ that starts at (k, first_n), 0 outside."""
    if K_ADJACENT:
        return load_tile(weight, (first_n, k), (N, K), (stride_wn, stride_wk), (BLOCK_N, BLOCK_K), TMA).T
    else:
        return load_tile(weight, (k, first_n), (K, N), (stride_wk, stride_wn), (BLOCK_K, BLOCK_N), TMA)


def weight_layout(weight: Tensor, up: Tensor | None) -> tuple[bool, bool]:
    """Return (K_ADJACENT, whether TMA can read) for weight [N, K] and `up`, the second half of a gated pair.

    Both halves have the same layout.
    """
    k_adjacent = weight.stride(1) == 1 or weight.stride(0) != 1
    return k_adjacent, allows_tma(*(x if k_adjacent or x is None else x.t() for x in (weight, up)))
