"""layer_norm: y = (x - mean) / sqrt(var + eps) * weight + bias over rows; and rms_norm's kernel, the same without mean.

A row that fits in a block is read once and stays in registers, so that the variance is a second pass over registers,
not E[x²] - E[x]², which loses all digits where the mean is large. For longer rows the moments of the blocks are merged
(Chan, Golub and LeVeque 1983) and all blocks but the last are read again, from the L2 cache.

The backward pass is in `layer_norm_backward`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_device, check_floats, check_shape
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.launch import Launch, cdiv, planned
from tpfuse.kernels.tiles import product, rounded


@triton.jit
def load_rows(ptr, rows, stride, offs_c, mask):
    """Load a tile in float32; 0 where masked."""
    return tl.load(ptr + rows * stride + offs_c, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _merge_moments(x, mask, seen, count, mean, squares, CENTERED: tl.constexpr):
    """Merge (mean, Σ (x - mean)²) of `seen` columns with a block of `count` more; without CENTERED (0, Σ x²)."""
    if CENTERED:
        block_mean = tl.sum(x, axis=1) / count
        centered = tl.where(mask, x - block_mean[:, None], 0.0)
        block_mean += tl.sum(centered, axis=1) / count  # what the first sum was rounded by, where the mean is large
        share = count / (seen + count)
        delta = block_mean - mean
        mean += delta * share
        squares += tl.sum(product(centered, centered), axis=1) + delta * (delta * (seen * share))
    else:
        squares += tl.sum(product(x, x), axis=1)
    return mean, squares


@triton.jit
def _store_normalized(x, weight_ptr, bias_ptr, out_ptr, rows, C, offs_c, mask, mask_c, mean, rstd):
    weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    out = (x - mean[:, None]) * rstd[:, None] * weight
    if bias_ptr is not None:
        out += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * C + offs_c, rounded(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_forward_kernel(
    x_ptr,  # [M, C] bf16, read
    weight_ptr,  # [C] bf16, read
    bias_ptr,  # [C] bf16, read; or None
    out_ptr,  # [M, C] bf16, written
    mean_ptr,  # [M] float32, written; None for rms_norm
    rstd_ptr,  # [M] float32, written
    M,
    C,
    x_stride,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    rows = offs_m.to(tl.int64)[:, None]
    mean = tl.zeros([BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    last = (C - 1) // BLOCK_C * BLOCK_C  # first column of the block that stays in registers
    for start in range(0, last, BLOCK_C):
        offs_c = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = mask_m[:, None] & (offs_c < C)
        x = load_rows(x_ptr, rows, x_stride, offs_c, mask)
        mean, squares = _merge_moments(x, mask, start, min(C - start, BLOCK_C), mean, squares, mean_ptr is not None)

    offs_c = (last + tl.arange(0, BLOCK_C))[None, :]
    mask_c = offs_c < C
    mask = mask_m[:, None] & mask_c
    x = load_rows(x_ptr, rows, x_stride, offs_c, mask)
    mean, squares = _merge_moments(x, mask, last, C - last, mean, squares, mean_ptr is not None)
    rstd = 1.0 / tl.sqrt_rn(squares / C + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + offs_m, mean, mask=mask_m)
    tl.store(rstd_ptr + offs_m, rstd, mask=mask_m)
    _store_normalized(x, weight_ptr, bias_ptr, out_ptr, rows, C, offs_c, mask, mask_c, mean, rstd)

    for start in range(0, last, BLOCK_C):
        offs_c = (start + tl.arange(0, BLOCK_C))[None, :]
        mask_c = offs_c < C
        mask = mask_m[:, None] & mask_c
        x = load_rows(x_ptr, rows, x_stride, offs_c, mask)
        _store_normalized(x, weight_ptr, bias_ptr, out_ptr, rows, C, offs_c, mask, mask_c, mean, rstd)


def norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (out, mean, rstd), where out is the normalised x.

    centered: layer_norm; otherwise rms_norm, whose mean is None, rstd 1 / sqrt(mean(x²) + eps), and which multiplies by
    the weight in float32, before the result is rounded, as torch.nn.functional.rms_norm does (arXiv:1910.07467).

    x: [M, C] of float32, float16 or bfloat16, rows of any stride (a tensor whose columns have another stride than 1 is
    copied first), C from 1 up; weight, bias: [C] of one such dtype. out has x's dtype; mean and rstd = 1 / sqrt(var +
    eps) are [M] float32. Raise ValueError for other shapes, dtypes or devices.
    """
    plan = _plan(x, weight, bias, eps, centered)
    (m, c), device = x.shape, x.device
    out = torch.empty(m, c, dtype=x.dtype, device=device)
    mean = torch.empty(m, dtype=torch.float32, device=device) if centered else None
    rstd = torch.empty(m, dtype=torch.float32, device=device)
    plan.run(
        x_ptr=x if x.stride(1) == 1 else x.contiguous(),
        weight_ptr=weight.contiguous(),
        bias_ptr=None if bias is None else bias.contiguous(),
        out_ptr=out,
        mean_ptr=mean,
        rstd_ptr=rstd,
    )
    return out, mean, rstd


@planned
def _plan(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Launch:
    check_norm("layer_norm" if centered else "rms_norm", x, weight, bias)
    (m, c), row = x.shape, choose_configuration("layer_norm", x.device, x.dtype, C=x.shape[1])
    grid = (cdiv(m, row.blocks["BLOCK_M"]),)
    return row.launch(norm_forward_kernel, grid, M=m, C=c, x_stride=row_stride(x), eps=eps)


def row_stride(x: Tensor) -> int:
    """Return the stride of the rows that a kernel reads of [M, C]; those of a copy if columns are not adjacent."""
    return x.stride(0) if x.stride(1) == 1 else x.shape[1]


def check_norm(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Raise ValueError unless x is [M, C] and weight and bias are [C]."""
    check_floats(operator, x=x)
    check_floats(operator, weight=weight, bias=bias)
    check_device(operator, "x", x, "weight", weight)
    if x.ndim != 2 or not x.shape[1]:
        raise ValueError(f"{operator}: x has shape {tuple(x.shape)}: expected [M, C] with C of at least 1")
    check_shape(operator, "weight", weight, (x.shape[1],))
    check_shape(operator, "bias", bias, (x.shape[1],))
