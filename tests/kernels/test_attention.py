"""Values of attention_forward beside the reference, and of attention_backward beside the reference's gradients."""

import mmap
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.support.tiers import exhaustive
from tpfuse.kernels import reference
from tpfuse.kernels.attention_backward import attention_backward
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.ops.dropout import keep_mask
from tpfuse.testing.compare import Expected, check_error, largest_term
from tpfuse.testing.inputs import integers, normal

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
KEY = torch.tensor(-(2**61) - 7)
Options = dict[str, Any]


def _with_a_dtype_in_turn(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Give each row one dtype in the first tier, in turn, and the other dtypes in the second tier."""
    rows = list(rows)
    first = [(*row, DTYPES[index % len(DTYPES)]) for index, row in enumerate(rows)]
    return [*first, *exhaustive(*((*row, dtype) for row in rows for dtype in DTYPES if (*row, dtype) not in first))]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype = F32) -> dict[str, Tensor]:
    batch, heads, key_heads, tq, tk, size = shape
    return {"q": normal(1, batch, heads, tq, size, dtype=dtype)} | {
        name: normal(seed, batch, key_heads, tk, size, dtype=dtype) for name, seed in (("k", 2), ("v", 3))
    }


def _gradient(inputs: dict[str, Tensor]) -> Tensor:
    """Return the gradients of out and, in the last column, of the log-sum-exp."""
    shape = inputs["q"].shape
    return normal(4, *shape[:3], shape[3] + 1, dtype=inputs["q"].dtype)


def _run(inputs: dict[str, Tensor], grad: Tensor | None, **options: Any) -> list[Tensor]:
    """Return out and lse, and if `grad` is given the gradients of q, k and v."""
    forward_options = {name: value for name, value in options.items() if name != "max_seqlen_k"}
    out, lse = attention_forward(**inputs, **forward_options)
    if grad is None:
        return [out, lse]
    results = {"out": out, "lse": lse, "grad_lse": grad[..., -1].float()}
    return [out, lse, *attention_backward(grad[..., :-1], **inputs, **results, **options)]


def _visibility(options: Options) -> Options:
    return {name: value for name, value in options.items() if "dropout" not in name and name != "head_rows"}


def _reference(options: Options, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    visibility = _visibility(options)
    if "dropout_p" not in options:
        return reference.attention(q, k, v, **visibility)
    first, width, p = options.get("k_offset", 0), options.get("dropout_width", k.shape[2]), options["dropout_p"]
    rows = options["head_rows"].unsqueeze(-1) * width + options.get("q_offset", 0) + torch.arange(q.shape[2])
    keep = keep_mask(rows, width, p, options["dropout_key"])[..., first : first + k.shape[2]]
    return reference.attention(q, k, v, dropout_mask=(keep.double() / (1 - p)).to(q.dtype), **visibility)


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0)


def _check(inputs: dict[str, Tensor], grad: Tensor | None, results: list[Tensor], **options: Any) -> None:
    """Compare results of `_run` with the reference: lse is as exact as in float32, the others as in their dtype."""

    def out_of(**x: Tensor) -> Tensor:
        return _reference(options, **x)[0]

    def lse_of(**x: Tensor) -> Tensor:
        return _finite(_reference(options, **x)[1])

    def both_of(**x: Tensor) -> Tensor:
        """Return [..., D + 1], one tensor, so that one comparison measures the gradients that arrive at both."""
        return torch.cat([out_of(**x), lse_of(**x).to(x["q"].dtype).unsqueeze(-1)], dim=-1)

    out, lse, *gradients = results
    wide = {name: x.float() for name, x in inputs.items()}
    hidden = _reference(options, **wide)[1] == -torch.inf
    assert torch.equal(lse == -torch.inf, hidden) and not out[hidden].any()
    Expected(out_of, inputs, torch.zeros_like(out)).check("out", out)
    scores, _ = reference.attention_scores(inputs["q"].double(), inputs["k"].double(), **_visibility(options))
    Expected(lse_of, wide, torch.zeros_like(lse)).check("out", _finite(lse), term=largest_term(scores))
    if grad is not None:
        expected = Expected(both_of, inputs, grad)
        # The backward pass computes probabilities as exp(score - lse) in float32: the exponent is rounded as lse is.
        rounding = torch.finfo(F32).eps * (_finite(lse).abs().max().item() if lse.numel() else 0.0)
        for name, gradient in zip("qkv", gradients, strict=True):
            truth = expected.float64[name]
            bound = expected.bound(name) + rounding * (truth.abs().max().item() if truth.numel() else 0.0)
            check_error(name, gradient, expected.same_dtype[name], truth, bound)


def _assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=False):
        assert torch.equal(one, other), name


CASES: tuple[tuple[tuple[int, ...], Options], ...] = (
    ((1, 1, 1, 1, 16, 16), {"q_offset": 15}),
    ((2, 1, 1, 16, 16, 24), {}),
    ((1, 2, 1, 63, 100, 40), {"q_offset": 37}),
    ((1, 1, 1, 64, 64, 64), {}),
    ((1, 4, 2, 40, 64, 80), {"causal": False, "scale": 0.3}),
    ((1, 1, 1, 161, 257, 64), {"q_offset": 96}),
    ((2, 2, 1, 1, 129, 16), {"q_offset": 128}),
    ((1, 1, 1, 16, 63, 256), {"causal": False}),
    ((1, 1, 1, 257, 257, 16), {"window": 50}),
    ((1, 2, 2, 64, 257, 16), {"window": 33, "q_offset": 193}),
    ((1, 1, 1, 100, 100, 16), {"causal": False, "window": 20}),
    ((1, 1, 1, 63, 100, 16), {"causal": False, "window": 5, "q_offset": 90, "k_offset": 3}),
    ((1, 1, 1, 100, 64, 16), {"q_offset": 7, "k_offset": 50}),  # queries that see no key
    ((1, 1, 1, 64, 64, 16), {"k_offset": 64}),  # no query sees a key
    ((1, 1, 1, 100, 64, 16), {"q_offset": 200, "window": 30}),
    ((1, 1, 1, 100, 16, 16), {"window": 30, "q_offset": 1000, "k_offset": 960}),
)
MORE = (((1, 1, 1, 16, 100, 80), {"q_offset": 80}, BF16), ((1, 1, 1, 161, 100, 16), {}, F32))
MORE += (((1, 1, 1, 100, 100, 48), {"window": 7}, F16), ((1, 2, 1, 150, 150, 16), {"window": 50}, BF16))


@pytest.mark.parametrize(("shape", "options", "dtype"), [*_with_a_dtype_in_turn(CASES), *exhaustive(*MORE)])
def test_against_reference(shape: tuple[int, ...], options: Options, dtype: torch.dtype) -> None:
    inputs = _inputs(shape, dtype)
    grad = _gradient(inputs)
    out, lse, *gradients = _run(inputs, grad, **options)
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *gradients)) and lse.is_contiguous()
    _check(inputs, grad, [out, lse, *gradients], **options)


@pytest.mark.parametrize("queries", [1, 16])
def test_one_key(queries: int) -> None:
    """The scores have only the log-sum-exp's gradient: the difference of two equal sums is rounding."""
    inputs = _inputs((1, 1, 1, queries, 1, 16))
    grad = _gradient(inputs)
    out, lse, dq, dk, dv = _run(inputs, grad, causal=False)
    _check(inputs, None, [out, lse], causal=False)
    rounding = 2 * 16 * torch.finfo(torch.float32).eps * (grad[..., :-1].abs() @ inputs["v"].abs().transpose(2, 3))
    error = dq - grad[..., -1:] * inputs["k"] / 4
    assert (error.abs() <= rounding * inputs["k"].abs() / 4).all()
    torch.testing.assert_close(dv, grad[..., :-1].sum(dim=2, keepdim=True))
    error = dk - (grad[..., -1:] * inputs["q"]).sum(dim=2, keepdim=True) / 4
    assert (error.abs() <= (rounding * inputs["q"].abs()).sum(dim=2, keepdim=True) / 4).all()


@pytest.mark.parametrize(
    ("factor", "options"),
    [(1e4, {"causal": False}), (1, {"window": 1}), (1, {"causal": False, "q_offset": -90, "window": 9})],
)
def test_large_scores_and_queries_that_see_one_key(factor: float, options: Options) -> None:
    """Scores do not overflow. Gradients of queries that see one key are rounding alone."""
    inputs = _inputs((1, 1, 1, 100, 100, 16))
    inputs["q"] *= factor
    _check(inputs, None, _run(inputs, None, **options), **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    q, k = torch.zeros(1, 1, 32, 16, dtype=dtype), normal(2, 1, 1, 256, 16, dtype=dtype)
    v = integers(3, 1, 1, 256, 16, low=0, high=9, dtype=dtype)  # sums of them need more bits than a half type has
    out, _ = attention_forward(q, k, v, causal=False)
    assert torch.equal(out, (v.float().sum(dim=2, keepdim=True) / 256).to(dtype).expand_as(out))


@pytest.mark.parametrize("window", [None, 20])
def test_dropout_drops_the_elements_of_the_explicit_mask(window: int | None) -> None:
    q, k = normal(1, 1, 2, 100, 64) / 8, normal(2, 1, 1, 64, 64)
    v, head_rows = torch.eye(64).expand(1, 1, 64, 64), torch.tensor([[5, 9]])
    out, _ = attention_forward(q, k, v, window=window, dropout_p=0.3, dropout_key=KEY, head_rows=head_rows)
    keep = keep_mask(head_rows.unsqueeze(-1) * 64 + torch.arange(100), 64, 0.3, KEY)
    distance = torch.arange(100).unsqueeze(1) - torch.arange(64)
    assert torch.equal(out != 0, keep & (distance >= 0) & (distance < (window or 1000)))


def _documents(*ends: int, longest: int, ends_k: tuple[int, ...] | None = None) -> Options:
    """Return the options of documents that end at these rows of q and k, the first of which is the first's start."""
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(x, dtype=torch.int32) for x in (ends, ends_k or ends))
    lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k} | lengths


