"""PositionEmbedding: whole or sequence-parallel."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tests.support.meshes import tensor_mesh
from tpfuse.layers.position_embedding import PositionEmbedding
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks(2)
def test_result_and_gradient_are_those_of_torch(sequence_parallel: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = PositionEmbedding(63, 9, sequence_parallel=sequence_parallel, device_mesh=tensor_mesh())
    assert isinstance(layer, nn.Embedding)
    assert isinstance(layer.weight, DTensor) and layer.weight.placements == (Replicate(),)
    whole = layer.weight.full_tensor().detach().requires_grad_()
    positions, grad = torch.arange(20 * world) % 63, integers(1, 20 * world, 9)
    expected = nn.functional.embedding(positions, whole)
    expected.backward(grad)
    own = slice(20 * rank, 20 * rank + 20) if sequence_parallel else slice(None)
    out = layer(positions[own])
    out.backward(grad[own])
    assert torch.equal(out, expected[own])
    assert isinstance(layer.weight.grad, DTensor) and torch.equal(layer.weight.grad.to_local(), whole.grad)


def test_a_table_of_torch_is_taken_whole() -> None:
    table = nn.Embedding(9, 5, dtype=torch.float64)
    layer = PositionEmbedding.from_embedding(table)
    assert torch.equal(layer.weight, table.weight) and layer.weight is not table.weight
    with pytest.raises(ValueError, match="padding_idx=2: expected None"):
        PositionEmbedding.from_embedding(nn.Embedding(9, 5, padding_idx=2))
