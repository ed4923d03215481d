"""Tensor-parallel products for torch.compile: operators of torch.library, each a node of the graph.

The compiler sees only shapes. When a node runs, `parallel_linear` chooses the implementation; the node finds the group
by its name. Tensors without values, on the meta device or under FakeTensorMode, take the same path: no product runs,
and the result has the right shape.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from tpfuse.comm.layout import is_traced
from tpfuse.comm.mesh import named_group
from tpfuse.ops.activation import GATED
from tpfuse.ops.linear.backend import ParallelLinear, parallel_linear


class TracedLinear:
    """The products of one group's ranks while torch.compile traces (see `ParallelLinear`)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name, self._world = group.group_name, group.size()

    def all_gather(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None, keep: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        """See `ParallelLinear`."""
        results = _all_gather(x, list(weights), list(biases), self._name, self._world, activation, keep)
        preactivations = results[len(weights) :] if keep else [None] * len(weights)
        return list(zip(results[: len(weights)], preactivations, strict=True))

    def all_gather_backward(
        self, lefts: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needs: Sequence[bool], needs_x: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """See `ParallelLinear`."""
        gradients = _all_gather_backward(list(lefts), x, list(weights), self._name, list(needs), needs_x)
        grad_x, *grad_weights = _where([needs_x, *needs], gradients)
        return grad_x, grad_weights

    def reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """See `ParallelLinear`."""
        out: Tensor = _reduce_scatter(x, weight, bias, residual, self._name, self._world)
        return out

    def reduce_scatter_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """See `ParallelLinear`."""
        grad_x, grad_weight, grad_bias = _where(
            needs, _reduce_scatter_backward(grad, x, weight, list(needs), self._name)
        )
        return grad_x, grad_weight, grad_bias

    def all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """See `ParallelLinear`."""
        out: Tensor = _all_reduce(x, weight, bias, residual, self._name)
        return out


def products(x: Tensor, group: dist.ProcessGroup) -> ParallelLinear:
    """Return what computes the products of x's device and dtype: `parallel_linear`, unless x is traced."""
    return TracedLinear(group) if is_traced(x) else parallel_linear(x, group)


def _where(needed: Sequence[bool], gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """Return for each flag the next gradient if it is true, otherwise None."""
    remaining = iter(gradients)
    return [next(remaining) if flag else None for flag in needed]


@custom_op("tpfuse::all_gather_linear", mutates_args=())
def _all_gather(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group_name: str,
    world: int,
    activation: str | None,
    keep: bool,
) -> list[Tensor]:
    """Return the outputs and, if `keep`, the pre-activations."""
    pairs = parallel_linear(x, named_group(group_name)).all_gather(x, weights, biases, activation, keep)
    return [out for out, _ in pairs] + [preactivation for _, preactivation in pairs if preactivation is not None]


@_all_gather.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group_name: str,
    world: int,
    activation: str | None,
    keep: bool,
) -> list[Tensor]:
    rows, half = (world * x.shape[0], *x.shape[1:-1]), 2 if activation in GATED else 1
    outs = [x.new_empty(*rows, weight.shape[0] // half) for weight in weights]
    return outs + ([x.new_empty(*rows, weight.shape[0]) for weight in weights] if keep else [])


@custom_op("tpfuse::all_gather_linear_backward", mutates_args=())
def _all_gather_backward(
    lefts: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    group_name: str,
    needs: Sequence[bool],
    needs_x: bool,
) -> list[Tensor]:
    """Return the needed ones of dX and the dWs."""
    chosen = parallel_linear(x, named_group(group_name))
    grad_x, grad_weights = chosen.all_gather_backward(lefts, x, weights, needs, needs_x)
    return [grad for grad in (grad_x, *grad_weights) if grad is not None]


@_all_gather_backward.register_fake
def _(
    lefts: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    group_name: str,
    needs: Sequence[bool],
    needs_x: bool,
) -> list[Tensor]:
    shapes = [x.shape] if needs_x else []
    shapes += [weight.shape for weight, needed in zip(weights, needs, strict=True) if needed]
    return [x.new_empty(shape) for shape in shapes]


@custom_op("tpfuse::linear_reduce_scatter", mutates_args=())
def _reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, group_name: str, world: int
) -> Tensor:
    return parallel_linear(x, named_group(group_name)).reduce_scatter(x, weight, bias, residual)


@_reduce_scatter.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, group_name: str, world: int) -> Tensor:
    return x.new_empty(x.shape[0] // world, *x.shape[1:-1], weight.shape[0])


@custom_op("tpfuse::linear_reduce_scatter_backward", mutates_args=())
def _reduce_scatter_backward(
    grad: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], group_name: str
) -> list[Tensor]:
    """Return the needed ones of dX, dW and db."""
    needs_x, needs_weight, needs_bias = needs
    chosen = parallel_linear(x, named_group(group_name))
    gradients = chosen.reduce_scatter_backward(grad, x, weight, (needs_x, needs_weight, needs_bias))
    return [gradient for gradient in gradients if gradient is not None]


@_reduce_scatter_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], group_name: str) -> list[Tensor]:
    shapes = x.shape, weight.shape, weight.shape[:1]
    return [x.new_empty(shape) for shape, needed in zip(shapes, needs, strict=True) if needed]


@custom_op("tpfuse::linear_all_reduce", mutates_args=())
def _all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, group_name: str) -> Tensor:
    return parallel_linear(x, named_group(group_name)).all_reduce(x, weight, bias, residual)


@_all_reduce.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, group_name: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
