"""linear_reduce_scatter by every implementation: exact with integers, and within the rounding of plain torch."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.implementation_choice import Implementation, implementation
from tpfuse.kernels import reference
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.testing.compare import Yardstick, evaluate
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import pool

IMPLEMENTATIONS: tuple[Implementation, ...] = ("direct", "collective", "fused")
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
Case = tuple[torch.dtype, tuple[int, ...], bool, bool]

# dtype, dimensions of a rank's result before the last, bias, residual. Tiles of interpreted kernels are 64 by 64.
FEW: list[Case] = [(F32, (21, 2), True, True), (BF16, (5,), True, True)]
CASES: list[Case] = [
    *FEW,
    (F32, (67,), False, False),
    (F32, (5,), True, False),
    (BF16, (21,), False, True),
    (F32, (1,), True, True),
    (F32, (0,), True, True),
    (BF16, (3, 2, 2), False, False),
]
IN_FLOAT64: list[Case] = [(F64, (21,), True, True), (F64, (5, 2), False, False)]


def _whole(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x: [rank, M, ..., K], weight: [rank, N, K]: slices of the features."""
    out = reference.linear(torch.cat(list(x), dim=-1), torch.cat(list(weight), dim=-1), bias)
    return out if residual is None else out + residual


def _strided(x: Tensor) -> Tensor:
    """x, between elements that must not be read."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


def _leaf(x: Tensor, strided: bool) -> Tensor:
    return (_strided(x) if strided else x.clone()).requires_grad_()


def _against_reference(dtype: torch.dtype, rows: tuple[int, ...], bias: bool, residual: bool) -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    n, width = rows[0], 70
    inputs = {
        "x": normal(1, world, world * n, *rows[1:], 33, dtype=dtype),
        "weight": normal(2, world, width, 33, dtype=dtype),
    }
    if bias:
        inputs["bias"] = normal(3, width, dtype=dtype)
    if residual:
        inputs["residual"] = normal(5, world * n, *rows[1:], width, dtype=dtype)
    grad = normal(4, world * n, *rows[1:], width, dtype=dtype)
    yardstick = Yardstick(_whole, inputs, grad)
    own = slice(rank * n, (rank + 1) * n)
    parts = {"x": rank, "weight": rank, "bias": slice(None), "residual": own}
    leaves = {name: _leaf(value[parts[name]], len(rows) > 1) for name, value in inputs.items()}
    if len(rows) == 1:
        leaves["weight"] = inputs["weight"][rank].t().contiguous().t().requires_grad_()
    bias_, residual_ = leaves.get("bias"), leaves.get("residual")
    out = linear_reduce_scatter(leaves["x"], leaves["weight"], bias_, group, residual=residual_)
    out.backward(_strided(grad[own]))
    yardstick.check("out", out, own)
    for name, leaf in leaves.items():
        yardstick.check(name, leaf.grad, parts[name])


def _values(name: Implementation, cases: list[Case]) -> None:
    with implementation(name):
        for case in cases:
            _against_reference(*case)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_against_reference(world: int, name: Implementation) -> None:
    if name == "fused":
        pool(world).run(_values, name, FEW if world > 2 else CASES)
    else:
        pool(world).run(_values, name, CASES + IN_FLOAT64)


def _exact(name: Implementation, n: int, dtype: torch.dtype) -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    small = {"low": -1, "high": 1} if dtype == BF16 else {}
    inputs = {
        "x": integers(5, world, world * n, 9, **small),
        "weight": integers(6, world, 33, 9, **small),
        "bias": integers(7, 33, **small),
        "residual": integers(8, world * n, 33, **small),
    }
    grad = integers(9, world * n, 33, **small)
    expected = evaluate(_whole, {key: value.double() for key, value in inputs.items()}, grad.double())
    own = slice(rank * n, (rank + 1) * n)
    parts = {"x": rank, "weight": rank, "bias": slice(None), "residual": own}
    leaves = {key: inputs[key][part].to(dtype, copy=True).requires_grad_() for key, part in parts.items()}
    with implementation(name):
        out = linear_reduce_scatter(**leaves, group=group)  # type: ignore[arg-type]
        out.backward(grad[own].to(dtype))
    assert out.dtype == dtype and torch.equal(out.double(), expected["out"][own])
    for key, leaf in leaves.items():
        assert leaf.grad.dtype == dtype and torch.equal(leaf.grad.double(), expected[key][parts[key]]), key


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_partial_sum_arrives(world: int, name: Implementation) -> None:
    pool(world).run(_exact, name, 13, F32)
    if world == 2:
        pool(world).run(_exact, name, 3, BF16)


def _some_gradients(name: Implementation) -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    inputs = {
        "x": integers(8, world, 3 * world, 4),
        "weight": integers(9, world, 5, 4),
        "bias": integers(10, 5),
        "residual": integers(11, 3 * world, 5),
    }
    grad = integers(12, 3 * world, 5)
    own = slice(3 * rank, 3 * rank + 3)
    expected = {
        "x": grad @ inputs["weight"][rank],
        "weight": grad.t() @ inputs["x"][rank],
        "bias": grad.sum(0),
        "residual": grad[own],
    }
    parts = {"x": rank, "weight": rank, "bias": slice(None), "residual": own}
    for wanted in inputs:
        leaves = {key: value[parts[key]].clone().requires_grad_(key == wanted) for key, value in inputs.items()}
        with implementation(name):
            linear_reduce_scatter(**leaves, group=group).backward(grad[own])  # type: ignore[arg-type]
        for key, leaf in leaves.items():
            assert (leaf.grad is not None) == (key == wanted)
        assert torch.equal(leaves[wanted].grad, expected[wanted]), wanted


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_each_gradient_alone(name: Implementation) -> None:
    pool(3 if name != "fused" else 2).run(_some_gradients, name)


def _autocast(name: Implementation) -> None:
    """The residual keeps its dtype, and gives the result its own."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    inputs = {
        "x": normal(1, world, 6 * world, 9, dtype=BF16),
        "weight": normal(2, world, 7, 9, dtype=BF16),
        "bias": normal(3, 7, dtype=BF16),
    }
    grad = normal(4, 6 * world, 7, dtype=BF16)
    yardstick = Yardstick(_whole, inputs, grad)
    own = slice(6 * rank, 6 * rank + 6)
    parts = {"x": rank, "weight": rank, "bias": slice(None)}
    leaves = {key: inputs[key][part].float().requires_grad_() for key, part in parts.items()}
    residual = torch.full((6, 7), 1000.0, requires_grad=True)
    with implementation(name), torch.autocast("cpu", dtype=BF16):
        out = linear_reduce_scatter(**leaves, group=group)  # type: ignore[arg-type]
        with_residual = linear_reduce_scatter(**leaves, group=group, residual=residual)  # type: ignore[arg-type]
    (out.float() + 0 * with_residual).backward(grad[own].float())
    yardstick.check("out", out, own)
    assert with_residual.dtype == F32 and torch.equal(with_residual, out.float() + 1000)
    assert torch.equal(residual.grad, torch.zeros(6, 7))
    for key, leaf in leaves.items():
        assert leaf.grad.dtype == F32
        yardstick.check(key, leaf.grad.to(BF16), parts[key])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_autocast(name: Implementation) -> None:
    pool(2).run(_autocast, name)


