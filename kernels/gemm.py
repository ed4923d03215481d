"""gemm: act(x Wᵀ + bias) + residual, one persistent program per multiprocessor.

Each program takes tile after tile in the grouped order of `tiles.grouped_tile` and applies bias, activation and
residual to the float32 accumulator while it is in registers: the pre-activation is written to memory only where the
backward pass needs it. A gated pair keeps two accumulators, of the gate and of the up projection, which share the tile
of x. Tiles are loaded by TMA where the configuration requests it and base and strides are aligned, by masked pointers
otherwise.

Where a row of the table says PING_PONG, `gemm_ping_pong` computes the products of which it can.

Thin shapes have fewer tiles than there are multiprocessors: there the reduction is split, and `sum_partials` adds the
parts in order (`gemm_split_k`), so that results do not depend on which program was first.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.activations import GATED
from tpfuse.kernels.checks import check_shape
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.gemm_split_k import split_reduction, sum_partials
from tpfuse.kernels.gemm_tiles import allows_tma, load_tile, matrix, store_result, store_tile, tile_options
from tpfuse.kernels.launch import Launch, cdiv, multiprocessors, planned
from tpfuse.kernels.product_calls import check_product, term_strides
from tpfuse.kernels.tiles import dot, grouped_tile


@triton.jit
def gemm_forward_kernel(
    x_ptr,  # [M, K] bf16, read
    weight_ptr,  # [N, K] bf16, read
    weight_up_ptr,  # [N, K] bf16, read: the second half of a gated pair, or None
    bias_ptr,  # [N] bf16, [2 N] gated, read; or None
    residual_ptr,  # [M, N] bf16, read; or None
    preactivation_ptr,  # [M, N] bf16, [M, 2 N] gated, written; or None
    out_ptr,  # [M, N] bf16, written
    partials_ptr,  # [splits, M, N] float32, [splits, M, 2 N] gated, written instead of the others; or None
    M,
    N,
    K,
    splits,
    split_size,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_bias,
    stride_rm,
    stride_rn,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_PARTS: tl.constexpr,
):
    GATED: tl.constexpr = weight_up_ptr is not None
    x = matrix(x_ptr, M, K, stride_xm, BLOCK_M, BLOCK_K, TMA)
    weight = matrix(weight_ptr, N, K, stride_wn, BLOCK_N, BLOCK_K, TMA)
    weight_up = matrix(weight_up_ptr, N, K, stride_wn, BLOCK_N, BLOCK_K, TMA) if GATED else None
    terms = ((bias_ptr, stride_bias), (residual_ptr, stride_rm, stride_rn), preactivation_ptr)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    for index in tl.range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        pid_m, pid_n = grouped_tile(index % tiles, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        split = index // tiles
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(split * split_size, min(split * split_size + split_size, K), BLOCK_K):
            a = load_tile(x, (first_m, k), (M, K), (stride_xm, stride_xk), (BLOCK_M, BLOCK_K), TMA)
            b = load_tile(weight, (first_n, k), (N, K), (stride_wn, stride_wk), (BLOCK_N, BLOCK_K), TMA)
            acc = dot(a, b.T, acc)
            if GATED:
                b_up = load_tile(weight_up, (first_n, k), (N, K), (stride_wn, stride_wk), (BLOCK_N, BLOCK_K), TMA)
                up = dot(a, b_up.T, up)
        if partials_ptr is None:
            store_result((acc, up), terms, out_ptr, (first_m, first_n), (M, N), ACTIVATION, EPILOGUE_PARTS)
        else:
            width = 2 * N if GATED else N
            part_ptr = partials_ptr + split.to(tl.int64) * M * width
            store_tile(acc, part_ptr, (first_m, first_n), (M, N), width)
            if GATED:
                store_tile(up, part_ptr, (first_m, N + first_n), (M, width), width)


def gemm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
    keep_preactivation: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return act(x Wᵀ + bias) + residual, accumulated in float32, and on request x Wᵀ + bias.

    x: [M, K]; weight: [N, K]; bias: [N]; residual: [M, N], for a gated activation [M, N / 2] (its weight and bias are
    [gate | up]); all of one dtype of float32, float16, bfloat16, any strides, any size from 0 up. Return (out,
    pre-activation [M, N] or None), contiguous, in that dtype; out is computed from the accumulator, not from the
    rounded pre-activation. Raise ValueError for other shapes, dtypes, devices or names of activations.
    """
    plan = _plan(x, weight, bias, residual, activation)
    if plan.ping_pong is not None:
        return plan.ping_pong(x, weight, bias, residual, activation=activation, keep_preactivation=keep_preactivation)
    out = torch.empty(plan.rows, plan.width, dtype=x.dtype, device=x.device)
    preactivation = torch.empty(plan.rows, plan.columns, dtype=x.dtype, device=x.device) if keep_preactivation else None
    partials = None
    if plan.splits > 1:
        partials = torch.empty(plan.splits, plan.rows, plan.columns, dtype=torch.float32, device=x.device)
    plan.product.run(
        x_ptr=x,
        weight_ptr=weight,
        weight_up_ptr=weight[plan.width :] if activation in GATED else None,
        bias_ptr=bias,
        residual_ptr=residual,
        preactivation_ptr=preactivation,
        out_ptr=out,
        partials_ptr=partials,
    )
    if partials is not None:
        sum_partials(partials, out, bias=bias, residual=residual, preactivation=preactivation, activation=activation)
    return out, preactivation


