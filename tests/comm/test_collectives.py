import pytest
import torch
import torch.distributed as dist

from tpfuse.comm import collectives
from tpfuse.comm.mesh import group_of
from tpfuse.testing.inputs import integers
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _collect(dtype: torch.dtype) -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    whole = integers(1, world, 7 * world, 9, dtype=dtype)
    mine = whole[rank]
    for x in (mine, mine.t().contiguous().t()):  # strides must not matter
        before = x.clone()
        assert torch.equal(collectives.all_gather(x, group), whole.flatten(0, 1))
        assert torch.equal(collectives.reduce_scatter(x, group), whole.sum(0)[7 * rank : 7 * rank + 7])
        assert torch.equal(collectives.all_reduce(x, group), whole.sum(0))
        assert torch.equal(collectives.all_reduce_max(x, group), whole.amax(0))
        assert torch.equal(x, before)
    out = mine.clone()
    collectives.start_all_reduce(out, group).wait()
    assert torch.equal(out, whole.sum(0))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives(world: int, dtype: torch.dtype) -> None:
    pool(world).run(_collect, dtype)


def _under_way() -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    whole = integers(2, world, 4 * world)
    gathered, gather = collectives.start_all_gather(whole[rank], group)
    scattered, scatter = collectives.start_reduce_scatter(whole[rank], group)
    gather.wait()
    scatter.wait()
    assert torch.equal(gathered, whole.flatten())
    assert torch.equal(scattered, whole.sum(0)[4 * rank : 4 * rank + 4])


@pytest.mark.parametrize("world", [1, 3])
def test_two_collectives_under_way(world: int) -> None:
    pool(world).run(_under_way)


def _uneven() -> None:
    with pytest.raises(ValueError, match="7 rows cannot be split among 2 ranks"):
        collectives.reduce_scatter(torch.zeros(7, 2), group_of(tensor_mesh()))


def test_rows_that_cannot_be_scattered_are_refused() -> None:
    pool(2).run(_uneven)
