"""gemm on Hopper in Gluon: the product of `ping_pong` with all rows at hand, and an activation's gradient in it."""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpfuse.kernels.activations import GATED
from tpfuse.kernels.checks import check_shape
from tpfuse.kernels.gemm_tiles import allows_tma
from tpfuse.kernels.gemm_weight import weight_layout
from tpfuse.kernels.launch import Launch, family, multiprocessors, planned
from tpfuse.kernels.ping_pong import load_tiles, matrix, product_arguments, product_tiles
from tpfuse.kernels.ping_pong_epilogue import run_warps
from tpfuse.kernels.product_calls import check_product


@gluon.jit
def _load_rows(x, M, rest):
    """Run the loading warp: fill the ring for all tiles of the program."""
    stage = 0
    parity = 1  # of the phase before the first one, which counts as ended: all stages are empty
    load_tiles(x, 0, M, gl.program_id(0), stage, parity, *rest)


@gluon.jit
def gemm_ping_pong_kernel(
    x_ptr,  # [M, K] bf16, read
    weight_ptr,  # [N, K] bf16, read
    weight_up_ptr,  # [N, K] bf16, read: the second half of a gated pair, or None
    bias_ptr,  # [N] bf16, [2 N] gated, read; or None
    beside_ptr,  # [M, N] bf16, read: the residual, or with GRADIENT the pre-activation; or None
    preactivation_ptr,  # [M, N] bf16, [M, 2 N] gated, written; or None
    out_ptr,  # [M, N] bf16, written
    M,
    N,
    K,
    stride_xm,
    stride_weight,
    stride_beside,
    ACTIVATION: gl.constexpr,
    GRADIENT: gl.constexpr,
    K_ADJACENT: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    run_warps(
        _load_rows, (matrix(x_ptr, M, K, stride_xm), M), weight_ptr, weight_up_ptr, bias_ptr, beside_ptr,
        preactivation_ptr, out_ptr, 0, M, N, K, stride_weight, stride_beside,
        ACTIVATION, GRADIENT, K_ADJACENT, GROUP_M, STAGES, 1,
    )  # fmt: skip


def gemm_ping_pong(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
    keep_preactivation: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return act(x Wᵀ + bias) + residual and, on request, x Wᵀ + bias, as `gemm_forward` does.

    The tensors are those of `gemm_forward`, of bfloat16 or float16, on an H100 or H200. Rows or columns of the weight,
    and rows of the others, have adjacent elements and begin at multiples of 16 bytes; so a result has a multiple of 8
    columns. A gated activation takes no residual. Raise ValueError for all else.
    """
    plan = _plan("gemm_ping_pong", x, weight, bias, residual, activation, False)
    out = torch.empty(plan.rows, plan.width, dtype=x.dtype, device=x.device)
    preactivation = torch.empty(plan.rows, len(weight), dtype=x.dtype, device=x.device) if keep_preactivation else None
    plan.product.run(
        x_ptr=x,
        weight_ptr=weight,
        weight_up_ptr=weight[plan.width :] if activation in GATED else None,
        bias_ptr=bias,
        beside_ptr=residual,
        preactivation_ptr=preactivation,
        out_ptr=out,
    )
    return out, preactivation


def gemm_ping_pong_gradient(grad: Tensor, weight: Tensor, preactivation: Tensor, activation: str) -> Tensor:
    """Return (grad W) ⊙ act'(preactivation) [M, N], the gradient of the argument of the activation before a product.

    grad: [M, K], of the product's result; weight: [K, N], the product's; preactivation: [M, N]. The activation is not
    gated. Everything else is as for `gemm_ping_pong`.
    """
    plan = _plan("gemm_ping_pong_gradient", grad, weight.t(), None, preactivation, activation, True)
    out = torch.empty(plan.rows, plan.width, dtype=grad.dtype, device=grad.device)
    plan.product.run(
        x_ptr=grad,
        weight_ptr=weight,
        weight_up_ptr=None,
        bias_ptr=None,
        beside_ptr=preactivation,
        preactivation_ptr=None,
        out_ptr=out,
    )
    return out


class _PingPongPlan(NamedTuple):
    """The sizes and the launch of a call."""

    rows: int
    width: int
    product: Launch


@planned
def _plan(
    operator: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    beside: Tensor | None,
    activation: str | None,
    gradient: bool,
) -> _PingPongPlan:
    name = "preactivation" if gradient else "residual"
    m, _, n = check_product(operator, x, weight, bias, activation, **{name: beside})
    width = n // 2 if activation in GATED else n
    check_shape(operator, name, beside, (m, width))
    problem = ping_pong_problem(x, weight, bias, beside, activation)
    if problem:
        raise ValueError(f"{operator}: {problem}")
    arguments = product_arguments(x, weight, width, activation) | {
        "stride_beside": beside.stride(0) if beside is not None else 0,
        "GRADIENT": gradient,
    }
    grid = (min(product_tiles(m, width, activation), multiprocessors(x.device)),)
    return _PingPongPlan(m, width, Launch(gemm_ping_pong_kernel, grid, arguments, num_warps=4, num_stages=1))


def ping_pong_problem(
    x: Tensor, weight: Tensor, bias: Tensor | None, beside: Tensor | None, activation: str | None
) -> str:
    """Return why the kernel cannot compute a product of `check_product`, or "" if it can."""
    gated = activation in GATED
    width = len(weight) // 2 if gated else len(weight)
    up = weight[width:] if gated else None
    if family(x.device) != "sm_90":
        return f"the tensors are on {x.device}: expected a GPU of compute capability 9.0"
    if x.element_size() != 2:
        return f"x is {x.dtype}: expected bfloat16 or float16"
    if gated and beside is not None:
        return f"{activation} is gated: expected no residual or pre-activation"
    if bias is not None and not bias.is_contiguous():
        return f"bias has strides {bias.stride()}: expected contiguous"
    if width % 8 or not weight_layout(weight[:width], up)[1] or not allows_tma(x, beside):
        return "a tensor is empty, or its rows are not of adjacent elements or do not begin at multiples of 16 bytes"
    return ""
