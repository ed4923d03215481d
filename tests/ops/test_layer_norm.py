"""layer_norm, also of a sum with a residual and on shards of the tokens, by torch and by the kernels."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.backend import kernels
from tpfuse.comm.mesh import group_of
from tpfuse.kernels import reference
from tpfuse.ops.layer_norm import _forward, _gradients, add_layer_norm, layer_norm
from tpfuse.testing.cases import naming
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import normal
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive, pairwise


def test_the_result_follows_the_formula() -> None:
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

    expected = Expected(whole, inputs, grad)
    x = inputs["x"][own].clone().requires_grad_()
    parameters = {name: inputs[name].clone().requires_grad_() for name in inputs if name != "x"}
    weight, b = parameters["weight"], parameters.get("bias")
    out = layer_norm(x, weight, b, 1e-5, sum_gradients_over=group if summed else None)
    out.backward(grad[own])
    expected.check("out", out, own)
    expected.check("x", x.grad, own)
    for name, parameter in parameters.items():
        if not summed and group is not None:
            dist.all_reduce(parameter.grad)
        expected.check(name, parameter.grad)


def _every_case_on_shards() -> None:
    for case in itertools.product((torch.float32, torch.float64, torch.bfloat16), (True, False), (True, False)):
        with naming(case):
            _on_shards(*case)


@pytest.mark.parametrize("world", [2, 3, *exhaustive(1, 4)])
def test_gradients_on_shards_are_those_of_all_rows(world: int) -> None:
    pool(world).run(_every_case_on_shards)


def _inputs(rows: int, columns: int, dtype: torch.dtype, *names: str) -> dict[str, Tensor]:
    shapes = {"x": (rows, columns), "residual": (rows, columns), "weight": (columns,), "bias": (columns,)}
    return {name: normal(seed, *shapes[name], dtype=dtype) for seed, name in enumerate(names)}


def _fused(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    if residual is None:
        return layer_norm(x, weight, bias, 1e-5)
    return torch.cat(add_layer_norm(x, residual, weight, bias, 1e-5))


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    if residual is None:
        return reference.layer_norm(x, weight, bias, 1e-5)
    return torch.cat([reference.layer_norm(x + residual, weight, bias, 1e-5), x + residual])


@pytest.mark.parametrize(
    *pairwise(
        first=4,
        shape=[(63, 64), (100, 257), (1, 1), (16, 100), (64, 63), (257, 16)],
        names=[("x", "weight", "bias", "residual"), ("x", "weight"), ("x", "weight", "bias")],
        dtype=[torch.float32, torch.bfloat16, torch.float16],
    )
)
def test_kernels_match_the_reference(shape: tuple[int, int], names: tuple[str, ...], dtype: torch.dtype) -> None:
    rows, columns = shape
    inputs = _inputs(rows, columns, dtype, *names)
    grad = normal(9, rows * (2 if "residual" in names else 1), columns, dtype=dtype)
    expected = Expected(_plain, inputs, grad)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    with kernels("triton"):
        out = _fused(**leaves)
        out.backward(grad)
    expected.check("out", out)
    for name, leaf in leaves.items():
        expected.check(name, leaf.grad)


def test_kernels_on_shards() -> None:
    pool(2).run(_kernels_on_shards)


def _kernels_on_shards() -> None:
    with kernels("triton"):
        _on_shards(torch.float32, True, True)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_only_the_sum_may_be_used(name: str) -> None:
    inputs = {key: x.requires_grad_() for key, x in _inputs(5, 8, torch.float32, "x", "residual", "weight").items()}
    with kernels(name):
        add_layer_norm(inputs["x"], inputs["residual"], inputs["weight"], None, 1e-5)[1].sum().backward()
    assert torch.equal(inputs["x"].grad, torch.ones(5, 8)) and torch.equal(inputs["residual"].grad, torch.ones(5, 8))
    assert inputs["weight"].grad is None


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (64,), (2, 3, 5, 64)])
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    x, residual = (normal(seed, *shape).requires_grad_() for seed in (1, 2))
    weight = normal(3, 64).requires_grad_()
    with kernels(name):
        out, summed = add_layer_norm(x, residual, weight, None, 1e-5)
        alone = layer_norm(x, weight, None, 1e-5)
        (out.sum() + summed.sum() + alone.sum()).backward()
    assert out.shape == summed.shape == alone.shape == x.grad.shape == shape
    torch.testing.assert_close(out, reference.layer_norm(x + residual, weight, None, 1e-5))
    if not x.numel():
        assert torch.equal(weight.grad, torch.zeros(64))


def test_views_and_transposed_inputs() -> None:
    x, grad = normal(1, 4, 63, 10, 2), normal(2, 4, 10, 63)
    outs = []
    for tensor in (x[..., 1].transpose(1, 2), x[..., 1].transpose(1, 2).contiguous()):
        leaf = tensor.detach().requires_grad_()
        with kernels("triton"):
            out = layer_norm(leaf, normal(3, 63), None, 1e-5)
            out.backward(grad)
        outs.append((out, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_gradcheck() -> None:
    inputs = [x.requires_grad_() for x in _inputs(3, 5, torch.float64, "x", "weight", "bias", "residual").values()]
    assert torch.autograd.gradcheck(_fused, inputs)


@pytest.mark.parametrize(
    ("centered", "extra"), [(True, True), (False, False), *exhaustive((True, False), (False, True))]
)
def test_operators_are_registered_correctly(centered: bool, extra: bool) -> None:
    x, residual, weight = (normal(seed, *shape) for seed, shape in ((1, (5, 16)), (2, (5, 16)), (3, (16,))))
    leaves = [y.requires_grad_() for y in (x, residual, weight)]
    added, bias = (leaves[1], normal(4, 16).requires_grad_()) if extra else (None, None)
    torch.library.opcheck(_forward, (leaves[0], added, leaves[2], bias, 1e-5, centered))
    mean, rstd = normal(5, 5 if centered else 0), normal(6, 5)
    arguments = (x.detach(), x.detach(), weight.detach(), mean, rstd, residual.detach() if extra else None)
    torch.library.opcheck(_gradients, (*arguments, centered, extra))


@pytest.mark.exhaustive
def test_compiled_as_one_graph() -> None:
    inputs = _inputs(7, 64, torch.float32, "x", "weight", "bias", "residual")
    gradients = []
    with kernels("triton"):
        for function in (_fused, torch.compile(_fused, fullgraph=True, backend="aot_eager")):
            leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
            out = function(**leaves)
            out.square().sum().backward()
            gradients.append([out, *(x.grad for x in leaves.values())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


ROWS, ROW = torch.zeros(2, 3, 8), torch.zeros(8)
ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: layer_norm(ROWS.long(), ROW, None, 1e-5), r"layer_norm: x is torch.int64 .*expected floats"),
    (lambda: layer_norm(torch.tensor(1.0), ROW, None, 1e-5), r"x is torch.float32 \(\): expected floats \[..., C\]"),
    (lambda: layer_norm(ROWS[..., :0], ROW[:0], None, 1e-5), r"x is torch.float32 \(2, 3, 0\).* C of at least 1"),
    (lambda: layer_norm(ROWS, ROW[1:], None, 1e-5), r"weight has shape \(7,\): expected \(8,\)"),
    (lambda: layer_norm(ROWS, ROW, ROW[1:], 1e-5), r"bias has shape \(7,\): expected \(8,\)"),
    (lambda: layer_norm(ROWS, ROW, ROW.half(), 1e-5), "bias is torch.float16: expected torch.float32, as weight"),
    (lambda: layer_norm(ROWS, ROW.long(), None, 1e-5), "weight is torch.int64: expected floats"),
    (lambda: layer_norm(ROWS, ROW.to("meta"), None, 1e-5), "weight is on meta, x on cpu"),
    (lambda: add_layer_norm(ROWS, ROWS[1:], ROW, None, 1e-5), r"residual has shape \(1, 3, 8\)"),
    (lambda: add_layer_norm(ROWS, ROWS.half(), ROW, None, 1e-5), "residual is torch.float16: .*torch.float32, as x"),
]


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_bad_arguments_are_refused(name: str, call: Callable[[], Any], message: str) -> None:
    with kernels(name), pytest.raises(ValueError, match=message):
        call()
