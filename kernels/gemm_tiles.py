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
def load_tile(
    source,  # [rows, columns] any dtype, read: made by `matrix`
    first_row,
    first_column,
    rows,
    columns,
    stride_row,
    stride_column,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load the tile that starts at (first_row, first_column), 0 outside the matrix."""
    if TMA:
        return source.load([first_row, first_column])
    else:
        offs_row = first_row + tl.arange(0, BLOCK_ROWS)
        offs_column = first_column + tl.arange(0, BLOCK_COLUMNS)
        offs = offs_row.to(tl.int64)[:, None] * stride_row + offs_column.to(tl.int64)[None, :] * stride_column
        mask = (offs_row < rows)[:, None] & (offs_column < columns)[None, :]
        return tl.load(source + offs, mask=mask, other=0.0)


@triton.jit
def store_tile(
    tile,
    out_ptr,  # [rows, columns] any dtype, written
    first_row,
    first_column,
    rows,
    columns,
    stride_row,
    stride_column,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Store the part of the tile that is inside the matrix, rounded to the matrix's dtype."""
    offs_row = first_row + tl.arange(0, BLOCK_ROWS)
    offs_column = first_column + tl.arange(0, BLOCK_COLUMNS)
    offs = offs_row.to(tl.int64)[:, None] * stride_row + offs_column.to(tl.int64)[None, :] * stride_column
    mask = (offs_row < rows)[:, None] & (offs_column < columns)[None, :]
    tl.store(out_ptr + offs, rounded(tile, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_columns(
    acc,
    up,  # the second accumulator of a gated pair; not used otherwise
    bias_ptr,
    residual_ptr,
    preactivation_ptr,
    out_ptr,
    first_m,
    first_n,
    M,
    N,
    stride_bias,
    stride_rm,
    stride_rn,
    stride_om,
    stride_on,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Do `store_result` for a tile whose epilogue fits in the registers."""
    GATED: tl.constexpr = ACTIVATION == "swiglu" or ACTIVATION == "geglu"
    if bias_ptr is not None:
        acc += load_tile(bias_ptr, 0, first_n, 1, N, 0, stride_bias, 1, BLOCK_N, False).to(tl.float32)
        if GATED:
            up += load_tile(bias_ptr, 0, N + first_n, 1, 2 * N, 0, stride_bias, 1, BLOCK_N, False).to(tl.float32)
    if preactivation_ptr is not None:
        width = 2 * N if GATED else N
        store_tile(acc, preactivation_ptr, first_m, first_n, M, N, width, 1, BLOCK_M, BLOCK_N)
        if GATED:
            store_tile(up, preactivation_ptr, first_m, N + first_n, M, width, width, 1, BLOCK_M, BLOCK_N)
    out = activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    if GATED:
        out *= up
    if residual_ptr is not None:
        residual = load_tile(residual_ptr, first_m, first_n, M, N, stride_rm, stride_rn, BLOCK_M, BLOCK_N, False)
        out += residual.to(tl.float32)
    store_tile(out, out_ptr, first_m, first_n, M, N, stride_om, stride_on, BLOCK_M, BLOCK_N)


@triton.jit
def column_parts(x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """Return the tile x as 1, 2 or 4 tiles of equal width, from left to right."""
    if PARTS == 1:
        return (x,)
    else:
        left, right = tl.split(tl.permute(tl.reshape(x, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        return column_parts(left, BLOCK_M, BLOCK_N // 2, PARTS // 2) + column_parts(
            right, BLOCK_M, BLOCK_N // 2, PARTS // 2
        )


@triton.jit
def store_result(
    acc,
    up,  # the second accumulator of a gated pair; not used otherwise
    bias_ptr,
    residual_ptr,
    preactivation_ptr,
    out_ptr,
    first_m,
    first_n,
    M,
    N,
    stride_bias,
    stride_rm,
    stride_rn,
    stride_om,
    stride_on,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
):
    """Store out = act(acc + bias) + residual of one tile, computed in float32, and the pre-activation where requested.

    With a gated activation bias is [2 N] and the pre-activation [M, 2 N]. A wide tile is stored in EPILOGUE_PARTS, so
    that the epilogue's operands need not be in registers beside the whole tile.
    """
    parts = column_parts(acc, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
    parts_up = column_parts(up, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
    for part in tl.static_range(EPILOGUE_PARTS):
        store_columns(
            parts[part], parts_up[part], bias_ptr, residual_ptr, preactivation_ptr, out_ptr,
            first_m, first_n + part * (BLOCK_N // EPILOGUE_PARTS), M, N,
            stride_bias, stride_rm, stride_rn, stride_om, stride_on, ACTIVATION, BLOCK_M, BLOCK_N // EPILOGUE_PARTS,
        )  # fmt: skip
