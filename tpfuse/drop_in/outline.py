"""The outline of a model: its modules, with their attributes and hooks, and no values."""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter


def outline(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a module and of its children that has their attributes and hooks, but no values.

    A style can be tried on it: parameters and buffers are on the meta device. memo: the copies made so far, by the id
    of what they copy, so that what is shared stays shared.
    """
    known: nn.Module | None = memo.get(id(module))
    if known is not None:
        return known
    copied = memo[id(module)] = module.__class__.__new__(module.__class__)
    for name, value in module.__dict__.items():
        copied.__dict__[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    for tensors in (copied._parameters, copied._buffers):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if id(tensor) not in memo:
                empty = torch.empty_like(tensor, device="meta") if not isinstance(tensor, DTensor) else tensor
                if isinstance(tensor, Parameter) and not isinstance(tensor, DTensor):
                    empty = Parameter(empty, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = empty
            tensors[name] = memo[id(tensor)]
    for name, child in copied._modules.items():
        copied._modules[name] = None if child is None else outline(child, memo)
    return copied
