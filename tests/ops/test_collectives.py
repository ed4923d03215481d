"""Differentiable collectives: integers reach the right ranks, and so do their gradients."""

import pytest
import torch
import torch.distributed as dist

from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.mesh import group_of
from tpfuse.ops import collectives
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks

NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "replicate", "gather_last", "split_last")


@pytest.mark.parametrize("world", [2, 3, *exhaustive(1, 4)])
@pytest.mark.parametrize("name", NAMES)
@on_ranks("world")
def test_forward_and_backward(name: str) -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    x, grad = integers(1, world, 5, 9), integers(2, world, 5, 9)
    if name in ("reduce_scatter", "split_last"):
        x = integers(1, world, 5 * world, 9 * world)
    wide = integers(3, 5, 9 * world)  # the gradient of a whole result, equal on all ranks
    narrow = slice(9 * rank, 9 * rank + 9)
    if name == "all_gather":
        grad = integers(2, world, 5 * world, 9)
        out, given, expected = x.flatten(0, 1), grad[rank], grad.sum(0)[5 * rank : 5 * rank + 5]
    elif name == "reduce_scatter":
        grad = integers(2, world, 5, 9 * world)
        out, given, expected = x.sum(0)[5 * rank : 5 * rank + 5], grad[rank], grad.flatten(0, 1)
    elif name == "all_reduce":
        out, given, expected = x.sum(0), grad[0], grad[0]
    elif name == "all_to_all":
        x, grad = integers(1, world, world, 9), integers(2, world, world, 9)
        out, given, expected = x[:, rank], grad[rank], grad[:, rank]
    elif name == "replicate":
        out, given, expected = x[rank], grad[rank], grad.sum(0)
    elif name == "gather_last":
        out, given, expected = torch.cat(list(x), dim=-1), wide, wide[:, narrow]
    else:
        x = x[:1].expand(world, -1, -1)
        grad = integers(2, world, 5 * world, 9)
        out, given, expected = x[rank, :, narrow], grad[rank], torch.cat(list(grad), dim=-1)
    leaf = x[rank].clone().requires_grad_()
    result = getattr(collectives, name)(leaf, group)
    result.backward(given)
    assert torch.equal(result, out)
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_is_the_identity(name: str) -> None:
    x = integers(4, 3, 5)
    assert getattr(collectives, name)(x, None) is x


@on_ranks(2)
def test_rows_that_the_ranks_do_not_divide_are_refused() -> None:
    group = group_of(tensor_mesh())
    with pytest.raises(ValueError, match="3 rows cannot be split among 2 ranks"):
        collectives.reduce_scatter(torch.ones(3, 2), group)
    with pytest.raises(ValueError, match="split_last: 3 features cannot be split among 2 ranks"):
        collectives.split_last(torch.ones(2, 3), group)
