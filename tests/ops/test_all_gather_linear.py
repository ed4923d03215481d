"""all_gather_linear by every implementation: exact with integers, and within the rounding of plain torch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import collectives
from tpfuse.implementation_choice import Implementation, implementation
from tpfuse.kernels import reference
from tpfuse.ops.activation import ACTIVATIONS, GATED
from tpfuse.ops.all_gather_linear import all_gather_linear
from tpfuse.ops.gemm import gemm
from tpfuse.testing.compare import Yardstick, evaluate
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import pool

IMPLEMENTATIONS: tuple[Implementation, ...] = ("direct", "collective", "fused")
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
Case = tuple[torch.dtype, tuple[int, ...], bool, str | None]

# dtype, dimensions of x before the last, bias, activation. Tiles of interpreted kernels are 64 rows by 64 columns.
FEW: list[Case] = [(F32, (21, 2), True, "gelu_tanh"), (BF16, (5,), False, None)]
CASES: list[Case] = [
    *FEW,
    *((F32, (5,), True, name) for name in (*ACTIVATIONS, None)),
    (BF16, (21,), True, "swiglu"),
    (F32, (67,), False, None),
    (F32, (1,), True, "gelu"),
    (F32, (0,), True, "relu"),
    (F32, (3, 2, 2), False, "silu"),
]
IN_FLOAT64: list[Case] = [(F64, (21,), True, None), (F64, (5, 2), False, "geglu")]


def _strided(x: Tensor) -> Tensor:
    """x, between elements that must not be read."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


