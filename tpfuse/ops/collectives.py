"""Collectives with a backward pass: the conjugate pairs of tensor parallelism.

On R ranks, forward and backward communicate:

| operator       | x, on each rank | result     | forward         | backward        |
|----------------|-----------------|------------|-----------------|-----------------|
| all_gather     | [n, ...]        | [R n, ...] | all-gather      | reduce-scatter  |
| reduce_scatter | [R n, ...]      | [n, ...]   | reduce-scatter  | all-gather      |
| all_reduce     | [...]           | [...]      | all-reduce      | none: identity  |
| all_to_all     | [R, ...]        | [R, ...]   | all-to-all      | all-to-all      |
| replicate      | [...]           | [...]      | none: identity  | all-reduce      |
| gather_last    | [..., n]        | [..., R n] | all-gather      | none: own slice |
| split_last     | [..., R n]      | [..., n]   | none: own slice | all-gather      |

`all_reduce` and `gather_last` give every rank the same result, from which every rank computes the same loss: their
gradients are equal on all ranks and must not be summed again (Megatron-LM, arXiv:1909.08053, f and g; sequence
parallelism: arXiv:2205.05198). A group of None means one rank: every operator is the identity.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.library import custom_op

from tpfuse.comm import collectives
from tpfuse.comm.layout import is_traced
from tpfuse.comm.mesh import check_group, named_group
from tpfuse.ops.autograd import apply, once_differentiable

Group = dist.ProcessGroup | None


class _Kind(NamedTuple):
    """A kind of collective, that of the operator with its name.

    run(x, group) is the collective, shape(x, world) the shape of its result. backward: the name of the kind that
    computes the gradient.
    """

    run: Callable[[Tensor, dist.ProcessGroup], Tensor]
    shape: Callable[[Tensor, int], tuple[int, ...]]
    backward: str


def _same(x: Tensor, world: int) -> tuple[int, ...]:
    return tuple(x.shape)


def _own_slice(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    width = x.shape[-1] // group.size()
    return x[..., group.rank() * width : (group.rank() + 1) * width].clone(memory_format=torch.contiguous_format)


def _gathered_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows = collectives.all_gather(x.movedim(-1, 0), group)
    return rows.movedim(0, -1).contiguous()


_KINDS = {
    "all_gather": _Kind(collectives.all_gather, lambda x, world: (world * x.shape[0], *x.shape[1:]), "reduce_scatter"),
    "reduce_scatter": _Kind(
        collectives.reduce_scatter, lambda x, world: (x.shape[0] // world, *x.shape[1:]), "all_gather"
    ),
    "all_reduce": _Kind(collectives.all_reduce, _same, "replicate"),
    "replicate": _Kind(lambda x, group: x.view_as(x), _same, "all_reduce"),
    "all_to_all": _Kind(collectives.all_to_all, _same, "all_to_all"),
    "gather_last": _Kind(_gathered_last, lambda x, world: (*x.shape[:-1], world * x.shape[-1]), "split_last"),
    "split_last": _Kind(_own_slice, lambda x, world: (*x.shape[:-1], x.shape[-1] // world), "gather_last"),
}


@custom_op("tpfuse::collective", mutates_args=())
def _collective(x: Tensor, kind: str, group_name: str, world: int) -> Tensor:
    """Return the collective of x: a node of torch.compile's graph."""
    return _KINDS[kind].run(x, named_group(group_name))


@_collective.register_fake
def _(x: Tensor, kind: str, group_name: str, world: int) -> Tensor:
    return x.new_empty(_KINDS[kind].shape(x, world))


class _Collective(Function):
    """A collective with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, name: str, world: int) -> Tensor:
        ctx.kind, ctx.ranks = kind, (name, world)
        return _run(x, kind, *ctx.ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _run(grad, _KINDS[ctx.kind].backward, *ctx.ranks), None, None, None


def _run(x: Tensor, kind: str, name: str, world: int) -> Tensor:
    if kind == "replicate":
        return x.view_as(x)
    return _collective(x, kind, name, world) if is_traced(x) else _KINDS[kind].run(x, named_group(name))


def _apply(x: Tensor, kind: str, group: Group) -> Tensor:
    check_group(kind, group)
    return x if group is None else apply(_Collective, x, kind, group.group_name, group.size())


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Gather [n, ...] of each rank to [world * n, ...] on all ranks, in rank order."""
    return _apply(x, "all_gather", group)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum the partial sums [world * n, ...] of all ranks and return this rank's [n, ...] of the result.

    Raise ValueError if the world does not divide the rows.
    """
    return _apply(x, "reduce_scatter", group)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' partial sums x, on every rank."""
    return _apply(x, "all_reduce", group)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Send row r of x [world, ...] to rank r, and return [world, ...] whose row r came from rank r.

    Raise ValueError if x does not have a row for each rank.
    """
    return _apply(x, "all_to_all", group)


def replicate(x: Tensor, group: Group) -> Tensor:
    """Return x, which is equal on all ranks. Each uses it for a part of the loss, so its gradients are summed."""
    return _apply(x, "replicate", group)


def gather_last(x: Tensor, group: Group) -> Tensor:
    """Gather [..., n] of each rank to [..., world * n] on all ranks."""
    return _apply(x, "gather_last", group)


def split_last(x: Tensor, group: Group) -> Tensor:
    """Return this rank's [..., n] of x [..., world * n], which is equal on all ranks.

    Raise ValueError if the world does not divide the last dimension.
    """
    if group is None:
        return x
    if x.shape[-1] % group.size():
        raise ValueError(f"split_last: {x.shape[-1]} features cannot be split among {group.size()} ranks")
    return _apply(x, "split_last", group)
