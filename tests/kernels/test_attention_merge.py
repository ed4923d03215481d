"""Values of attention_merge beside the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import refusals
from tests.support.tiers import exhaustive
from tpfuse.kernels import reference
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.kernels.attention_merge import attention_merge
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import normal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = [*((dtype, dtype) for dtype in DTYPES), (torch.float32, torch.float16), (torch.float32, torch.bfloat16)]

SHAPES = [(1, 1, 1, 16), (2, 3, 63, 40), (1, 2, 100, 64), (1, 1, 257, 256), (2, 1, 64, 80)]


def _halves(shape: tuple[int, ...], dtype_a: torch.dtype, dtype_b: torch.dtype) -> dict[str, Tensor]:
    return {
        "out_a": normal(1, *shape, dtype=dtype_a),
        "lse_a": normal(2, *shape[:-1]) * 3,
        "out_b": normal(3, *shape, dtype=dtype_b),
        "lse_b": normal(4, *shape[:-1]) * 3,
    }


def _check(halves: dict[str, Tensor], out: Tensor, lse: Tensor) -> None:
    """Compare with the reference in float64: out is as exact as in out_a's dtype, lse as in float32."""

    def merged(**x: Tensor) -> Tensor:
        return reference.attention_merge(**x)[0].to(x["out_a"].dtype)

    Expected(merged, halves, torch.zeros_like(halves["out_a"])).check("out", out)
    zeros = torch.zeros_like(halves["lse_a"])
    Expected(lambda **x: reference.attention_merge(**x)[1], halves, zeros).check("out", lse)


@pytest.mark.parametrize(
    ("shape", "dtype_a", "dtype_b"),
    [
        *((shape, *PAIRS[i]) for i, shape in enumerate(SHAPES)),
        *exhaustive(*((shape, *PAIRS[(i + more) % 5]) for i, shape in enumerate(SHAPES) for more in (2, 3))),
    ],
)
def test_against_reference(shape: tuple[int, ...], dtype_a: torch.dtype, dtype_b: torch.dtype) -> None:
    halves = _halves(shape, dtype_a, dtype_b)
    out, lse = attention_merge(**halves)
    assert out.data_ptr() != halves["out_a"].data_ptr()
    _check(halves, out, lse)
    expected = out.clone(), lse.clone()
    out, lse = attention_merge(**halves, in_place=True)
    assert out is halves["out_a"] and lse is halves["lse_a"]
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(torch.float32, torch.float16)])
def test_halves_of_the_keys_are_the_whole(dtype: torch.dtype) -> None:
    q, k, v = (normal(seed, 1, 2, 100, 16, dtype=dtype) for seed in (1, 2, 3))
    options: dict[str, Any] = {"window": 60}
    out_a, lse_a = attention_forward(q, k[:, :, :40], v[:, :, :40], **options)
    out_b, lse_b = attention_forward(q, k[:, :, 40:], v[:, :, 40:], k_offset=40, **options)
    out, lse = attention_merge(out_a.float(), lse_a, out_b, lse_b)

    def whole(**x: Tensor) -> Tensor:
        ranges = (slice(0, 40), slice(40, 100))
        parts = [
            reference.attention(x["q"], x["k"][:, :, r], x["v"][:, :, r], k_offset=r.start, **options) for r in ranges
        ]
        return reference.attention_merge(*parts[0], *parts[1])[0].to(x["q"].dtype)

    expected = Expected(whole, {"q": q, "k": k, "v": v}, torch.zeros_like(q))
    truth = reference.attention(q.double(), k.double(), v.double(), **options)[0]
    torch.testing.assert_close(expected.float64["out"], truth, rtol=1e-12, atol=1e-12)
    expected.check("out", out.to(dtype))
    assert lse.isfinite().all()


