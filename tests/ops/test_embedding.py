"""The embedding of a table that is sharded by rows: integers, equal to those of torch."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.cases import naming
from tests.support.meshes import tensor_mesh
from tpfuse.comm.mesh import group_of, shard_range
from tpfuse.ops import checks
from tpfuse.ops.embedding import embedding
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks


def _exact(table: int, shape: tuple[int, ...], scatter: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    own = slice(*shard_range(table, rank, world))
    shape = (shape[0] * world, *shape[1:])
    ids = torch.randint(table, shape, generator=torch.Generator().manual_seed(1))
    whole, grad = integers(2, table, 9).requires_grad_(), integers(3, *shape, 9)
    expected = F.embedding(ids, whole)
    expected.backward(grad)
    rows = slice(rank * shape[0] // world, (rank + 1) * shape[0] // world) if scatter else slice(None)
    weight = whole.detach()[own].clone().requires_grad_()
    out = embedding(ids, weight, table, group_of(tensor_mesh()), scatter=scatter)
    out.backward(grad[rows])
    assert torch.equal(out, expected[rows])
    assert torch.equal(weight.grad, whole.grad[own])


@on_ranks(3)
def test_rows_and_gradients_are_exact() -> None:
    for case in itertools.product((1, 2, 63, 100), ((21,), (5, 3)), (False, True)):
        with naming(case):
            _exact(*case)


@on_ranks(3)
def test_ids_out_of_range_are_refused() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    start, stop = shard_range(10, rank, world)
    for ids in ([0, 10], [-1, 0]):
        with pytest.raises(ValueError, match=f"ids between {min(ids)} and {max(ids)} do not fit a table of 10 rows"):
            embedding(torch.tensor(ids), torch.zeros(stop - start, 3), 10, group_of(tensor_mesh()))
    with mock.patch.object(checks, "is_traced", return_value=True):  # as on GPUs, whose values are not checked
        out = embedding(torch.tensor([-1, 0, 9, 10, 10**6]), torch.ones(stop - start, 3), 10, group_of(tensor_mesh()))
    assert torch.equal(out.isnan().all(1), torch.tensor([True, False, False, True, True]))
    assert torch.equal(out[1:3], torch.ones(2, 3))
