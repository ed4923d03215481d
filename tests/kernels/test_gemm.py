"""Values of the gemm launcher beside exact products of whole numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import refusals
from tests.support.tiers import exhaustive
from tpfuse.kernels import gemm_tiles, reference
from tpfuse.kernels.activations import GATED
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.gemm_split_k import split_reduction
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import integers, normal

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = (1, 16, 63, 64, 100, 257)
SHAPES = sorted({(s, 64, 100) for s in SIZES} | {(63, s, 257) for s in SIZES} | {(100, 16, s) for s in SIZES})


def _exact(x: Tensor, weight: Tensor, *terms: Tensor) -> Tensor:
    """Return x Wᵀ + terms of whole numbers, rounded once."""
    out = x.double() @ weight.double().t()
    for term in terms:
        out = out + term.double()
    return out.float().to(x.dtype)


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [
        (1, 1, 1, F32),
        (63, 100, 257, BF16),
        (257, 65, 63, F32),
        *exhaustive(*((*shape, (F32, BF16)[i % 2]) for i, shape in enumerate(SHAPES))),
    ],
)
def test_sizes(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = integers(1, m, k, dtype=dtype), integers(2, n, k, dtype=dtype)
    bias, residual = integers(3, n, dtype=dtype), integers(4, m, n, dtype=dtype)
    out, preactivation = gemm_forward(x, weight, bias, residual)
    assert preactivation is None
    assert torch.equal(out, _exact(x, weight, bias, residual))


def test_strides(layout: Callable[[int, int, int], Tensor]) -> None:
    m, n, k = 70, 36, 68
    plain = {"x": integers(1, m, k), "weight": integers(2, n, k), "bias": integers(3, n), "residual": integers(4, m, n)}
    views = {
        "x": layout(5, m, k),
        "weight": layout(6, n, k),
        "bias": layout(8, n, 3)[:, 1],
        "residual": layout(7, m, n),
    }
    for changes in (*({name: view} for name, view in views.items()), views):
        inputs = plain | changes
        assert torch.equal(gemm_forward(**inputs)[0], _exact(*inputs.values())), changes.keys()


def test_gated_halves_of_any_width() -> None:
    for width in (1, 15, 65):
        x, weight, bias = integers(1, 20, 9), integers(2, 2 * width, 9), integers(3, 2 * width)
        weight[:width] = weight[:width].abs() + 9  # silu of a large gate is the gate itself
        x = x.abs() + 9
        out, preactivation = gemm_forward(x, weight, bias, activation="swiglu", keep_preactivation=True)
        gate, up = _exact(x, weight, bias).split(width, dim=1)
        assert torch.equal(out, gate * up)
        assert torch.equal(preactivation, torch.cat([gate, up], dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tma_where_rows_are_aligned(dtype: torch.dtype, launches: list[dict[str, Any]]) -> None:
    for k, tma in ((64, True), (104, True), (100, dtype == torch.float32), (63, False), (0, False)):
        x, weight = integers(1, 70, k, dtype=dtype), integers(2, 36, k, dtype=dtype)
        assert torch.equal(gemm_forward(x, weight)[0], _exact(x, weight))
        assert launches[-1]["TMA"] == tma, k


def test_tensors_that_tma_cannot_read() -> None:
    x = torch.zeros(64, 64)
    assert gemm_tiles.allows_tma(x, None, x[:, :40], x[8:])
    for refused in (x.t(), x[:, 1:], x[:, :63].contiguous(), x[:0], x[:, ::2], x[:1].expand(64, 64)):
        assert not gemm_tiles.allows_tma(x, refused)


@pytest.mark.parametrize(
    ("activation", "dtype"), [("gelu", F32), ("swiglu", BF16), *exhaustive((None, BF16), (None, F32), ("swiglu", F32))]
)
def test_split_reduction(activation: str | None, dtype: torch.dtype, launches: list[dict[str, Any]]) -> None:
    m, n, k = 5, 24, 700
    width = n // 2 if activation in GATED else n
    inputs = {
        "x": normal(1, m, k, dtype=dtype),
        "weight": normal(2, n, k, dtype=dtype) / 25,
        "bias": normal(3, n, dtype=dtype),
        "residual": normal(4, m, width, dtype=dtype),
    }
    expected = Expected(
        lambda **tensors: reference.linear(activation_name=activation, **tensors), inputs, torch.zeros(m, width)
    )
    runs = [gemm_forward(**inputs, activation=activation, keep_preactivation=True) for _ in range(3)]
    assert {seen["splits"] for seen in launches} == {3}
    expected.check("out", runs[0][0])
    inputs.pop("residual")
    Expected(reference.linear, inputs, torch.zeros(m, n)).check("out", runs[0][1])
    assert all(torch.equal(out, runs[0][0]) for out, _ in runs)


def test_every_part_of_a_reduction_has_elements() -> None:
    for tiles, size, block in ((1, 700, 32), (1, 129, 16), (2, 4096, 64), (1, 1, 32), (1, 0, 32), (9, 4096, 32)):
        splits, each = split_reduction(tiles, size, block, torch.device("cpu"))
        assert splits == 1 or each % block == 0
        assert (splits - 1) * each < max(size, 1) <= splits * each


def test_every_tile_has_a_program(launches: list[dict[str, Any]]) -> None:
    gemm_forward(torch.zeros(257, 16), torch.zeros(257, 16))
    gemm_forward(torch.zeros(16, 16), torch.zeros(16, 16))
    assert [seen["grid"] for seen in launches] == [(3,), (1,)]


@pytest.mark.parametrize("activation", ["swiglu", *exhaustive("gelu", "relu2")])
def test_nan_and_inf_stay_in_their_row(activation: str) -> None:
    x, weight = normal(1, 70, 70), normal(2, 70, 70)
    clean, _ = gemm_forward(x, weight, activation=activation)
    x[3, 69], x[5, 0] = torch.nan, torch.inf
    out, _ = gemm_forward(x, weight, activation=activation)
    expected = reference.linear(x.double(), weight.double(), activation_name=activation)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    others = torch.ones(70, dtype=torch.bool)
    others[[3, 5]] = False
    assert torch.equal(out[others], clean[others])


def test_float16_overflows_only_when_it_is_stored() -> None:
    x, weight = torch.full((2, 64), 128.0).half(), torch.full((3, 64), 16.0).half()
    residual = torch.full((2, 3), -65504.0).half()
    assert gemm_forward(x, weight)[0].isinf().all()
    assert torch.equal(gemm_forward(x, weight, None, residual)[0], torch.full((2, 3), 131072.0 - 65504).half())


def test_empty_sizes() -> None:
    for m, n, k in ((0, 5, 3), (5, 0, 3), (0, 0, 0)):
        out, preactivation = gemm_forward(torch.zeros(m, k), torch.zeros(n, k), keep_preactivation=True)
        assert out.shape == (m, n)
        assert preactivation is not None and preactivation.shape == (m, n)
    bias, residual = integers(1, 6), integers(2, 4, 6)
    out, preactivation = gemm_forward(torch.zeros(4, 0), torch.zeros(6, 0), bias, residual, keep_preactivation=True)
    assert torch.equal(out, bias + residual)
    assert torch.equal(preactivation, bias.expand(4, 6))


test_bad_input_is_named = refusals(
    gemm_forward,
    {"x": torch.zeros(4, 3), "weight": torch.zeros(6, 3)},
    "",
    ({"x": torch.zeros(4)}, r"gemm_forward: x has shape \(4,\): expected \[M, K\]"),
    ({"weight": torch.zeros(6, 4)}, r"gemm_forward: weight has shape \(6, 4\): expected \(6, 3\)"),
    ({"weight": torch.zeros(6)}, r"gemm_forward: weight has shape \(6,\): expected \(6, 3\)"),
    ({"bias": torch.zeros(5)}, r"gemm_forward: bias has shape \(5,\): expected \(6,\)"),
    ({"residual": torch.zeros(4, 5)}, r"gemm_forward: residual has shape \(4, 5\): expected \(4, 6\)"),
    ({"residual": torch.zeros(4, 6), "activation": "geglu"}, r"expected \(4, 3\)"),
    ({"weight": torch.zeros(5, 3), "activation": "swiglu"}, r"weight has 5 rows: swiglu expects an even number"),
    ({"activation": "tanh"}, r"gemm_forward: activation 'tanh' is not known"),
    ({"bias": torch.zeros(6).half()}, r"bias is torch.float16, x is torch.float32: expected one dtype"),
    ({"x": torch.zeros(4, 3).long()}, r"x is torch.int64: expected float32, float16 or bfloat16"),
    ({"weight": torch.zeros(6, 3, device="meta")}, r"weight is on meta, x on cpu: expected one device"),
)
