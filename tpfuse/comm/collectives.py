"""Collectives over torch.distributed (NCCL or Gloo) along dimension 0, without autograd.

A group of None stands for a single rank and costs nothing. `start_*` begin a collective and return the
result with a handle; the result may be read once `wait()` has returned.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the two; older releases know only the second name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Blocks (on CUDA: the current stream) until the result may be read."""


class _Done:
    def wait(self) -> None:
        return None


def start_all_gather(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Handle]:
    """All ranks' `x` [n, ...] behind each other in rank order: [world * n, ...]. Shapes must agree."""
    if group is None:
        return x, _Done()
    x = x.contiguous()
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    work = _all_gather(out, x, group=group, async_op=True)
    return out, work if work is not None else _Done()


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Handle]:
    """This rank's [n, ...] of the sum over all ranks of `x` [world * n, ...]."""
    if group is None:
        return x, _Done()
    if x.shape[0] % group.size():
        raise ValueError(f"reduce_scatter: {x.shape[0]} rows cannot be split among {group.size()} ranks")
    x = x.contiguous()
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    work = _reduce_scatter(out, x, group=group, async_op=True)
    return out, work if work is not None else _Done()


def start_all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Handle:
    """Replaces the contiguous `x` by its sum over all ranks, in place."""
    if group is None:
        return _Done()
    work = dist.all_reduce(x, group=group, async_op=True)
    return work if work is not None else _Done()


def all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`start_all_gather`, waited for."""
    out, handle = start_all_gather(x, group)
    handle.wait()
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`start_reduce_scatter`, waited for."""
    out, handle = start_reduce_scatter(x, group)
    handle.wait()
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A new tensor: the sum of `x` over all ranks."""
    if group is None:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    start_all_reduce(out, group).wait()
    return out


def all_reduce_max(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A new tensor: the maximum of `x` over all ranks."""
    if group is None:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=dist.ReduceOp.MAX, group=group)
    return out
