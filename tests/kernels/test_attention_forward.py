"""Values of attention_forward beside the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.ops.dropout import keep_mask
from tpfuse.testing.compare import Expected, largest_term
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.tiers import exhaustive

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _with_a_dtype_in_turn(rows: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """Gives each row one dtype in the first tier, in turn, and the other dtypes in the second tier."""
    first = [(*row, DTYPES[index % len(DTYPES)]) for index, row in enumerate(rows)]
    return [*first, *exhaustive(*((*row, dtype) for row in rows for dtype in DTYPES if (*row, dtype) not in first))]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    batch, heads, key_heads, tq, tk, size = shape
    return {"q": normal(1, batch, heads, tq, size, dtype=dtype)} | {
        name: normal(seed, batch, key_heads, tk, size, dtype=dtype) for name, seed in (("k", 2), ("v", 3))
    }


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0)


def _check(inputs: dict[str, Tensor], out: Tensor, lse: Tensor, **options: Any) -> None:
    """Compares out and lse with the reference: out is as exact as in the inputs' dtype, lse as in float32."""

    def lse_of(**x: Tensor) -> Tensor:
        return _finite(reference.attention(**x, **options)[1])

    grad = torch.zeros_like(inputs["q"])
    Expected(lambda **x: reference.attention(**x, **options)[0], inputs, grad).check("out", out)
    wide = {name: x.float() for name, x in inputs.items()}
    visibility = {name: x for name, x in options.items() if name != "dropout_mask"}
    scores, _ = reference.attention_scores(inputs["q"].double(), inputs["k"].double(), **visibility)
    Expected(lse_of, wide, grad[..., 0].float()).check("out", _finite(lse), term=largest_term(scores))
    hidden = reference.attention(**wide, **options)[1] == -torch.inf
    assert torch.equal(lse == -torch.inf, hidden)
    assert not out[hidden].any()


CASES: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (  # B, H, Hk, Tq, Tk, D
    ((1, 1, 1, 1, 1, 16), {}),
    ((2, 1, 1, 16, 16, 24), {}),
    ((1, 2, 1, 63, 100, 40), {"q_offset": 37}),
    ((1, 1, 1, 64, 64, 64), {}),
    ((1, 4, 2, 100, 64, 80), {"causal": False, "scale": 0.3}),
    ((1, 1, 1, 257, 257, 64), {}),
    ((2, 3, 1, 1, 257, 128), {"q_offset": 256}),
    ((1, 1, 1, 16, 63, 256), {"causal": False}),
    ((1, 1, 1, 257, 257, 16), {"window": 50}),
    ((1, 1, 1, 100, 100, 16), {"window": 1}),
    ((1, 2, 2, 64, 257, 16), {"window": 33, "q_offset": 193}),
    ((1, 1, 1, 100, 100, 16), {"causal": False, "window": 20}),
    ((1, 1, 1, 63, 100, 16), {"causal": False, "window": 5, "q_offset": 90, "k_offset": 3}),
    ((1, 1, 1, 100, 64, 16), {"q_offset": 7, "k_offset": 50}),
    ((1, 1, 1, 64, 64, 16), {"k_offset": 64}),
    ((1, 1, 1, 100, 16, 16), {"window": 30, "q_offset": 1000, "k_offset": 960}),
)


