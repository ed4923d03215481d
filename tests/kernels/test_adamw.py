"""Values of the adamw launcher beside the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import refusals
from tests.support.tiers import pairwise
from tpfuse.kernels import reference
from tpfuse.kernels.adamw import adamw_
from tpfuse.testing.compare import check_error
from tpfuse.testing.inputs import normal

RATES = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def _state(n: int) -> list[Tensor]:
    """Return master and moments of a shard that has been trained."""
    return [normal(1, n), normal(2, n) * 1e-2, normal(3, n).square() * 1e-4]


def _update(state: list[Tensor], gradient: Tensor, step: float = 1, **options: Any) -> Tensor | None:
    """Change `state`; return the parameter."""
    parameter = options.pop("parameter", None)
    lr, number = torch.tensor([options.pop("lr", 1e-2)]), torch.tensor([step])
    master, exp_avg, exp_avg_sq = state
    adamw_(master, gradient, exp_avg, exp_avg_sq, parameter, lr=lr, step=number, **(RATES | options))
    return parameter


@pytest.mark.parametrize(
    *pairwise(
        first=35,
        dtype=[torch.float32, torch.float16, torch.bfloat16],
        n=[0, 1, 16, 63, 100, 257, 16385],
        step=[1, 2, 7, 1000, 100000],
    )
)
def test_against_reference(n: int, step: int, dtype: torch.dtype) -> None:
    gradient, state = normal(4, n, dtype=dtype), _state(n)
    plain, truth = list(map(torch.clone, state)), [x.double() for x in state]
    truth = reference.adamw(truth[0], gradient.double(), *truth[1:], lr=1e-2, step=step, **RATES)
    number = [torch.tensor(float(step))]
    lists = [[plain[0]], [gradient.float()], [plain[1]], [plain[2]], [], number]
    torch._fused_adamw_(*lists, lr=1e-2, amsgrad=False, maximize=False, **RATES)
    parameter = _update(state, gradient, step, parameter=torch.empty(n, dtype=dtype))
    assert torch.equal(parameter, state[0].to(dtype))
    for name, actual, other, expected in zip(("master", "exp_avg", "exp_avg_sq"), state, plain, truth, strict=True):
        scale, error = (x.abs().max().item() if n else 0.0 for x in (expected, other.double() - expected))
        check_error(name, actual, other, expected, 2 * error + torch.finfo(torch.float32).eps * scale)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.95, 0.9999])
def test_bias_corrections_keep_their_digits(beta2: float) -> None:
    """A constant gradient g has corrected moments g and g²: every update is lr, for all betas."""
    for step in (1, 2, 30, 500):
        share = 1 - beta2 ** (step - 1)
        state = [torch.zeros(8), torch.full((8,), 1 - 0.9 ** (step - 1)) * 0.5, torch.full((8,), share) * 0.25]
        _update(state, torch.full((8,), 0.5), step, lr=1.0, beta2=beta2, eps=0.0, weight_decay=0.0)
        torch.testing.assert_close(state[0], torch.full((8,), -1.0), rtol=3e-7 / (1 - 0.9**step), atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_stay_in_their_element(value: float) -> None:
    gradient, expected = normal(4, 100), _state(100)
    gradient[7] = value
    state = _state(100)
    _update(state, gradient)
    torch._fused_adamw_(
        *([x] for x in (expected[0], gradient, *expected[1:])),
        [], [torch.tensor(1.0)], lr=1e-2, amsgrad=False, maximize=False, **RATES,
    )  # fmt: skip
    for actual, other in zip(state, expected, strict=True):
        assert torch.equal(actual.isfinite(), torch.arange(100) != 7)
        assert torch.equal(actual.isnan(), other.isnan())


def test_only_the_shard_is_written() -> None:
    # A whole block follows the shard, so that a write past its end is found here and damages nothing else.
    flats = [torch.full((2**15,), 7.0) for _ in range(4)]
    master, exp_avg, exp_avg_sq, parameter = (flat[8:31] for flat in flats)
    adamw_(master, normal(4, 23), exp_avg, exp_avg_sq, parameter, torch.tensor(0.1), step=torch.tensor(1.0), **RATES)
    for flat in flats:
        assert (flat[:8] == 7).all() and (flat[31:] == 7).all() and (flat[8:31] != 7).all()


test_bad_input = refusals(
    adamw_,
    dict.fromkeys(("master", "gradient", "exp_avg", "exp_avg_sq", "parameter"), torch.zeros(8))
    | {"lr": torch.tensor(0.1), "step": torch.tensor(1.0)}
    | RATES,
    "",
    ({"master": torch.zeros(8).double()}, r"gradient is torch\.float32: expected .* float64"),
    ({"master": torch.zeros(2, 4)}, r"master is torch\.float32 \(2, 4\): expected float32 \[n\]"),
    ({"master": torch.zeros(8).long()}, r"master is torch\.int64 \(8,\)"),
    ({"gradient": torch.zeros(7)}, r"gradient has shape \(7,\): expected \(8,\)"),
    ({"gradient": torch.zeros(8).int()}, r"gradient is torch\.int32: expected float16 or bfloat16 or float32"),
    ({"exp_avg": torch.zeros(8).half()}, r"exp_avg is torch\.float16: expected float32"),
    ({"exp_avg_sq": torch.zeros(8, device="meta")}, "exp_avg_sq is on meta, master on cpu"),
    ({"parameter": torch.zeros(16)[::2]}, r"parameter has strides \(2,\): expected contiguous"),
    ({"step": torch.zeros(2)}, r"step has shape \(2,\): expected one element"),
    ({"lr": torch.zeros((), dtype=torch.float64)}, r"lr is torch\.float64: expected float32"),
    ({"clip": torch.zeros((), device="meta")}, "clip is on meta, master on cpu"),
)
