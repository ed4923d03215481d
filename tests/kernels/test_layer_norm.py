"""The launchers that layer_norm and rms_norm share; the operators' numbers are in tests/ops."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.cases import refusals
from tests.support.tiers import exhaustive
from tpfuse.kernels.layer_norm import norm_forward
from tpfuse.kernels.layer_norm_backward import norm_backward
from tpfuse.testing.compare import check_error
from tpfuse.testing.inputs import integers, normal


def _both(x: Tensor, grad: Tensor, *, rms: bool) -> dict[str, Tensor]:
    """Return all results of forward and backward, by name; the gradient also comes by a residual path."""
    weight, bias = normal(8, x.shape[1], dtype=x.dtype), normal(9, x.shape[1], dtype=x.dtype)
    out, mean, rstd = norm_forward(x, weight, None if rms else bias, 1e-5, centered=not rms)
    dx, dweight, dbias = norm_backward(grad, x, weight, mean, rstd, grad, with_bias=not rms)
    results = {"out": out, "mean": mean, "rstd": rstd, "dx": dx, "dweight": dweight, "dbias": dbias}
    return {name: y for name, y in results.items() if y is not None}


@pytest.mark.parametrize(("rms", "columns"), [(False, 257), (True, 63), *exhaustive((False, 63), (True, 257))])
def test_strides(rms: bool, columns: int) -> None:
    x, grad = normal(1, 40, columns), normal(2, 40, columns)
    wide = torch.full((40, columns + 7), torch.nan)
    wide[:, 3 : 3 + columns] = x
    for name, strided, gradient in (
        ("rows further apart; transposed", wide[:, 3 : 3 + columns], grad.t().contiguous().t()),
        ("expanded", x.unsqueeze(1).expand(40, 2, columns)[:, 1], grad),
        ("repeated", x, grad[:1].expand(40, columns)),
    ):
        actual = _both(strided, gradient, rms=rms)
        for key, value in _both(x, gradient.contiguous(), rms=rms).items():
            assert torch.equal(actual[key], value), (name, key)


@pytest.mark.parametrize("columns", [64, 257])
@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_a_large_mean_keeps_the_variance(columns: int, offset: float) -> None:
    x = integers(1, 33, columns) + offset  # exact in float32
    results = norm_forward(x, torch.ones(columns), None, 1e-5, centered=True)
    plain = torch.native_layer_norm(x, (columns,), None, None, 1e-5)
    truth = torch.native_layer_norm(x.double(), (columns,), None, None, 1e-5)
    for name, actual, index in (("out", results[0], 0), ("rstd", results[2], 2)):
        expected = truth[index].view_as(actual)
        error = (plain[index].view_as(actual) - expected).abs().max().item()
        check_error(name, actual, actual, expected, 2 * error + 2**-23 * expected.abs().max().item())


def test_huge_values_do_not_overflow() -> None:
    x = torch.full((2, 64), 2.0**100)
    out, mean, _ = norm_forward(x, torch.ones(64), None, 1e-5, centered=True)
    assert torch.equal(mean, torch.full((2,), 2.0**100)) and torch.equal(out, torch.zeros(2, 64))


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize(
    ("columns", "value"), [(63, torch.nan), (257, torch.inf), *exhaustive((257, torch.nan), (63, -torch.inf))]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where inf - inf is computed
def test_values_that_are_not_finite_stay_in_their_row(rms: bool, columns: int, value: float) -> None:
    x, grad = normal(1, 40, columns), normal(2, 40, columns)
    x[7, 5] = value
    weight, bias = normal(8, columns), normal(9, columns)
    leaf = x.clone().requires_grad_()
    norm = F.rms_norm(leaf, (columns,), weight, 1e-5) if rms else F.layer_norm(leaf, (columns,), weight, bias, 1e-5)
    norm.backward(grad)
    results = _both(x, grad, rms=rms)
    for actual, expected in ((results["out"], norm.detach()), (results["dx"], leaf.grad + grad)):
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.isfinite().all(1), torch.arange(40) != 7)
    assert results["dweight"].isnan().any()
    if not rms:
        assert results["dbias"].isfinite().all()  # dbias depends on the gradient alone


def test_gradients_of_weights_are_exact_sums() -> None:
    x, grad = integers(1, 257, 100), integers(2, 257, 100)
    statistics = torch.zeros(257), torch.ones(257)
    _, dweight, dbias = norm_backward(grad, x, torch.ones(100), *statistics, with_bias=True)
    assert dbias is not None
    assert torch.equal(dweight, (x * grad).sum(0)) and torch.equal(dbias, grad.sum(0))


def test_weights_may_have_another_dtype() -> None:
    x, weight = normal(1, 20, 64, dtype=torch.bfloat16), normal(2, 64)
    out, mean, rstd = norm_forward(x, weight, None, 1e-5, centered=True)
    dx, dweight, _ = norm_backward(x, x, weight, mean, rstd, with_bias=False)
    assert out.dtype == dx.dtype == torch.bfloat16 and dweight.dtype == torch.float32


ROWS, ROW = torch.zeros(4, 8), torch.zeros(8)
test_bad_input_of_forward = refusals(
    norm_forward,
    {"x": ROWS, "weight": ROW, "bias": None, "eps": 1e-5, "centered": True},
    "layer_norm: ",
    ({"x": ROWS.int()}, "x is torch.int32: expected"),
    ({"x": ROWS.double()}, "x is torch.float64: expected float32"),
    ({"x": ROW}, r"x has shape \(8,\): expected \[M, C\]"),
    ({"x": ROWS[:, :0]}, r"x has shape \(4, 0\)"),
    ({"weight": ROW[1:]}, r"weight has shape \(7,\): expected \(8,\)"),
    ({"bias": ROWS}, r"bias has shape \(4, 8\): expected \(8,\)"),
    ({"bias": ROW.half()}, "bias is torch.float16, weight is"),
    ({"weight": ROW.to("meta")}, "weight is on meta, x on cpu"),
)
test_bad_input_of_backward = refusals(
    norm_backward,
    {"grad_out": ROWS, "x": ROWS, "weight": ROW, "mean": None, "rstd": ROW[:4], "with_bias": False},
    "rms_norm_backward: ",
    ({"grad_out": ROWS[1:]}, "grad_out has shape"),
    ({"grad_out": ROWS.half()}, "grad_out is torch.float16"),
    ({"added": ROWS[1:]}, "added has shape"),
    ({"added": ROWS.half()}, "added is torch.float16"),
    ({"rstd": ROW}, r"rstd has shape \(8,\): expected \(4,\)"),
    ({"rstd": ROW[:4].double()}, "rstd is torch.float64: expected float32"),
)
