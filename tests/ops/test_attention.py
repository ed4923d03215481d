"""attention by torch and by the kernels: results, gradients, dropout, documents and refusals."""

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import exhaustive, pairwise
from tpfuse.choices import Kernels
from tpfuse.kernels import reference
from tpfuse.ops import attention as module
from tpfuse.ops.attention import attention
from tpfuse.ops.dropout import keep_mask
from tpfuse.switches import chosen_kernels, use
from tpfuse.testing.compare import Expected, evaluate
from tpfuse.testing.inputs import normal

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
KEY = torch.tensor(-(2**61) - 7)
HEAD_ROWS = torch.tensor([[4, 5, 6, 7], [10, 11, 12, 2**35]])
Options = dict[str, Any]


def _inputs(dtype: torch.dtype, tq: int = 40, tk: int = 70, batch: int = 2, heads: int = 4) -> dict[str, Tensor]:
    return {"q": normal(1, batch, heads, tq, 16, dtype=dtype)} | {
        name: normal(seed, batch, 2, tk, 16, dtype=dtype) for name, seed in (("k", 2), ("v", 3))
    }


def _both(result: tuple[Tensor, Tensor]) -> Tensor:
    """Return [..., D + 1]: out and the log-sum-exp in one tensor, so that one check covers both and all gradients."""
    out, lse = result
    return torch.cat([out, lse.masked_fill(lse == -torch.inf, 0).to(out.dtype).unsqueeze(-1)], dim=-1)


def _mask(options: Options, tq: int, tk: int) -> Tensor | None:
    """Return the factors by which the reference multiplies probabilities, or None."""
    if not options.get("dropout_p"):
        return None
    q_pos = torch.arange(tq) + options.get("q_offset", tk - tq)
    first, width = options.get("k_offset", 0), options.get("dropout_width", tk)
    rows = options["head_rows"].unsqueeze(-1) * width + q_pos
    keep = keep_mask(rows, width, options["dropout_p"], options["key"])[..., first : first + tk]
    return keep.double() / (1 - options["dropout_p"])


def _reference(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    plain = {name: value for name, value in options.items() if name in ("causal", "window", "k_offset", "scale")}
    default = k.shape[2] - q.shape[2] if options.get("causal", True) else 0
    mask = _mask(options, q.shape[2], k.shape[2])
    plain |= {"q_offset": options.get("q_offset", default), "dropout_mask": None if mask is None else mask.to(q.dtype)}
    return reference.attention(q, k, v, **plain)


def _check(name: Kernels, inputs: dict[str, Tensor], options: Options) -> None:
    grad = normal(4, *inputs["q"].shape[:3], 17, dtype=inputs["q"].dtype)

    def both(**x: Tensor) -> Tensor:
        result = attention(**x, **options, return_lse=True)
        assert result[1].dtype == (torch.float64 if x["q"].dtype == torch.float64 else torch.float32)
        return _both(result)

    with use(kernels=name):
        Expected(lambda **x: _both(_reference(**x, options=options)), inputs, grad).check_function(both)


CASES: tuple[Options, ...] = (
    {},
    {"causal": False, "scale": 0.3},
    {"window": 15},
    {"causal": False, "window": 9, "q_offset": 20},
    {"q_offset": 7, "k_offset": 20},  # queries that see no key
    {"dropout_p": 0.3, "key": KEY, "head_rows": HEAD_ROWS},
    {"dropout_p": 0.3, "key": KEY, "head_rows": HEAD_ROWS, "q_offset": 50, "k_offset": 10, "dropout_width": 200},
    {"causal": False, "window": sys.maxsize, "q_offset": 20},
)


ROWS = [
    *(("torch", torch.float64, options) for options in CASES),
    *(("triton", torch.float32, options) for options in (*CASES[1:3], CASES[4], *CASES[6:8])),
]
MORE_ROWS = [
    ("torch", torch.bfloat16, CASES[2]),
    ("torch", torch.float16, CASES[6]),
    *(("triton", (torch.bfloat16, torch.float16)[index % 2], options) for index, options in enumerate(CASES)),
]


@pytest.mark.parametrize(("name", "dtype", "options"), [*ROWS, *exhaustive(*MORE_ROWS)])
def test_results_and_gradients_match_the_reference(name: Kernels, dtype: torch.dtype, options: Options) -> None:
    _check(name, _inputs(dtype), options)


def test_windows_that_nearly_reach_all_keys() -> None:
    q, k, v = _inputs(torch.float64, 5, 9).values()
    for causal, q_offset, k_offset, window in itertools.product((True, False), (0, 4, 20), (0, 11), range(1, 26)):
        options = {"causal": causal, "q_offset": q_offset, "k_offset": k_offset, "window": window}
        expected = _reference(q, k, v, options)
        torch.testing.assert_close(attention(q, k, v, **options, return_lse=True), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tq", "tk", "options"),
    [
        (16, 16, {}),
        (63, 63, {}),
        (63, 63, {"scale": 0.1}),
        (1, 100, {}),
        (7, 63, {}),
        (30, 20, {"causal": False}),
        (16, 40, {"q_offset": 39}),
    ],
)
def test_the_torch_path_without_a_log_sum_exp(tq: int, tk: int, options: Options, dtype: torch.dtype) -> None:
    """It is scaled_dot_product_attention if that can express the call."""
    inputs = _inputs(dtype, tq, tk)
    grad = normal(4, *inputs["q"].shape, dtype=dtype)
    expected = Expected(lambda **x: _reference(**x, options=options)[0], inputs, grad)
    found, terms = evaluate(partial(attention, **options), inputs, grad), _terms(inputs, grad, options)
    for name in expected.same_dtype:
        expected.check(name, found[name], term=terms.get(name, 0.0))


def _terms(inputs: dict[str, Tensor], grad: Tensor, options: Options) -> dict[str, float]:
    """Return the largest term of the sums over keys and over queries that are the gradients of q and k.

    A term is p (grad · v) k, or q, times the scale. The sum over keys of its first two factors is subtracted, so that
    terms may be larger than every gradient.
    """
    q, k, v = (x.double() for x in inputs.values())
    p = _reference(q, k, torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:3], -1), options)[0]
    products = grad.double() @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).mT
    largest = (p * products).abs().max() * options.get("scale", q.shape[-1] ** -0.5)
    return {"q": (largest * k.abs().max()).item(), "k": (largest * q.abs().max()).item()}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make attention choose on the CPU as on a GPU, without deterministic algorithms."""
    monkeypatch.setattr(module, "use_triton", lambda x: x.dtype != torch.float64 and chosen_kernels() != "torch")
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def _training(**changes: Any) -> tuple[dict[str, Tensor], Options]:
    """Return causal heads that require gradients, as a model's projection returns them, with changed arguments."""
    inputs = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in _inputs(torch.half, 20, 20).items()}
    inputs |= {name: changes.pop(name) for name in "qkv" if name in changes}
    return {name: x.requires_grad_() for name, x in inputs.items()}, changes