ENDS_Q, ENDS_K = (0, 5, 5, 70, 103, 104), (0, 9, 13, 78, 78, 148)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"causal": False, "window": 20, "k_offset": 30}, F16),
        ({"dropout_p": 0.3, "dropout_key": KEY, "dropout_width": 80}, BF16),
        *exhaustive(({}, F32), ({"causal": False}, BF16), ({"window": 7, "q_offset": 2}, F16)),
    ],
)
def test_documents_are_attended_one_by_one(options: Options, dtype: torch.dtype) -> None:
    """Rows after the last document have no result and no gradient."""
    inputs, head_rows = _inputs((1, 2, 1, 110, 150, 24), dtype), 3 * torch.arange(10).view(5, 2) + 2**33
    grad = _gradient(inputs)
    rows = {"head_rows": head_rows} if options.get("dropout_p") else {}
    results = _run(inputs, grad, **options, **rows, **_documents(*ENDS_Q, longest=79, ends_k=ENDS_K))
    for index, (*ends_q, first_k, last_k) in enumerate(zip(ENDS_Q, ENDS_Q[1:], ENDS_K, ENDS_K[1:], strict=False)):
        of_q, of_k = slice(*ends_q), slice(first_k, last_k)
        alone = {name: x[:, :, of_q if name == "q" else of_k] for name, x in inputs.items()}
        only = [x[:, :, part] for x, part in zip(results, (of_q, of_q, of_q, of_k, of_k), strict=True)]
        given = options | {name: x[index : index + 1] for name, x in rows.items()}
        if all(x.shape[2] for x in alone.values()):
            _check(alone, None, only[:2], **given)
        _assert_equal(only, _run(alone, grad[:, :, of_q], **given))
    out, lse, dq, dk, dv = results
    assert not (out[:, :, 104:].any() or dq[:, :, 104:].any() or dk[:, :, 148:].any() or dv[:, :, 148:].any())
    assert (lse[:, :, 104:] == -torch.inf).all()


