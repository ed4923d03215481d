"""torch.autograd.Function with types, and under autocast.

torch's `apply` has no annotations. Its `once_differentiable` returns gradients without a graph, and so without an
error, if the upstream gradient requires none (after a sum or a loss). Inside a Function, autocast would give forward
other dtypes than backward has.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

_Backward = TypeVar("_Backward", bound=Callable[..., Any])


def apply(function: type[Function], *args: object) -> Tensor:
    """Return `function.apply(*args)` of a Function that returns one tensor."""
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]


class _FirstDerivative(Function):
    """The identity of gradients, whose own gradients are an error."""

    @staticmethod
    def forward(ctx: Any, operator: str, anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.operator = operator
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            f"{ctx.operator} has no second derivative: create_graph=True gives gradients that cannot be differentiated"
        )


def once_differentiable(backward: _Backward) -> _Backward:
    """Return `backward`, computed without a graph, such that a second derivative is an error.

    backward: the backward of a Function, or of an operator of torch.library.
    """

    @functools.wraps(backward)
    def first_derivative(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # no create_graph; compiled code has none
            return results
        gradients = [results] if isinstance(results, Tensor) else list(results)
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        operator = type(ctx).__name__.removeprefix("_").removesuffix("Backward")
        anchor = torch.ones((), requires_grad=True)
        marked = _FirstDerivative.apply(operator, anchor, *(gradients[index] for index in present))  # type: ignore[no-untyped-call]
        for index, gradient in zip(present, marked, strict=True):
            gradients[index] = gradient
        return gradients[0] if isinstance(results, Tensor) else tuple(gradients)

    return cast(_Backward, first_derivative)


def is_autocast(device: torch.device) -> bool:
    """Return whether torch.autocast is on for tensors on `device`; the meta device has no autocast."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast(x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors, converted under torch.autocast to its dtype as F.linear does; float64 is not converted."""
    tensors = x, *others
    if not is_autocast(x.device):
        return tensors
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(x if x is None or x.dtype is torch.float64 else x.to(dtype) for x in tensors)
