"""Differentiable collectives: integers reach the right ranks, and so do their gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.meshes import tensor_mesh
from tpfuse.comm.mesh import group_of
from tpfuse.ops import collectives
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks

Part = Callable[[Tensor, int], Tensor]
# collective -> (shapes of x and of the result's gradient on three ranks; what rank r gets of all x, of all gradients)
CASES: dict[str, tuple[tuple[int, int], tuple[int, int], Part, Part]] = {
    "all_gather": ((5, 9), (15, 9), lambda x, r: x.flatten(0, 1), lambda grad, r: grad.sum(0).chunk(3)[r]),
    "reduce_scatter": ((15, 9), (5, 9), lambda x, r: x.sum(0).chunk(3)[r], lambda grad, r: grad.flatten(0, 1)),
    "all_reduce": ((5, 9), (5, 9), lambda x, r: x.sum(0), lambda grad, r: grad[r]),
    "all_to_all": ((3, 9), (3, 9), lambda x, r: x[:, r], lambda grad, r: grad[:, r]),
    "replicate": ((5, 9), (5, 9), lambda x, r: x[r], lambda grad, r: grad.sum(0)),
    "gather_last": ((5, 9), (5, 27), lambda x, r: torch.cat([*x], -1), lambda grad, r: grad[0].chunk(3, -1)[r]),
    "split_last": ((5, 27), (5, 9), lambda x, r: x[0].chunk(3, -1)[r], lambda grad, r: torch.cat([*grad], -1)),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(3)
def test_forward_and_backward(name: str) -> None:
    shape, of_result, forward, backward = CASES[name]
    rank, x, grad = dist.get_rank(), integers(1, 3, *shape), integers(2, 3, *of_result)
    if name == "split_last":  # x is equal on all ranks
        x = x[:1].expand_as(x)
    if name in ("all_reduce", "gather_last"):  # so are the results, and their gradients
        grad = grad[:1].expand_as(grad)
    leaf = x[rank].clone().requires_grad_()
    result = getattr(collectives, name)(leaf, group_of(tensor_mesh()))
    result.backward(grad[rank])
    assert torch.equal(result, forward(x, rank))
    assert torch.equal(leaf.grad, backward(grad, rank))


@pytest.mark.parametrize("name", CASES)
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