def _computed_by(monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Tensor], options: Options) -> str:
    """Return what computes a call: "sdpa", "triton", or "definition"."""
    called = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: called.append(name) or function(*args, **options)

    sdpa = recorded("sdpa", torch.nn.functional.scaled_dot_product_attention)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
        patch.setattr(module, "_forward", recorded("triton", module._forward))
        attention(**inputs, **options)
    return called[0] if called else "definition"


OF_DOCUMENTS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 7, 20], dtype=torch.int32))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("by", "changes"),
    [
        *(("sdpa", x) for x in ({}, {"causal": False, "scale": 0.2}, {"q": normal(1, 2, 4, 1, 16).half()})),
        *(("triton", x) for x in ({"window": 5}, {"return_lse": True}, {"q_offset": 2})),
        ("triton", {"dropout_p": 0.1, "key": KEY, "head_rows": HEAD_ROWS}),
        ("triton", {x: normal(seed, 1, 2, 20, 16).half() for seed, x in enumerate("qkv")} | OF_DOCUMENTS),
        ("triton", {x: normal(seed, 2, 2, 20, 16) for seed, x in enumerate("qkv")}),  # float32
        ("triton", {x: normal(seed, 1, 1, 20, 136).half() for seed, x in enumerate("qkv")}),
        ("triton", {"v": normal(3, 2, 2, 16, 20).half().transpose(2, 3)}),
    ],
)
def test_auto_trains_by_scaled_dot_product_attention_if_that_can_express_the_call(
    monkeypatch: pytest.MonkeyPatch, by: str, changes: Options
) -> None:
    inputs, options = _training(**changes)
    assert _computed_by(monkeypatch, inputs, options) == by
    with use(kernels="triton"):
        assert _computed_by(monkeypatch, inputs, options) == "triton"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_auto_uses_triton_where_torch_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, options = _training()
    with torch.no_grad():  # lengths change from call to call
        assert _computed_by(monkeypatch, inputs, options) == "triton"
    assert _computed_by(monkeypatch, {name: x.detach() for name, x in inputs.items()}, options) == "triton"
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert _computed_by(monkeypatch, inputs, options) == "triton"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_choice_is_the_same_when_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, _ = _training()
    torch._dynamo.reset()
    graphs: list[str] = []

    def shown(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(lambda **inputs: attention(**inputs), fullgraph=True, backend=shown)
    compiled(**inputs)
    torch.use_deterministic_algorithms(True)
    compiled(**inputs)
    assert ["scaled_dot_product_attention" in code for code in graphs] == [True, False]
    assert ["tpfuse.attention_forward" in code for code in graphs] == [False, True]


ENDS_Q, ENDS_K = [0, 20, 20, 35], [0, 30, 40, 70]
DOCUMENTS: Options = {
    "cu_seqlens_q": torch.tensor(ENDS_Q, dtype=torch.int32),
    "cu_seqlens_k": torch.tensor(ENDS_K, dtype=torch.int32),
}


@pytest.mark.parametrize(
    *pairwise(
        first=4,
        options=[{"causal": False, "window": 12, "dropout_p": 0.3, "key": KEY}, {"q_offset": 5}],
        dtype=[torch.bfloat16, torch.float32],
        name=["triton", "torch"],
    )
)
def test_documents_do_not_see_each_other(options: Options, dtype: torch.dtype, name: Kernels) -> None:
    inputs = _inputs(dtype, batch=1)
    rows = torch.arange(12).view(3, 4)
    dropout = {"head_rows": rows, "dropout_width": 70} if "key" in options else {}

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for i, (a, b, c, d) in enumerate(zip(ENDS_Q, ENDS_Q[1:], ENDS_K, ENDS_K[1:], strict=False)):
            alone = {"q_offset": 0} | options | dropout | ({"head_rows": rows[i : i + 1]} if dropout else {})
            parts.append(_both(_reference(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], alone)))
        return torch.nn.functional.pad(torch.cat(parts, dim=2), (0, 0, 0, 5))

    def together(**x: Tensor) -> Tensor:
        result = attention(**x, **options, **dropout, **DOCUMENTS, return_lse=True)
        assert (result[1][:, :, 35:] == -torch.inf).all()
        return _both(result)

    with use(kernels=name):
        Expected(apart, inputs, normal(4, 1, 4, 40, 17, dtype=dtype)).check_function(together)


