"""torch.autograd.Function with types: torch leaves `apply` and `once_differentiable` without annotations."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable as _once_differentiable

_Backward = TypeVar("_Backward", bound=Callable[..., Any])


def apply(function: type[Function], *args: object) -> Tensor:
    """`function.apply(*args)` of a Function that returns one tensor."""
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]


def once_differentiable(backward: _Backward) -> _Backward:
    """Makes a second derivative an error: a collective inside `backward` would drop out of it silently."""
    return cast(_Backward, _once_differentiable(backward))
