"""gemm's gradients of weight and bias: dW = Pᵀ x and db = Σ P over rows, with P = grad ⊙ act'(pre-activation).

Both may be added to float32 buffers, which makes the accumulation of gradients over micro-batches free. A gated pair
keeps an accumulator for each half of P; they share the tile of x.

The bias gradient is one more product, Pᵀ 1 with a narrow tile of ones: it costs no second pass over grad, and its order
of summation is the product's. All programs multiply by ones, those of the first tile column store it: a branch in the
loop would keep Triton from specializing warps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.activations import GATED
from tpfuse.kernels.checks import check_device, check_floats, check_shape
from tpfuse.kernels.configurations import choose
from tpfuse.kernels.gemm_preactivation import check_preactivation, halves_of, load_preactivation_gradient
from tpfuse.kernels.gemm_split_k import split_reduction, sum_partials
from tpfuse.kernels.gemm_tiles import (
    allows_tma,
    column_parts,
    load_tile,
    matrix,
    new_partials,
    store_tile,
    tile_options,
)
from tpfuse.kernels.launch import launch, multiprocessors
from tpfuse.kernels.tiles import dot, grouped_tile, rounded


@triton.jit
def store_weight_gradient(
    acc,
    sums,
    out_ptr,
    added_ptr,
    bias_ptr,
    added_bias_ptr,
    first_n,
    first_k,
    N,
    K,
    stride_on,
    stride_ok,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
):
    """Stores a tile of dW and, in the first tile column, of db, added to what is there where asked for."""
    WIDTH: tl.constexpr = BLOCK_N // EPILOGUE_PARTS
    parts = column_parts(acc, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
    for part in tl.static_range(EPILOGUE_PARTS):
        tile, first = parts[part], first_k + part * WIDTH
        if added_ptr is not None:
            tile += load_tile(added_ptr, first_n, first, N, K, stride_on, stride_ok, BLOCK_M, WIDTH, False)
        store_tile(tile, out_ptr, first_n, first, N, K, stride_on, stride_ok, BLOCK_M, WIDTH)
    if bias_ptr is not None:
        if first_k == 0:  # all columns of sums are equal: they are those of a matrix of one column
            if added_bias_ptr is not None:
                sums += load_tile(added_bias_ptr, first_n, 0, N, 1, stride_bn, 1, BLOCK_M, 16, False)
            store_tile(sums, bias_ptr, first_n, 0, N, 1, stride_bn, 1, BLOCK_M, 16)


@triton.jit
def gemm_weight_gradient_kernel(
    grad_ptr,  # [M, N] bf16, read
    gate_ptr,  # [M, N] bf16, read: the pre-activation, or None
    up_ptr,  # [M, N] bf16, read: its second half of a gated pair, or None
    x_ptr,  # [M, K] bf16, read
    out_ptr,  # [N, K] bf16 or float32, [2 N, K] gated, written; with more than one split [splits, N, K] float32
    added_ptr,  # like out, read: what is added to the gradient, out itself; or None
    bias_ptr,  # [N] bf16 or float32, [2 N] gated, written; or None; split like out
    added_bias_ptr,  # like bias, read: what is added to its gradient, bias itself; or None
    M,
    N,
    K,
    splits,
    split_size,
    stride_gm,
    stride_gn,
    stride_pm,
    stride_pn,
    stride_xm,
    stride_xk,
    stride_on,
    stride_ok,
    stride_bn,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
):
    # A tile of the result is BLOCK_M rows of N by BLOCK_N columns of K; the reduction runs over M in blocks of BLOCK_K.
    GATED: tl.constexpr = ACTIVATION == "swiglu" or ACTIVATION == "geglu"
    grad = matrix(grad_ptr, M, N, stride_gm, BLOCK_K, BLOCK_M, TMA)
    gate = matrix(gate_ptr, M, N, stride_pm, BLOCK_K, BLOCK_M, TMA) if gate_ptr is not None else None
    up = matrix(up_ptr, M, N, stride_pm, BLOCK_K, BLOCK_M, TMA) if GATED else None
    x = matrix(x_ptr, M, K, stride_xm, BLOCK_K, BLOCK_N, TMA)
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_M), max(tl.cdiv(K, BLOCK_N), 1)  # K = 0 has a bias gradient still
    tiles = tiles_n * tiles_k
    for index in tl.range(tl.program_id(0), tiles * splits, tl.num_programs(0), warp_specialize=WARP_SPECIALIZE):
        pid_n, pid_k = grouped_tile(index % tiles, tiles_n, tiles_k, GROUP_M)
        first_n, first_k = pid_n * BLOCK_M, pid_k * BLOCK_N
        split = index // tiles
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        sums = tl.zeros((BLOCK_M, 16), tl.float32)
        sums_up = tl.zeros((BLOCK_M, 16), tl.float32)
        for m in range(split * split_size, min(split * split_size + split_size, M), BLOCK_K):
            p, p_up = load_preactivation_gradient(
                grad, gate, up, m, first_n, M, N, stride_gm, stride_gn, stride_pm, stride_pn,
                ACTIVATION, BLOCK_K, BLOCK_M, TMA,
            )  # fmt: skip
            b = load_tile(x, m, first_k, M, K, stride_xm, stride_xk, BLOCK_K, BLOCK_N, TMA)
            acc = dot(p.T, b, acc)
            if GATED:
                acc_up = dot(p_up.T, b, acc_up)
            if bias_ptr is not None:
                ones = rounded(tl.full((BLOCK_K, 16), 1.0, tl.float32), p.dtype)
                sums = dot(p.T, ones, sums)
                if GATED:
                    sums_up = dot(p_up.T, ones, sums_up)
        rows = 2 * N if GATED else N
        part_ptr = out_ptr + split.to(tl.int64) * rows * K
        bias_part_ptr = bias_ptr
        if bias_ptr is not None:
            bias_part_ptr += split.to(tl.int64) * rows
        store_weight_gradient(
            acc, sums, part_ptr, added_ptr, bias_part_ptr, added_bias_ptr,
            first_n, first_k, N, K, stride_on, stride_ok, stride_bn, BLOCK_M, BLOCK_N, EPILOGUE_PARTS,
        )  # fmt: skip
        if GATED:
            store_weight_gradient(
                acc_up, sums_up, part_ptr, added_ptr, bias_part_ptr, added_bias_ptr,
                N + first_n, first_k, rows, K, stride_on, stride_ok, stride_bn, BLOCK_M, BLOCK_N, EPILOGUE_PARTS,
            )  # fmt: skip


def gemm_weight_gradient(
    grad: Tensor,
    x: Tensor,
    preactivation: Tensor | None = None,
    *,
    activation: str | None = None,
    with_bias: bool = False,
    accumulate_into: Tensor | None = None,
    accumulate_bias_into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """dW = (grad ⊙ act'(pre-activation))ᵀ x and, with_bias, the sum of its left factor over rows.

    grad: [M, N], for a gated activation [M, N / 2]; x: [M, K]; preactivation: [M, N], needed with an activation, unused
    without; one dtype of float32, float16, bfloat16, any strides. Returns (dW [N, K], db [N] or None) in that dtype;
    or, where float32 buffers of these shapes are given (any strides), these, to which the gradients were added. Raises
    ValueError for other shapes, dtypes, devices or names of activations, and for a bias buffer without with_bias.
    """
    operator = "gemm_weight_gradient"
    preactivation = check_preactivation(operator, grad, preactivation, activation)
    check_floats(operator, grad=grad, x=x, preactivation=preactivation)
    (m, n), halves = grad.shape, 2 if activation in GATED else 1
    if x.ndim != 2:
        raise ValueError(f"{operator}: x has shape {tuple(x.shape)}: expected [M, K]")
    k = x.shape[1]
    check_shape(operator, "x", x, (m, k))
    if accumulate_bias_into is not None and not with_bias:
        raise ValueError(f"{operator}: accumulate_bias_into was given without with_bias")
    out = _buffer(operator, "accumulate_into", accumulate_into, grad, halves * n, k)
    bias = _buffer(operator, "accumulate_bias_into", accumulate_bias_into, grad, halves * n) if with_bias else None

    gate, up = halves_of(preactivation, activation, 1)
    aligned = allows_tma(grad, gate, up, x)
    row = choose(
        "gemm_weight_gradient", grad.device, grad.dtype,
        M=n, N=k, K=m, activated=int(gate is not None), gated=int(up is not None), unaligned=int(not aligned),
    )  # fmt: skip
    options = tile_options(row, aligned)
    block_m, block_n, block_k = (options[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    tiles = triton.cdiv(n, block_m) * max(triton.cdiv(k, block_n), 1)
    splits, split_size = split_reduction(tiles, m, block_k, grad.device)
    partials = new_partials(splits, halves * n, k, grad.device)
    bias_partials = new_partials(splits, 1, halves * n, grad.device) if with_bias else None
    launch(
        gemm_weight_gradient_kernel,
        (min(tiles * splits, multiprocessors(grad.device)),),
        grad_ptr=grad,
        gate_ptr=gate,
        up_ptr=up,
        x_ptr=x,
        out_ptr=out if partials is None else partials,
        added_ptr=accumulate_into if partials is None else None,
        bias_ptr=bias if bias_partials is None else bias_partials,
        added_bias_ptr=accumulate_bias_into if bias_partials is None else None,
        M=m,
        N=n,
        K=k,
        splits=splits,
        split_size=split_size,
        stride_gm=grad.stride(0),
        stride_gn=grad.stride(1),
        stride_pm=preactivation.stride(0) if preactivation is not None else 0,
        stride_pn=preactivation.stride(1) if preactivation is not None else 0,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        stride_on=out.stride(0) if partials is None else k,
        stride_ok=out.stride(1) if partials is None else 1,
        stride_bn=bias.stride(0) if bias is not None and bias_partials is None else 1,
        ACTIVATION=activation or "none",
        **options,
    )
    if partials is not None:
        sum_partials(partials, out, residual=accumulate_into)
    if bias is not None and bias_partials is not None:
        added = accumulate_bias_into[None] if accumulate_bias_into is not None else None
        sum_partials(bias_partials, bias[None], residual=added)
    return out, bias


def _buffer(operator: str, name: str, given: Tensor | None, grad: Tensor, *shape: int) -> Tensor:
    """What the gradient is written to: the buffer that was given, or a new tensor like grad."""
    if given is None:
        return torch.empty(shape, dtype=grad.dtype, device=grad.device)
    check_shape(operator, name, given, shape)
    check_device(operator, "grad", grad, name, given)
    if given.dtype != torch.float32:
        raise ValueError(f"{operator}: {name} is {given.dtype}: expected float32")
    return given