def test_a_set_without_visible_keys_has_no_weight() -> None:
    halves = _halves((1, 1, 8, 16), torch.float32, torch.float32)
    halves["lse_a"][..., :4] = -torch.inf
    halves["lse_b"][..., 2:6] = -torch.inf
    halves["out_a"][..., :4, :], halves["out_b"][..., 2:6, :] = 0, 0
    out, lse = attention_merge(**halves)
    for rows, side in ((slice(0, 2), "b"), (slice(4, 6), "a")):
        assert torch.equal(out[..., rows, :], halves[f"out_{side}"][..., rows, :])
        assert torch.equal(lse[..., rows], halves[f"lse_{side}"][..., rows])
    assert not out[..., 2:4, :].any() and (lse[..., 2:4] == -torch.inf).all()
    assert not lse[..., 6:].isinf().any()


def test_large_differences_do_not_overflow() -> None:
    halves = _halves((1, 1, 64, 16), torch.float32, torch.float32)
    halves["lse_a"] *= 100
    halves["lse_b"] += 1e4 * torch.tensor([-1.0, 1.0]).repeat(32)
    _check(halves, *attention_merge(**halves))


def test_nan_stays() -> None:
    halves = _halves((1, 1, 3, 16), torch.float32, torch.float32)
    halves["lse_a"][..., 0], halves["lse_b"][..., 1] = torch.nan, torch.nan
    halves["out_b"][..., 2, 5] = torch.nan
    out, lse = attention_merge(**halves)
    expected = reference.attention_merge(**halves)
    assert torch.equal(out.isnan(), expected[0].isnan()) and torch.equal(lse.isnan(), expected[1].isnan())


def test_strides_and_surrounding_memory_do_not_matter() -> None:
    halves = _halves((2, 3, 63, 48), torch.bfloat16, torch.bfloat16)
    expected = attention_merge(**halves)
    around = torch.full((2, 80, 3, 64), torch.nan, dtype=torch.bfloat16)
    around[:, 5:68, :, 8:56] = halves["out_a"].transpose(1, 2)
    halves["out_a"] = around[:, 5:68, :, 8:56].transpose(1, 2)
    halves["out_b"] = halves["out_b"].transpose(1, 2).contiguous().transpose(1, 2)
    halves["lse_b"] = halves["lse_b"].transpose(0, 2).contiguous().transpose(0, 2)
    for in_place in (False, True):
        out, lse = attention_merge(**halves, in_place=in_place)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert around[:, 68:].isnan().all() and around[..., 56:].isnan().all()


@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (1, 0, 5, 16), (1, 2, 0, 16)])
def test_empty(shape: tuple[int, ...]) -> None:
    out, lse = attention_merge(**_halves(shape, torch.float32, torch.float32))
    assert out.shape == shape and lse.shape == shape[:3]


OUT, LSE = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5)

test_bad_input_is_refused = refusals(
    attention_merge,
    _halves((1, 2, 5, 16), torch.float16, torch.float16),
    "attention_merge: ",
    ({"out_b": OUT}, "out_b is torch.float32, out_a is torch.float16: expected one dtype, or out_a float32"),
    ({"out_a": OUT.double()}, "out_a is torch.float64: expected float32"),
    ({"out_a": OUT[0]}, r"out_a has shape \(2, 5, 16\): expected \[B, H, T, D\]"),
    ({"out_b": OUT[:, :, :4].half()}, r"out_b has shape \(1, 2, 4, 16\): expected \(1, 2, 5, 16\)"),
    ({"lse_a": LSE[..., :4]}, r"lse_a has shape \(1, 2, 4\): expected \(1, 2, 5\)"),
    ({"lse_b": LSE.half()}, "lse_b is torch.float16: expected float32"),
    ({"lse_b": LSE.to("meta")}, "lse_b is on meta, out_a on cpu"),
    ({"out_b": OUT.half().mT.contiguous().mT}, "out_b has strides .*: expected contiguous rows"),
    ({"lse_a": LSE.mT.contiguous().mT, "in_place": True}, r"lse_a has strides \(10, 1, 2\): expected a contiguous"),
)
