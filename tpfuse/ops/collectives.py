"""Collectives with a backward pass: the conjugate pairs of tensor parallelism.

| operator       | forward                  | backward                 |
|----------------|--------------------------|--------------------------|
| all_gather     | all-gather, dim 0        | reduce-scatter           |
| reduce_scatter | reduce-scatter, dim 0    | all-gather               |
| all_reduce     | all-reduce               | identity                 |
| all_to_all     | all-to-all, dim 0        | all-to-all               |
| replicate      | identity                 | all-reduce               |
| gather_last    | all-gather, last dim     | this rank's slice        |
| split_last     | this rank's slice        | all-gather, last dim     |

`all_reduce` and `gather_last` give every rank the same result, of which every rank computes the same loss:
their gradients are equal on all ranks and must not be summed again (Megatron-LM, arXiv:1909.08053, f and g;
sequence parallelism: arXiv:2205.05198). A group of None is one rank: every operator is the identity.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm import collectives
from tpfuse.comm.mesh import rank_and_size
from tpfuse.ops.autograd import apply, once_differentiable

Group = dist.ProcessGroup | None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.reduce_scatter(grad, ctx.group), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_gather(grad, ctx.group), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return collectives.all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.all_to_all(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_to_all(grad, ctx.group), None


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(grad, ctx.group), None


def _own_slice(x: Tensor, group: Group) -> Tensor:
    rank, world = rank_and_size(group)
    width = x.shape[-1] // world
    return x[..., rank * width : (rank + 1) * width].contiguous()


def _gathered_last(x: Tensor, group: Group) -> Tensor:
    rows = collectives.all_gather(x.movedim(-1, 0), group)
    return rows.movedim(0, -1).contiguous()


class _GatherLast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered_last(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_slice(grad, ctx.group), None


class _SplitLast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _own_slice(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered_last(grad, ctx.group), None


def all_gather(x: Tensor, group: Group) -> Tensor:
    """[n, ...] on each rank -> [world * n, ...] on all, in rank order."""
    return x if group is None else apply(_AllGather, x, group)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """[world * n, ...] partial sums on each rank -> this rank's [n, ...] of their sum.

    Raises ValueError where the world does not divide the rows.
    """
    return x if group is None else apply(_ReduceScatter, x, group)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Partial sums on each rank -> their sum on all."""
    return x if group is None else apply(_AllReduce, x, group)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """[world, ...] on each rank: row r goes to rank r -> [world, ...], row r came from rank r.

    Raises ValueError where x does not have a row for each rank.
    """
    return x if group is None else apply(_AllToAll, x, group)


def replicate(x: Tensor, group: Group) -> Tensor:
    """The same tensor on all ranks, used by each for a part of the loss: its gradients are summed."""
    return x if group is None else apply(_Replicate, x, group)


def gather_last(x: Tensor, group: Group) -> Tensor:
    """[..., n] on each rank -> [..., world * n] on all."""
    return x if group is None else apply(_GatherLast, x, group)


def split_last(x: Tensor, group: Group) -> Tensor:
    """[..., world * n], equal on all ranks -> this rank's [..., n].

    Raises ValueError where the world does not divide the last dimension.
    """
    if group is None:
        return x
    if x.shape[-1] % group.size():
        raise ValueError(f"split_last: {x.shape[-1]} features cannot be split among {group.size()} ranks")
    return apply(_SplitLast, x, group)