@pytest.mark.parametrize(("shape", "options", "dtype"), _with_a_dtype_in_turn(CASES))
def test_against_reference(shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = _inputs(shape, dtype)
    out, lse = attention_forward(**inputs, **options)
    assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()
    _check(inputs, out, lse, **options)


def test_large_scores_do_not_overflow() -> None:
    inputs = _inputs((1, 1, 1, 64, 100, 16), torch.float32)
    inputs["q"] *= 1e4
    out, lse = attention_forward(**inputs, causal=False)
    _check(inputs, out, lse, causal=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    q, k = torch.zeros(1, 1, 32, 16, dtype=dtype), normal(2, 1, 1, 256, 16, dtype=dtype)
    v = integers(3, 1, 1, 256, 16, low=0, high=9, dtype=dtype)  # sums of them need more bits than a half type has
    out, _ = attention_forward(q, k, v, causal=False)
    assert torch.equal(out, (v.float().sum(dim=2, keepdim=True) / 256).to(dtype).expand_as(out))


def _dropout_mask(head_rows: Tensor, tq: int, q_offset: int, k_offset: int, tk: int, width: int, key: int) -> Tensor:
    rows = head_rows.unsqueeze(-1) * width + torch.arange(q_offset, q_offset + tq)
    columns = keep_mask(rows, max(width, k_offset + tk), 0.3, key)
    assert width >= k_offset + tk
    return columns[..., k_offset : k_offset + tk]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", [7, -(2**62) - 1])
def test_dropout(dtype: torch.dtype, key: int) -> None:
    inputs = _inputs((2, 2, 1, 63, 100, 16), dtype)
    head_rows = torch.tensor([[3, 4], [2**33, 11]])
    options: dict[str, Any] = {"q_offset": 40, "k_offset": 3}
    keep = _dropout_mask(head_rows, 63, 40, 3, 100, 130, key)
    dropped = {"dropout_p": 0.3, "dropout_key": torch.tensor(key), "head_rows": head_rows, "dropout_width": 130}
    out, lse = attention_forward(**inputs, **options, **dropped)
    _check(inputs, out, lse, **options, dropout_mask=keep.double() / 0.7)
    assert torch.equal(lse, attention_forward(**inputs, **options)[1])


@pytest.mark.parametrize("window", [None, 20])
def test_dropout_drops_the_elements_of_the_explicit_mask(window: int | None) -> None:
    q, k = normal(1, 1, 2, 100, 64) / 8, normal(2, 1, 1, 64, 64)
    v = torch.eye(64).expand(1, 1, 64, 64)
    head_rows = torch.tensor([[5, 9]])
    dropped = {"dropout_p": 0.3, "dropout_key": torch.tensor(2**60 + 5), "head_rows": head_rows}
    out, _ = attention_forward(q, k, v, window=window, **dropped)  # type: ignore[arg-type]
    keep = _dropout_mask(head_rows, 100, 0, 0, 64, 64, 2**60 + 5)
    distance = torch.arange(100).unsqueeze(1) - torch.arange(64)
    seen = (distance >= 0) & (distance < (window or 1000))
    assert torch.equal(out != 0, keep & seen)


LENGTHS_Q, LENGTHS_K = (5, 0, 65, 33, 1), (9, 4, 65, 0, 70)


def _cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


DOCUMENTS: tuple[tuple[dict[str, Any]], ...] = (
    ({},),
    ({"causal": False},),
    ({"window": 7, "q_offset": 2},),
    ({"causal": False, "window": 20, "k_offset": 30},),
)


@pytest.mark.parametrize(("options", "dtype"), _with_a_dtype_in_turn(DOCUMENTS))
def test_documents_are_attended_one_by_one(options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = _inputs((1, 2, 1, sum(LENGTHS_Q), sum(LENGTHS_K), 24), dtype)
    cu_q, cu_k = _cumulative(LENGTHS_Q), _cumulative(LENGTHS_K)
    lengths: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 70}
    out, lse = attention_forward(**inputs, **options, **lengths)
    for index in range(len(LENGTHS_Q)):
        rows_q, rows_k = (slice(int(cu[index]), int(cu[index + 1])) for cu in (cu_q, cu_k))
        alone = {name: x[:, :, rows_q if name == "q" else rows_k] for name, x in inputs.items()}
        if LENGTHS_Q[index] and LENGTHS_K[index]:
            _check(alone, out[:, :, rows_q], lse[:, :, rows_q], **options)
        expected = attention_forward(**alone, **options)
        assert torch.equal(out[:, :, rows_q], expected[0]) and torch.equal(lse[:, :, rows_q], expected[1])


def test_dropout_counts_positions_within_the_document() -> None:
    inputs = _inputs((1, 2, 2, 70, 70, 16), torch.float32)
    cu, head_rows = _cumulative((30, 40)), torch.tensor([[4, 8], [15, 2]])
    dropped: dict[str, Any] = {"dropout_p": 0.3, "dropout_key": torch.tensor(3), "dropout_width": 50}
    lengths: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 40}
    out, lse = attention_forward(**inputs, **dropped, **lengths, head_rows=head_rows)
    for index, rows in enumerate((slice(0, 30), slice(30, 70))):
        alone = {name: x[:, :, rows] for name, x in inputs.items()}
        keep = _dropout_mask(head_rows[index : index + 1], rows.stop - rows.start, 0, 0, rows.stop - rows.start, 50, 3)
        _check(alone, out[:, :, rows], lse[:, :, rows], dropout_mask=keep.double() / 0.7)


def test_a_query_that_sees_nothing_has_zero_and_minus_infinity() -> None:
    inputs = _inputs((1, 1, 1, 100, 64, 16), torch.float16)
    for options in (
        {"k_offset": 200},
        {"q_offset": 200, "window": 30},
        {"causal": False, "q_offset": -90, "window": 9},
    ):
        out, lse = attention_forward(**inputs, **options)  # type: ignore[arg-type]
        hidden = reference.attention(**inputs, **options)[1] == -torch.inf  # type: ignore[arg-type]
        assert hidden.any()
        assert not out[hidden].any() and torch.equal(lse == -torch.inf, hidden) and not lse.isnan().any()


def test_nan_and_inf_reach_only_queries_that_see_them() -> None:
    clean = _inputs((1, 1, 1, 100, 100, 16), torch.float32)
    whole = attention_forward(**clean)
    for value in (torch.nan, torch.inf):
        inputs = {name: x.clone() for name, x in clean.items()}
        inputs["k"][:, :, 50, 3] = value
        inputs["q"][:, :, 20, 2] = value
        out, lse = attention_forward(**inputs)
        expected = reference.attention(**inputs)
        torch.testing.assert_close(out.isnan(), expected[0].isnan())
        torch.testing.assert_close(lse.isnan() | lse.isinf(), expected[1].isnan() | expected[1].isinf())
        rows = [row for row in range(50) if row != 20]
        assert torch.equal(out[:, :, rows], whole[0][:, :, rows]) and torch.equal(lse[:, :, rows], whole[1][:, :, rows])
        inputs = {name: x.clone() for name, x in clean.items()}
        inputs["v"][:, :, 50, 3] = value
        out, lse = attention_forward(**inputs)
        assert not out[:, :, 50:, 3].isfinite().any() and torch.equal(lse, whole[1])
        assert torch.equal(out[:, :, :32], whole[0][:, :, :32])  # these queries' tile does not touch key 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_surrounding_memory_do_not_matter(dtype: torch.dtype) -> None:
    packed = normal(1, 2, 100, 3, 2, 48, dtype=dtype).permute(2, 0, 3, 1, 4)  # the layout of a projection's result
    expected = attention_forward(*(x.contiguous() for x in packed))
    surrounded = torch.full((3, 4, 3, 140, 64), torch.nan, dtype=dtype)
    surrounded[:, 1:3, :2, 20:120, 8:56] = packed
    for q, k, v in (packed, surrounded[:, 1:3, :2, 20:120, 8:56], packed.transpose(3, 4).contiguous().transpose(3, 4)):
        out, lse = attention_forward(q, k, v)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    shared = packed[:, :, :1].expand(-1, -1, 2, -1, -1)
    grouped = attention_forward(packed[0], packed[1, :, :1], packed[2, :, :1])
    assert torch.equal(attention_forward(packed[0], shared[1], shared[2])[0], grouped[0])


def test_every_run_gives_the_same_bits() -> None:
    inputs = _inputs((1, 2, 1, 63, 100, 16), torch.bfloat16)
    first = attention_forward(**inputs, q_offset=37)
    for _ in range(9):
        again = attention_forward(**inputs, q_offset=37)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.parametrize("shape", [(0, 2, 1, 5, 5, 16), (1, 0, 0, 5, 5, 16), (1, 2, 1, 0, 5, 16), (1, 2, 1, 5, 0, 16)])
def test_empty(shape: tuple[int, ...]) -> None:
    inputs = _inputs(shape, torch.float32)
    out, lse = attention_forward(**inputs)
    assert out.shape == inputs["q"].shape and lse.shape == out.shape[:3]
    assert not out.any() and (lse == -torch.inf).all()


def test_no_documents() -> None:
    inputs, none = _inputs((1, 2, 1, 0, 0, 16), torch.float32), torch.zeros(1, dtype=torch.int32)
    out, lse = attention_forward(**inputs, cu_seqlens_q=none, cu_seqlens_k=none, max_seqlen_q=0)
    assert out.shape == (1, 2, 0, 16) and lse.shape == (1, 2, 0)


def test_documents_that_end_outside_are_cut() -> None:
    """GPUs do not check cumulative lengths before a launch."""
    inputs, results = _inputs((1, 2, 1, 5, 5, 16), torch.float32), []
    for lengths in ([-2, 3, 99], [0, 3, 5]):
        ends = torch.tensor(lengths, dtype=torch.int32)
        results.append(attention_forward(**inputs, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=5))
    assert all(torch.equal(cut, plain) for cut, plain in zip(*results, strict=True))


def test_documents_need_the_longest_length() -> None:
    inputs, lengths = _inputs((1, 1, 1, 4, 4, 16), torch.float32), _cumulative((4,))
    with pytest.raises(ValueError, match="max_seqlen_q is None: expected the longest document's length"):
        attention_forward(**inputs, cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    with pytest.raises(ValueError, match="attention_forward: window 0"):
        attention_forward(**inputs, window=0)
