"""layer_norm and rms_norm, also on shards of the tokens, by torch and by the kernels."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.cases import naming
from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive, pairwise
from tpfuse.choices import Kernels
from tpfuse.comm.mesh import group_of
from tpfuse.kernels import reference
from tpfuse.ops.layer_norm import layer_norm, layer_norm_and_input
from tpfuse.ops.rms_norm import rms_norm
from tpfuse.switches import use
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import pool

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Norm:
    """A norm, by tpfuse and by plain torch: functions of (x, *parameters, eps)."""

    function: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    parameters: tuple[str, ...]

    def fused(self, x: Tensor, **parameters: Tensor) -> Tensor:
        return self.function(x, *map(parameters.get, self.parameters), 1e-5)

    def reference(self, x: Tensor, **parameters: Tensor) -> Tensor:
        return self.plain(x, *map(parameters.get, self.parameters), 1e-5)


def _residual(x: Tensor, *others: Any, **options: Any) -> Tensor:
    y, x = layer_norm_and_input(x, *others, **options)
    return x + y


NORMS = {
    "layer_norm": Norm(layer_norm, reference.layer_norm, ("weight", "bias")),
    "residual": Norm(_residual, lambda x, *others: x + reference.layer_norm(x, *others), ("weight", "bias")),
    "rms_norm": Norm(rms_norm, reference.rms_norm, ("weight",)),
}
BOTH = pytest.mark.parametrize("name", ["torch", "triton"])


def _inputs(norm: Norm, rows: int, columns: int, dtype: torch.dtype, left_out: str = "") -> dict[str, Tensor]:
    """Return x and the parameters, except the one that is left out."""
    shapes = {"x": (rows, columns)} | dict.fromkeys(norm.parameters, (columns,))
    drawn = {name: normal(seed, *shape, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items())}
    return {name: x for name, x in drawn.items() if name != left_out}


def test_results_follow_the_formulas() -> None:
    x, weight, bias = (normal(seed, *shape, dtype=F64) for seed, shape in enumerate(((7, 63), (63,), (63,))))
    expected = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-2).sqrt() * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-2), expected, rtol=1e-13, atol=1e-13)
    expected = x / (x.square().mean(1, keepdim=True) + 1e-2).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-2), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    *pairwise(
        first=10,
        norm=list(NORMS.values()),
        shape=[(63, 64), (100, 257), (1, 1), (16, 100), (64, 63), (257, 16)],
        left_out=["", "bias"],
        dtype=[F32, BF16, F16],
        name=["triton", "torch"],
    )
)
def test_results_and_gradients_match_the_reference(
    norm: Norm, shape: tuple[int, int], left_out: str, dtype: torch.dtype, name: Kernels
) -> None:
    inputs = _inputs(norm, *shape, dtype, left_out)
    grad = normal(9, *shape, dtype=dtype)
    with use(kernels=name):
        Expected(norm.reference, inputs, grad).check_function(norm.fused)


def _on_shards(key: str, name: Kernels, dtype: torch.dtype, left_out: str, summed: bool) -> None:
    """Compare with one rank that has all rows. The gradients of parameters are summed in backward, or afterwards."""
    norm, group, rank, world = NORMS[key], group_of(tensor_mesh()), dist.get_rank(), dist.get_world_size()
    inputs = _inputs(norm, 21 * world, 100, dtype, left_out)
    grad, own = normal(9, 21 * world, 100, dtype=dtype), slice(21 * rank, 21 * rank + 21)
    parameters = [inputs[key].clone().requires_grad_() if key in inputs else None for key in norm.parameters]
    x = inputs["x"][own].clone().requires_grad_()
    with use(kernels=name):
        out = norm.function(x, *parameters, 1e-5, sum_gradients_over=group if summed else None)
        out.backward(grad[own])
    expected = Expected(norm.reference, inputs, grad)
    expected.check("out", out, own)
    expected.check("x", x.grad, own)
    for key, parameter in zip(norm.parameters, parameters, strict=True):
        if parameter is not None:
            if not summed and group is not None:
                dist.all_reduce(parameter.grad)
            expected.check(key, parameter.grad)


@pytest.mark.parametrize("world", [2, *exhaustive(1, 3)])
def test_gradients_on_shards_are_those_of_all_rows(world: int) -> None:
    by_torch = itertools.product(NORMS, ("torch",), (F32, F64, BF16), ("", "bias"), (True, False))
    by_kernels = itertools.product(NORMS, ("triton",), (F32,), ("",), (True,))
    for case in (*by_torch, *by_kernels):
        with naming(case):
            pool(world).run(_on_shards, *case)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@BOTH
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (64,), (2, 3, 5, 64)])
def test_shapes(norm: Norm, name: Kernels, shape: tuple[int, ...]) -> None:
    x = normal(1, *shape).requires_grad_()
    weight, *others = (normal(3, 64).requires_grad_(), None)[: len(norm.parameters)]
    with use(kernels=name):
        out = norm.function(x, weight, *others, 1e-5)
        out.sum().backward()
    assert out.shape == x.grad.shape == shape
    torch.testing.assert_close(out, norm.plain(x, weight, *others, 1e-5))
    if not x.numel():
        assert torch.equal(weight.grad, torch.zeros(64))


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@BOTH
@pytest.mark.parametrize("norm", NORMS.values(), ids=naming(NORMS))
def test_a_result_may_have_no_gradient(norm: Norm, name: Kernels) -> None:
    given = {key: x.requires_grad_() for key, x in _inputs(norm, 5, 33, F32).items()}
    with use(kernels=name):
        (_WithoutGradient.apply(norm.fused(**given)).sum() + given["x"].sum()).backward()
    assert torch.equal(given["x"].grad, torch.ones(5, 33)) and not given["weight"].grad


def test_a_residual_path_needs_no_addition_of_its_own() -> None:
    x = normal(1, 2, 3, 16).requires_grad_()
    with use(kernels="triton"):
        y, same = layer_norm_and_input(x * 1, None, None, 1e-5)
        (grad,) = torch.autograd.grad(same.sum(), x, retain_graph=True)  # nothing uses the norm
        assert y.grad_fn.next_functions[0][0] is same.grad_fn.next_functions[0][0]
        with torch.no_grad():
            assert layer_norm_and_input(x, None, None, 1e-5)[1] is x
    assert torch.equal(grad, torch.ones(2, 3, 16))


def test_views_and_transposed_inputs() -> None:
    x, grad = normal(1, 4, 63, 10, 2)[..., 1].transpose(1, 2), normal(2, 4, 10, 63)
    outs = []
    for tensor in (x, x.contiguous()):
        leaf = tensor.detach().requires_grad_()
        with use(kernels="triton"):
            out = layer_norm(leaf, normal(3, 63), None, 1e-5)
            out.backward(grad)
        outs.append((out, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize(("centered", "with_bias"), [(True, True), *exhaustive((False, False))])
def test_operators_are_registered_correctly(centered: bool, with_bias: bool) -> None:
    x, weight = normal(1, 5, 16).requires_grad_(), normal(3, 16).requires_grad_()
    bias = normal(4, 16).requires_grad_() if with_bias else None
    torch.library.opcheck(torch.ops.tpfuse.norm_forward.default, (x, weight, bias, 1e-5, centered))
    mean, rstd = normal(5, 5 if centered else 0), normal(6, 5)
    added = x.detach() if with_bias else None
    arguments = (x.detach(), x.detach(), weight.detach(), mean, rstd, added)
    torch.library.opcheck(torch.ops.tpfuse.norm_backward.default, (*arguments, centered, with_bias, True, with_bias))


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
    (lambda: rms_norm(ROWS, ROW[1:], 1e-5), r"rms_norm: weight has shape \(7,\): expected \(8,\)"),
    (lambda: rms_norm(ROWS.int(), ROW, 1e-5), "^rms_norm: x is torch.int32"),
]


@BOTH
@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_bad_arguments_are_refused(name: Kernels, call: Callable[[], Any], message: str) -> None:
    with use(kernels=name), pytest.raises(ValueError, match=message):
        call()
