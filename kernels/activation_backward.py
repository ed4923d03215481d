"""activation_backward: P = grad ⊙ act'(pre-activation), in one elementwise pass that also sums P's columns.

P is the gradient of x Wᵀ + bias, the argument of an activation. Both products of the backward pass, P W and Pᵀ x, read
P, and the sums of its columns are the bias gradient. If the products computed P themselves, in registers, they would
compute it again for every column of tiles, and these instructions would bound the products: by a count of the
instructions in their compiled loops, an H100's tensor cores would reach 18 to 48 % of their rate.

A program takes the columns of one tile in some of the rows. Where sums are requested, it adds the rounded elements in
float32: it first keeps one partial sum for each element of a tile and then adds those of a column. The partial sums of
different rows are added in order. The kernel uses no atomics, so the results are the same in every run on one kind of
GPU.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.activations import GATED, activate, activation_gradient, check_activation
from tpfuse.kernels.checks import check_floats, check_shape
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.gemm_tiles import load_tile, store_tile
from tpfuse.kernels.launch import Launch, cdiv, multiprocessors, planned
from tpfuse.kernels.tiles import rounded

_PROGRAMS = 8  # for each multiprocessor if there are enough rows: programs hide each other's waits for memory


@triton.jit
def activation_backward_kernel(
    grad_ptr,  # [M, N] bf16, read
    gate_ptr,  # [M, N] bf16, read: the pre-activation, or the first half of a gated pair
    up_ptr,  # [M, N] bf16, read: the second half of a gated pair, or None
    out_ptr,  # [M, N] bf16, [M, 2 N] gated, written
    sums_ptr,  # [parts, N] float32, [parts, 2 N] gated, written; or None
    M,
    N,
    part_size,
    stride_gm,
    stride_gn,
    stride_pm,
    stride_pn,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    GATED: tl.constexpr = up_ptr is not None
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    width = 2 * N if GATED else N
    tiles_n = tl.cdiv(N, BLOCK_N)
    part, first_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n * BLOCK_N
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    sums_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for m in range(part * part_size, min(part * part_size + part_size, M), BLOCK_M):
        first = m, first_n
        grad = load_tile(grad_ptr, first, (M, N), (stride_gm, stride_gn), (BLOCK_M, BLOCK_N), False).to(tl.float32)
        gate = load_tile(gate_ptr, first, (M, N), (stride_pm, stride_pn), (BLOCK_M, BLOCK_N), False).to(tl.float32)
        if GATED:
            up = load_tile(up_ptr, first, (M, N), (stride_pm, stride_pn), (BLOCK_M, BLOCK_N), False).to(tl.float32)
            p_up = rounded(grad * activate(gate, ACTIVATION, dtype), dtype)
            store_tile(p_up, out_ptr, (m, N + first_n), (M, width), width)
            sums_up += p_up.to(tl.float32)
            grad *= up
        p = rounded(activation_gradient(grad, gate, ACTIVATION, dtype), dtype)
        store_tile(p, out_ptr, first, (M, N), width)
        sums += p.to(tl.float32)
    if sums_ptr is not None:
        offs = first_n + tl.arange(0, BLOCK_N)
        part_ptr = sums_ptr + part.to(tl.int64) * width
        tl.store(part_ptr + offs, tl.sum(sums, 0), mask=offs < N)
        if GATED:
            tl.store(part_ptr + N + offs, tl.sum(sums_up, 0), mask=offs < N)


def activation_backward(
    grad: Tensor, preactivation: Tensor, activation: str, *, with_sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return (P = grad ⊙ act'(preactivation) [M, N], the sums of its columns [N] if `with_sums`), contiguous.

    grad: [M, N], for a gated activation [M, N / 2]; preactivation: [M, N], for a gated activation [gate | up]; both of
    one dtype of float32, float16, bfloat16, any strides, any size from 0 up. Both results have that dtype; the sums are
    those of P's rounded elements, in float32. Raise ValueError for other shapes, dtypes, devices or activations.
    """
    plan = _plan(grad, preactivation, activation, with_sums)
    n, width = grad.shape[1], preactivation.shape[1]
    out = torch.empty(grad.shape[0], width, dtype=grad.dtype, device=grad.device)
    sums = torch.empty(plan.parts, width, dtype=torch.float32, device=grad.device) if with_sums else None
    plan.gradient.run(
        grad_ptr=grad,
        gate_ptr=preactivation,
        up_ptr=preactivation[:, n:] if width > n else None,
        out_ptr=out,
        sums_ptr=sums,
    )
    return out, None if sums is None else sums.sum(0).to(grad.dtype)


class _GradientPlan(NamedTuple):
    """The launch of a call of `activation_backward`, which sums columns in this number of parts."""

    parts: int
    gradient: Launch


@planned
def _plan(grad: Tensor, preactivation: Tensor, activation: str, with_sums: bool) -> _GradientPlan:
    operator = "activation_backward"
    if activation is None:
        raise ValueError(f"{operator}: activation is None: expected the name of one")
    check_activation(operator, activation)
    if grad.ndim != 2:
        raise ValueError(f"{operator}: grad has shape {tuple(grad.shape)}: expected [M, N]")
    m, n = grad.shape
    check_shape(operator, "preactivation", preactivation, (m, 2 * n if activation in GATED else n))
    check_floats(operator, grad=grad, preactivation=preactivation)
    row = choose_configuration(operator, grad.device, grad.dtype)
    block_m, block_n = row.blocks["BLOCK_M"], row.blocks["BLOCK_N"]
    tiles_m, tiles_n = cdiv(m, block_m), cdiv(n, block_n)
    wanted = min(tiles_m, cdiv(_PROGRAMS * multiprocessors(grad.device), max(tiles_n, 1)))
    part_size = block_m * cdiv(tiles_m, max(wanted, 1))
    parts = cdiv(m, max(part_size, 1))
    gradient = row.launch(
        activation_backward_kernel,
        (parts * tiles_n,),
        M=m,
        N=n,
        part_size=part_size,
        stride_gm=grad.stride(0),
        stride_gn=grad.stride(1),
        stride_pm=preactivation.stride(0),
        stride_pn=preactivation.stride(1),
        ACTIVATION=activation,
    )
    return _GradientPlan(parts, gradient)
