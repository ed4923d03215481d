"""LayerNorm as a module: whole or sequence-parallel, its parameters and their gradients."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tpfuse.kernels import reference
from tpfuse.layers.layer_norm import LayerNorm
from tpfuse.testing.cases import naming
from tpfuse.testing.compare import Yardstick
from tpfuse.testing.inputs import normal
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive


def _whole(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return reference.layer_norm(x, weight, bias, 1e-3)


def _check(dtype: torch.dtype, bias: bool, sequence_parallel: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = LayerNorm(100, 1e-3, bias, sequence_parallel=sequence_parallel, device_mesh=tensor_mesh(), dtype=dtype)
    assert isinstance(layer, nn.LayerNorm) and layer.sum_gradients == (sequence_parallel and world > 1)
    for seed, parameter in enumerate(layer.parameters()):
        assert isinstance(parameter, DTensor) and parameter.placements == (Replicate(),)
        assert torch.equal(parameter.to_local(), torch.full((100,), 1.0 - seed, dtype=dtype))  # ones, then zeros
        parameter.detach().to_local().copy_(normal(seed, 100))
    rows = slice(7 * rank, 7 * rank + 7) if sequence_parallel else slice(None)
    x, grad = normal(3, 7 * world, 100, dtype=dtype), normal(4, 7 * world, 100, dtype=dtype)
    inputs = {"x": x} | {name: p.full_tensor().detach() for name, p in layer.named_parameters()}
    yardstick = Yardstick(_whole, inputs, grad)
    mine = x[rows].clone().requires_grad_()
    out = layer(mine)
    out.backward(grad[rows])
    yardstick.check("out", out, rows)
    yardstick.check("x", mine.grad, rows)
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        yardstick.check(name, parameter.grad.to_local())


def _every_case() -> None:
    for case in itertools.product((torch.float32, torch.float64, torch.bfloat16), (True, False), (True, False)):
        with naming(case):
            _check(*case)


@pytest.mark.parametrize("world", [2, 3, *exhaustive(1, 4)])
def test_against_reference(world: int) -> None:
    pool(world).run(_every_case)


def _left_to_others() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = LayerNorm(100, sequence_parallel=True, device_mesh=tensor_mesh())
    layer.sum_gradients = False
    grad = normal(4, world, 7, 100)
    layer(normal(3, world, 7, 100)[rank]).backward(grad[rank])
    assert layer.bias.grad is not None
    torch.testing.assert_close(layer.bias.grad.to_local(), grad[rank].sum(0))


def test_the_sum_over_ranks_can_be_left_to_others() -> None:
    pool(2).run(_left_to_others)
