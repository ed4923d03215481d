"""rope by torch and by the kernel: results, gradients, strides and refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import naming
from tests.support.tiers import pairwise
from tpfuse.backend import kernels
from tpfuse.kernels import reference
from tpfuse.ops.rope import _forward, rope
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import integers, normal

ANGLES = normal(7, 300, 50)
POSITIONS = integers(6, 2, 257, low=0, high=299, dtype=torch.int64)


def _tables(half: int) -> tuple[Tensor, Tensor]:
    return ANGLES[:, :half].cos().contiguous(), ANGLES[:, :half].sin().contiguous()


def _plain(q: Tensor, k: Tensor, positions: Tensor, half: int, **options: Any) -> Tensor:
    return torch.cat([reference.rope(x, *_tables(half), positions, **options) for x in (q, k)], dim=2)


def test_the_result_follows_the_formula() -> None:
    q, (cos, sin) = normal(1, 2, 21, 3, 16, dtype=torch.float64), _tables(8)
    rotation = torch.complex(cos, sin)[POSITIONS[:, :21]].unsqueeze(2)
    out, _ = rope(q, q, cos, sin, POSITIONS[:, :21])
    turned = torch.complex(q[..., :8], q[..., 8:]) * rotation
    torch.testing.assert_close(out, torch.cat([turned.real, turned.imag], dim=-1))
    out, _ = rope(q, q, cos, sin, POSITIONS[:, :21], interleaved=True)
    turned = torch.complex(q[..., ::2], q[..., 1::2]) * rotation
    torch.testing.assert_close(out, torch.view_as_real(turned).flatten(-2))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_scores_depend_on_distances_alone(name: str) -> None:
    half, step = 16, torch.arange(40)
    angles = step.unsqueeze(1) * 10000 ** (-torch.arange(half) / half)
    q, k = normal(1, 1, 1, 1, 32).expand(1, 30, 1, 32), normal(2, 1, 1, 1, 32).expand(1, 30, 1, 32)
    with kernels(name):
        q, k = rope(q, k, angles.cos(), angles.sin(), step[:30])
    scores = (q[0, :, 0] @ k[0, :, 0].T).unfold(0, 1, 1)[..., 0]
    for distance in (-5, 0, 7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    *pairwise(
        first=6,
        shape=[(63, (3, 1), 100, 50), (100, (2, 2), 64, 9), (1, (1, 1), 16, 8)],
        options=[{}, {"interleaved": True}, {"inverse": True}],
        name=["triton", "torch"],
        dtype=[torch.float32, torch.bfloat16, torch.float16],
    )
)
def test_results_and_gradients_match_the_reference(
    shape: tuple[int, tuple[int, int], int, int], options: dict[str, bool], name: str, dtype: torch.dtype
) -> None:
    time, heads, size, half = shape
    positions = POSITIONS[:, :time]
    inputs = {key: normal(i, 2, time, heads[i], size, dtype=dtype) for i, key in enumerate(("q", "k"))}
    grad = normal(9, 2, time, sum(heads), size, dtype=dtype)
    expected = Expected(lambda q, k: _plain(q, k, positions, half, **options), inputs, grad)
    with kernels(name):
        expected.check_function(lambda q, k: torch.cat(rope(q, k, *_tables(half), positions, **options), dim=2))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_inverse_undoes_the_rotation(name: str) -> None:
    q, k, tables = normal(1, 2, 21, 3, 32), normal(2, 2, 21, 1, 32), _tables(12)
    with kernels(name):
        back = rope(*rope(q, k, *tables, POSITIONS[0, :21]), *tables, POSITIONS[0, :21], inverse=True)
    for a, b in zip((q, k), back, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_one_of_both_is_used_and_empty_ones(name: str) -> None:
    tables = _tables(8)
    q, k = normal(1, 2, 5, 3, 16).requires_grad_(), normal(2, 2, 5, 1, 16).requires_grad_()
    with kernels(name):
        rope(q, k, *tables, POSITIONS[0, :5])[0].sum().backward()
        assert q.grad.shape == q.shape and (k.grad is None or torch.equal(k.grad, torch.zeros_like(k)))
        empty = torch.empty(0, 5, 3, 16, requires_grad=True)
        rope(empty, empty, *tables, POSITIONS[0, :5])[0].sum().backward()
        assert empty.grad.shape == empty.shape


def test_heads_first_keeps_its_layout() -> None:
    q = normal(1, 2, 3, 21, 16)
    with kernels("triton"):
        out, _ = rope(q.transpose(1, 2), q.transpose(1, 2), *_tables(8), POSITIONS[:, :21])
        last_first, _ = rope(q.transpose(1, 2).mT.contiguous().mT, q.transpose(1, 2), *_tables(8), POSITIONS[:, :21])
    assert out.transpose(1, 2).is_contiguous() and torch.equal(out, last_first)


def test_gradcheck_and_its_own_derivative() -> None:
    q, k = normal(1, 1, 3, 2, 6, dtype=torch.float64), normal(2, 1, 3, 1, 6, dtype=torch.float64)
    function = lambda q, k: rope(q, k, *_tables(2), POSITIONS[0, :3])  # noqa: E731
    assert torch.autograd.gradcheck(function, (q.requires_grad_(), k.requires_grad_()))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_operator_is_registered_correctly(interleaved: bool) -> None:
    q, k = normal(1, 1, 5, 2, 16).requires_grad_(), normal(2, 1, 2, 5, 16).transpose(1, 2).requires_grad_()
    torch.library.opcheck(_forward, (q, k, *_tables(4), POSITIONS[0, :5], interleaved, False))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_bad_arguments_are_refused(name: str) -> None:
    x, positions = torch.zeros(2, 5, 3, 16), POSITIONS[0, :5]
    for q, k, where, message in (
        (x.long(), x, positions, r"rope: q is torch\.int64: expected floats"),
        (x[..., 1:], x[..., 1:], positions, r"rope: q has shape \(2, 5, 3, 15\): expected .* D even"),
        (x, x[:, 1:], positions, r"rope: k has shape \(2, 4, 3, 16\)"),
        (x, x, torch.tensor([2, 3, 4, 5, 300]), "rope: positions from 2 to 300: expected 0 to 299"),
        (x, x, torch.tensor([2, 3, 4, 5, -1]), "rope: positions from -1 to 5"),
    ):
        with naming(message), kernels(name), pytest.raises(ValueError, match=message):
            rope(q, k, *_tables(8), where)