def takes_ping_pong(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None
) -> bool:
    """Return whether `gemm_forward` computes a product with `gemm_ping_pong`, since it was measured to be faster."""
    return _plan(x, weight, bias, residual, activation).ping_pong is not None


class _GemmPlan(NamedTuple):
    """The sizes and launches of a call of `gemm_forward`. ping_pong: the launcher that takes its place, or None."""

    # The result is [rows, width]. The product has `columns`, gate and up included.
    rows: int
    width: int
    columns: int
    splits: int
    product: Launch
    ping_pong: Callable[..., tuple[Tensor, Tensor | None]] | None


@planned
def _plan(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None) -> _GemmPlan:
    m, k, n = check_product("gemm_forward", x, weight, bias, activation, residual=residual)
    width = n // 2 if activation in GATED else n
    check_shape("gemm_forward", "residual", residual, (m, width))
    gate, up = (weight[:width], weight[width:]) if activation in GATED else (weight, None)
    aligned = allows_tma(x, gate, up)
    programs = multiprocessors(x.device)
    row = choose_configuration(
        "gemm", x.device, x.dtype,
        M=m, N=width, K=k, gated=int(up is not None), unaligned=int(not aligned), programs=programs,
    )  # fmt: skip
    options = tile_options(row, aligned)
    num_warps, num_stages = options.pop("num_warps"), options.pop("num_stages")
    ping_pong = _ping_pong(x, weight, bias, residual, activation) if options.pop("PING_PONG", False) else None
    tiles = cdiv(m, options["BLOCK_M"]) * cdiv(width, options["BLOCK_N"])
    splits, split_size = split_reduction(tiles, k, options["BLOCK_K"], x.device)
    arguments = {
        "M": m,
        "N": width,
        "K": k,
        "splits": splits,
        "split_size": split_size,
        "stride_xm": x.stride(0),
        "stride_xk": x.stride(1),
        "stride_wn": weight.stride(0),
        "stride_wk": weight.stride(1),
        **term_strides(bias, residual),
        "ACTIVATION": activation or "none",
        **options,
    }
    grid = (min(tiles * splits, programs),)
    product = Launch(gemm_forward_kernel, grid, arguments, num_warps, num_stages)
    return _GemmPlan(m, width, n, splits, product, ping_pong if splits == 1 else None)


def _ping_pong(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None
) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    from tpfuse.kernels import gemm_ping_pong  # it imports Gluon, which takes a tenth of a second

    problem = gemm_ping_pong.ping_pong_problem(x, weight, bias, residual, activation)
    return None if problem else gemm_ping_pong.gemm_ping_pong
