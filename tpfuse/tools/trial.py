"""What `tpfuse tune` measures: a launcher at a shape of a model, with its plain meaning to compare with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Trial:
    """name: what is measured. inputs: draws them, on "meta" too. run: the launcher, with all of them by keyword. plain:
    the same outputs by torch, in any dtype. work: operations or bytes of one call, `unit` is 1e12 of them a second."""

    name: str
    inputs: Callable[[torch.device, torch.dtype], dict[str, Tensor]]
    run: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    work: float
    unit: str


def normal(device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers times `scale`."""
    return (torch.randn(shape, device=device) * scale).to(dtype)


def gradients(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad: Tensor) -> Outputs:
    """The gradients of all inputs, for the gradient `grad` of the result."""
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    return torch.autograd.grad(function(**dict(zip(inputs, leaves, strict=True))), leaves, grad)
