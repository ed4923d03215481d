"""The position of local tensors in global ones, compared with DTensor; whole tensors are loaded and gathered."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.support.meshes import mesh_of, tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.collectives import on_any_rank
from tpfuse.comm.layout import (
    Slices,
    copy_whole_,
    from_local,
    gather_whole,
    is_sharded,
    load_part_,
    local_slices,
    local_tensor,
)
from tpfuse.comm.mesh import groups_of
from tpfuse.layers.on_mesh import empty_parameter
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks


@pytest.mark.parametrize("world", [3, 4, *exhaustive(1)])
@on_ranks("world")
def test_local_slices_are_those_of_dtensor() -> None:
    dp = 2 if dist.get_world_size() == 4 else 1
    for mesh in (tensor_mesh(), mesh_of(dp, dist.get_world_size() // dp)):
        whole = integers(3, 5, 7, 2)
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            placements = [Replicate()] * (mesh.ndim - 1) + [placement]
            x = distribute_tensor(whole, mesh, placements)
            part = whole[tuple(slice(start, stop) for start, stop in local_slices(x))]
            assert torch.equal(part, x.to_local())
            assert is_sharded(x) == isinstance(placement, Shard)
            x = distribute_tensor(torch.zeros_like(whole), mesh, placements)
            copy_whole_(x, whole)
            assert torch.equal(x.full_tensor(), whole)


@pytest.mark.parametrize("world", [3, *exhaustive(1)])
@on_ranks("world")
def test_from_local_gives_the_global_shape_and_placement() -> None:
    whole = integers(4, 5, 3)
    rank, world = dist.get_rank(), dist.get_world_size()
    chunk = -(-5 // world)
    x = from_local(whole[rank * chunk : (rank + 1) * chunk], tensor_mesh(), 0, whole.shape)
    assert isinstance(x, DTensor) and x.shape == whole.shape and x.stride() == whole.stride()
    assert torch.equal(x.full_tensor(), whole)
    partial = DTensor.from_local(whole, tensor_mesh(), [Partial()])
    with pytest.raises(ValueError, match="expected Shard or Replicate"):
        local_slices(partial)


def test_a_plain_tensor_is_its_own_local_part() -> None:
    x = torch.zeros(3, 4)
    assert local_slices(x) == ((0, 3), (0, 4)) and not is_sharded(x)
    assert local_tensor(x.requires_grad_()).data_ptr() == x.data_ptr() and not local_tensor(x).requires_grad
    copy_whole_(x, torch.ones(3, 4, dtype=torch.float64))
    assert torch.equal(x, torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"\(4, 3\) does not fit one of \(3, 4\)"):
        copy_whole_(x, torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"read a tensor of shape \(1, 3\): expected \(3, 4\)"):
        load_part_(x, lambda slices: torch.ones(1, 3))


@pytest.mark.parametrize("world", [3, *exhaustive(1)])
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


@pytest.mark.parametrize("world", [2, *exhaustive(1)])
@on_ranks("world")
def test_a_flag_of_one_rank_is_one_of_all() -> None:
    cpu, groups = torch.device("cpu"), groups_of(tensor_mesh())
    assert on_any_rank(dist.get_rank() == dist.get_world_size() - 1, cpu, *groups)
    assert not on_any_rank(False, cpu, *groups)
    assert on_any_rank(True, cpu, None) and not on_any_rank(False, cpu)
