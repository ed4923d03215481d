"""Values of attention_backward beside autograd's gradients of the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.attention_backward import attention_backward
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.ops.dropout import keep_mask
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import normal
from tpfuse.testing.tiers import exhaustive

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
SMALL = (1, 2, 1, 40, 70, 16)


def _inputs(shape: tuple[int, ...], dtype: torch.dtype = F32) -> dict[str, Tensor]:
    batch, heads, key_heads, tq, tk, size = shape
    return {"q": normal(1, batch, heads, tq, size, dtype=dtype)} | {
        name: normal(seed, batch, key_heads, tk, size, dtype=dtype) for name, seed in (("k", 2), ("v", 3))
    }


def _both(out: Tensor, lse: Tensor) -> Tensor:
    """Returns [..., D + 1], one tensor, so that one comparison measures the gradients that arrive at both."""
    finite = lse.masked_fill(lse == -torch.inf, 0).to(out.dtype)
    return torch.cat([out, finite.unsqueeze(-1)], dim=-1)


def _gradient(inputs: dict[str, Tensor]) -> Tensor:
    shape = inputs["q"].shape
    return normal(4, *shape[:3], shape[3] + 1, dtype=inputs["q"].dtype)


def _backward(inputs: dict[str, Tensor], grad: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the kernels' gradients, computed from the kernels' out and lse."""
    forward_options = {name: value for name, value in options.items() if name not in ("max_seqlen_k", "grad_dtype")}
    out, lse = attention_forward(**inputs, **forward_options)
    return attention_backward(grad[..., :-1], **inputs, out=out, lse=lse, grad_lse=grad[..., -1].float(), **options)


def _check(expected: Expected, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    for name, gradient in zip("qkv", gradients, strict=True):
        assert gradient.transpose(1, 2).is_contiguous()
        expected.check(name, gradient)


CASES: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (  # B, H, Hk, Tq, Tk, D
    ((1, 1, 1, 1, 16, 16), {"q_offset": 15}),
    ((2, 1, 1, 16, 16, 24), {}),
    ((1, 4, 2, 63, 64, 16), {"q_offset": 1}),
    ((1, 1, 1, 64, 64, 64), {}),
    ((1, 3, 1, 63, 63, 40), {"causal": False, "scale": 0.3}),
    ((1, 1, 1, 100, 100, 16), {"causal": False, "window": 20}),
    ((1, 1, 1, 63, 100, 16), {"causal": False, "window": 5, "q_offset": 90, "k_offset": 3}),
    ((1, 1, 1, 100, 64, 16), {"q_offset": 7, "k_offset": 50}),  # queries that see no key
    ((1, 1, 1, 64, 64, 16), {"k_offset": 64}),  # no query sees a key
)
LARGE: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((1, 1, 1, 16, 100, 80), {"q_offset": 80}),
    ((1, 1, 1, 161, 100, 16), {}),
    ((1, 1, 1, 100, 100, 48), {"window": 7}),
    ((2, 2, 1, 1, 129, 16), {"q_offset": 128}),
    ((1, 1, 1, 16, 63, 256), {"causal": False}),
    ((1, 2, 1, 150, 150, 16), {"window": 50}),
)