def test_documents_that_end_outside_are_cut() -> None:
    """GPUs do not check cumulative lengths before a launch."""
    inputs = _inputs((1, 2, 1, 5, 5, 16))
    cut, plain = (_run(inputs, _gradient(inputs), **_documents(*x, longest=5)) for x in ((-2, 3, 99), (0, 3, 5)))
    _assert_equal(cut, plain)


@pytest.mark.exhaustive
def test_rows_that_are_far_apart() -> None:
    """The fourth row of each tensor begins beyond 2^31 elements, in memory that is only mapped."""
    inputs = _inputs((1, 1, 1, 4, 4, 16), F16)
    grad = _gradient(inputs)
    expected = _run(inputs, grad)
    stride = 2**30 - 8
    mapped = torch.frombuffer(mmap.mmap(-1, 2 * (3 * stride + 17)), dtype=F16)
    for name in (*inputs, "grad"):
        x = grad if name == "grad" else inputs[name]
        far = mapped.as_strided(x.shape, (0, 0, stride, 1)).copy_(x)
        _assert_equal(_run(inputs | ({} if name == "grad" else {name: far}), far if name == "grad" else grad), expected)


def test_documents_do_not_see_each_other() -> None:
    inputs, documents = _inputs((1, 1, 1, 64, 64, 16)), _documents(0, 20, 64, longest=44)
    grad = _gradient(inputs)
    before = _run(inputs, grad, **documents)
    for x in (*inputs.values(), grad):
        x[:, :, 20:] = torch.nan
    for actual, finite in zip(_run(inputs, grad, **documents), before, strict=True):
        assert torch.equal(actual[:, :, :20], finite[:, :, :20])
        assert actual[:, :, 20:].isnan().all()


