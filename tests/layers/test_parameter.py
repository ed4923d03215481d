"""Parameters of layers: shards have the shapes of DTensors, and ranks share a random generator."""

import torch
import torch.distributed as dist

from tpfuse.layers.parameter import empty_parameter, shared_generator
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool


def _draws() -> list[float]:
    torch.manual_seed(dist.get_rank())
    return [torch.rand(1, generator=shared_generator(tensor_mesh())).item() for _ in range(3)]


def test_ranks_share_a_generator_with_another_state_at_each_call() -> None:
    torch.manual_seed(0)
    alone = [torch.rand(1, generator=shared_generator(None)).item() for _ in range(3)]
    assert len(set(alone)) == 3
    for world in (2, 3):
        assert pool(world).run(_draws) == [alone] * world


def _shapes() -> list[tuple[int, ...]]:
    mesh = tensor_mesh()
    parameter = empty_parameter((7, 5), 0, mesh, None, torch.bfloat16)
    assert parameter.shape == (7, 5) and parameter.dtype == torch.bfloat16
    return [tuple(empty_parameter((7, 5), dim, mesh, "meta", None).to_local().shape) for dim in (0, 1, None)]


def test_shards_have_the_shape_of_dtensors() -> None:
    assert pool(3).run(_shapes) == [
        [(3, 5), (7, 2), (7, 5)],
        [(3, 5), (7, 2), (7, 5)],
        [(1, 5), (7, 1), (7, 5)],
    ]
