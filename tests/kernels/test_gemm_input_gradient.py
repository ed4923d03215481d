from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.activations import ACTIVATIONS, GATED
from tpfuse.kernels.gemm_input_gradient import gemm_input_gradient
from tpfuse.testing.compare import check_error
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.tiers import exhaustive

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = (1, 16, 63, 64, 100, 257)
SHAPES = sorted({(s, 64, 20) for s in SIZES} | {(20, s, 65) for s in SIZES} | {(65, 20, s) for s in SIZES})


def _gradient(grad: Tensor, weight: Tensor, preactivation: Tensor, activation: str | None) -> Tensor:
    """By autograd, from a stored pre-activation, as torch's eager backward has it."""
    leaf = preactivation.detach().requires_grad_()
    return torch.autograd.grad(reference.activation(leaf, activation), leaf, grad)[0] @ weight


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [
        (1, 1, 1, F32),
        (63, 100, 65, BF16),
        (100, 63, 257, F32),
        *exhaustive(*((*shape, (F32, BF16)[i % 2]) for i, shape in enumerate(SHAPES))),
    ],
)
def test_sizes(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    grad, weight = integers(1, m, n, dtype=dtype), integers(2, n, k, dtype=dtype)
    expected = (grad.double() @ weight.double()).float().to(dtype)
    assert torch.equal(gemm_input_gradient(grad, weight), expected)


@pytest.mark.parametrize(
    ("n", "activation"),
    [
        (100, "relu"),
        (63, "swiglu"),
        *exhaustive((1, "relu"), (257, "relu"), (16, "swiglu"), (64, "swiglu"), (257, "swiglu")),
    ],
)
def test_masks_with_an_activation(n: int, activation: str) -> None:
    halves = 2 if activation in GATED else 1
    grad, weight = integers(1, 20, n), integers(2, halves * n, 30)
    preactivation = integers(3, 20, halves * n)
    expected = _gradient(grad.double(), weight.double(), preactivation.double(), activation)
    torch.testing.assert_close(
        gemm_input_gradient(grad, weight, preactivation, activation=activation).double(), expected, rtol=1e-6, atol=1e-4
    )


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        ("gelu", BF16),
        ("swiglu", F32),
        *exhaustive(*((name, (F32, F16, BF16)[i % 3]) for i, name in enumerate(ACTIVATIONS))),
    ],
)
def test_activations(activation: str | None, dtype: torch.dtype) -> None:
    m, n, k = 65, 70, 40
    width = n // 2 if activation in GATED else n
    tensors = (normal(1, m, width, dtype=dtype), normal(2, n, k, dtype=dtype), normal(3, m, n, dtype=dtype) * 2)
    plain = _gradient(*tensors, activation)
    truth = _gradient(*(x.double() for x in tensors), activation)
    bound = 2 * (plain.double() - truth).abs().max().item() + torch.finfo(dtype).eps * truth.abs().max().item()
    grad, weight, preactivation = tensors
    actual = gemm_input_gradient(grad, weight, preactivation, activation=activation)
    check_error("input gradient", actual, plain, truth, bound)


def test_strides() -> None:
    m, n, k = 70, 36, 68
    grads = (integers(1, n, m).t(), integers(1, m, 1).expand(m, n), integers(1, m, 2 * n)[:, ::2], integers(1, m, n))
    weights = (integers(2, k, n).t(), integers(2, 1, k).expand(n, k), integers(2, n, k + 1)[:, 1:], integers(2, n, k))
    kept = (integers(3, n, m).t(), integers(3, 1, n).expand(m, n), integers(3, m, n + 4)[:, 4:], integers(3, m, n))
    for grad, weight, preactivation in zip(grads, weights, kept, strict=True):
        expected = torch.where(preactivation > 0, grad, 0) @ weight
        assert torch.equal(gemm_input_gradient(grad, weight, preactivation, activation="relu"), expected)


def test_nan_stays_in_its_row() -> None:
    grad, weight, preactivation = normal(1, 70, 70), normal(2, 70, 70), normal(3, 70, 70)
    clean = gemm_input_gradient(grad, weight, preactivation, activation="gelu")
    grad[3, 69], preactivation[5, 0] = torch.nan, torch.nan
    out = gemm_input_gradient(grad, weight, preactivation, activation="gelu")
    others = torch.ones(70, dtype=torch.bool)
    others[[3, 5]] = False
    assert out[~others].isnan().all()
    assert torch.equal(out[others], clean[others])


def test_every_run_gives_the_same_bits() -> None:
    grad, weight, preactivation = normal(1, 40, 257), normal(2, 257, 33), normal(3, 40, 257)
    runs = [gemm_input_gradient(grad, weight, preactivation, activation="silu") for _ in range(3)]
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_empty_sizes() -> None:
    for m, n, k in ((0, 5, 3), (5, 3, 0), (5, 0, 3)):
        out = gemm_input_gradient(torch.zeros(m, n), torch.zeros(n, k))
        assert torch.equal(out, torch.zeros(m, k))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grad": torch.zeros(4)}, r"grad has shape \(4,\): expected \[M, N\]"),
        ({"weight": torch.zeros(6)}, r"weight has shape \(6,\): expected \[N, K\]"),
        ({"weight": torch.zeros(5, 3)}, r"weight has shape \(5, 3\): expected \(6, 3\)"),
        ({"activation": "gelu"}, r"preactivation is None: activation gelu expects it"),
        ({"activation": "elu"}, r"activation 'elu' is not known"),
        (
            {"activation": "swiglu", "preactivation": torch.zeros(4, 6)},
            r"preactivation has shape \(4, 6\): expected \(4, 12\)",
        ),
        ({"weight": torch.zeros(6, 3).half()}, r"weight is torch.float16, grad is torch.float32: expected one dtype"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"grad": torch.zeros(4, 6), "weight": torch.zeros(6, 3)}
    with pytest.raises(ValueError, match=f"^gemm_input_gradient: {message}"):
        gemm_input_gradient(**good | changes)
