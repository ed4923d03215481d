"""gemm's gradient of x: dX = P W with P = grad ⊙ act'(pre-activation), persistent like `gemm`.

A gated pair adds the products of both halves of P with both halves of W to one accumulator.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.activations import GATED
from tpfuse.kernels.checks import check_floats, check_shape
from tpfuse.kernels.configurations import choose
from tpfuse.kernels.gemm_preactivation import check_preactivation, halves_of, load_preactivation_gradient
from tpfuse.kernels.gemm_split_k import split_reduction, sum_partials
from tpfuse.kernels.gemm_tiles import allows_tma, load_tile, matrix, new_partials, store_tile, tile_options
from tpfuse.kernels.launch import launch, multiprocessors
from tpfuse.kernels.tiles import dot, grouped_tile


@triton.jit
def gemm_input_gradient_kernel(
    grad_ptr,  # [M, N] bf16, read
    gate_ptr,  # [M, N] bf16, read: the pre-activation, or None
    up_ptr,  # [M, N] bf16, read: its second half of a gated pair, or None
    weight_ptr,  # [N, K] bf16, read
    weight_up_ptr,  # [N, K] bf16, read: the second half of a gated pair, or None
    out_ptr,  # [M, K] bf16, written; with more than one split [splits, M, K] float32
    M,
    N,
    K,
    splits,
    split_size,
    stride_gm,
    stride_gn,
    stride_pm,
    stride_pn,
    stride_wn,
    stride_wk,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # A tile of the result is BLOCK_M rows of M by BLOCK_N columns of K; the reduction runs over N in blocks of BLOCK_K.
    GATED: tl.constexpr = weight_up_ptr is not None
    grad = matrix(grad_ptr, M, N, stride_gm, BLOCK_M, BLOCK_K, TMA)
    gate = matrix(gate_ptr, M, N, stride_pm, BLOCK_M, BLOCK_K, TMA) if gate_ptr is not None else None
    up = matrix(up_ptr, M, N, stride_pm, BLOCK_M, BLOCK_K, TMA) if GATED else None
    weight = matrix(weight_ptr, N, K, stride_wn, BLOCK_K, BLOCK_N, TMA)
    weight_up = matrix(weight_up_ptr, N, K, stride_wn, BLOCK_K, BLOCK_N, TMA) if GATED else None
    tiles_m, tiles_k = tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_N)
    tiles = tiles_m * tiles_k
    for index in tl.range(tl.program_id(0), tiles * splits, tl.num_programs(0), warp_specialize=WARP_SPECIALIZE):
        pid_m, pid_k = grouped_tile(index % tiles, tiles_m, tiles_k, GROUP_M)
        first_m, first_k = pid_m * BLOCK_M, pid_k * BLOCK_N
        split = index // tiles
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for n in range(split * split_size, min(split * split_size + split_size, N), BLOCK_K):
            p, p_up = load_preactivation_gradient(
                grad, gate, up, first_m, n, M, N, stride_gm, stride_gn, stride_pm, stride_pn,
                ACTIVATION, BLOCK_M, BLOCK_K, TMA,
            )  # fmt: skip
            w = load_tile(weight, n, first_k, N, K, stride_wn, stride_wk, BLOCK_K, BLOCK_N, TMA)
            acc = dot(p, w, acc)
            if GATED:
                w_up = load_tile(weight_up, n, first_k, N, K, stride_wn, stride_wk, BLOCK_K, BLOCK_N, TMA)
                acc = dot(p_up, w_up, acc)
        store_tile(acc, out_ptr + split.to(tl.int64) * M * K, first_m, first_k, M, K, K, 1, BLOCK_M, BLOCK_N)


def gemm_input_gradient(
    grad: Tensor, weight: Tensor, preactivation: Tensor | None = None, *, activation: str | None = None
) -> Tensor:
    """dX = (grad ⊙ act'(pre-activation)) W.

    grad: [M, N], for a gated activation [M, N / 2]; weight: [N, K]; preactivation: [M, N], needed with an activation,
    unused without; one dtype of float32, float16, bfloat16, any strides. Returns [M, K], contiguous, in that dtype.
    Raises ValueError for other shapes, dtypes, devices or names of activations.
    """
    operator = "gemm_input_gradient"
    preactivation = check_preactivation(operator, grad, preactivation, activation)
    check_floats(operator, grad=grad, weight=weight, preactivation=preactivation)
    (m, n), halves = grad.shape, 2 if activation in GATED else 1
    if weight.ndim != 2:
        raise ValueError(f"{operator}: weight has shape {tuple(weight.shape)}: expected [N, K]")
    k = weight.shape[1]
    check_shape(operator, "weight", weight, (halves * n, k))
    out = torch.empty(m, k, dtype=grad.dtype, device=grad.device)

    gate, up = halves_of(preactivation, activation, 1)
    weight_gate, weight_up = halves_of(weight, activation, 0)
    aligned = allows_tma(grad, gate, up, weight_gate, weight_up)
    row = choose(
        "gemm_input_gradient", grad.device, grad.dtype,
        M=m, N=k, K=n, activated=int(gate is not None), gated=int(up is not None), unaligned=int(not aligned),
    )  # fmt: skip
    options = tile_options(row, aligned)
    block_m, block_n, block_k = (options[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    tiles = triton.cdiv(m, block_m) * triton.cdiv(k, block_n)
    splits, split_size = split_reduction(tiles, n, block_k, grad.device)
    partials = new_partials(splits, m, k, grad.device)
    launch(
        gemm_input_gradient_kernel,
        (min(tiles * splits, multiprocessors(grad.device)),),
        grad_ptr=grad,
        gate_ptr=gate,
        up_ptr=up,
        weight_ptr=weight_gate,
        weight_up_ptr=weight_up,
        out_ptr=out if partials is None else partials,
        M=m,
        N=n,
        K=k,
        splits=splits,
        split_size=split_size,
        stride_gm=grad.stride(0),
        stride_gn=grad.stride(1),
        stride_pm=preactivation.stride(0) if preactivation is not None else 0,
        stride_pn=preactivation.stride(1) if preactivation is not None else 0,
        stride_wn=weight.stride(0),
        stride_wk=weight.stride(1),
        ACTIVATION=activation or "none",
        **options,
    )
    if partials is not None:
        sum_partials(partials, out)
    return out
