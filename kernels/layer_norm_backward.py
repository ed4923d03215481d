"""Backward of layer_norm and rms_norm. With x̂ = (x - mean) rstd and u = grad_out weight:

    dx = (u - x̂ mean(u x̂) - mean(u)) rstd        dweight = Σ grad_out x̂        dbias = Σ grad_out

rms_norm has no mean, and so neither mean(u) nor dbias.

A fixed number of programs loop over the rows and keep their part of the weights' gradients in registers, in float32; a
second kernel adds the parts in order. The kernels use no atomics, so that every run gives the same bits. For rows that
are longer than a block, a separate kernel computes their two means first, and each block of columns has its own
programs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_floats, check_shape, check_tensor
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.launch import Launch, cdiv, multiprocessors, planned
from tpfuse.kernels.layer_norm import check_norm, load_rows, row_stride
from tpfuse.kernels.tiles import product, rounded

_WARPS = 16  # that the programs start on each multiprocessor, which leaves each thread 128 registers


@triton.jit
def _load_tile(grad_ptr, x_ptr, weight, mean_ptr, rstd_ptr, offs_m, offs_c, M, C, grad_stride, x_stride):
    """Load (grad_out, x̂, grad_out weight, rstd) of a tile, with 0 in grad_out where masked."""
    mask_m = offs_m < M
    rows = offs_m.to(tl.int64)[:, None]
    mask = mask_m[:, None] & (offs_c < C)[None, :]
    grad = load_rows(grad_ptr, rows, grad_stride, offs_c[None, :], mask)
    normalized = load_rows(x_ptr, rows, x_stride, offs_c[None, :], mask)
    rstd = tl.load(rstd_ptr + offs_m, mask=mask_m, other=0.0)
    if mean_ptr is not None:
        normalized -= tl.load(mean_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
    normalized *= rstd[:, None]
    return grad, normalized, grad * weight[None, :], rstd


@triton.jit
def norm_row_means_kernel(
    grad_ptr,  # [M, C] bf16, read
    x_ptr,  # [M, C] bf16, read
    weight_ptr,  # [C] bf16, read
    mean_ptr,  # [M] float32, read; None for rms_norm
    rstd_ptr,  # [M] float32, read
    row_means_ptr,  # [2, M] float32, written: mean(u x̂) and mean(u); [1, M] for rms_norm, without mean(u)
    M,
    C,
    grad_stride,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    along = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    level = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, C, BLOCK_C):
        offs_c = start + tl.arange(0, BLOCK_C)
        weight = tl.load(weight_ptr + offs_c, mask=offs_c < C, other=0.0).to(tl.float32)
        _, normalized, scaled, _ = _load_tile(
            grad_ptr, x_ptr, weight, mean_ptr, rstd_ptr, offs_m, offs_c, M, C, grad_stride, x_stride
        )
        along += scaled * normalized
        if mean_ptr is not None:
            level += scaled
    tl.store(row_means_ptr + offs_m, tl.sum(along, axis=1) / C, mask=offs_m < M)
    if mean_ptr is not None:
        tl.store(row_means_ptr + M + offs_m, tl.sum(level, axis=1) / C, mask=offs_m < M)


@triton.jit
def norm_backward_kernel(
    grad_ptr,  # [M, C] bf16, read
    x_ptr,  # [M, C] bf16, read
    weight_ptr,  # [C] bf16, read
    mean_ptr,  # [M] float32, read; None for rms_norm
    rstd_ptr,  # [M] float32, read
    row_means_ptr,  # as norm_row_means_kernel wrote it, read; None where a row is one block
    added_ptr,  # [M, C] bf16, read: what else belongs to dx; or None
    dx_ptr,  # [M, C] bf16, written; None if it is not wanted
    dweight_parts_ptr,  # [programs, C] float32, written; None if it is not wanted
    dbias_parts_ptr,  # [programs, C] float32, written; None without bias
    M,
    C,
    grad_stride,
    x_stride,
    added_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    dbias = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(pid * BLOCK_M, M, programs * BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        grad, normalized, scaled, rstd = _load_tile(
            grad_ptr, x_ptr, weight, mean_ptr, rstd_ptr, offs_m, offs_c, M, C, grad_stride, x_stride
        )
        if dweight_parts_ptr is not None:
            dweight += grad * normalized
        if dbias_parts_ptr is not None:
            dbias += grad
        if dx_ptr is not None:
            if row_means_ptr is None:
                along = tl.sum(product(scaled, normalized), axis=1) / C
            else:
                along = tl.load(row_means_ptr + offs_m, mask=mask_m, other=0.0)
            dx = scaled - normalized * along[:, None]
            if mean_ptr is not None:
                if row_means_ptr is None:
                    level = tl.sum(scaled, axis=1) / C
                else:
                    level = tl.load(row_means_ptr + M + offs_m, mask=mask_m, other=0.0)
                dx -= level[:, None]
            dx *= rstd[:, None]
            rows = offs_m.to(tl.int64)[:, None]
            mask = mask_m[:, None] & mask_c[None, :]
            if added_ptr is not None:
                dx += load_rows(added_ptr, rows, added_stride, offs_c[None, :], mask)
            tl.store(dx_ptr + rows * C + offs_c[None, :], rounded(dx, dx_ptr.dtype.element_ty), mask=mask)
    offs = pid.to(tl.int64) * C + offs_c
    if dweight_parts_ptr is not None:
        tl.store(dweight_parts_ptr + offs, tl.sum(dweight, axis=0), mask=mask_c)
    if dbias_parts_ptr is not None:
        tl.store(dbias_parts_ptr + offs, tl.sum(dbias, axis=0), mask=mask_c)


@triton.jit
def norm_sum_parts_kernel(
    parts_ptr,  # [2, parts, C] float32, read: those of dweight, then those of dbias
    dweight_ptr,  # [C] bf16, written
    dbias_ptr,  # [C] bf16, written; or None
    parts,
    C,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    which = tl.program_id(1)
    acc = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for start in range(0, parts, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask = (offs_p < parts)[:, None] & (offs_c < C)[None, :]
        acc += load_rows(parts_ptr, (which.to(tl.int64) * parts + offs_p)[:, None], C, offs_c[None, :], mask)
    total = rounded(tl.sum(acc, axis=0), dweight_ptr.dtype.element_ty)
    if which == 0:
        tl.store(dweight_ptr + offs_c, total, mask=offs_c < C)
    elif dbias_ptr is not None:
        tl.store(dbias_ptr + offs_c, total, mask=offs_c < C)


def norm_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    added: Tensor | None = None,
    *,
    with_bias: bool,
    with_x: bool = True,
    with_weight: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx + added, dweight, dbias) for the x that `norm_forward` normalised.

    grad_out, x, added: [M, C] of one dtype; weight: [C]; mean, rstd: [M] float32; mean: None for rms_norm. added: the
    gradient that x has from elsewhere, as on a residual path; the sum is rounded once. dx has x's dtype, dweight and
    dbias are [C] in weight's dtype. dx is None unless with_x, dweight unless with_weight, and dbias unless with_weight
    and with_bias. Raise ValueError for other shapes, dtypes or devices.
    """
    plan = _plan(grad_out, x, weight, mean, rstd, added, with_bias, with_x, with_weight)
    (m, c), device, kinds = x.shape, x.device, plan.kinds
    read = {
        "grad_ptr": grad_out if grad_out.stride(1) == 1 else grad_out.contiguous(),
        "x_ptr": x if x.stride(1) == 1 else x.contiguous(),
        "weight_ptr": weight.contiguous(),
        "mean_ptr": mean,
        "rstd_ptr": rstd,
    }
    row_means = None
    if plan.row_means is not None:
        row_means = torch.empty(1 if mean is None else 2, m, dtype=torch.float32, device=device)
        plan.row_means.run(**read, row_means_ptr=row_means)
    dx = torch.empty(m, c, dtype=x.dtype, device=device) if with_x else None
    parts = torch.empty(kinds, plan.programs, c, dtype=torch.float32, device=device)
    plan.gradients.run(
        **read,
        row_means_ptr=row_means,
        added_ptr=added if added is None or added.stride(1) == 1 else added.contiguous(),
        dx_ptr=dx,
        dweight_parts_ptr=parts[0] if kinds > 0 else None,
        dbias_parts_ptr=parts[1] if kinds > 1 else None,
    )
    if plan.sums is None:
        return dx, None, None
    dweight = torch.empty(c, dtype=weight.dtype, device=device)
    dbias = torch.empty(c, dtype=weight.dtype, device=device) if kinds == 2 else None
    plan.sums.run(parts_ptr=parts, dweight_ptr=dweight, dbias_ptr=dbias)
    return dx, dweight, dbias