@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        *((*case, DTYPES[i % 3]) for i, case in enumerate(CASES)),
        *exhaustive(*((*case, DTYPES[(i + 1) % 3]) for i, case in enumerate(CASES))),
        *exhaustive(*((*case, DTYPES[i % 3]) for i, case in enumerate(LARGE))),
    ],
)
def test_against_reference(shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = _inputs(shape, dtype)
    grad = _gradient(inputs)
    expected = Expected(lambda **x: _both(*reference.attention(**x, **options)), inputs, grad)
    _check(expected, _backward(inputs, grad, **options))


@pytest.mark.parametrize("queries", [1, 16])
def test_one_key(queries: int) -> None:
    """The scores have only the log-sum-exp's gradient: the difference of two equal sums is rounding."""
    inputs = _inputs((1, 1, 1, queries, 1, 16))
    grad = _gradient(inputs)
    dq, dk, dv = _backward(inputs, grad, causal=False)
    rounding = 2 * 16 * torch.finfo(torch.float32).eps * (grad[..., :-1].abs() @ inputs["v"].abs().transpose(2, 3))
    error = dq - grad[..., -1:] * inputs["k"] / 4
    assert (error.abs() <= rounding * inputs["k"].abs() / 4).all()
    torch.testing.assert_close(dv, grad[..., :-1].sum(dim=2, keepdim=True))
    error = dk - (grad[..., -1:] * inputs["q"]).sum(dim=2, keepdim=True) / 4
    assert (error.abs() <= (rounding * inputs["q"].abs()).sum(dim=2, keepdim=True) / 4).all()


@pytest.mark.parametrize(
    ("options", "size", "dtype"),
    [
        ({"window": 30}, 16, F32),
        *exhaustive(
            ({"causal": False, "q_offset": 70, "k_offset": 10}, 16, F32),
            ({"causal": False, "q_offset": 70, "k_offset": 10}, 48, F16),
        ),
    ],
)
def test_dropout(options: dict[str, Any], size: int, dtype: torch.dtype) -> None:
    inputs = _inputs((2, 2, 1, 70, 100, size), dtype)
    head_rows, width, key = torch.tensor([[3, 4], [9, 2**40]]), 200, -(2**61) - 7
    q_pos = torch.arange(70) + options.get("q_offset", 0)
    first = options.get("k_offset", 0)
    keep = keep_mask(head_rows.unsqueeze(-1) * width + q_pos, width, 0.3, key)[..., first : first + 100]

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _both(*reference.attention(q, k, v, dropout_mask=keep.to(q.dtype) / 0.7, **options))

    grad = _gradient(inputs)
    dropout = {"dropout_p": 0.3, "dropout_key": torch.tensor(key), "head_rows": head_rows, "dropout_width": width}
    _check(Expected(dropped, inputs, grad), _backward(inputs, grad, **options, **dropout))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"causal": False, "window": 30}, BF16),
        *exhaustive(({}, F16), ({"q_offset": 5}, F32), ({"causal": False, "window": 30}, F32)),
    ],
)
def test_documents(options: dict[str, Any], dtype: torch.dtype) -> None:
    ends_q, ends_k = [0, 40, 40, 41, 120], [0, 70, 71, 75, 140]
    inputs = _inputs((1, 2, 1, 120, 150, 16), dtype)
    grad = _gradient(inputs)
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_k))
    documents = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 79, "max_seqlen_k": 70}
    dq, dk, dv = _backward(inputs, grad, **options, **documents)

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            _both(*reference.attention(q[:, :, i:j], k[:, :, m:n], v[:, :, m:n], **options))
            for i, j, m, n in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
        ]
        return torch.cat(parts, dim=2)

    _check(Expected(apart, inputs, grad), (dq, dk, dv))
    assert not dk[:, :, 140:].any() and not dv[:, :, 140:].any()


def test_documents_that_end_outside_are_cut() -> None:
    inputs, results = _inputs((1, 2, 1, 5, 5, 16), F32), []
    for lengths in ([-2, 3, 99], [0, 3, 5]):
        ends = torch.tensor(lengths, dtype=torch.int32)
        documents = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 5, "max_seqlen_k": 5}
        results.append(_backward(inputs, _gradient(inputs), **documents))
    assert all(torch.equal(cut, plain) for cut, plain in zip(*results, strict=True))


def test_documents_do_not_see_each_other() -> None:
    inputs = _inputs((1, 1, 1, 64, 64, 16))
    cu_seqlens = torch.tensor([0, 20, 64], dtype=torch.int32)
    documents = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 44, "max_seqlen_k": 44}
    grad = _gradient(inputs)
    before = _backward(inputs, grad, **documents)
    for x in (*inputs.values(), grad):
        x[:, :, 20:] = torch.nan
    for gradient, finite in zip(_backward(inputs, grad, **documents), before, strict=True):
        assert torch.equal(gradient[:, :, :20], finite[:, :, :20])
        assert gradient[:, :, 20:].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, *exhaustive(F16)])
def test_gradients_in_float32(dtype: torch.dtype) -> None:
    inputs = _inputs(SMALL, dtype)
    grad = _gradient(inputs)
    for wide, narrow in zip(_backward(inputs, grad, grad_dtype=torch.float32), _backward(inputs, grad), strict=True):
        assert wide.dtype == torch.float32
        assert torch.equal(wide.to(dtype), narrow)
        assert not torch.equal(wide, narrow.float())


def test_any_strides() -> None:
    inputs = _inputs(SMALL)
    grad = _gradient(inputs)
    before = _backward(inputs, grad)
    inputs = {
        "q": inputs["q"].transpose(2, 3).contiguous().transpose(2, 3),
        "k": inputs["k"].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "v": torch.stack([inputs["v"], inputs["v"]], dim=-1)[..., 1],
    }
    for actual, expected in zip(_backward(inputs, grad), before, strict=True):
        assert torch.equal(actual, expected)


