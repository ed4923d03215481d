"""The gradient of the pre-activation, P = grad ⊙ act'(pre-activation), as the prologue of both products of backward.

P is computed tile by tile in front of the products and never stored; it is rounded to the element type, as torch's own
backward rounds it. A gated pair has two halves of P, from the same tiles of grad, gate and up: act'(gate) up grad and
act(gate) grad.
"""

import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.activations import GATED, activate, activation_gradient, check_activation
from tpfuse.kernels.checks import check_shape
from tpfuse.kernels.gemm_tiles import load_tile
from tpfuse.kernels.tiles import rounded


@triton.jit
def load_preactivation_gradient(
    grad,  # of `matrix`, like the next two
    gate,  # the pre-activation, of a gated pair its first half; None without an activation
    up,  # the second half of a gated pair, or None
    first_m,
    first_n,
    M,
    N,
    stride_gm,
    stride_gn,
    stride_pm,
    stride_pn,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):
    """A tile of P = grad ⊙ act'(pre-activation) and, of a gated pair, of its second half, in grad's dtype."""
    dy = load_tile(grad, first_m, first_n, M, N, stride_gm, stride_gn, BLOCK_M, BLOCK_N, TMA)
    if ACTIVATION == "none":
        return dy, dy
    else:
        dy_32 = dy.to(tl.float32)
        g = load_tile(gate, first_m, first_n, M, N, stride_pm, stride_pn, BLOCK_M, BLOCK_N, TMA).to(tl.float32)
        if up is None:
            p = rounded(activation_gradient(dy_32, g, ACTIVATION), dy.dtype)
            return p, p
        else:
            u = load_tile(up, first_m, first_n, M, N, stride_pm, stride_pn, BLOCK_M, BLOCK_N, TMA).to(tl.float32)
            p = rounded(activation_gradient(dy_32 * u, g, ACTIVATION), dy.dtype)
            return p, rounded(dy_32 * activate(g, ACTIVATION), dy.dtype)


def check_preactivation(
    operator: str, grad: Tensor, preactivation: Tensor | None, activation: str | None
) -> Tensor | None:
    """The pre-activation where it is used."""
    check_activation(operator, activation)
    if grad.ndim != 2:
        raise ValueError(f"{operator}: grad has shape {tuple(grad.shape)}: expected [M, N]")
    if activation is None:
        return None
    if preactivation is None:
        raise ValueError(f"{operator}: preactivation is None: activation {activation} expects it")
    m, n = grad.shape
    check_shape(operator, "preactivation", preactivation, (m, 2 * n if activation in GATED else n))
    return preactivation


def halves_of(x: Tensor | None, activation: str | None, dimension: int) -> tuple[Tensor | None, Tensor | None]:
    """(gate, up) of a gated pair, (x, None) otherwise."""
    if x is None or activation not in GATED:
        return x, None
    gate, up = x.tensor_split(2, dim=dimension)
    return gate, up
