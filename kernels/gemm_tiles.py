"""Device functions that products share: tiles of a matrix by pointers or by TMA, and the epilogue of a tile."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.activations import activate
from tpfuse.kernels.configurations import Configuration
from tpfuse.kernels.tiles import rounded


def tile_options(row: Configuration, tma: bool) -> dict[str, Any]:
    """Return the options of a table's row for a launch. tma: whether the operands allow TMA."""
    return row.options | {"TMA": tma and row.blocks["TMA"]}


def allows_tma(*matrices: Tensor | None) -> bool:
    """Return whether TMA can read the matrices: not empty, rows of adjacent elements, base and rows aligned to 16."""
    return all(_allows_tma(x) for x in matrices if x is not None)


def _allows_tma(x: Tensor) -> bool:
    rows, columns = x.shape
    if rows == 0 or columns == 0 or x.stride(1) != 1 or x.stride(0) < columns:
        return False
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


@triton.jit
def matrix(x_ptr, rows, columns, stride_row, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """Return the source that `load_tile` reads: the pointer itself, or a descriptor of tiles of adjacent elements.

    The descriptor is made on the device: one from the host takes more of the host's time at each launch
    (benchmarks/results/gpu.md).
    """
    if TMA:
        return tl.make_tensor_descriptor(x_ptr, [rows, columns], [stride_row, 1], [BLOCK_ROWS, BLOCK_COLUMNS])
    else:
        return x_ptr


@triton.jit
def load_tile(source, first, shape, strides, blocks, TMA: tl.constexpr):
    """Load the tile that starts at (row, column) `first`, 0 outside the matrix.

    source: what `matrix` returns, of any dtype, read; strides: from row to row and from column to column; blocks: the
    rows and columns of the tile, constants.
    """
    if TMA:
        return source.load([first[0], first[1]])
    else:
        offs_row = first[0] + tl.arange(0, blocks[0])
        offs_column = first[1] + tl.arange(0, blocks[1])
        offs = offs_row.to(tl.int64)[:, None] * strides[0] + offs_column.to(tl.int64)[None, :] * strides[1]
        mask = (offs_row < shape[0])[:, None] & (offs_column < shape[1])[None, :]
        return tl.load(source + offs, mask=mask, other=0.0)


@triton.jit
def store_tile(tile, out_ptr, first, shape, stride_row):
    """Store the part of the tile that is inside the matrix, rounded to the matrix's dtype.

    out_ptr: any dtype, written, columns adjacent; first: (row, column) where the tile starts; shape: (rows, columns).
    """
    offs_row = first[0] + tl.arange(0, tile.shape[0])
    offs_column = first[1] + tl.arange(0, tile.shape[1])
    offs = offs_row.to(tl.int64)[:, None] * stride_row + offs_column.to(tl.int64)[None, :]
    mask = (offs_row < shape[0])[:, None] & (offs_column < shape[1])[None, :]
    tl.store(out_ptr + offs, rounded(tile, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def column_parts(x, PARTS: tl.constexpr):
    """Return the tile x as 1, 2 or 4 tiles of equal width, from left to right."""
    if PARTS == 1:
        return (x,)
    else:
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
        return column_parts(left, PARTS // 2) + column_parts(right, PARTS // 2)


@triton.jit
def store_result(sums, terms, out_ptr, first, shape, ACTIVATION: tl.constexpr, EPILOGUE_PARTS: tl.constexpr):
    """Store out = act(sums + bias) + residual of one tile, computed in float32, and the pre-activation where requested.

    sums: (accumulator, the second one of a gated pair); the second is not used otherwise. terms: ((bias_ptr, stride),
    (residual_ptr, stride of rows, of columns), preactivation_ptr), where each pointer may be None; with a gated
    activation bias is [2 N] and the pre-activation [M, 2 N]. out_ptr: [M, N], contiguous, written, as is the
    pre-activation. first: (row, column) where the tile starts; shape: (M, N). A wide tile is stored in EPILOGUE_PARTS,
    so that the epilogue's operands need not be in registers beside the whole tile.
    """
    parts, parts_up = column_parts(sums[0], EPILOGUE_PARTS), column_parts(sums[1], EPILOGUE_PARTS)
    for part in tl.static_range(EPILOGUE_PARTS):
        column = first[1] + part * (sums[0].shape[1] // EPILOGUE_PARTS)
        _store_columns(parts[part], parts_up[part], terms, out_ptr, (first[0], column), shape, ACTIVATION)


@triton.jit
def _store_columns(acc, up, terms, out_ptr, first, shape, ACTIVATION: tl.constexpr):
    GATED: tl.constexpr = ACTIVATION == "swiglu" or ACTIVATION == "geglu"
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    bias, residual, preactivation_ptr = terms
    bias_ptr, stride = bias
    residual_ptr, stride_rm, stride_rn = residual
    first_m, first_n = first
    M, N = shape
    if bias_ptr is not None:
        acc += load_tile(bias_ptr, (0, first_n), (1, N), (0, stride), (1, BLOCK_N), False).to(tl.float32)
        if GATED:
            up += load_tile(bias_ptr, (0, N + first_n), (1, 2 * N), (0, stride), (1, BLOCK_N), False).to(tl.float32)
    if preactivation_ptr is not None:
        width = 2 * N if GATED else N
        store_tile(acc, preactivation_ptr, first, shape, width)
        if GATED:
            store_tile(up, preactivation_ptr, (first_m, N + first_n), (M, width), width)
    out = activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    if GATED:
        out *= up
    if residual_ptr is not None:
        beside = load_tile(residual_ptr, first, shape, (stride_rm, stride_rn), (BLOCK_M, BLOCK_N), False)
        out += beside.to(tl.float32)
    store_tile(out, out_ptr, first, shape, N)
