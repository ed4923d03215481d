from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.activations import ACTIVATIONS, GATED
from tpfuse.kernels.gemm_weight_gradient import gemm_weight_gradient
from tpfuse.testing.compare import check_error
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.tiers import exhaustive

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = (1, 16, 63, 64, 100, 257)
SHAPES = sorted({(s, 64, 20) for s in SIZES} | {(20, s, 65) for s in SIZES} | {(65, 20, s) for s in SIZES})


def _gradients(grad: Tensor, x: Tensor, preactivation: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    """By autograd, from a stored pre-activation, as torch's eager backward has it."""
    leaf = preactivation.detach().requires_grad_()
    left = torch.autograd.grad(reference.activation(leaf, activation), leaf, grad)[0]
    return left.t() @ x, left.sum(0)


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
    grad, x = integers(1, m, n, dtype=dtype), integers(2, m, k, dtype=dtype)
    out, bias = gemm_weight_gradient(grad, x, with_bias=True)
    assert torch.equal(out, (grad.double().t() @ x.double()).float().to(dtype))
    assert torch.equal(bias, grad.double().sum(0).float().to(dtype))
    again, nothing = gemm_weight_gradient(grad, x)
    assert torch.equal(again, out)
    assert nothing is None


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        ("gelu", BF16),
        ("swiglu", F32),
        *exhaustive(*((name, (F32, F16, BF16)[i % 3]) for i, name in enumerate(ACTIVATIONS))),
    ],
)
def test_activations(activation: str | None, dtype: torch.dtype) -> None:
    m, n, k = 70, 140, 40
    width = n // 2 if activation in GATED else n
    tensors = (normal(1, m, width, dtype=dtype), normal(2, m, k, dtype=dtype), normal(3, m, n, dtype=dtype) * 2)
    plain = _gradients(*tensors, activation)
    truth = _gradients(*(x.double() for x in tensors), activation)
    actual = gemm_weight_gradient(*tensors, activation=activation, with_bias=True)
    for name, a, p, t in zip(("weight", "bias"), actual, plain, truth, strict=True):
        bound = 2 * (p.double() - t).abs().max().item() + torch.finfo(dtype).eps * t.abs().max().item()
        assert a is not None
        check_error(name, a, p, t, bound)


@pytest.mark.parametrize(
    ("m", "activation"),  # 600: the reduction is split
    [(40, "relu"), (600, "swiglu"), *exhaustive((40, "swiglu"), (600, None), (600, "relu"))],
)
def test_accumulates_into_float32(m: int, activation: str | None) -> None:
    n, k = 20, 100  # two tiles side by side: the bias gradient is added once
    width = n // 2 if activation in GATED else n
    grad, x = integers(1, m, width, dtype=torch.bfloat16), integers(2, m, k, dtype=torch.bfloat16)
    kept = integers(3, m, n, dtype=torch.bfloat16)
    if activation == "swiglu":
        kept[:, :width] += 32  # silu of a large gate is the gate itself: whole numbers stay whole
    expected, expected_bias = gemm_weight_gradient(
        grad.float(), x.float(), kept.float(), activation=activation, with_bias=True
    )
    assert expected_bias is not None
    around = torch.full((k + 2, 2 * n), torch.nan)
    into, bias_into = around[1:-1, ::2].t(), torch.full((n, 2), torch.nan)[:, 1]
    into.copy_(integers(4, n, k))
    bias_into.copy_(integers(5, n))
    out, bias = gemm_weight_gradient(
        grad, x, kept, activation=activation, with_bias=True, accumulate_into=into, accumulate_bias_into=bias_into
    )
    assert out is into
    assert bias is bias_into
    assert torch.equal(out, integers(4, n, k) + expected)
    assert torch.equal(bias, integers(5, n) + expected_bias)
    assert around.isnan().sum() == around.numel() - n * k


