"""Tensor-parallel products for torch.compile: operators of torch.library, each a node of the graph.

The compiler sees only shapes. When a node runs, it finds the group by its name, and the implementation is chosen then.
Tensors without values, on the meta device or under FakeTensorMode, take the same path: no product runs, and the result
has the right shape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from tpfuse.comm.mesh import named_group
from tpfuse.ops.activation import GATED
from tpfuse.ops.linear.parallel_linear import ByMethod, ParallelLinear

_Shape = tuple[int, ...]
# The shapes of the results, None for one that is not computed.
_Shapes = list[_Shape | None]


def _all_gather(
    world: int, x: Tensor, weights: list[Tensor], biases: Any, activation: str | None, keep: bool
) -> _Shapes:
    rows, half = (world * x.shape[0], *x.shape[1:-1]), 2 if activation in GATED else 1
    counts = [weight.shape[0] for weight in weights]
    pairs = [((*rows, n // half), (*rows, n) if keep else None) for n in counts]
    return [shape for pair in pairs for shape in pair]


def _all_gather_backward(
    world: int, lefts: list[Tensor], x: Tensor, weights: list[Tensor], needs: list[bool], needs_x: bool
) -> _Shapes:
    pairs = zip((x, *weights), (needs_x, *needs), strict=True)
    return [tensor.shape if needed else None for tensor, needed in pairs]


def _reduce_scatter_backward(world: int, grad: Tensor, x: Tensor, weight: Tensor, needs: list[bool]) -> _Shapes:
    shapes = x.shape, weight.shape, weight.shape[:1]
    return [shape if needed else None for shape, needed in zip(shapes, needs, strict=True)]


_LINEAR = "Tensor x, Tensor weight, Tensor? bias, Tensor? residual"
# For each method of `ParallelLinear`: the operator's name, its arguments, and the shapes of its results.
_OPERATORS: dict[str, tuple[str, str, Callable[..., _Shapes]]] = {
    "all_gather": (
        "all_gather_linear", "Tensor x, Tensor[] weights, Tensor?[] biases, str? activation, bool keep", _all_gather
    ),
    "all_gather_backward": (
        "all_gather_linear_backward", "Tensor[] lefts, Tensor x, Tensor[] weights, bool[] needs, bool needs_x",
        _all_gather_backward,
    ),
    "reduce_scatter": (
        "linear_reduce_scatter", _LINEAR,
        lambda world, x, weight, *_: [(x.shape[0] // world, *x.shape[1:-1], weight.shape[0])],
    ),
    "reduce_scatter_backward": (
        "linear_reduce_scatter_backward", "Tensor grad, Tensor x, Tensor weight, bool[] needs", _reduce_scatter_backward
    ),
    "all_reduce": ("linear_all_reduce", _LINEAR, lambda world, x, weight, *_: [(*x.shape[:-1], weight.shape[0])]),
}  # fmt: skip


Operators = Mapping[str, Callable[..., list[Tensor]]]
"""The operator of torch.library for each method of `ParallelLinear`; it returns the results that are computed."""


def define_operators(choose: Callable[[Tensor, dist.ProcessGroup], ParallelLinear]) -> Operators:
    """Define the operators, which run what `choose` returns. Call it once in a process."""
    return {method: _define(method, *row, choose) for method, row in _OPERATORS.items()}


def _define(
    method: str,
    name: str,
    arguments: str,
    shapes: Callable[..., _Shapes],
    choose: Callable[[Tensor, dist.ProcessGroup], ParallelLinear],
) -> Callable[..., list[Tensor]]:
    def run(*call: Any) -> list[Tensor]:
        *given, group, _ = call
        return list(_tensors(getattr(choose(_first(given), named_group(group)), method)(*given)))

    def fake(*call: Any) -> list[Tensor]:
        *given, _, world = call
        return [_first(given).new_empty(shape) for shape in shapes(world, *given) if shape is not None]

    schema = f"({arguments}, str group, SymInt world) -> Tensor[]"
    operator = custom_op(f"tpfuse::{name}", run, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator


def _first(arguments: Sequence[Any]) -> Tensor:
    return next(x for x in arguments if isinstance(x, Tensor))


def _tensors(results: Any) -> Iterator[Tensor]:
    """Yield the tensors in a result, which may be one, or sequences of them with None for those not computed."""
    if isinstance(results, Tensor):
        yield results
    elif results is not None:
        for each in results:
            yield from _tensors(each)


class TracedLinear(ByMethod):
    """The products of one group's ranks while torch.compile traces (see `ParallelLinear`)."""

    def __init__(self, operators: Operators, group: dist.ProcessGroup) -> None:
        self._operators, self._name, self._world = operators, group.group_name, group.size()

    def _run(self, method: str, *call: Any) -> Any:
        arguments = [list(x) if isinstance(x, list | tuple) else x for x in call]
        computed = iter(self._operators[method](*arguments, self._name, self._world))
        shapes = _OPERATORS[method][2](self._world, *arguments)
        results = [None if shape is None else next(computed) for shape in shapes]
        if method == "all_gather":
            return list(zip(results[::2], results[1::2], strict=True))
        if method == "all_gather_backward":
            return results[0], results[1:]
        return tuple(results) if method == "reduce_scatter_backward" else results[0]