class _NormBackwardPlan(NamedTuple):
    """The launches of a call of `norm_backward`."""

    kinds: int  # of parts: those of dweight, then those of dbias
    programs: int
    row_means: Launch | None
    gradients: Launch
    sums: Launch | None


@planned
def _plan(
    grad_out: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, added: Tensor | None,
    with_bias: bool, with_x: bool, with_weight: bool,
) -> _NormBackwardPlan:  # fmt: skip
    operator = "rms_norm_backward" if mean is None else "layer_norm_backward"
    check_norm(operator, x, weight)
    check_floats(operator, x=x, grad_out=grad_out, added=added)
    for name, gradient in (("grad_out", grad_out), ("added", added)):
        check_shape(operator, name, gradient, tuple(x.shape))
    (m, c), device = x.shape, x.device
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        check_tensor(operator, name, statistic, (m,), (torch.float32,), ("x", x))
    row = choose_configuration("layer_norm", device, x.dtype, C=c)
    columns, tiles = cdiv(c, row.blocks["BLOCK_C"]), cdiv(m, row.blocks["BLOCK_M"])
    programs = min(tiles, cdiv(multiprocessors(device) * max(_WARPS // row.num_warps, 1), columns))
    sizes = {"M": m, "C": c, "grad_stride": row_stride(grad_out), "x_stride": row_stride(x)}
    row_means = row.launch(norm_row_means_kernel, (tiles,), **sizes) if columns > 1 and with_x else None
    added_stride = 0 if added is None else row_stride(added)
    gradients = row.launch(norm_backward_kernel, (programs, columns), **sizes, added_stride=added_stride)
    kinds, sums = (2 if with_bias else 1) if with_weight else 0, None
    if with_weight:
        row = choose_configuration("layer_norm_sum_parts", device, torch.float32)
        sums = row.launch(norm_sum_parts_kernel, (cdiv(c, row.blocks["BLOCK_C"]), kinds), parts=programs, C=c)
    return _NormBackwardPlan(kinds, programs, row_means, gradients, sums)
