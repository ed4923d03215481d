"""gemm by torch and by the kernels: results, gradients, dtypes and refusals."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.tiers import exhaustive
from tpfuse.kernels import launch as launching
from tpfuse.kernels import reference
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.launch import launch
from tpfuse.ops import gemm as gemm_module
from tpfuse.ops.activation import ACTIVATIONS, GATED
from tpfuse.ops.gemm import gemm
from tpfuse.switches import use
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import integers, normal

NAMES = (None, *ACTIVATIONS)
HALVES = [torch.float32, torch.float16, torch.bfloat16]


def _inputs(activation: str | None, dtype: torch.dtype, names: str = "x weight bias residual") -> dict[str, Tensor]:
    n, k = 70, 36
    width = n // 2 if activation in GATED else n
    tensors = {
        "x": normal(1, 3, 11, k, dtype=dtype),
        "weight": normal(2, n, k, dtype=dtype) / 4,
        "bias": normal(3, n, dtype=dtype),
        "residual": normal(4, 3, 11, width, dtype=dtype),
    }
    return {name: tensors[name] for name in names.split()}


def _check_all(inputs: dict[str, Tensor], activation: str | None, choice: Any) -> None:
    """Compare output and every gradient of gemm with the reference."""
    grad = normal(9, *_result(inputs, activation).shape, dtype=inputs["x"].dtype)
    with use(kernels=choice):
        expected = Expected(lambda **tensors: _result(tensors, activation), inputs, grad)
        expected.check_function(partial(gemm, activation=activation))


def _result(inputs: dict[str, Tensor], activation: str | None) -> Tensor:
    return reference.linear(activation_name=activation, **inputs)


ROWS = [
    *((activation, torch.float32, "torch") for activation in NAMES),
    (None, torch.float32, "triton"),
    ("gelu_tanh", torch.bfloat16, "triton"),
    ("swiglu", torch.float32, "triton"),
]
MORE_ROWS = [
    *((activation, dtype, "torch") for activation in (None, "relu", "geglu") for dtype in HALVES[1:]),
    *((activation, HALVES[index % 3], "triton") for index, activation in enumerate(NAMES)),
]


@pytest.mark.parametrize(
    ("activation", "dtype", "choice"), [*ROWS, *exhaustive(*(row for row in MORE_ROWS if row not in ROWS))]
)
def test_output_and_every_gradient(activation: str | None, dtype: torch.dtype, choice: str) -> None:
    _check_all(_inputs(activation, dtype), activation, choice)


@pytest.mark.parametrize(
    ("activation", "names"),
    [
        (None, "x weight"),
        ("gelu", "x weight residual"),
        ("swiglu", "x weight bias"),
        *exhaustive((None, "x weight residual")),
    ],
)
def test_without_bias_or_residual(activation: str | None, names: str) -> None:
    _check_all(_inputs(activation, torch.bfloat16, names), activation, "triton")


@pytest.mark.parametrize("needed", ["x", "weight", "bias", "residual"])
def test_one_gradient_alone(needed: str) -> None:
    inputs = _inputs("gelu", torch.float32)
    inputs[needed].requires_grad_()
    with use(kernels="triton"):
        gemm(**inputs, activation="gelu").sum().backward()
    actual = inputs[needed].grad
    inputs[needed].grad = None
    _result(inputs, "gelu").sum().backward()
    torch.testing.assert_close(actual, inputs[needed].grad)


@pytest.mark.parametrize("choice", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6), (4, 0)])
def test_empty_inputs(shape: tuple[int, ...], choice: Any) -> None:
    inputs = {"x": torch.zeros(shape), "weight": torch.ones(5, shape[-1]), "bias": integers(1, 5)}
    for x in inputs.values():
        x.requires_grad_()
    with use(kernels=choice):
        out = gemm(**inputs, activation="relu")
        out.sum().backward()
    assert torch.equal(out, inputs["bias"].relu().expand(*shape[:-1], 5))
    grads = {name: x.grad for name, x in inputs.items()}
    assert all(grad is not None and grad.shape == inputs[name].shape for name, grad in grads.items())
    rows = out.numel() // 5
    assert torch.equal(grads["bias"], (inputs["bias"] > 0) * float(rows))
    assert torch.equal(grads["weight"], torch.zeros(5, shape[-1]))


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_opcheck(activation: str | None) -> None:
    inputs = _inputs(activation, torch.float32)
    rows = {name: x.reshape(-1, x.shape[-1]) if x.ndim == 3 else x for name, x in inputs.items()}
    leaves = [rows[name].clone().requires_grad_() for name in ("x", "weight", "bias", "residual")]
    keep = activation is not None
    torch.library.opcheck(torch.ops.tpfuse.gemm_forward.default, (*leaves, activation, keep))
    if not keep:
        return
    grad, kept = normal(6, *rows["residual"].shape), normal(5, 33, 70)
    for with_sums in (True, False):
        torch.library.opcheck(torch.ops.tpfuse.activation_backward.default, (grad, kept, activation, with_sums))


def test_no_preactivation_is_kept_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    real = torch.ops.tpfuse.gemm_forward.default

    def spy(*arguments: Any) -> Any:
        kept.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr("tpfuse.ops.gemm._forward", spy)
    inputs = _inputs("gelu", torch.float32)
    with use(kernels="triton"):
        gemm(**inputs, activation="gelu")
        inputs["weight"].requires_grad_()
        gemm(**inputs, activation="gelu")
        gemm(**inputs, activation=None)
        with torch.no_grad():
            gemm(**inputs, activation="gelu")
    assert kept == [False, True, False, False]


def test_only_observed_calls_go_through_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatched, registered = [], gemm_module._forward._registered
    monkeypatch.setattr(
        gemm_module._forward, "_registered", lambda *inputs: dispatched.append(len(inputs)) or registered(*inputs)
    )
    inputs = _inputs("gelu", torch.float32)
    inputs["weight"].requires_grad_()
    with use(kernels="triton"):
        gemm(**inputs, activation="gelu").sum().backward()
        assert dispatched == [] and inputs["weight"].grad is not None
        with FlopCounterMode(display=False):
            gemm(**inputs, activation="gelu")
    assert dispatched == [6]


@pytest.mark.parametrize("choice", ["torch", "triton"])
def test_autocast_computes_in_its_dtype(choice: Any) -> None:
    inputs = _inputs("gelu", torch.float32)
    for x in inputs.values():
        x.requires_grad_()
    with use(kernels=choice), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = gemm(inputs["x"], inputs["weight"], inputs["bias"], activation="gelu")
        out = gemm(**inputs, activation="gelu")
    assert plain.dtype == torch.bfloat16
    assert out.dtype == torch.float32  # as the residual
    out.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in inputs.values())
    torch.testing.assert_close(out, _result(inputs, "gelu"), rtol=2e-2, atol=5e-2)


def test_what_autocast_allows_is_refused_without_it() -> None:
    x, weight = torch.ones(2, 4), torch.ones(6, 4).half()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert gemm(x, weight).dtype == torch.bfloat16
        with pytest.raises(ValueError, match=r"weight is torch.float16, x is torch.float32: expected one dtype"):
            gemm(x, weight)


def test_cublas_multiplies_where_that_is_faster_on_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(gemm_module, "family", lambda device: "sm_90")
    monkeypatch.setattr(
        gemm_module, "gemm_forward", lambda *args, **options: calls.append(options) or gemm_forward(*args, **options)
    )
    _check_all(_inputs("gelu_tanh", torch.float32), "gelu_tanh", "triton")
    _check_all(_inputs(None, torch.float32), None, "triton")
    assert not calls
    _check_all(_inputs("swiglu", torch.float32), "swiglu", "triton")
    with use(kernels="triton"), torch.no_grad():
        gemm(**_inputs("gelu_tanh", torch.float32), activation="gelu_tanh")
    assert [call["activation"] for call in calls] == ["swiglu", "gelu_tanh"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(torch.float16)])
def test_cublaslt_applies_gelu_where_its_argument_is_not_kept(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in counts its calls. With an argument to keep, without a bias and for an empty x it is not called."""
    calls: list[tuple[int, ...]] = []
    addmm = torch._addmm_activation

    def spy(bias: torch.Tensor, x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        calls.append(x.shape)
        return addmm(bias, x, *rest, **options)

    monkeypatch.setattr(gemm_module, "family", lambda device: "sm_90")
    monkeypatch.setattr(torch, "_addmm_activation", spy)
    inputs = _inputs("gelu_tanh", dtype)
    x, weight, bias = (inputs[name] for name in ("x", "weight", "bias"))
    expected = Expected(lambda **tensors: _result(tensors, "gelu_tanh"), inputs, torch.ones_like(inputs["residual"]))
    with use(kernels="triton"), torch.no_grad():
        expected.check("out", gemm(**inputs, activation="gelu_tanh"))
        out, kept = gemm_module.product(x, weight, bias, "gelu_tanh", False)
        torch.testing.assert_close(out + inputs["residual"], gemm(**inputs, activation="gelu_tanh"))
        assert kept is None and len(calls) == 3
        for others in ((x, weight, bias, "gelu_tanh", True), (x, weight, None, "gelu_tanh", False)):
            gemm_module.product(*others)
        gemm_module.product(x, weight, bias, "gelu", False)
        empty = gemm_module.product(x[..., :0], weight[:, :0], bias, "gelu_tanh", False)[0]
    assert len(calls) == 3
    torch.testing.assert_close(empty[0, 0], F.gelu(bias, approximate="tanh"))


def test_torch_computes_products_that_nothing_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def spy(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        launched.append(kernel.__name__)
        launch(kernel, grid, **arguments)

    monkeypatch.setattr(launching, "launch", spy)
    inputs = _inputs("gelu", torch.float32)
    for x in inputs.values():
        x.requires_grad_()
    with use(kernels="triton"):
        gemm(inputs["x"], inputs["weight"], inputs["bias"]).sum().backward()
        gemm(inputs["x"], inputs["weight"], residual=inputs["residual"].double())  # is added after the product
        assert launched == []
        gemm(**inputs).sum().backward()
        assert launched == ["gemm_forward_kernel"]
        gemm(inputs["x"], inputs["weight"], inputs["bias"], activation="gelu").sum().backward()
    assert launched[1:] == ["gemm_forward_kernel", "activation_backward_kernel"]


@pytest.mark.parametrize("choice", ["torch", "triton"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(())}, r"x has shape \(\): expected \[\.\.\., K\]"),
        ({"x": torch.zeros(4, 3).long()}, r"x is torch.int64: expected a float dtype"),
        ({"weight": torch.zeros(6, 4)}, r"weight has shape \(6, 4\): expected \[N, 3\]"),
        ({"bias": torch.zeros(5)}, r"bias has shape \(5,\): expected \(6,\)"),
        ({"residual": torch.zeros(4, 1)}, r"residual has shape \(4, 1\): expected \(2, 6\)"),
        ({"weight": torch.zeros(5, 3), "activation": "geglu"}, r"weight has 5 rows: geglu expects an even number"),
        ({"weight": torch.zeros(6, 3).half()}, r"weight is torch.float16, x is torch.float32: expected one dtype"),
        ({"bias": torch.zeros(6, device="meta")}, r"bias is on meta, x on cpu: expected one device"),
        ({"activation": "gelo"}, r"'gelo' is not known: expected None or one of gelu"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str, choice: Any) -> None:
    good: dict[str, Any] = {"x": torch.zeros(2, 3), "weight": torch.zeros(6, 3)}
    with use(kernels=choice), pytest.raises(ValueError, match=message):
        gemm(**good | changes)
