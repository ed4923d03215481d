"""Values and gradients of the activations beside torch's."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels import activations, reference
from tpfuse.kernels.activations import activate, activation_gradient
from tpfuse.kernels.launch import launch
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import normal

NAMES = [name for name in activations.ACTIVATIONS if name not in activations.GATED]


@triton.jit
def _activation_kernel(x_ptr, grad_ptr, out_ptr, grad_x_ptr, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    grad = tl.load(grad_ptr + offs, mask=offs < n)
    tl.store(out_ptr + offs, activate(x, ACTIVATION, tl.float32), mask=offs < n)
    tl.store(grad_x_ptr + offs, activation_gradient(grad, x, ACTIVATION, tl.float32), mask=offs < n)


def _run(x: Tensor, grad: Tensor, name: str | None) -> tuple[Tensor, Tensor]:
    out, grad_x = torch.empty_like(x), torch.empty_like(x)
    tensors = {"x_ptr": x, "grad_ptr": grad, "out_ptr": out, "grad_x_ptr": grad_x, "n": len(x)}
    constants = {"ACTIVATION": name or "none", "BLOCK": triton.next_power_of_2(len(x))}
    launch(_activation_kernel, (1,), num_warps=4, num_stages=1, **tensors, **constants)
    return out, grad_x


def _torch(x: Tensor, grad: Tensor, name: str | None) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = reference.activation(x, name)
    return out.detach(), torch.autograd.grad(out, x, grad)[0]


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient(name: str | None) -> None:
    x = torch.cat([normal(1, 800) * 3, torch.linspace(-12, 12, 201)])
    grad = normal(2, len(x))
    expected = Expected(lambda x: reference.activation(x, name), {"x": x}, grad)
    out, grad_x = _run(x, grad, name)
    expected.check("out", out)
    expected.check("x", grad_x)


@pytest.mark.parametrize("name", NAMES)
def test_extremes(name: str | None) -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e4, -1e4, 89.0, -89.0, 1e-38, -1e-38, 1e18, -1e18])
    out, grad_x = _run(x, torch.ones_like(x), name)
    # float64, because torch's vectorized float32 gelu turns inf into NaN, and its cubes overflow
    wide, wide_grad = _torch(x.double(), torch.ones_like(x).double(), name)
    expected, expected_grad = wide.float(), wide_grad.float()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-36, equal_nan=True)
    torch.testing.assert_close(grad_x, expected_grad, rtol=1e-6, atol=1e-36, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_finite_values_stay_finite(name: str | None) -> None:
    x = torch.tensor([1e30, -1e30, 3.4e38, -3.4e38])
    out, grad_x = _run(x, torch.ones_like(x), name)
    assert torch.equal(out.isfinite(), torch.tensor([name != "relu2", True] * 2))
    assert torch.equal(grad_x[:2], torch.tensor({None: [1.0, 1.0], "relu2": [2e30, 0.0]}.get(name, [1.0, 0.0])))
    assert not grad_x.isnan().any()


@pytest.mark.parametrize("name", ["relu", "relu2"])
def test_relu_passes_no_gradient_where_it_is_0(name: str) -> None:
    x = torch.tensor([-1.0, 0.0, -torch.inf, 1.0, torch.nan])
    for grad in (torch.inf, torch.nan, 1.0):
        _, actual = _run(x, torch.full_like(x, grad), name)
        _, expected = _torch(x, torch.full_like(x, grad), name)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^gemm: activation 'gelo' is not known: expected one of None, gelu, "):
        activations.check_activation("gemm", "gelo")