def _arguments(dtype: torch.dtype) -> tuple[tuple[Any, ...], Options]:
    inputs = [x.requires_grad_() for x in _inputs(dtype, 20, 20, batch=1).values()]
    options = {"causal": True, "window": None, "q_offset": 0, "k_offset": 0, "scale": None, "dropout_p": 0.3}
    options |= {"dropout_width": 20, "max_seqlen_q": 20, "max_seqlen_k": 20}
    return (*inputs, None, None, HEAD_ROWS[:1], KEY), options


@pytest.mark.parametrize("checks", ["test_schema test_faketensor", *exhaustive("test_aot_dispatch_dynamic")])
def test_custom_operators_are_registered_right(checks: str) -> None:
    tensors, options = _arguments(torch.float16)  # the log-sum-exp is float32
    torch.library.opcheck(module._forward, tensors, options, test_utils=checks.split())
    with torch.no_grad():
        out, lse = module._forward(*tensors, **options)
    saved = (out, lse, *(x.detach() for x in tensors[:3]), out, lse, *tensors[3:])
    torch.library.opcheck(module._gradients, saved, options, test_utils=checks.split())


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_one_of_two_results_may_be_unused(name: Kernels) -> None:
    leaves = [x.requires_grad_() for x in _inputs(torch.float32, batch=1).values()]
    with use(kernels=name):
        out, lse = attention(*leaves, return_lse=True)
        both = torch.autograd.grad(out.sum() + lse.sum(), leaves, retain_graph=True)
        first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        second = torch.autograd.grad(lse.sum(), leaves, allow_unused=True)
    for whole, a, b in zip(both, first, second, strict=True):
        torch.testing.assert_close(a if b is None else a + b, whole)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 8), (torch.float16, 32)])
