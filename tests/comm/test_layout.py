"""The position of local tensors in global ones, compared with DTensor."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.support.meshes import mesh_of, tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import copy_whole_, from_local, is_sharded, local_slices, local_tensor
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks


@pytest.mark.parametrize("world", [3, 4, *exhaustive(1, 2)])
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


@pytest.mark.parametrize("world", [3, *exhaustive(1, 2)])
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
