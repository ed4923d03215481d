import pytest
import torch
import torch.distributed as dist

from tpfuse.comm.mesh import group_of
from tpfuse.kernels import reference
from tpfuse.ops.all_gather_linear import all_gather_linear
from tpfuse.testing.compare import Yardstick
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool


def _against_reference(dtype: torch.dtype, rows: tuple[int, ...], bias: bool, activation: str | None) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    n, height = rows[0], 50
    inputs = {
        "x": normal(1, world * n, *rows[1:], 63, dtype=dtype),
        "weight": normal(2, world, height, 63, dtype=dtype),
    }
    if bias:
        inputs["bias"] = normal(3, world, height, dtype=dtype)

    def whole(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        outs = [reference.linear(x, w, None if bias is None else bias[r], activation) for r, w in enumerate(weight)]
        return torch.stack(outs)

    width = height // 2 if activation in ("swiglu", "geglu") else height
    grad = normal(4, world, world * n, *rows[1:], width, dtype=dtype)
    yardstick = Yardstick(whole, inputs, grad)
    own = slice(rank * n, (rank + 1) * n)
    x = inputs["x"][own].clone().requires_grad_()
    weight = inputs["weight"][rank].clone().requires_grad_()
    b = inputs["bias"][rank].clone().requires_grad_() if bias else None
    out = all_gather_linear(x, weight, b, group_of(tensor_mesh()), activation=activation)
    out.backward(grad[rank])
    yardstick.check("out", out, rank)
    yardstick.check("x", x.grad, own)
    yardstick.check("weight", weight.grad, rank)
    if b is not None:
        yardstick.check("bias", b.grad, rank)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_against_reference(world: int, dtype: torch.dtype, bias: bool) -> None:
    pool(world).run(_against_reference, dtype, (21,), bias, None)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu"])
def test_activations(world: int, activation: str) -> None:
    pool(world).run(_against_reference, torch.float32, (5, 2), True, activation)


def _exact() -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    x = integers(5, world, 100, 63)
    weight, bias = integers(6, world, 9, 63), integers(7, world, 9)
    out = all_gather_linear(x[rank], weight[rank], bias[rank], group)
    assert torch.equal(out, x.flatten(0, 1) @ weight[rank].t() + bias[rank])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_chunk_arrives_at_its_place(world: int) -> None:
    pool(world).run(_exact)


def _some_gradients(wanted: str) -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    inputs = {"x": integers(8, world, 3, 4), "weight": integers(9, world, 5, 4), "bias": integers(10, world, 5)}
    grad = integers(11, world, 3 * world, 5)
    leaves = {name: value[rank].clone().requires_grad_(name == wanted) for name, value in inputs.items()}
    all_gather_linear(**leaves, group=group).backward(grad[rank])
    expected = {
        "x": torch.einsum("rmn,rnk->mk", grad, inputs["weight"])[3 * rank : 3 * rank + 3],
        "weight": grad[rank].t() @ inputs["x"].flatten(0, 1),
        "bias": grad[rank].sum(0),
    }
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name == wanted)
    assert torch.equal(leaves[wanted].grad, expected[wanted])


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_each_gradient_alone(wanted: str) -> None:
    pool(3).run(_some_gradients, wanted)


def _empty_shard() -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    x = integers(1, world, 3, 4)[rank].requires_grad_()
    weight = integers(2, 0 if rank else 5, 4).requires_grad_()
    out = all_gather_linear(x, weight, None, group)
    assert out.shape == (3 * world, 0 if rank else 5)
    out.sum().backward()
    assert torch.equal(x.grad, integers(2, 5, 4).sum(0).expand(3, 4)) and weight.grad.shape == weight.shape


def test_ranks_without_rows_of_the_weight() -> None:
    pool(3).run(_empty_shard)


def _second_derivative() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    out = all_gather_linear(x, torch.ones(4, 3, requires_grad=True), None, group_of(tensor_mesh()))
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_second_derivative_is_an_error() -> None:
    pool(2).run(_second_derivative)