def test_large_scores_of_half_types_are_as_exact_as_torchs(dtype: torch.dtype, size: int) -> None:
    """Scores rounded to bfloat16 have errors of many units, and float16 has none above 65504."""
    inputs = {name: normal(seed, 1, 2, 64, 64, dtype=dtype) for seed, name in enumerate("qkv")}
    inputs["q"] *= size
    inputs["k"] *= size
    inputs["k"][:, :, ::5] = inputs["q"][:, :, ::5]
    distance = torch.arange(64).unsqueeze(1) - torch.arange(64)
    mask = (distance >= 0) & (distance < 16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = Expected(lambda q, k, v: sdpa(q, k, v, mask), inputs, normal(4, 1, 2, 64, 64, dtype=dtype))
    with torch.autocast("cpu", dtype):
        expected.check_function(partial(attention, window=16))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_autocast_computes_in_its_dtype(name: Kernels) -> None:
    leaves = [x.requires_grad_() for x in _inputs(torch.float32, 20, 20).values()]
    with use(kernels=name), torch.autocast("cpu", torch.bfloat16):
        out, lse = attention(*leaves, return_lse=True)
        out.sum().backward()
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)])
def test_empty_inputs(name: Kernels, shape: tuple[int, int, int]) -> None:
    batch, tq, tk = shape
    leaves = [x.requires_grad_() for x in _inputs(torch.float32, tq, tk, batch).values()]
    with use(kernels=name):
        out, lse = attention(*leaves, causal=False, return_lse=True)
        out.sum().backward()
    assert out.shape == leaves[0].shape and lse.shape == out.shape[:3]
    assert not out.any() and (lse == -torch.inf).all()
    for leaf in leaves:
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_empty_documents_alone_have_gradients_of_zero(name: Kernels) -> None:
    leaves = [torch.full((1, 2, 5, 16), torch.inf, requires_grad=True) for _ in range(3)]
    with use(kernels=name):
        out = attention(*leaves, **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.zeros(3, dtype=torch.int32)))
        out.sum().backward()
    assert not out.any() and all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def _lengths(*ends: int) -> Options:
    return dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 3, 16)}, r"q is torch.float32 \(4, 3, 16\): expected floats \[B, H, Tq, D\]"),
        ({"q": torch.zeros(1, 4, 3, 16).long()}, "q is torch.int64"),
        ({"k": torch.zeros(1, 2, 3, 24)}, r"k has shape \(1, 2, 3, 24\): expected \[1, Hk, Tk, 16\], as q"),
        ({"v": torch.zeros(1, 2, 4, 16)}, r"v has shape \(1, 2, 4, 16\): expected \(1, 2, 3, 16\)"),
        ({"v": torch.zeros(1, 2, 3, 16).half()}, "v is torch.float16, q is torch.float32: expected one dtype"),
        ({"k": torch.zeros(1, 2, 3, 16, device="meta")}, "k is on meta, q on cpu: expected one device"),
        ({"q": torch.zeros(1, 3, 3, 16)}, "k has 2 heads, q 3: expected a divisor of q's"),
        (
            {"q": torch.zeros(1, 4, 4, 16)},
            "4 queries and 3 keys: expected at least as many keys as queries, or a q_offset",
        ),
        ({"window": 0}, "window 0: expected at least 1"),
        ({"scale": 0.0}, "scale 0.0: expected a positive number"),
        ({"dropout_p": 1.0}, "dropout_p 1.0: expected 0 <= dropout_p < 1"),
        ({"dropout_p": 0.1}, "head_rows is None"),
        ({"dropout_p": 0.1, "head_rows": HEAD_ROWS[:1]}, "key is None"),
        ({"dropout_p": 0.1, "head_rows": HEAD_ROWS}, r"head_rows has shape \(2, 4\): expected \(1, 4\)"),
        ({"cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32)}, "cu_seqlens_k is None: expected both"),
        ({name: torch.tensor([0, 3]) for name in DOCUMENTS}, "cu_seqlens_q is torch.int64: expected int32"),
        (DOCUMENTS | {"cu_seqlens_k": DOCUMENTS["cu_seqlens_k"][:2]}, "cu_seqlens_k has shape"),
        (_lengths(1, 3), "cu_seqlens_q goes from 1 to 3: expected cumulative lengths from 0 to at most 3, the number"),
        (_lengths(0, 4), "cu_seqlens_q goes from 0 to 4"),
        (_lengths(0, 2, 1, 3), "cu_seqlens_q decreases from 2 to 1"),
        (_lengths(0, -1, 3), "cu_seqlens_q decreases from 0 to -1"),
        (_lengths(0, 3) | {"max_seqlen_q": 2}, "cu_seqlens_q has a document of 3 rows: expected at most 2"),
        (_lengths(0, 3) | {"cu_seqlens_k": torch.tensor([0, 4], dtype=torch.int32)}, "cu_seqlens_k goes from 0 to 4"),
    ],
)
def test_bad_input_is_refused(name: Kernels, change: Options, message: str) -> None:
    good: Options = {"q": torch.zeros(1, 4, 3, 16), "k": torch.zeros(1, 2, 3, 16), "v": torch.zeros(1, 2, 3, 16)}
    if message.startswith("key") or message.startswith("head_rows has"):
        change = change | ({} if "key" in message else {"key": KEY})
    with use(kernels=name), pytest.raises(ValueError, match=f"attention:? {message}"):
        attention(**(good | change))


def test_kernels_refuse_other_head_sizes() -> None:
    for size in (8, 20, 264):
        x = torch.zeros(1, 1, 2, size)
        attention(x, x, x)
        with use(kernels="triton"), pytest.raises(ValueError, match=f"head size {size}: expected a multiple of 8"):
            attention(x, x, x)
