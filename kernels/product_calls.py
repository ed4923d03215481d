"""Checks, plans and arguments that calls of several kernels share, above all of one in Triton and one in Gluon."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tpfuse.kernels.activations import GATED, check_activation
from tpfuse.kernels.checks import check_contiguous, check_device, check_floats, check_shape
from tpfuse.kernels.endpoint import Endpoint, check_ready
from tpfuse.kernels.launch import Launch, cdiv


def check_product(
    operator: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None = None,
    **others: Tensor | None,
) -> tuple[int, int, int]:
    """Return (M, K, N). Raise ValueError unless x is [M, K], weight [N, K] and bias [N].

    N must be even for a gated activation. All have one dtype and are on one device, the others too.
    """
    check_activation(operator, activation)
    check_floats(operator, x=x, weight=weight, bias=bias, **others)
    if x.ndim != 2:
        raise ValueError(f"{operator}: x has shape {tuple(x.shape)}: expected [M, K]")
    (m, k), n = x.shape, weight.shape[0] if weight.ndim else 0
    check_shape(operator, "weight", weight, (n, k))
    if activation in GATED and n % 2:
        raise ValueError(f"{operator}: weight has {n} rows: {activation} expects an even number, [gate | up]")
    check_shape(operator, "bias", bias, (n,))
    return m, k, n


class GatherPlan(NamedTuple):
    """The sizes and the launch of a call."""

    # The result is [rows, width]. The product has `columns`, gate and up included.
    rows: int
    width: int
    columns: int
    product: Launch


def run_gather(
    plan: GatherPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gathered: Tensor,
    ready: Tensor,
    activation: str | None,
    keep_preactivation: bool,
) -> tuple[Tensor, Tensor | None]:
    """Launch a planned product, and return its results as `all_gather_gemm_forward` does."""
    out = torch.empty(plan.rows, plan.width, dtype=x.dtype, device=x.device)
    preactivation = torch.empty(plan.rows, plan.columns, dtype=x.dtype, device=x.device) if keep_preactivation else None
    plan.product.run(
        x_ptr=x,
        weight_ptr=weight,
        weight_up_ptr=weight[plan.width :] if activation in GATED else None,
        bias_ptr=bias,
        preactivation_ptr=preactivation,
        out_ptr=out,
        gathered_ptr=gathered,
        ready_ptr=ready,
    )
    return out, preactivation


def check_gather(
    operator: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gathered: Tensor,
    ready: Tensor,
    endpoint: Endpoint,
    activation: str | None,
) -> tuple[int, int, int]:
    """Return (m, K, N). Raise ValueError unless the arguments are those of `all_gather_gemm_forward`."""
    m, k, n = check_product(operator, x, weight, bias, activation, gathered=gathered)
    check_device(operator, "the channel", endpoint.slots, "x", x)
    check_ready(operator, ready, endpoint)
    check_shape(operator, "gathered", gathered, (endpoint.world, m, k))
    check_contiguous(operator, "gathered", gathered)
    return m, k, n


def programs_beside_copies(tiles: int, endpoint: Endpoint) -> tuple[int]:
    """Return how many programs multiply beside copy engines. One of them at least advances the epoch."""
    return (max(min(tiles, endpoint.programs - 1), 1),)


class ScatterPlan(NamedTuple):
    """The sizes and the launch of a call, whose result is [rows, columns]. ping_pong: the launcher in its place."""

    rows: int
    columns: int
    product: Launch
    ping_pong: Callable[..., Tensor] | None


def check_scatter(
    operator: str, x: Tensor, weight: Tensor, endpoint: Endpoint, bias: Tensor | None, residual: Tensor | None
) -> tuple[int, int, int, int]:
    """Return (M, K, N, the most rows of an owner) of a call; raise ValueError for other shapes, dtypes or devices."""
    m, k, n = check_product(operator, x, weight, bias, residual=residual)
    check_device(operator, "the channel", endpoint.slots, "x", x)
    check_shape(operator, "residual", residual, (own_rows(m, endpoint), n))
    return m, k, n, cdiv(m, endpoint.world)


def own_rows(m: int, endpoint: Endpoint) -> int:
    """Return how many of M rows this rank owns."""
    chunk = cdiv(m, endpoint.world)
    return min(max(m - endpoint.rank * chunk, 0), chunk)


def term_strides(bias: Tensor | None, residual: Tensor | None) -> dict[str, int]:
    """Return the strides that a kernel takes of the terms of its epilogue, 0 without a term."""
    rm, rn = (0, 0) if residual is None else residual.stride()
    return {"stride_bias": 0 if bias is None else bias.stride(0), "stride_rm": rm, "stride_rn": rn}
