"""torch.autograd.Function with types, and under autocast.

torch leaves `apply` and `once_differentiable` without annotations; and inside a Function autocast would give
forward other dtypes than backward sees.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
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


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Under torch.autocast the tensors in its dtype (float64 stays), as F.linear would take them; else as they are."""
    device_type = next(x.device.type for x in tensors if x is not None)
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x is None or x.dtype is torch.float64 else x.to(dtype) for x in tensors)
