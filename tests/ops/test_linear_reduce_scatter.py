import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.mesh import group_of
from tpfuse.kernels import reference
from tpfuse.ops.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.testing.compare import Yardstick
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool


def _whole(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x: [rank, M, ..., K], weight: [rank, N, K]: slices of the features."""
    out = reference.linear(torch.cat(list(x), dim=-1), torch.cat(list(weight), dim=-1), bias)
    return out if residual is None else out + residual


def _against_reference(dtype: torch.dtype, rows: tuple[int, ...], bias: bool) -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    n = rows[0]
    inputs = {
        "x": normal(1, world, world * n, *rows[1:], 63, dtype=dtype),
        "weight": normal(2, world, 100, 63, dtype=dtype),
        "residual": normal(5, world * n, *rows[1:], 100, dtype=dtype),
    }
    if bias:
        inputs["bias"] = normal(3, 100, dtype=dtype)
    grad = normal(4, world * n, *rows[1:], 100, dtype=dtype)
    yardstick = Yardstick(_whole, inputs, grad)
    own = slice(rank * n, (rank + 1) * n)
    parts = {"x": rank, "weight": rank, "bias": slice(None), "residual": own}
    leaves = {name: value[parts[name]].clone().requires_grad_() for name, value in inputs.items()}
    out = linear_reduce_scatter(leaves["x"], leaves["weight"], leaves.get("bias"), group, residual=leaves["residual"])
    out.backward(grad[own])
    yardstick.check("out", out, own)
    for name, leaf in leaves.items():
        yardstick.check(name, leaf.grad, parts[name])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(21,), (5, 2)])
def test_against_reference(world: int, dtype: torch.dtype, bias: bool, rows: tuple[int, ...]) -> None:
    pool(world).run(_against_reference, dtype, rows, bias)


def _exact() -> None:
    group, rank, world = group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    x, weight, bias = integers(5, world, 100 * world, 9), integers(6, world, 63, 9), integers(7, 63)
    expected = _whole(x, weight, bias)
    out = linear_reduce_scatter(x[rank], weight[rank], bias, group)
    assert torch.equal(out, expected[100 * rank : 100 * rank + 100])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_partial_sum_arrives(world: int) -> None:
    pool(world).run(_exact)


def _uneven() -> None:
    with pytest.raises(ValueError, match="5 rows cannot be split among 2 ranks"):
        linear_reduce_scatter(torch.ones(5, 3), torch.ones(4, 3), None, group_of(tensor_mesh()))


def test_rows_that_cannot_be_scattered_are_refused() -> None:
    pool(2).run(_uneven)
