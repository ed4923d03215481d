import pytest
import torch
import torch.distributed as dist

from tpfuse.comm.mesh import group_of
from tpfuse.kernels import reference
from tpfuse.ops.layer_norm import layer_norm
from tpfuse.testing.compare import Yardstick
from tpfuse.testing.inputs import normal
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool


def test_formula() -> None:
    x, weight, bias = (
        normal(seed, *shape, dtype=torch.float64) for seed, shape in ((1, (7, 63)), (2, (63,)), (3, (63,)))
    )
    expected = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-2).sqrt() * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-2), expected, rtol=1e-13, atol=1e-13)


def _on_shards(dtype: torch.dtype, bias: bool, summed: bool) -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    inputs = {"x": normal(1, 21 * world, 100, dtype=dtype), "weight": normal(2, 100, dtype=dtype)}
    if bias:
        inputs["bias"] = normal(3, 100, dtype=dtype)
    grad = normal(4, 21 * world, 100, dtype=dtype)
    own = slice(21 * rank, 21 * rank + 21)

    def whole(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return reference.layer_norm(x, weight, bias, 1e-5)

    yardstick = Yardstick(whole, inputs, grad)
    x = inputs["x"][own].clone().requires_grad_()
    parameters = {name: inputs[name].clone().requires_grad_() for name in inputs if name != "x"}
    weight, b = parameters["weight"], parameters.get("bias")
    out = layer_norm(x, weight, b, 1e-5, sum_gradients_over=group if summed else None)
    out.backward(grad[own])
    yardstick.check("out", out, own)
    yardstick.check("x", x.grad, own)
    for name, parameter in parameters.items():
        if not summed and group is not None:
            dist.all_reduce(parameter.grad)
        yardstick.check(name, parameter.grad)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("summed", [True, False])
def test_on_shards(world: int, dtype: torch.dtype, bias: bool, summed: bool) -> None:
    pool(world).run(_on_shards, dtype, bias, summed)
