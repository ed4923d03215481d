"""Values of the rope launchers beside the reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import exhaustive
from tpfuse.kernels import reference
from tpfuse.kernels.rope import rope_forward
from tpfuse.testing.inputs import integers, normal


def _tables(n_positions: int, half: int) -> tuple[Tensor, Tensor]:
    angles = normal(7, n_positions, half)
    return angles.cos(), angles.sin()


def _check(q: Tensor, k: Tensor, half: int, interleaved: bool, inverse: bool = False) -> None:
    cos, sin = _tables(300, half)
    positions = integers(6, *q.shape[:2], low=0, high=299, dtype=torch.int64)
    outs = rope_forward(q, k, cos, sin, positions, interleaved=interleaved, inverse=inverse)
    for x, out in zip((q, k), outs, strict=True):
        expected = reference.rope(x.double(), cos, sin, positions, interleaved=interleaved, inverse=inverse)
        bound = torch.finfo(x.dtype).eps * expected.abs().max().item() if x.numel() else 0.0
        assert out.shape == x.shape and out.dtype == x.dtype
        assert not x.numel() or (out.double() - expected).abs().max() <= bound
        assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ONE, ODD = (1, 1, 1, 1, 2, 1), (1, 63, 1, 1, 100, 50)  # batch, time, heads of q, heads of k, head size, half
PART, LONG = (3, 100, 2, 2, 64, 10), (1, 257, 5, 3, 16, 8)


@pytest.mark.parametrize(
    ("shape", "dtype", "interleaved"),
    [
        (ONE, F32, True),
        (ODD, BF16, False),
        (ODD, F32, True),
        ((2, 16, 3, 1, 32, 16), F16, False),
        (PART, F32, False),
        *exhaustive(
            (ONE, BF16, False),
            (ODD, F16, True),
            ((2, 16, 3, 1, 32, 16), BF16, True),
            (PART, BF16, True),
            (PART, F16, False),
            (LONG, F32, False),
            (LONG, BF16, True),
            (LONG, F16, True),
        ),
    ],
)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool) -> None:
    batch, time, heads, heads_k, size, half = shape
    q, k = normal(1, batch, time, heads, size, dtype=dtype), normal(2, batch, time, heads_k, size, dtype=dtype)
    _check(q, k, half, interleaved)


@pytest.mark.parametrize("interleaved", [False, *exhaustive(True)])
def test_strides(interleaved: bool) -> None:
    packed = normal(1, 2, 33, 5, 3, 64)
    _check(packed[..., 0, :40], packed[:, :, :1, 1, :40], 20, interleaved)
    _check(packed[..., 1, :], packed[:, :, :2, 2], 32, interleaved, inverse=True)
    heads_first = normal(2, 2, 5, 33, 24).transpose(1, 2)
    _check(heads_first, heads_first[:, :, :1], 12, interleaved)
    _check(normal(3, 2, 33, 1, 24).expand(2, 33, 4, 24), heads_first[:, :, :1], 12, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_stay_in_their_pair(interleaved: bool, value: float) -> None:
    q, (cos, sin) = normal(1, 1, 20, 2, 16), _tables(20, 8)
    q[0, 3, 1, 4] = value
    out, _ = rope_forward(q, q, cos, sin, torch.arange(20), interleaved=interleaved)
    expected = reference.rope(q, cos, sin, torch.arange(20), interleaved=interleaved)
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())
    assert (~out.isfinite()).sum() == 2


def test_positions_outside_the_tables_give_nan() -> None:
    cos, sin = _tables(20, 8)
    out, _ = rope_forward(*[normal(1, 1, 3, 2, 16)] * 2, cos, sin, torch.tensor([19, 20, -1]))
    assert out[:, 0].isfinite().all() and out[:, 1:].isnan().all()


@pytest.mark.parametrize("shape", [(0, 5, 3, 16), (2, 0, 3, 16), (2, 5, 0, 16)])
def test_empty(shape: tuple[int, ...]) -> None:
    _check(torch.empty(shape), torch.empty(shape), 8, False)


X, TABLE, HERE = torch.zeros(2, 5, 3, 16), torch.zeros(9, 8), torch.zeros(5, dtype=torch.int64)
SMALL = TABLE[:, :1].contiguous()
ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: rope_forward(X.int(), X.int(), TABLE, TABLE, HERE), r"q is torch.int32: expected floats"),
    (
        lambda: rope_forward(X.double(), X.double(), TABLE, TABLE, HERE),
        r"q is torch.float64: expected float32",
    ),
    (lambda: rope_forward(X, X.half(), TABLE, TABLE, HERE), "rope_forward: k is torch.float16: .* one dtype"),
    (lambda: rope_forward(X[..., 1:], X[..., 1:], TABLE, TABLE, HERE), r"\(2, 5, 3, 15\): expected .* D even"),
    (
        lambda: rope_forward(X[..., :14], X[..., :14], TABLE, TABLE, HERE),
        r"\(2, 5, 3, 14\): .* at least 16",
    ),
    (lambda: rope_forward(X[0], X[0], TABLE, TABLE, HERE), r"q has shape \(5, 3, 16\): expected \[B, T, H, D\]"),
    (lambda: rope_forward(X, X[:1], TABLE, TABLE, HERE), r"k has shape \(1, 5, 3, 16\): expected \(2, 5, 3, 16\)"),
    (lambda: rope_forward(X.transpose(2, 3), X.transpose(2, 3), SMALL, SMALL, HERE), "q has shape .2, 5, 16, 3."),
    (lambda: rope_forward(X[..., ::2], X[..., ::2], SMALL, SMALL, HERE), "expected 1 for the last"),
    (lambda: rope_forward(X, X, TABLE, TABLE[1:], HERE), r"sin has shape \(8, 8\): expected \(9, 8\)"),
    (lambda: rope_forward(X, X, TABLE.half(), TABLE.half(), HERE), r"cos is torch.float16 .*float32 tables"),
    (lambda: rope_forward(X, X, TABLE.t(), TABLE.t(), HERE), "expected contiguous float32 tables"),
    (lambda: rope_forward(X, X, TABLE, TABLE, HERE.int()), "positions is torch.int32: expected int64"),
    (lambda: rope_forward(X, X, TABLE, TABLE, HERE[:4]), r"positions has shape \(4,\): expected \(2, 5\)"),
    (lambda: rope_forward(X, X, TABLE, TABLE, HERE.to("meta")), "positions is on meta, q on cpu"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
