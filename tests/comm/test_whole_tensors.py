"""Whole tensors are loaded into sharded parameters and gathered from them."""

import pytest
import torch
import torch.distributed as dist

from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.collectives import anywhere
from tpfuse.comm.layout import Slices, copy_whole_, gather_whole, load_part_
from tpfuse.layers.on_mesh import empty_parameter
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks, pool


@pytest.mark.parametrize("world", [2, 3, *exhaustive(1, 4)])
@on_ranks("world")
def test_loading_and_gathering_return_the_same() -> None:
    for shape, dim in (((7, 5), 0), ((7, 5), 1), ((7, 5), None), ((2, 3), 0)):
        whole, asked = integers(1, *shape, dtype=torch.float64), []

        def read(slices: Slices, whole: torch.Tensor = whole, asked: list[Slices] = asked) -> torch.Tensor:
            asked.append(slices)
            return whole[tuple(slice(*bounds) for bounds in slices)]

        parameter = empty_parameter(shape, dim, tensor_mesh(), None, torch.float32)
        copy_whole_(parameter.detach(), whole)
        assert torch.equal(gather_whole(parameter), whole.float()) and not gather_whole(parameter).requires_grad
        parameter.detach().zero_()
        load_part_(parameter, read)
        assert torch.equal(gather_whole(parameter), whole.float())
        assert len(asked) == (1 if parameter.to_local().numel() else 0)


def test_plain_tensors_and_wrong_shapes() -> None:
    x = torch.zeros(2, 3)
    copy_whole_(x, torch.ones(2, 3))
    assert torch.equal(gather_whole(x), torch.ones(2, 3))
    with pytest.raises(ValueError, match="does not fit"):
        copy_whole_(x, torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"read a tensor of shape \(1, 3\): expected \(2, 3\)"):
        load_part_(x, lambda slices: torch.ones(1, 3))


def _anywhere() -> tuple[bool, bool]:
    return anywhere(dist.get_rank() == dist.get_world_size() - 1, tensor_mesh()), anywhere(False, tensor_mesh())


@pytest.mark.parametrize("world", [2, 3, *exhaustive(1)])
def test_anywhere_is_true_if_one_rank_is(world: int) -> None:
    assert pool(world).run(_anywhere) == [(True, False)] * world
    assert anywhere(True, None) and not anywhere(False, None)
