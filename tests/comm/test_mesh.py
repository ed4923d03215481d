"""Device meshes, their groups, and the shards of a dimension."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import tpfuse
from tests.support.meshes import mesh_of
from tpfuse.comm import mesh as mesh_module
from tpfuse.comm.errors import named
from tpfuse.comm.layout import local_slices
from tpfuse.comm.mesh import (
    build_mesh,
    check_order,
    context_mesh,
    flat_group,
    group_of,
    group_of_ends,
    rank_and_size,
    shard_range,
)
from tpfuse.kernels.launch import RESERVED
from tpfuse.parallel.context import ContextParallel
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero.sharded_units import data_mesh


@pytest.mark.parametrize("size", [0, 1, 2, 3, 63, 100, 1000])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_shards_are_those_of_torch_chunk(size: int, world: int) -> None:
    pieces = [torch.arange(size)[slice(*shard_range(size, rank, world))] for rank in range(world)]
    chunks = torch.arange(size).chunk(world)
    assert all(torch.equal(piece, chunk) for piece, chunk in zip(pieces, chunks, strict=False))
    assert torch.equal(torch.cat(pieces), torch.arange(size))


@on_ranks(4)
def test_neighbouring_ranks_are_a_tensor_parallel_group() -> None:
    rank, mesh = dist.get_rank(), mesh_of(2, 2)
    assert dist.get_process_group_ranks(group_of(mesh["tp"])) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(group_of(mesh["dp"])) == [rank % 2, rank % 2 + 2]


def _context_groups(ulysses: int) -> list[list[int]]:
    mesh = mesh_of(2, 1, 2) if ulysses == 1 else mesh_of(1, 1, 4, 2)
    context = context_mesh(mesh)
    assert context is not None
    found = [context.get_group(axis) for axis in range(context.ndim)]
    found += [flat_group(mesh, "dp", "cp", "ring", "ulysses"), flat_group(mesh, "cp", "ring", "ulysses")]
    assert flat_group(mesh, "tp") is None
    assert flat_group(mesh, "cp", "nowhere") is (None if ulysses == 2 else context.get_group())
    return [dist.get_process_group_ranks(group) for group in found]


def test_context_parallel_ranks_are_neighbours_and_ulysses_ranks_too() -> None:
    everyone = [0, 1, 2, 3]
    assert pool(4).run(_context_groups, 1) == [[own, everyone, own] for own in ([0, 1], [0, 1], [2, 3], [2, 3])]
    assert pool(4).run(_context_groups, 2) == [
        [ring, ulysses, everyone, everyone]
        for ring, ulysses in (([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3]))
    ]


@on_ranks(4)
def test_the_ranks_of_a_pipeline_are_farthest_apart() -> None:
    rank, mesh = dist.get_rank(), mesh_of(1, 2, pp=2)
    assert mesh.mesh_dim_names == ("pp", "dp", "tp")
    assert dist.get_process_group_ranks(mesh.get_group("pp")) == [rank % 2, rank % 2 + 2]
    for group in (flat_group(mesh, "dp", "tp"), mesh.get_group("tp")):
        assert dist.get_process_group_ranks(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert named(rank) == f"rank {rank} (pp {rank // 2}, tp {rank % 2})"


@on_ranks(4)
def test_only_the_ranks_of_a_mesh_make_the_group_of_its_ends() -> None:
    rank, default = dist.get_rank(), dist.distributed_c10d._get_default_group()
    mesh = DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("pp",))
    default.bound_device_id = torch.device("cuda", 0)
    splits = AssertionError("a communicator of all ranks is split")
    with mock.patch.object(dist.distributed_c10d, "_get_split_source", side_effect=splits):
        ends = group_of_ends(mesh, 0, 2) if rank < 3 else None
    assert default.bound_device_id == torch.device("cuda", 0)
    default.bound_device_id = None
    assert (ends and dist.get_process_group_ranks(ends)) == (None if rank % 2 else [0, 2])
    dist.barrier(dist.new_group())  # all ranks still count as many groups


def test_sums_by_nccl_have_no_more_programs_than_products_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(mesh_module, "init_device_mesh", lambda *_, **given: made.update(given))
    build_mesh("cuda", dp=4, tp=1)
    assert [*made["backend_override"]] == ["dp"] and made["backend_override"]["dp"].config.max_ctas == RESERVED // 2
    build_mesh("cuda", dp=1, tp=4)
    assert made["backend_override"] is None


@on_ranks(4)
def test_groups_of_a_mesh_have_no_more_programs_than_products_leave() -> None:
    """Check `max_ctas` of the groups of data-parallel ranks that are made from a mesh, as NCCL would have them."""
    mesh, made, options = mesh_of(2, 2), list[list[int]](), lambda: SimpleNamespace(config=SimpleNamespace())

    def make(self: DeviceMesh, *_: Any, backend_override: Any) -> Any:
        groups = backend_override.values() if isinstance(backend_override, dict) else [backend_override]
        made.append([each.config.max_ctas for each in groups])
        return mock.MagicMock()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda *_: "nccl")
        patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
        patch.setattr(DeviceMesh, "_unflatten", make)
        patch.setattr(DeviceMesh, "_flatten", make)
        data_mesh(mesh, 1)
        data_mesh(mesh, 2)
        flat_group(mesh, "dp", "tp")
    assert made == [[RESERVED] * 2, [RESERVED // 2] * 2, [RESERVED // 2]]


@on_ranks(2)
def test_wrong_meshes_are_refused() -> None:
    for sizes, message in (
        ({"dp": 1, "cp": 2, "tp": 1, "ulysses": 3}, "ulysses 3 does not divide cp 2"),
        ({"dp": 2, "tp": 3}, "dp 2 x tp 3 needs 6 ranks, but 2 are running"),
        ({"dp": 2, "tp": 1, "cp": 3, "pp": 2}, "pp 2 x dp 2 x cp 3 x tp 1 needs 12 ranks, but 2 are running"),
    ):
        with pytest.raises(ValueError, match=message):
            build_mesh("cpu", **sizes)
    with pytest.raises(ValueError, match=r'slice it, as in mesh\["tp"\]'):
        group_of(mesh_of(1, 2))


def _pipeline(mesh: DeviceMesh) -> object:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return tpfuse.Pipeline(
        model, embed=lambda x: x, blocks=list(model), head=lambda x: x, device_mesh=mesh, micro_batches=2
    )


# Whatever takes a mesh from a user, by name.
_ENTRANCES: dict[str, Callable[[DeviceMesh], object]] = {
    "layer": lambda mesh: tpfuse.VocabParallelEmbedding(5, 4, device_mesh=mesh),
    "norm": lambda mesh: tpfuse.LayerNorm(4, device_mesh=mesh),
    "norm of a sequence": lambda mesh: tpfuse.LayerNorm(4, sequence_parallel=True, device_mesh=mesh),
    "parallelize": lambda mesh: tpfuse.parallelize(nn.Linear(4, 4), mesh, {"": ColwiseParallel()}),
    "style": lambda mesh: parallelize_module(nn.Linear(4, 4), mesh, tpfuse.FusedColwiseParallel()),
    "context": ContextParallel,
    "pipeline": _pipeline,
    "zero": lambda mesh: tpfuse.ZeroOptimizer(nn.Linear(4, 4), mesh, stage=3),
    "checkpoint": lambda mesh: local_slices(distribute_tensor(torch.zeros(5), mesh, [Shard(0)])),
}


@on_ranks(2)
def test_a_mesh_in_another_order_is_refused_wherever_it_enters() -> None:
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",))
    for name, enter in _ENTRANCES.items():
        with pytest.raises(ValueError, match=r"ranks \[1, 0\] along axis dp: expected ascending order"):
            enter(mesh)
            pytest.fail(name)


@pytest.mark.parametrize("ranks", [[0], [0, 2]])
@on_ranks(3)
def test_a_rank_outside_of_a_mesh_is_refused_wherever_the_mesh_enters(ranks: list[int]) -> None:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp",))
    for name, enter in _ENTRANCES.items() if dist.get_rank() == 1 else ():
        if name != "checkpoint":  # torch makes no such DTensor
            with pytest.raises(ValueError, match=r"rank 1 is not in device_mesh, which has the ranks \[0"):
                enter(mesh)
                pytest.fail(name)


@on_ranks(4)
def test_all_ranks_refuse_a_slice_that_is_out_of_order_on_some_of_them() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"ranks \[3, 2\] along axis tp"):
        check_order(mesh["tp"])
    check_order(mesh["dp"])
    check_order(DeviceMesh("cpu", [[0, 2], [1, 3]]))  # ascending in both axes
    with pytest.raises(ValueError, match=r"ranks \[2, 0\] along axis 0"):
        check_order(DeviceMesh("cpu", [[2, 3], [0, 1]]))


@on_ranks(1)
def test_one_rank_has_no_group() -> None:
    assert rank_and_size(None) == (0, 1)
    for mesh in (None, mesh_of(1, 1)):
        assert group_of(mesh and mesh["tp"]) is None
        assert flat_group(mesh, "dp", "tp") is None
        assert context_mesh(mesh) is None