VIEWS = {
    "surrounded by NaN": lambda x: pad(x, (8, 8, 16, 64, 1, 1), value=torch.nan)[:, 1:-1, 16:-64, 8:-8],
    "odd addresses": lambda x: pad(x, (1, 0), value=torch.nan)[..., 1:],
    "columns first": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "tokens first": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "every second element": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0],
}


@pytest.mark.parametrize(("size", "dtype"), [(40, F32), *exhaustive((16, F32), (48, BF16))])
def test_strides_and_surrounding_memory_do_not_matter(size: int, dtype: torch.dtype) -> None:
    inputs = _inputs((1, 2, 1, 20, 40, size), dtype)
    grad = _gradient(inputs)
    expected = _run(inputs, grad)
    for view in VIEWS.values():
        _assert_equal(_run({name: view(x) for name, x in inputs.items()}, view(grad)), expected)
    repeated = {name: x.expand(-1, 2, -1, -1) for name, x in inputs.items()}
    _assert_equal(_run(repeated, None), expected[:2])
    _assert_equal(_run(inputs, torch.ones((), dtype=dtype).expand(grad.shape)), _run(inputs, torch.ones_like(grad)))


def test_lse_of_more_keys() -> None:
    """Two separate sets of keys, with the merged out and lse, have the gradients of both together."""
    inputs, options = _inputs((1, 2, 1, 70, 100, 16)), {"q_offset": 30}
    grad = _gradient(inputs)
    out, lse = _run(inputs, None, **options)
    common = {"out": out, "lse": lse, "grad_lse": grad[..., -1].contiguous(), **options}
    halves = []
    for part in (slice(0, 60), slice(60, 100)):
        keys = {name: inputs[name][:, :, part] for name in "kv"}
        halves.append(attention_backward(grad[..., :-1], inputs["q"], **keys, **common, k_offset=part.start))
    dk, dv = (torch.cat([half[index] for half in halves], dim=2) for index in (1, 2))
    _check(inputs, grad, [out, lse, halves[0][0] + halves[1][0], dk, dv], **options)


def test_queries_without_keys_add_nothing() -> None:
    inputs = _inputs((1, 1, 1, 64, 64, 16))
    grad = _gradient(inputs)
    before = _run(inputs, grad, k_offset=20)
    grad[:, :, :20] = 1e4
    inputs["q"][:, :, :20] = 1e4
    _assert_equal(_run(inputs, grad, k_offset=20), before)
    assert not before[2][:, :, :20].any()


