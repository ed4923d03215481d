"""linear_all_reduce by every implementation: exact with integers, and within the rounding of plain torch."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.implementation_choice import Implementation, implementation
from tpfuse.kernels import reference
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear_all_reduce import linear_all_reduce
from tpfuse.testing.compare import Yardstick, evaluate
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import pool

IMPLEMENTATIONS: tuple[Implementation, ...] = ("direct", "collective", "fused")
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
Case = tuple[torch.dtype, tuple[int, ...], int, bool, bool]

# dtype, dimensions of x before the last, columns, bias, residual. Tiles of interpreted kernels are 64 by 64; some
# results are longer than what every rank sums by itself.
FEW: list[Case] = [(F32, (7, 3), 70, True, True), (BF16, (5,), 9, True, True)]
CASES: list[Case] = [
    *FEW,
    (F32, (131,), 70, False, False),
    (F32, (5,), 9, True, False),
    (BF16, (21,), 70, False, True),
    (F32, (1,), 9, True, True),
    (F32, (0,), 9, True, True),
    (F32, (), 9, True, True),
    (BF16, (3, 2, 2), 9, False, False),
]
IN_FLOAT64: list[Case] = [(F64, (21,), 9, True, True), (F64, (131, 2), 70, True, True)]


def _whole(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x: [rank, ..., K], weight: [rank, N, K]: slices of the features."""
    out = reference.linear(torch.cat(list(x), dim=-1), torch.cat(list(weight), dim=-1), bias)
    return out if residual is None else out + residual


