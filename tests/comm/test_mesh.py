import pytest
import torch
import torch.distributed as dist

from tpfuse.comm.mesh import build_mesh, group_of, rank_and_size, shard_range
from tpfuse.testing.meshes import mesh_of
from tpfuse.testing.ranks import pool


@pytest.mark.parametrize("size", [0, 1, 2, 3, 63, 100, 1000])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_shards_are_those_of_torch_chunk(size: int, world: int) -> None:
    pieces = [torch.arange(size)[slice(*shard_range(size, rank, world))] for rank in range(world)]
    chunks = torch.arange(size).chunk(world)
    assert all(torch.equal(piece, chunk) for piece, chunk in zip(pieces, chunks, strict=False))
    assert torch.equal(torch.cat(pieces), torch.arange(size))


def _ranks_of_groups() -> tuple[list[int], list[int]]:
    mesh = mesh_of(2, 2)
    groups = group_of(mesh["tp"]), group_of(mesh["dp"])
    return dist.get_process_group_ranks(groups[0]), dist.get_process_group_ranks(groups[1])


def test_neighbours_are_a_tensor_parallel_group() -> None:
    assert pool(4).run(_ranks_of_groups) == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]


def _refusals() -> None:
    with pytest.raises(ValueError, match="dp 2 x tp 3 needs 6 ranks, but 2 are running"):
        build_mesh("cpu", dp=2, tp=3)
    with pytest.raises(ValueError, match=r'slice it, as in mesh\["tp"\]'):
        group_of(mesh_of(1, 2))


def test_wrong_meshes_are_refused() -> None:
    pool(2).run(_refusals)


def _single() -> None:
    assert group_of(mesh_of(1, 1)["tp"]) is None


def test_one_rank_has_no_group() -> None:
    assert group_of(None) is None
    assert rank_and_size(None) == (0, 1)
    pool(1).run(_single)