def test_only_one_of_both_is_accumulated() -> None:
    grad, x = integers(1, 30, 20), integers(2, 30, 24)
    into = integers(3, 20, 24)
    out, bias = gemm_weight_gradient(grad, x, with_bias=True, accumulate_into=into.clone())
    assert torch.equal(out, into + grad.t() @ x)
    assert torch.equal(bias, grad.sum(0))
    into = integers(4, 20)
    out, bias = gemm_weight_gradient(grad, x, with_bias=True, accumulate_bias_into=into.clone())
    assert torch.equal(out, grad.t() @ x)
    assert torch.equal(bias, into + grad.sum(0))


def test_strides() -> None:
    m, n, k = 70, 36, 68
    grads = (integers(1, n, m).t(), integers(1, m, 1).expand(m, n), integers(1, m, 2 * n)[:, ::2], integers(1, m, n))
    xs = (integers(2, k, m).t(), integers(2, 1, k).expand(m, k), integers(2, m, k + 1)[:, 1:], integers(2, m, k))
    kept = (integers(3, n, m).t(), integers(3, 1, n).expand(m, n), integers(3, m, n + 4)[:, 4:], integers(3, m, n))
    for grad, x, preactivation in zip(grads, xs, kept, strict=True):
        left = torch.where(preactivation > 0, grad, 0)
        out, bias = gemm_weight_gradient(grad, x, preactivation, activation="relu", with_bias=True)
        assert torch.equal(out, left.t() @ x)
        assert torch.equal(bias, left.sum(0))


def test_nan_stays_in_its_row() -> None:
    grad, x, preactivation = normal(1, 70, 70), normal(2, 70, 70), normal(3, 70, 70)
    grad[69, 3], preactivation[0, 5] = torch.nan, torch.inf
    out, bias = gemm_weight_gradient(grad, x, preactivation, activation="gelu", with_bias=True)
    rows = torch.zeros(70, dtype=torch.bool)
    rows[[3, 5]] = True
    assert bias is not None
    assert torch.equal(bias.isnan(), rows)
    assert torch.equal(out.isnan(), rows[:, None].expand(70, 70))


@pytest.mark.parametrize("m", [100, *exhaustive(600)])
def test_every_run_gives_the_same_bits(m: int) -> None:
    grad, x = normal(1, m, 33), normal(2, m, 20)
    runs = [gemm_weight_gradient(grad, x, with_bias=True) for _ in range(3)]
    assert all(torch.equal(out, runs[0][0]) and torch.equal(bias, runs[0][1]) for out, bias in runs)


def test_empty_sizes() -> None:
    for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0)):
        out, _ = gemm_weight_gradient(torch.zeros(m, n), torch.zeros(m, k))
        assert torch.equal(out, torch.zeros(n, k))
    out, bias = gemm_weight_gradient(torch.zeros(0, 5), torch.zeros(0, 3), with_bias=True)
    assert torch.equal(bias, torch.zeros(5))


def test_the_bias_of_no_features() -> None:
    grad = integers(1, 30, 20)
    out, bias = gemm_weight_gradient(grad, torch.zeros(30, 0), with_bias=True)
    assert out.shape == (20, 0)
    assert torch.equal(bias, grad.sum(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grad": torch.zeros(4)}, r"grad has shape \(4,\): expected \[M, N\]"),
        ({"x": torch.zeros(4)}, r"x has shape \(4,\): expected \[M, K\]"),
        ({"x": torch.zeros(5, 3)}, r"x has shape \(5, 3\): expected \(4, 3\)"),
        ({"activation": "gelu"}, r"preactivation is None: activation gelu expects it"),
        ({"x": torch.zeros(4, 3).bfloat16()}, r"x is torch.bfloat16, grad is torch.float32: expected one dtype"),
        ({"accumulate_into": torch.zeros(6, 4)}, r"accumulate_into has shape \(6, 4\): expected \(6, 3\)"),
        ({"accumulate_into": torch.zeros(6, 3).half()}, r"accumulate_into is torch.float16: expected float32"),
        ({"accumulate_bias_into": torch.zeros(6)}, r"accumulate_bias_into was given without with_bias"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"grad": torch.zeros(4, 6), "x": torch.zeros(4, 3)}
    with pytest.raises(ValueError, match=f"^gemm_weight_gradient: {message}"):
        gemm_weight_gradient(**good | changes)