def test_nan_and_inf_reach_only_queries_that_see_them() -> None:
    clean = _inputs((1, 1, 1, 100, 100, 16))
    whole = attention_forward(**clean)
    for value in (torch.nan, torch.inf):
        inputs = {name: x.clone() for name, x in clean.items()}
        inputs["k"][:, :, 50, 3] = value
        inputs["q"][:, :, 20, 2] = value
        out, lse = attention_forward(**inputs)
        expected = reference.attention(**inputs)
        torch.testing.assert_close(out.isnan(), expected[0].isnan())
        torch.testing.assert_close(lse.isfinite(), expected[1].isfinite())
        rows = [row for row in range(50) if row != 20]
        assert torch.equal(out[:, :, rows], whole[0][:, :, rows]) and torch.equal(lse[:, :, rows], whole[1][:, :, rows])
        v = clean["v"].clone()
        v[:, :, 50, 3] = value
        out, lse = attention_forward(**clean | {"v": v})
        assert not out[:, :, 50:, 3].isfinite().any() and torch.equal(lse, whole[1])
        assert torch.equal(out[:, :, :32], whole[0][:, :, :32])  # these queries' tile does not touch key 50


def test_a_nan_gradient_reaches_what_it_should() -> None:
    """NaN reaches what the query sees, and in part what it does not see in the same tile, where torch has NaN too."""
    inputs = _inputs((1, 1, 1, 130, 130, 16))
    grad = _gradient(inputs)
    grad[0, 0, 40, 3] = torch.nan
    _, _, dq, dk, dv = _run(inputs, grad)
    assert dq[0, 0, 40].isnan().all() and dq[0, 0, :40].isfinite().all() and dq[0, 0, 41:].isfinite().all()
    assert dk[0, 0, :41].isnan().all() and dk[0, 0, 64:].isfinite().all()
    assert dv[0, 0, :41, 3].isnan().all() and dv[0, 0, :, 4:].isfinite().all() and dv[0, 0, 64:].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 2, 1, 8, 8), (1, 0, 0, 8, 8), (1, 2, 1, 0, 8), (1, 2, 1, 8, 0), (1, 2, 1, 0, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    inputs = _inputs((*shape, 16))
    out, lse, *gradients = _run(inputs, _gradient(inputs), causal=False)
    assert (lse == -torch.inf).all() and lse.shape == out.shape[:3]
    for actual, x in zip((out, *gradients), (inputs["q"], *inputs.values()), strict=True):
        assert actual.shape == x.shape and not actual.any()


def test_no_documents() -> None:
    out, lse = _run(_inputs((1, 2, 1, 0, 0, 16)), None, **_documents(0, longest=0))
    assert out.shape == (1, 2, 0, 16) and lse.shape == (1, 2, 0)


OUT, LSE = torch.ones(1, 2, 8, 16), torch.zeros(1, 2, 8)
LENGTHS = {"cu_seqlens_q": torch.tensor([0, 8], dtype=torch.int32)}
BOTH_LENGTHS = LENGTHS | {"cu_seqlens_k": LENGTHS["cu_seqlens_q"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": OUT[..., :8]}, r"out has shape \(1, 2, 8, 8\)"),
        ({"grad_out": OUT.half()}, "grad_out is torch.float16, q is torch.float32"),
        ({"grad_out": OUT[:, :1]}, "grad_out has shape"),
        ({"lse": LSE.double()}, "lse is torch.float64: expected float32"),
        ({"lse": LSE[..., :4]}, "lse has shape"),
        ({"grad_lse": LSE.half()}, "grad_lse is torch.float16: expected float32"),
        ({"grad_lse": LSE.to("meta")}, "grad_lse is on meta"),
        ({"q": OUT.long()}, "q is torch.int64"),
        ({"window": 0}, "window 0"),
        (LENGTHS, "cu_seqlens_k is None"),
        (BOTH_LENGTHS | {"max_seqlen_q": 8}, "max_seqlen_k is None"),
        ({"dropout_p": 0.5}, "head_rows is None"),
    ],
)
def test_bad_input_of_backward_is_refused(changes: Options, message: str) -> None:
    good: Options = _inputs((1, 2, 1, 8, 8, 16)) | {"grad_out": OUT, "out": OUT, "lse": LSE}
    with pytest.raises(ValueError, match=f"attention_backward: {message}"):
        attention_backward(**good | changes)


@pytest.mark.parametrize(("options", "message"), [(BOTH_LENGTHS, "max_seqlen_q is None"), ({"window": 0}, "window 0")])
def test_bad_input_of_forward_is_refused(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=f"attention_forward: {message}"):
        attention_forward(**_inputs((1, 2, 1, 8, 8, 16)), **options)
