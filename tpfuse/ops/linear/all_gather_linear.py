"""all_gather_linear: act(all_gather(x) Wᵀ + bias), the entry of a sequence-parallel block, for one weight or several.

On each of R ranks, with M rows in all (dimensions after the first are rows too), P the gradient of the pre-activation:

    x [M / R, K]    W [N, K], this rank's rows    bias [N]    out [M, N], [M, N / 2] for a gated activation

    forward    X = all_gather(x) [M, K]; out = act(X Wᵀ + bias)         all-gather of x
    dgrad      dx = reduce_scatter(P W) [M / R, K]                      reduce-scatter of P W
    wgrad      dW = Pᵀ X [N, K], this rank's                            all-gather of x again
    dbias      column sums of P [N], this rank's                        none

Only this rank's shard of x is kept for backward (arXiv:2205.05198), and the pre-activation if there is one. Several
weights (q, k and v; gate and up) share one gather, and the sum of x's gradients through them is scattered once.
`tpfuse.ops.linear.dispatch` chooses the implementation.
"""

from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm.mesh import check_group
from tpfuse.ops.activation import GATED
from tpfuse.ops.autograd import apply, autocast, no_view, once_differentiable, refuse_tangents, wanted_gradients
from tpfuse.ops.checks import check_linear
from tpfuse.ops.gemm import gemm, preactivation_gradient
from tpfuse.ops.linear.dispatch import products
from tpfuse.ops.linear.parallel_linear import ParallelLinear

Biases = Sequence[Tensor | None]


class _AllGatherLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, chosen: ParallelLinear, activation: str | None, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights, biases = _weights(parameters), parameters[count:]
        ctx.products, ctx.activation, ctx.count = chosen, activation, count
        keep = activation is not None and any(ctx.needs_input_grad)
        pairs = chosen.all_gather(x, weights, biases, activation, keep)
        ctx.save_for_backward(x, *weights, *(preactivation for _, preactivation in pairs))
        return tuple(no_view(out) for out, _ in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        weights, preactivations = saved[: ctx.count], saved[ctx.count :]
        needs_x, _, _, *needs = wanted_gradients(ctx)
        triples = zip(grads, preactivations, needs[ctx.count :], strict=True)
        pairs = [preactivation_gradient(grad, before, ctx.activation, bias) for grad, before, bias in triples]
        lefts = [left for left, _ in pairs]
        grad_x, grad_weights = ctx.products.all_gather_backward(lefts, x, weights, needs[: ctx.count], needs_x)
        return grad_x, None, None, *grad_weights, *(sums for _, sums in pairs)


@overload
def all_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None, *, activation: str | None = None
) -> Tensor: ...
@overload
def all_gather_linear(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Biases | None,
    group: dist.ProcessGroup | None,
    *,
    activation: str | None = None,
) -> tuple[Tensor, ...]: ...
def all_gather_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Biases | None,
    group: dist.ProcessGroup | None,
    *,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Return act(all_gather(x) Wᵀ + bias), gathered along dimension 0.

    x: [n, ..., K], this rank's shard, with the same n on all ranks; weight: [N, K] and bias: [N], this rank's rows, in
    x's dtype. The result is [world * n, ..., N], or N / 2 for the gated activations, whose weight is [gate | up]. For
    several weights, and as many biases or None, the result is a tuple of their outputs, each with the activation
    applied (which must not be a gated one). In backward x's gradient is this rank's shard of the sum over ranks; the
    gradients of weights and biases are this rank's own.

    Raise ValueError for shapes, dtypes, devices or names of activations that do not fit, and if shape or
    dtype of x differ between ranks.
    """
    single = isinstance(weight, Tensor)
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [bias] if bias is None or isinstance(bias, Tensor) else list(bias)
    if not single and bias is None:
        biases = [None] * len(weights)
    check_group("all_gather_linear", group)
    _check(x, weights, biases, activation, single)
    if group is None:
        outs = tuple(gemm(x, w, b, activation=activation) for w, b in zip(weights, biases, strict=True))
        return outs[0] if single else outs
    x_, *parameters = autocast(x, *weights, *biases)
    chosen = products(x_, group)
    if torch.is_grad_enabled():
        outs = tuple(apply(_AllGatherLinear, x_, chosen, activation, *parameters))
    else:
        refuse_tangents("all_gather_linear", x_, *parameters)
        pairs = chosen.all_gather(x_, _weights(parameters), parameters[len(weights) :], activation, False)
        outs = tuple(out for out, _ in pairs)
    return outs[0] if single else outs


def _weights(parameters: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the first half of the parameters, none of which is None."""
    return [weight for weight in parameters[: len(parameters) // 2] if weight is not None]


def _check(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None, single: bool
) -> None:
    operator = "all_gather_linear"
    if not weights or len(biases) != len(weights):
        numbers = f"{len(weights)} weights and {len(biases)} biases"
        raise ValueError(f"{operator}: {numbers}: expected at least one weight and as many biases")
    if activation in GATED and not single:
        raise ValueError(f"{operator}: {activation} expects one weight, [gate | up], not {len(weights)}")
    for weight, bias in zip(weights, biases, strict=True):
        check_linear(operator, x, weight, bias, activation)
    if x.ndim < 2:
        raise ValueError(f"{operator}: x has shape {tuple(x.shape)}: expected [n, ..., K]")
