"""Parameters of layers: shards have the shapes of DTensors, and initial weights do not depend on the ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.meshes import tensor_mesh
from tpfuse.comm.layout import local_tensor
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.on_mesh import shared_generator
from tpfuse.layers.position_embedding import PositionEmbedding
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks, pool


def _draws() -> list[float]:
    torch.manual_seed(dist.get_rank())
    return [torch.rand(1, generator=shared_generator(tensor_mesh())).item() for _ in range(3)]


def test_ranks_share_a_generator_with_another_state_at_each_call() -> None:
    torch.manual_seed(0)
    alone = [torch.rand(1, generator=shared_generator(None)).item() for _ in range(3)]
    assert len(set(alone)) == 3
    for world in (2, 3):
        assert pool(world).run(_draws) == [alone] * world


LAYERS: dict[str, tuple[type[nn.Module], tuple[int, int], dict[str, Any]]] = {
    "column": (ColumnParallelLinear, (9, 180), {"parts": 3}),
    "row": (RowParallelLinear, (60, 9), {}),
    "vocabulary": (VocabParallelEmbedding, (63, 9), {}),
    "positions": (PositionEmbedding, (63, 9), {}),
}


@pytest.mark.parametrize("name", LAYERS)
@on_ranks(2)
def test_layers_take_the_weights_of_whole_ones(name: str) -> None:
    kind, sizes, options = LAYERS[name]
    for mesh in (tensor_mesh(), None):
        layer = kind(*sizes, device_mesh=mesh, **options)
        own = {key: integers(seed, *x.shape) for seed, (key, x) in enumerate(layer.named_parameters())}
        packed = {key: x.flatten(0, 1) if x.ndim > 2 else x for key, x in own.items()}  # as in an nn.Linear
        for state in (own, packed):
            for parameter in layer.parameters():
                parameter.data.zero_()
            assert not any(layer.load_state_dict(state))
            for key, parameter in layer.named_parameters():
                found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                assert torch.equal(found, own[key]), key
        other = kind(*sizes, device_mesh=mesh, **options)
        assert not any(other.load_state_dict(layer.state_dict()))  # shards
        pairs = zip(other.parameters(), layer.parameters(), strict=True)
        assert all(torch.equal(local_tensor(x), local_tensor(y)) for x, y in pairs)
        with pytest.raises(RuntimeError, match="size mismatch"):
            layer.load_state_dict({key: x[1:] for key, x in packed.items()})


def _initial(name: str) -> list[Tensor]:
    torch.manual_seed(5 + dist.get_rank())
    kind, sizes, options = LAYERS[name]
    parameters = list(kind(*sizes, device_mesh=tensor_mesh(), **options).parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    return [parameter.full_tensor().detach() for parameter in parameters]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LAYERS)
def test_initial_weights_do_not_depend_on_the_world(name: str) -> None:
    torch.manual_seed(5)
    kind, sizes, options = LAYERS[name]
    alone = list(kind(*sizes, **options).parameters())
    assert not any(isinstance(parameter, DTensor) for parameter in alone)
    for world in (2, 3):
        for parameters in pool(world).run(_initial, name):
            assert all(map(torch.equal, parameters, alone)) and len(parameters) == len(alone)