def _second_derivative(name: Implementation) -> None:
    x = torch.ones(4, 3, requires_grad=True)
    with implementation(name):
        out = linear_reduce_scatter(x, torch.ones(5, 3, requires_grad=True), None, dist.group.WORLD)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_second_derivative_is_an_error(name: Implementation) -> None:
    pool(2).run(_second_derivative, name)


def test_one_rank_without_a_group() -> None:
    x, weight, bias, residual = normal(1, 4, 2, 6), normal(2, 8, 6), normal(3, 8), normal(4, 4, 2, 8)
    out = linear_reduce_scatter(x, weight, bias, None, residual=residual)
    assert torch.equal(out, gemm(x, weight, bias, residual=residual))


X, W, B, R = torch.ones(4, 3), torch.ones(5, 3), torch.ones(5), torch.ones(2, 5)
BAD = [
    ((X.int(), W, B, R), r"x is torch\.int32: expected a float dtype"),
    ((X[0], W, B, None), r"x has shape \(3,\): expected \[world \* n, \.\.\., K\]"),
    ((torch.ones(5, 3), W, B, None), r"5 rows cannot be split among 2 ranks"),
    ((X, W.t(), B, R), r"weight has shape \(3, 5\): expected \[N, 3\]"),
    ((X, W, B[:4], R), r"bias has shape \(4,\): expected \(5,\)"),
    ((X, W, B, torch.ones(4, 5)), r"residual has shape \(4, 5\): expected \(2, 5\)"),
    ((X, W.double(), None, None), r"weight is torch\.float64, x is torch\.float32: expected one dtype"),
    ((X, W, B.to("meta"), R), r"bias is on meta, x on cpu: expected one device"),
    ((X, W, B, R.to("meta")), r"residual is on meta, x on cpu: expected one device"),
]


def _bad() -> None:
    for (x, weight, bias, residual), message in BAD:
        with pytest.raises(ValueError, match=f"linear_reduce_scatter: {message}"):
            linear_reduce_scatter(x, weight, bias, dist.group.WORLD, residual=residual)


def test_bad_input_is_refused() -> None:
    pool(2).run(_bad)
