import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.mesh import group_of
from tpfuse.kernels import reference
from tpfuse.ops.linear_all_reduce import linear_all_reduce
from tpfuse.testing.compare import Yardstick
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool


def _whole(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [rank, M, K], weight: [rank, N, K]: slices of the features."""
    return reference.linear(torch.cat(list(x), dim=-1), torch.cat(list(weight), dim=-1), bias)


def _against_reference(dtype: torch.dtype, bias: bool) -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    inputs = {"x": normal(1, world, 21, 63, dtype=dtype), "weight": normal(2, world, 100, 63, dtype=dtype)}
    if bias:
        inputs["bias"] = normal(3, 100, dtype=dtype)
    grad = normal(4, 21, 100, dtype=dtype)
    yardstick = Yardstick(_whole, inputs, grad)
    parts = {"x": rank, "weight": rank, "bias": slice(None)}
    leaves = {name: value[parts[name]].clone().requires_grad_() for name, value in inputs.items()}
    out = linear_all_reduce(leaves["x"], leaves["weight"], leaves.get("bias"), group)
    out.backward(grad)
    yardstick.check("out", out)
    for name, leaf in leaves.items():
        yardstick.check(name, leaf.grad, parts[name])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_against_reference(world: int, dtype: torch.dtype, bias: bool) -> None:
    pool(world).run(_against_reference, dtype, bias)


def _exact() -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    x, weight, bias = integers(5, world, 100, 9), integers(6, world, 63, 9), integers(7, 63)
    assert torch.equal(linear_all_reduce(x[rank], weight[rank], bias, group), _whole(x, weight, bias))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_partial_sum_arrives(world: int) -> None:
    pool(world).run(_exact)
