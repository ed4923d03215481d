"""dropout: x / (1 - p) where the hash of (key, row * C + column) keeps it, 0 elsewhere; it computes the gradient too.

The kernel computes the mask of `tpfuse.ops.dropout` in registers: splitmix64's output function (Steele, Lea and Flood
2014) of the counter times the golden ratio plus the key. Modulo 2^64 the product splits into a part of the row and one
of the column, which leaves one addition and two products for each element. The key is read from device memory: another
step's mask needs no other launch, so that a CUDA graph can be replayed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_floats, check_tensor
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.tiles import rounded

_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def hashed_rows(row, width, key):
    """Return the rows' part of the hash of `kept`, uint64; row: int64, key: 64 bits."""
    return (row * width).to(tl.uint64) * _GOLDEN + key.to(tl.uint64)


@triton.jit
def kept(rows, column, threshold):
    """Return whether dropout keeps each element; rows: from `hashed_rows`, column: integers (they broadcast)."""
    x = rows + column.to(tl.uint64) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = x ^ (x >> 31)
    return x.to(tl.int64, bitcast=True) >= threshold


def threshold(p: float) -> int:
    """Return the int64 from which on a hash keeps its element; hashes, read as int64, are uniform in [-2^63, 2^63)."""
    return round(p * 2.0**64) - 2**63


@triton.jit(do_not_specialize=["threshold"])
def dropout_kernel(
    x_ptr,  # [M, C] bf16, read
    rows_ptr,  # [M] int64, read
    key_ptr,  # [1] int64, read
    out_ptr,  # [M, C] bf16, written
    M,
    C,
    x_stride,
    threshold: tl.int64,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (offs_m < M)[:, None] & (offs_c < C)[None, :]
    row = tl.load(rows_ptr + offs_m, mask=offs_m < M, other=0)
    keep = kept(hashed_rows(row, C, tl.load(key_ptr))[:, None], offs_c[None, :], threshold)
    x = tl.load(x_ptr + offs_m.to(tl.int64)[:, None] * x_stride + offs_c[None, :], mask=mask, other=0.0)
    out = x.to(tl.float32) * tl.where(keep, scale, 0.0)
    offs = offs_m.to(tl.int64)[:, None] * C + offs_c[None, :]
    tl.store(out_ptr + offs, rounded(out, out_ptr.dtype.element_ty), mask=mask)


def dropout_forward(x: Tensor, p: float, rows: Tensor, key: Tensor) -> Tensor:
    """Keep each element of x [M, C] with probability 1 - p, divided by 1 - p, and multiply the others by 0.

    x: float32, float16 or bfloat16, rows of any stride, and NaN and inf times 0 are NaN; rows: [M] int64, their indices
    in the unsharded tensor; key: one int64 element. Return a contiguous tensor of x's dtype. Applied to the gradient
    of that tensor, it returns x's gradient. Raise ValueError for other shapes, dtypes or devices and for p outside [0,
    1).
    """
    check_floats("dropout", x=x)
    if x.ndim != 2:
        raise ValueError(f"dropout: x has shape {tuple(x.shape)}: expected [M, C]")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout: p {p}: expected 0 <= p < 1")
    m, c = x.shape
    for name, integers, count in (("rows", rows, m), ("key", key, 1)):
        check_tensor("dropout", name, integers.reshape(-1), (count,), (torch.int64,), ("x", x))
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(m, c, dtype=x.dtype, device=x.device)
    row = choose_configuration("dropout", x.device, x.dtype)
    launch(
        dropout_kernel,
        (cdiv(m, row.blocks["BLOCK_M"]), cdiv(c, row.blocks["BLOCK_C"])),
        x_ptr=x,
        rows_ptr=rows.contiguous(),
        key_ptr=key,
        out_ptr=out,
        M=m,
        C=c,
        x_stride=x.stride(0),
        threshold=threshold(p),
        scale=1.0 / (1.0 - p),
        **row.options,
    )
    return out