def _against_reference(dtype: torch.dtype, rows: tuple[int, ...], bias: bool, activation: str | None) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    n, height = rows[0], 50
    inputs = {
        "x": normal(1, world * n, *rows[1:], 63, dtype=dtype),
        "weight": normal(2, world, height, 63, dtype=dtype),
    }
    if bias:
        inputs["bias"] = normal(3, world, height, dtype=dtype)

    def whole(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outs = [reference.linear(x, w, None if bias is None else bias[r], activation) for r, w in enumerate(weight)]
        return torch.stack(outs)

    width = height // 2 if activation in GATED else height
    grad = normal(4, world, world * n, *rows[1:], width, dtype=dtype)
    yardstick = Yardstick(whole, inputs, grad)
    own = slice(rank * n, (rank + 1) * n)
    x = (inputs["x"][own] if bias else _strided(inputs["x"][own])).clone().requires_grad_()
    weight = inputs["weight"][rank].t().contiguous().t() if bias else _strided(inputs["weight"][rank])
    weight.requires_grad_()
    b = inputs["bias"][rank].clone().requires_grad_() if bias else None
    out = all_gather_linear(x, weight, b, dist.group.WORLD, activation=activation)
    out.backward(grad[rank])
    yardstick.check("out", out, rank)
    yardstick.check("x", x.grad, own)
    yardstick.check("weight", weight.grad, rank)
    if b is not None:
        yardstick.check("bias", b.grad, rank)


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
        "x": integers(5, world * n, 33, **small),
        "weight": integers(6, world, 9, 33, **small),
        "bias": integers(7, world, 9, **small),
    }
    grad = integers(8, world, world * n, 9, **small)

    def whole(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(torch.einsum("mk,rnk->rmn", x, weight) + bias[:, None])

    expected = evaluate(whole, {key: value.double() for key, value in inputs.items()}, grad.double())
    parts = {"x": slice(rank * n, (rank + 1) * n), "weight": rank, "bias": rank}
    leaves = {key: inputs[key][part].to(dtype, copy=True).requires_grad_() for key, part in parts.items()}
    with implementation(name):
        out = all_gather_linear(**leaves, group=group, activation="relu")  # type: ignore[call-overload]
        out.backward(grad[rank].to(dtype))
    assert torch.equal(out.double(), expected["out"][rank])
    for key, leaf in leaves.items():
        assert leaf.grad.dtype == dtype and torch.equal(leaf.grad.double(), expected[key][parts[key]]), key


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_chunk_arrives_at_its_place(world: int, name: Implementation) -> None:
    pool(world).run(_exact, name, 13, F32)
    if world == 2:
        pool(world).run(_exact, name, 3, BF16)


def _some_gradients(name: Implementation) -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    inputs = {"x": integers(8, world, 3, 4), "weight": integers(9, world, 5, 4), "bias": integers(10, world, 5)}
    grad = integers(11, world, 3 * world, 5)
    expected = {
        "x": torch.einsum("rmn,rnk->mk", grad, inputs["weight"])[3 * rank : 3 * rank + 3],
        "weight": grad[rank].t() @ inputs["x"].flatten(0, 1),
        "bias": grad[rank].sum(0),
    }
    for wanted in inputs:
        leaves = {key: value[rank].clone().requires_grad_(key == wanted) for key, value in inputs.items()}
        with implementation(name):
            all_gather_linear(**leaves, group=group).backward(grad[rank])  # type: ignore[call-overload]
        for key, leaf in leaves.items():
            assert (leaf.grad is not None) == (key == wanted)
        assert torch.equal(leaves[wanted].grad, expected[wanted]), wanted


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_each_gradient_alone(name: Implementation) -> None:
    pool(3 if name != "fused" else 2).run(_some_gradients, name)


class _Counted:
    """How often the ranks' rows were gathered and scattered by whole collectives."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("all_gather", "start_all_gather", "start_reduce_scatter"):
            patch.setattr(collectives, name, self._counting(name, getattr(collectives, name)))

    def _counting(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return function(*args)

        return call


def _several(name: Implementation, activation: str | None) -> None:
    """Three weights, one without a bias, one that is not trained; and the same one by one."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = integers(1, world, 4, 2, 5)[rank]
    weights = [integers(2 + i, world, height, 5)[rank] for i, height in enumerate((3, 7, 2))]
    biases = [integers(6, world, 3)[rank], None, integers(7, world, 2)[rank]]
    grads = [integers(8 + i, world, 4 * world, 2, len(weight))[rank] for i, weight in enumerate(weights)]

    def leaves() -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        ws = [weight.clone().requires_grad_(i != 1) for i, weight in enumerate(weights)]
        return x.clone().requires_grad_(), ws, [b if b is None else b.clone().requires_grad_() for b in biases]

    with implementation(name), pytest.MonkeyPatch.context() as patch:
        x1, ws1, bs1 = leaves()
        apart = [all_gather_linear(x1, w, b, group, activation=activation) for w, b in zip(ws1, bs1, strict=True)]
        torch.autograd.backward(apart, grads)
        calls = _Counted(patch).calls
        x2, ws2, bs2 = leaves()
        together = all_gather_linear(x2, ws2, bs2, group, activation=activation)
        torch.autograd.backward(together, grads)
    if name == "collective":
        assert sorted(calls) == ["all_gather", "all_gather", "start_all_gather", "start_reduce_scatter"], (
            "one of them compares the numbers of rows"
        )
    assert all(torch.equal(*pair) for pair in zip(together, apart, strict=True))
    assert torch.equal(x2.grad, x1.grad)
    for one, other in (*zip(ws2, ws1, strict=True), *zip(bs2, bs1, strict=True)):
        if one is not None:
            assert (one.grad is None) == (other.grad is None) == (one is ws2[1])
            assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_several_weights_are_fed_by_one_gather(name: Implementation, activation: str | None) -> None:
    pool(2).run(_several, name, activation)
    if activation is None:
        pool(3).run(_several, name, activation)


def _empty_shard(name: Implementation) -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = integers(1, world, 3, 4)[rank].requires_grad_()
    weight = integers(2, 0 if rank else 5, 4).requires_grad_()
    with implementation(name):
        out = all_gather_linear(x, weight, None, group)
        assert out.shape == (3 * world, 0 if rank else 5)
        out.sum().backward()
    assert torch.equal(x.grad, integers(2, 5, 4).sum(0).expand(3, 4)) and weight.grad.shape == weight.shape


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_ranks_without_rows_of_the_weight(name: Implementation) -> None:
    pool(3).run(_empty_shard, name)


def _autocast(name: Implementation) -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    inputs = {"x": normal(1, 6 * world, 9, dtype=BF16), "weight": normal(2, world, 7, 9, dtype=BF16)}
    grad = normal(3, world, 6 * world, 7, dtype=BF16)
    yardstick = Yardstick(lambda x, weight: torch.stack([reference.linear(x, w) for w in weight]), inputs, grad)
    parts = {"x": slice(6 * rank, 6 * rank + 6), "weight": rank}
    leaves = {key: inputs[key][part].float().requires_grad_() for key, part in parts.items()}
    with implementation(name), torch.autocast("cpu", dtype=BF16):
        out = all_gather_linear(leaves["x"], leaves["weight"], None, group)
    out.backward(grad[rank])
    yardstick.check("out", out, rank)
    for key, leaf in leaves.items():
        assert leaf.grad.dtype == F32
        yardstick.check(key, leaf.grad.to(BF16), parts[key])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_autocast(name: Implementation) -> None:
    pool(2).run(_autocast, name)


def _second_derivative(name: Implementation) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with implementation(name):
        out = all_gather_linear(x, torch.ones(4, 3, requires_grad=True), None, dist.group.WORLD)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_second_derivative_is_an_error(name: Implementation) -> None:
    pool(2).run(_second_derivative, name)


def test_one_rank_without_a_group() -> None:
    x, weight, bias = normal(1, 4, 2, 6), normal(2, 8, 6), normal(3, 8)
    assert torch.equal(all_gather_linear(x, weight, bias, None), gemm(x, weight, bias))
    first, second = all_gather_linear(x, [weight, -weight], None, None, activation="relu")
    assert torch.equal(first, gemm(x, weight, activation="relu"))
    assert torch.equal(second, gemm(x, -weight, activation="relu"))


X, W, B = torch.ones(3, 4), torch.ones(6, 4), torch.ones(6)
BAD = [
    ((X, W, B, "tanh"), r"activation 'tanh' is not known: expected None or one of gelu, gelu_tanh, relu, relu2, silu"),
    ((X.int(), W, B, None), r"x is torch\.int32: expected a float dtype"),
    ((X[0], W, B, None), r"x has shape \(4,\): expected \[n, \.\.\., K\]"),
    ((X, W.t(), B, None), r"weight has shape \(4, 6\): expected \[N, 4\]"),
    ((X, W, B[:5], None), r"bias has shape \(5,\): expected \(6,\)"),
    ((X, W[:5], None, "geglu"), r"weight has 5 rows: geglu expects an even number, \[gate \| up\]"),
    ((X, W.double(), None, None), r"weight is torch\.float64, x is torch\.float32: expected one dtype"),
    ((X, W, B.to("meta"), None), r"bias is on meta, x on cpu: expected one device"),
    ((X, [], [], None), r"0 weights and 0 biases: expected as many, one or more"),
    ((X, [W, W], [B], None), r"2 weights and 1 biases: expected as many, one or more"),
    ((X, [W, W], [B, B], "swiglu"), r"swiglu expects one weight, \[gate \| up\], not 2"),
]


def _bad(index: int) -> None:
    (x, weight, bias, activation), message = BAD[index]
    with pytest.raises(ValueError, match=message):
        all_gather_linear(x, weight, bias, dist.group.WORLD, activation=activation)  # type: ignore[call-overload]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_input_is_refused(index: int) -> None:
    pool(1).run(_bad, index)
