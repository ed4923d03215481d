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


class _SumInRankOrder:
    """The second half of a reduce-scatter by all-to-all: adds up what every rank sent, rank 0 first."""

    def __init__(self, received: Tensor, out: Tensor, work: Handle) -> None:
        self._received, self._out, self._work = received, out, work

    def wait(self) -> None:
        self._work.wait()
        half = self._out.dtype in (torch.bfloat16, torch.float16)
        total = self._received[0].float() if half else self._out.copy_(self._received[0])
        for partial in self._received[1:]:
            total += partial
        if half:
            self._out.copy_(total)


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Handle]:
    """This rank's [n, ...] of the sum over all ranks of `x` [world * n, ...].

    Over Gloo each rank sends its partial sums to their owners, who add them in rank order, half types in
    float32: the result does not depend on the rank, and it takes two thirds of the time of Gloo's own
    reduce-scatter (1 MB, 2 ranks, torch 2.13: 0.56 ms against 0.84). Raises ValueError where the world does
    not divide the rows.
    """
    if group is None:
        return x, _Done()
    world = group.size()
    if x.shape[0] % world:
        raise ValueError(f"reduce_scatter: {x.shape[0]} rows cannot be split among {world} ranks")
    x = x.contiguous()
    out = x.new_empty(x.shape[0] // world, *x.shape[1:])
    if dist.get_backend(group) == "gloo":
        received = x.new_empty(world, *out.shape)
        sent = dist.all_to_all_single(received.view(x.shape), x, group=group, async_op=True)
        return out, _SumInRankOrder(received, out, sent) if sent is not None else _Done()
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