def _strided(x: Tensor) -> Tensor:
    """x, between elements that must not be read."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


def _against_reference(dtype: torch.dtype, rows: tuple[int, ...], width: int, bias: bool, residual: bool) -> Tensor:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    inputs = {"x": normal(1, world, *rows, 33, dtype=dtype), "weight": normal(2, world, width, 33, dtype=dtype)}
    if bias:
        inputs["bias"] = normal(3, width, dtype=dtype)
    if residual:
        inputs["residual"] = normal(5, *rows, width, dtype=dtype)
    grad = normal(4, *rows, width, dtype=dtype)
    yardstick = Yardstick(_whole, inputs, grad)
    parts = {"x": rank, "weight": rank, "bias": slice(None), "residual": ...}
    leaves = {name: value[parts[name]].clone() for name, value in inputs.items()}
    if len(rows) > 1:
        leaves = {name: _strided(value) for name, value in leaves.items()}
    else:
        leaves["weight"] = leaves["weight"].t().contiguous().t()
    for leaf in leaves.values():
        leaf.requires_grad_()
    bias_, residual_ = leaves.get("bias"), leaves.get("residual")
    out = linear_all_reduce(leaves["x"], leaves["weight"], bias_, group, residual=residual_)
    out.backward(_strided(grad))
    yardstick.check("out", out)
    for name, leaf in leaves.items():
        yardstick.check(name, leaf.grad, parts[name])
    return out.detach()


def _values(name: Implementation, cases: list[Case]) -> list[Tensor]:
    with implementation(name):
        return [_against_reference(*case) for case in cases]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_against_reference(world: int, name: Implementation) -> None:
    cases = (FEW if world > 2 else CASES) if name == "fused" else CASES + IN_FLOAT64
    first, *others = pool(world).run(_values, name, cases)
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True)), "the same on all ranks"


def _exact(name: Implementation, n: int, dtype: torch.dtype) -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    small = {"low": -1, "high": 1} if dtype == BF16 else {}
    inputs = {
        "x": integers(5, world, n, 9, **small),
        "weight": integers(6, world, 33, 9, **small),
        "bias": integers(7, 33, **small),
        "residual": integers(8, n, 33, **small),
    }
    grad = integers(9, n, 33, **small)
    expected = evaluate(_whole, {key: value.double() for key, value in inputs.items()}, grad.double())
    parts = {"x": rank, "weight": rank, "bias": slice(None), "residual": slice(None)}
    leaves = {key: inputs[key][part].to(dtype, copy=True).requires_grad_() for key, part in parts.items()}
    with implementation(name):
        out = linear_all_reduce(**leaves, group=group)  # type: ignore[arg-type]
        out.backward(grad.to(dtype))
    assert out.dtype == dtype and torch.equal(out.double(), expected["out"])
    for key, leaf in leaves.items():
        assert leaf.grad.dtype == dtype and torch.equal(leaf.grad.double(), expected[key][parts[key]]), key


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_partial_sum_arrives(world: int, name: Implementation) -> None:
    pool(world).run(_exact, name, 13, F32)
    if world == 2:
        pool(world).run(_exact, name, 3, BF16)
    if name != "fused":
        pool(world).run(_exact, name, 307, F32)


def _some_gradients(name: Implementation) -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    inputs = {
        "x": integers(8, world, 3, 4),
        "weight": integers(9, world, 5, 4),
        "bias": integers(10, 5),
        "residual": integers(11, 3, 5),
    }
    grad = integers(12, 3, 5)
    parts = {"x": rank, "weight": rank, "bias": slice(None), "residual": slice(None)}
    expected = {
        "x": grad @ inputs["weight"][rank],
        "weight": grad.t() @ inputs["x"][rank],
        "bias": grad.sum(0),
        "residual": grad,
    }
    for wanted in inputs:
        leaves = {key: value[parts[key]].clone().requires_grad_(key == wanted) for key, value in inputs.items()}
        with implementation(name):
            linear_all_reduce(**leaves, group=group).backward(grad)  # type: ignore[arg-type]
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
        "x": normal(1, world, 6, 9, dtype=BF16),
        "weight": normal(2, world, 7, 9, dtype=BF16),
        "bias": normal(3, 7, dtype=BF16),
    }
    grad = normal(4, 6, 7, dtype=BF16)
    yardstick = Yardstick(_whole, inputs, grad)
    parts = {"x": rank, "weight": rank, "bias": slice(None)}
    leaves = {key: inputs[key][part].float().requires_grad_() for key, part in parts.items()}
    with implementation(name), torch.autocast("cpu", dtype=BF16):
        out = linear_all_reduce(**leaves, group=group)  # type: ignore[arg-type]
        added = linear_all_reduce(**leaves, group=group, residual=torch.full((6, 7), 1000.0))  # type: ignore[arg-type]
    out.backward(grad)
    yardstick.check("out", out)
    assert added.dtype == F32 and torch.equal(added, out.float() + 1000)
    for key, leaf in leaves.items():
        assert leaf.grad.dtype == F32
        yardstick.check(key, leaf.grad.to(BF16), parts[key])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_autocast(name: Implementation) -> None:
    pool(2).run(_autocast, name)


def _second_derivative(name: Implementation) -> None:
    x = torch.ones(4, 3, requires_grad=True)
    with implementation(name):
        out = linear_all_reduce(x, torch.ones(5, 3, requires_grad=True), None, dist.group.WORLD)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_second_derivative_is_an_error(name: Implementation) -> None:
    pool(2).run(_second_derivative, name)


def test_one_rank_without_a_group() -> None:
    x, weight, bias, residual = normal(1, 4, 2, 6), normal(2, 8, 6), normal(3, 8), normal(4, 4, 2, 8)
    out = linear_all_reduce(x, weight, bias, None, residual=residual)
    assert torch.equal(out, gemm(x, weight, bias, residual=residual))


X, W, B, R = torch.ones(4, 3), torch.ones(5, 3), torch.ones(5), torch.ones(4, 5)
BAD = [
    ((X.int(), W, B, R), r"x is torch\.int32: expected a float dtype"),
    ((X, W.t(), B, R), r"weight has shape \(3, 5\): expected \[N, 3\]"),
    ((X, W, B[:4], R), r"bias has shape \(4,\): expected \(5,\)"),
    ((X, W, B, R[:2]), r"residual has shape \(2, 5\): expected \(4, 5\)"),
    ((X, W.double(), None, None), r"weight is torch\.float64, x is torch\.float32: expected one dtype"),
    ((X, W.to("meta"), B, R), r"weight is on meta, x on cpu: expected one device"),
    ((X, W, B, R.to("meta")), r"residual is on meta, x on cpu: expected one device"),
]


def _bad() -> None:
    for (x, weight, bias, residual), message in BAD:
        with pytest.raises(ValueError, match=f"linear_all_reduce: {message}"):
            linear_all_reduce(x, weight, bias, dist.group.WORLD, residual=residual)


def test_bad_input_is_refused() -> None:
    pool(2).run(_bad)
