"""rms_norm: results and gradients; test_layer_norm.py tests shapes, strides and errors, which both share."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.backend import kernels
from tpfuse.comm.mesh import group_of
from tpfuse.kernels import reference
from tpfuse.ops.rms_norm import add_rms_norm, rms_norm
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import normal
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import pairwise


def _fused(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    return rms_norm(x, weight, 1e-5) if residual is None else torch.cat(add_rms_norm(x, residual, weight, 1e-5))


def _plain(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    if residual is None:
        return reference.rms_norm(x, weight, 1e-5)
    return torch.cat([reference.rms_norm(x + residual, weight, 1e-5), x + residual])


def _inputs(rows: int, columns: int, dtype: torch.dtype, with_residual: bool) -> dict[str, Tensor]:
    inputs = {"x": normal(1, rows, columns, dtype=dtype), "weight": normal(2, columns, dtype=dtype)}
    return inputs | ({"residual": normal(3, rows, columns, dtype=dtype)} if with_residual else {})


def test_the_result_follows_the_formula() -> None:
    x, weight = normal(1, 7, 63, dtype=torch.float64), normal(2, 63, dtype=torch.float64)
    expected = x / (x.square().mean(1, keepdim=True) + 1e-2).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-2), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    *pairwise(
        first=6,
        shape=[(63, 64), (100, 257), (1, 1), (16, 100), (64, 63)],
        with_residual=[True, False],
        dtype=[torch.float32, torch.bfloat16, torch.float16],
        name=["triton", "torch"],
    )
)
def test_results_and_gradients_match_the_reference(
    shape: tuple[int, int], with_residual: bool, dtype: torch.dtype, name: str
) -> None:
    rows, columns = shape
    inputs = _inputs(rows, columns, dtype, with_residual)
    grad = normal(9, rows * (1 + with_residual), columns, dtype=dtype)
    expected = Expected(_plain, inputs, grad)
    leaves = {key: x.clone().requires_grad_() for key, x in inputs.items()}
    with kernels(name):
        out = _fused(**leaves)
        out.backward(grad)
    expected.check("out", out)
    for key, leaf in leaves.items():
        expected.check(key, leaf.grad)


def _on_shards(name: str) -> None:
    group, rank = group_of(tensor_mesh()), dist.get_rank()
    inputs = _inputs(42, 64, torch.float32, True)
    grad, own = normal(9, 42, 64), slice(21 * rank, 21 * rank + 21)
    whole = {key: x.clone().requires_grad_() for key, x in inputs.items()}
    reference.rms_norm(whole["x"] + whole["residual"], whole["weight"], 1e-5).backward(grad)
    weight = inputs["weight"].clone().requires_grad_()
    with kernels(name):
        out, _ = add_rms_norm(inputs["x"][own], inputs["residual"][own], weight, 1e-5, sum_gradients_over=group)
        alone = rms_norm(inputs["x"][own] + inputs["residual"][own], weight, 1e-5, sum_gradients_over=group)
        torch.autograd.backward((out, alone), (grad[own] / 2, grad[own] / 2))
    torch.testing.assert_close(weight.grad, whole["weight"].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_gradients_on_shards_are_those_of_all_rows(name: str) -> None:
    pool(2).run(_on_shards, name)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_no_rows(name: str) -> None:
    leaves = {key: x.requires_grad_() for key, x in _inputs(0, 64, torch.float32, True).items()}
    with kernels(name):
        out = _fused(**leaves)
        out.sum().backward()
    assert out.shape == (0, 64) and torch.equal(leaves["weight"].grad, torch.zeros(64))


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(_fused, [x.requires_grad_() for x in _inputs(3, 5, torch.float64, True).values()])


@pytest.mark.exhaustive
def test_compiled_as_one_graph() -> None:
    gradients = []
    with kernels("triton"):
        for function in (_fused, torch.compile(_fused, fullgraph=True, backend="aot_eager")):
            leaves = {name: x.requires_grad_() for name, x in _inputs(7, 64, torch.float32, True).items()}
            out = function(**leaves)
            out.square().sum().backward()
            gradients.append([out, *(x.grad for x in leaves.values())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_bad_arguments_are_refused(name: str) -> None:
    rows, row = torch.zeros(2, 8), torch.zeros(8)
    with kernels(name):
        with pytest.raises(ValueError, match=r"rms_norm: weight has shape \(7,\): expected \(8,\)"):
            rms_norm(rows, row[1:], 1e-5)
        with pytest.raises(ValueError, match=r"rms_norm: x is torch.int32"):
            rms_norm(rows.int(), row, 1e-5)
        with pytest.raises(ValueError, match=r"add_rms_norm: residual has shape \(8,\): expected \(2, 8\)"):
            add_rms_norm(rows, row, row, 1e-5)
