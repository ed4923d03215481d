"""Checks of launchers' arguments: each error names in one line the argument, what was received and what is accepted."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_tensor(
    operator: str,
    name: str,
    x: Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    beside: tuple[str, Tensor],
    *,
    contiguous: bool = False,
) -> None:
    """Raise ValueError unless x has this shape, one of these dtypes and the device of `beside`; None is skipped."""
    if x is not None:
        check_dtype(operator, name, x, dtypes)
        check_device(operator, *beside, name, x)
        check_shape(operator, name, x, shape)
        if contiguous:
            check_contiguous(operator, name, x)


def check_shape(operator: str, name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless x has exactly this shape; None is skipped."""
    if x is not None and tuple(x.shape) != shape:
        raise ValueError(f"{operator}: {name} has shape {tuple(x.shape)}: expected {shape}")


def check_floats(operator: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors have one dtype of FLOATS and are on one device; None is skipped."""
    present = {name: x for name, x in tensors.items() if x is not None}
    first_name, first = next(iter(present.items()))
    for name, x in present.items():
        if x.dtype not in FLOATS:
            raise ValueError(f"{operator}: {name} is {x.dtype}: expected float32, float16 or bfloat16")
        if x.dtype != first.dtype:
            raise ValueError(f"{operator}: {name} is {x.dtype}, {first_name} is {first.dtype}: expected one dtype")
        check_device(operator, first_name, first, name, x)


def check_device(operator: str, first_name: str, first: Tensor, name: str, x: Tensor) -> None:
    """Raise ValueError unless both tensors are on one device."""
    if x.device != first.device:
        raise ValueError(f"{operator}: {name} is on {x.device}, {first_name} on {first.device}: expected one device")


def check_contiguous(operator: str, name: str, x: Tensor) -> None:
    """Raise ValueError unless x is contiguous."""
    if not x.is_contiguous():
        raise ValueError(f"{operator}: {name} has strides {x.stride()}: expected contiguous")


def check_dtype(operator: str, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ValueError unless x has one of these dtypes."""
    if x.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{operator}: {name} is {x.dtype}: expected {expected}")
