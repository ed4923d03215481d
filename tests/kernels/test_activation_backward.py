"""Values of activation_backward beside torch's gradients."""

import pytest
import torch
from torch import Tensor

from tests.support.cases import refusals
from tests.support.tiers import exhaustive
from tpfuse.kernels import reference
from tpfuse.kernels.activation_backward import activation_backward
from tpfuse.kernels.activations import GATED
from tpfuse.testing.inputs import integers, normal

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def _gradient(grad: Tensor, preactivation: Tensor, activation: str) -> Tensor:
    """Return the gradient that torch's eager backward computes from a stored pre-activation."""
    leaf = preactivation.detach().requires_grad_()
    return torch.autograd.grad(reference.activation(leaf, activation), leaf, grad)[0]


@pytest.mark.parametrize(
    ("m", "n"),  # 600 rows: several parts, each of several tiles
    [(1, 1), (600, 70), *exhaustive((16, 65), (17, 63), (64, 300))],
)
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_sizes(m: int, n: int, activation: str) -> None:
    """P of whole numbers is exact, and so are its sums in every order of addition."""
    width = 2 * n if activation in GATED else n
    grad, preactivation = integers(1, m, n), integers(2, m, width)
    if activation == "swiglu":
        preactivation[:, :n] += 200  # silu of a large gate is the gate itself, and its slope 1
    out, sums = activation_backward(grad, preactivation, activation, with_sums=True)
    assert torch.equal(out, _gradient(grad.double(), preactivation.double(), activation).float())
    assert torch.equal(sums, out.double().sum(0).float())
    again, nothing = activation_backward(grad, preactivation, activation)
    assert nothing is None and torch.equal(again, out)


def test_strides() -> None:
    m, n = 70, 36
    grads = (integers(1, n, m).t(), integers(1, m, 1).expand(m, n), integers(1, m, 2 * n)[:, ::2], integers(1, m, n))
    x = integers(3, m, n)
    preactivations = integers(3, n, m).t(), integers(3, 1, n).expand(m, n), integers(3, m, n + 4)[:, 4:], x
    for grad, preactivation in zip(grads, preactivations, strict=True):
        out, sums = activation_backward(grad, preactivation, "relu", with_sums=True)
        assert torch.equal(out, torch.where(preactivation > 0, grad, 0)) and out.is_contiguous()
        assert torch.equal(sums, out.sum(0))
    pairs = torch.cat([integers(4, 2 * n, m).t() + 200, integers(5, 2 * n, m).t()], 1)[:, ::2]
    out, _ = activation_backward(grads[0], pairs, "swiglu")
    assert torch.equal(out, _gradient(grads[0].double(), pairs.double(), "swiglu").float())


def test_nan_stays_in_its_element_and_in_its_sum() -> None:
    grad, preactivation = normal(1, 70, 70), normal(3, 70, 70)
    grad[69, 3], preactivation[0, 5] = torch.nan, torch.inf
    out, sums = activation_backward(grad, preactivation, "gelu", with_sums=True)
    expected = torch.zeros(70, 70, dtype=torch.bool)
    expected[69, 3] = expected[0, 5] = True
    assert sums is not None
    assert torch.equal(out.isnan(), expected)
    assert torch.equal(sums.isnan(), expected.any(0))


def test_empty_sizes() -> None:
    for m, n in ((0, 5), (5, 0), (0, 0)):
        out, sums = activation_backward(torch.zeros(m, n), torch.zeros(m, 2 * n), "geglu", with_sums=True)
        assert out.shape == (m, 2 * n)
        assert torch.equal(sums, torch.zeros(2 * n))


test_bad_input_is_named = refusals(
    activation_backward,
    {"grad": torch.zeros(4, 6), "preactivation": torch.zeros(4, 6), "activation": "gelu"},
    "^activation_backward: ",
    ({"grad": torch.zeros(4)}, r"grad has shape \(4,\): expected \[M, N\]"),
    ({"activation": None}, "activation is None: expected the name of one"),
    ({"activation": "elu"}, "activation 'elu' is not known"),
    ({"activation": "swiglu"}, r"preactivation has shape \(4, 6\): expected \(4, 12\)"),
    ({"preactivation": torch.zeros(4, 6).half()}, "preactivation is torch.float16, grad is torch.float32"),
    ({"preactivation": torch.zeros(4, 6, device="meta")}, "preactivation is on meta, grad on cpu"),
)