def test_an_expanded_gradient() -> None:
    inputs = _inputs(SMALL)
    out, lse = attention_forward(**inputs)
    one = torch.ones(())
    ones = attention_backward(torch.ones_like(out), **inputs, out=out, lse=lse)
    for actual, expected in zip(
        attention_backward(one.expand(out.shape), **inputs, out=out, lse=lse), ones, strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("size", [40, *exhaustive(16)])
def test_memory_beside_the_tensors_is_not_read(size: int) -> None:
    inputs = _inputs((1, 2, 1, 40, 70, size))
    grad = _gradient(inputs)
    before = _backward(inputs, grad)
    poisoned = {}
    for name, x in inputs.items():
        around = torch.full((1, x.shape[1] + 2, x.shape[2] + 80, size + 16), torch.nan)
        poisoned[name] = around[:, 1:-1, 16:-64, 8:-8]
        poisoned[name].copy_(x)
    for actual, expected in zip(_backward(poisoned, grad), before, strict=True):
        assert torch.equal(actual, expected)


def test_lse_of_more_keys() -> None:
    """Two separate sets of keys, with the merged out and lse, have the gradients of both together."""
    inputs = _inputs((1, 2, 1, 70, 100, 16))
    grad = _gradient(inputs)
    options = {"q_offset": 30}
    out, lse = attention_forward(**inputs, **options)
    common = {"out": out, "lse": lse, "grad_lse": grad[..., -1].contiguous(), "grad_dtype": torch.float32}
    halves = []
    for first, last in ((0, 60), (60, 100)):
        keys = {name: inputs[name][:, :, first:last] for name in "kv"}
        halves.append(attention_backward(grad[..., :-1], inputs["q"], **keys, **common, **options, k_offset=first))
    expected = Expected(lambda **x: _both(*reference.attention(**x, **options)), inputs, grad)
    expected.check("q", halves[0][0] + halves[1][0])
    expected.check("k", torch.cat([halves[0][1], halves[1][1]], dim=2))
    expected.check("v", torch.cat([halves[0][2], halves[1][2]], dim=2))


def test_queries_without_keys_add_nothing() -> None:
    inputs = _inputs((1, 1, 1, 64, 64, 16))
    grad = _gradient(inputs)
    before = _backward(inputs, grad, k_offset=20)
    grad[:, :, :20] = 1e4
    inputs["q"][:, :, :20] = 1e4
    for actual, expected in zip(_backward(inputs, grad, k_offset=20), before, strict=True):
        assert torch.equal(actual, expected)
    assert not before[0][:, :, :20].any()


def test_nan_reaches_what_it_should() -> None:
    """NaN reaches what the query sees, and in part what it does not see in the same tile, where torch has NaN too."""
    inputs = _inputs((1, 1, 1, 130, 130, 16))
    grad = _gradient(inputs)
    grad[0, 0, 40, 3] = torch.nan
    dq, dk, dv = _backward(inputs, grad)
    assert dq[0, 0, 40].isnan().all() and dq[0, 0, :40].isfinite().all() and dq[0, 0, 41:].isfinite().all()
    assert dk[0, 0, :41].isnan().all() and dk[0, 0, 64:].isfinite().all()
    assert dv[0, 0, :41, 3].isnan().all() and dv[0, 0, :, 4:].isfinite().all() and dv[0, 0, 64:].isfinite().all()


def test_the_same_bits_in_every_run() -> None:
    inputs = _inputs((1, 2, 1, 40, 70, 16), BF16)
    grad = _gradient(inputs)
    first = _backward(inputs, grad)
    for _ in range(2):
        for actual, expected in zip(_backward(inputs, grad), first, strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "shape", [(0, 2, 1, 8, 8, 16), (1, 0, 0, 8, 8, 16), (1, 2, 1, 0, 8, 16), (1, 2, 1, 8, 0, 16), (1, 2, 1, 0, 0, 16)]
)
def test_empty(shape: tuple[int, ...]) -> None:
    inputs = _inputs(shape)
    gradients = _backward(inputs, _gradient(inputs), causal=False)
    for gradient, x in zip(gradients, inputs.values(), strict=True):
        assert gradient.shape == x.shape and not gradient.any()


def test_bad_input_is_refused() -> None:
    inputs = _inputs((1, 2, 1, 8, 8, 16))
    out, lse = attention_forward(**inputs)
    good: dict[str, Any] = inputs | {"grad_out": torch.ones_like(out), "out": out, "lse": lse}
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32)
    for change, message in (
        ({"out": out[..., :8]}, r"out has shape \(1, 2, 8, 8\)"),
        ({"grad_out": out.half()}, "grad_out is torch.float16, q is torch.float32"),
        ({"grad_out": out[:, :1]}, "grad_out has shape"),
        ({"lse": lse.double()}, "lse is torch.float64: expected float32"),
        ({"lse": lse[..., :4]}, "lse has shape"),
        ({"grad_lse": lse.half()}, "grad_lse is torch.float16: expected float32"),
        ({"grad_lse": lse.to("meta")}, "grad_lse is on meta"),
        ({"q": out.long()}, "q is torch.int64"),
        ({"window": 0}, "window 0"),
        ({"cu_seqlens_q": cu_seqlens}, "cu_seqlens_k is None"),
        ({"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 8}, "max_seqlen_k is None"),
        ({"dropout_p": 0.5}, "head_rows is None"),
    ):
        with pytest.raises(ValueError, match=f"attention_backward: {message}"):
            attention_backward(**(good | change))
