"""Every implementation of every collective is exact. Integers differ per rank, so that a wrong index shows."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm import collectives, handle
from tpfuse.comm.agreement import exchange
from tpfuse.comm.collectives import collective, direct
from tpfuse.comm.collectives.fused import FusedCollectives
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.mesh import group_of
from tpfuse.comm.settings import set_settings
from tpfuse.switches import use
from tpfuse.testing.inputs import integers
from tpfuse.testing.patience import patient
from tpfuse.testing.ranks import on_ranks, pool

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
IMPLEMENTATIONS: tuple[Implementation, ...] = ("direct", "fused", "collective")


def _collect_one(name: Implementation, dtype: torch.dtype, rows: int, columns: int) -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    whole = integers(1, world, rows * world, columns, dtype=dtype)
    mine = whole[rank]
    with use(implementation=name):
        for x in (mine, mine.t().contiguous().t()):  # Strides must not matter.
            before = x.clone()
            assert torch.equal(collectives.all_gather(x, group), whole.flatten(0, 1))
            part = whole.sum(0, dtype=dtype)[rows * rank : rows * rank + rows]
            assert torch.equal(collectives.reduce_scatter(x, group), part)
            assert torch.equal(collectives.all_reduce(x, group), whole.sum(0, dtype=dtype))
            assert torch.equal(collectives.all_reduce_max(x, group), whole.amax(0))
            turned = whole.view(world, world, rows, columns)[:, rank]
            assert torch.equal(collectives.all_to_all(x.reshape(world, rows, columns), group), turned)
            assert torch.equal(x, before)
        out = mine.clone()
        collectives.start_all_reduce(out, group).wait()
        assert torch.equal(out, whole.sum(0, dtype=dtype))


@pytest.mark.parametrize(
    ("world", "dtypes"),
    [(2, (torch.float32, torch.int64)), (3, (torch.float64, torch.bfloat16)), *exhaustive((1, DTYPES), (4, DTYPES))],
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@on_ranks("world")
def test_every_collective_is_exact(name: Implementation, dtypes: tuple[torch.dtype, ...]) -> None:
    """The sizes are empty, small and above a slot; kernels, which are interpreted, have another test of the latter."""
    for dtype in dtypes:
        for rows, columns in ((7, 9), (0, 3), *[(10_003, 70)] * (name == "direct" and dtype.itemsize == 8)):
            _collect_one(name, dtype, rows, columns)


@pytest.mark.parametrize(
    ("name", "triton", "served"),
    [
        ("auto", False, ["DirectCollectives"] * 2),
        ("auto", True, ["FusedCollectives", "DirectCollectives"]),
        ("direct", True, ["DirectCollectives"] * 2),
        ("collective", True, ["TorchCollectives"] * 2),
    ],
)
@on_ranks(2)
def test_the_implementation_that_was_set_is_used(name: Implementation, triton: bool, served: list[str]) -> None:
    """The second class takes a maximum, which has no kernel."""
    x, group = torch.ones(3), dist.group.WORLD
    with use(implementation=name, kernels="triton" if triton else "auto"):
        found = [type(collectives.collectives_of(x, group, kernels=kernels)).__name__ for kernels in (True, False)]
    assert found == served


@on_ranks(2)
def test_tensors_above_a_slot_go_through_it_in_pieces() -> None:
    """Run kernels with slots that hold less than a row."""
    group, rank, world = dist.new_group(), dist.get_rank(), dist.get_world_size()
    launched = FusedCollectives(symmetric_memory(group, torch.device("cpu")), slot_bytes=128)
    whole = integers(1, world, world, 50)
    mine, row, rows = whole[rank].clone(), torch.empty(50), torch.empty(world, 50)
    for operation, x, out, expected in (
        (launched.all_gather, mine[0], rows, whole[:, 0]),
        (launched.all_to_all, mine, rows, whole[:, rank]),
        (launched.reduce_scatter, mine, row, whole.sum(0)[rank]),
        (launched.all_reduce, mine, rows, whole.sum(0)),
    ):
        operation(x, out).wait()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("world", [1, 3])
@on_ranks("world")
def test_several_collectives_under_way() -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    whole = integers(2, world, 4 * world)
    large = integers(3, world, 300_000 * world)
    gathered, gather = collectives.start_all_gather(whole[rank], group)
    scattered, scatter = collectives.start_reduce_scatter(large[rank], group)
    third, handle = collectives.start_all_gather(large[rank], group)
    assert torch.equal(collectives.all_reduce(whole[rank], group), whole.sum(0)), "one that overtakes all of them"
    for under_way in (scatter, gather, handle, handle):
        under_way.wait()
    assert torch.equal(gathered, whole.flatten())
    assert torch.equal(scattered, large.sum(0).view(world, -1)[rank])
    assert torch.equal(third, large.flatten())


@on_ranks(4)
def test_collectives_of_overlapping_groups_do_not_interfere() -> None:
    """Pairs of ranks and all ranks sum in turn, and one group's collective begins inside of the other's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    pair, first = pairs[rank // 2], rank // 2 * 2
    for i in range(20):
        whole = integers(i, world, 500 + i)
        out = whole[rank].clone()
        handle = collectives.start_all_reduce(out, dist.group.WORLD)
        assert torch.equal(collectives.all_gather(whole[rank], pair), whole[first : first + 2].flatten())
        handle.wait()
        assert torch.equal(out, whole.sum(0))


@pytest.mark.parametrize("world", [2, 3, 4])
@on_ranks("world")
def test_sums_are_rounded_once_and_the_same_on_all_ranks() -> None:
    ranks = range(dist.get_world_size())
    x = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in ranks]
    total = x[0].float()
    for part in x[1:]:
        total += part.float()
    for limit in (0, 2**20):  # two shots, and one
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct, "ONE_SHOT_BYTES", limit)
            assert torch.equal(collectives.all_reduce(x[dist.get_rank()], dist.group.WORLD), total.bfloat16())


def _late(objects: bool, deadline: float) -> str:
    """Let rank 2 stay away from a Gloo group of ranks 1 to 3, which no rank can use after the time-out.

    deadline: seconds, equal on all ranks.
    """
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() in (0, 2):
        dist.barrier()
        return ""
    set_settings(timeout=deadline)
    before, handle.PATIENCE = handle.PATIENCE, deadline
    try:
        if objects:
            collective.set_timeout(group)
            exchange("anything", group, op="all_reduce")
        with use(implementation="collective"):
            collectives.all_reduce(torch.zeros(3), group)
    except PeerTimeout as error:
        return f"{type(error).__name__}: {error}"
    finally:
        set_settings(timeout=60.0)
        handle.PATIENCE = before
        dist.barrier()
    return "no error"


@pytest.mark.parametrize("objects", [False, *exhaustive(True)])
def test_a_collective_of_gloo_names_the_missing_rank(objects: bool) -> None:
    """It is named by its number in the world, not in the group."""
    texts = pool(4).run(_late, objects, patient(0.5))
    for rank in (1, 3):
        assert re.match(rf"PeerTimeout: all_reduce: rank {rank} waited \d+\.\d s for rank 2$", texts[rank]), texts


@on_ranks(3)
def test_the_first_collective_names_the_missing_rank() -> None:
    group = dist.new_group()
    if dist.get_rank() != 1:
        set_settings(timeout=0.3)
        expected = rf"symmetric memory: rank {dist.get_rank()} waited \d+\.\d s for rank 1; it has not come"
        try:
            with pytest.raises(PeerTimeout, match=expected):
                collectives.all_reduce(torch.zeros(3), group)
        finally:
            set_settings(timeout=60.0)
    dist.barrier()


@on_ranks(2)
def test_an_error_of_another_kind_names_no_rank() -> None:
    named = handle.CollectiveHandle("all_reduce", dist.group.WORLD, None)
    with pytest.raises(RuntimeError, match=r"^no kernel image"), named.name_missing_rank():
        raise RuntimeError("no kernel image is available")


@on_ranks(2)
def test_collectives_are_outside_autograd() -> None:
    x = torch.ones(3, requires_grad=True)
    for out in (collectives.all_gather(x, dist.group.WORLD), collectives.all_reduce(x, dist.group.WORLD)):
        assert not out.requires_grad
    memory = symmetric_memory(dist.group.WORLD, torch.device("cpu"))
    assert not any(memory.buffer(key, b.shape, b.dtype).local.requires_grad for key, b in memory._buffers.items())


@on_ranks(2)
def test_rows_that_cannot_be_scattered_are_refused() -> None:
    group = group_of(tensor_mesh())
    with pytest.raises(ValueError, match="7 rows cannot be split among 2 ranks"):
        collectives.reduce_scatter(torch.zeros(7, 2), group)
    with pytest.raises(ValueError, match="all_to_all: 7 rows: expected one for each of 2 ranks"):
        collectives.all_to_all(torch.zeros(7, 2), group)
