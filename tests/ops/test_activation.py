"""Activations: values, gradients and unknown names."""

import math

import pytest
import torch

from tpfuse.ops.activation import ACTIVATIONS, GATED, activation, check_activation
from tpfuse.testing.inputs import normal


def _formula(name: str, x: float) -> float:
    gelu = 0.5 * x * (1 + math.erf(x / math.sqrt(2)))
    tanh = 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    silu = x / (1 + math.exp(-x))
    return {"gelu": gelu, "gelu_tanh": tanh, "relu": max(x, 0), "relu2": max(x, 0) ** 2, "silu": silu}[name]


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_values_follow_the_formulas(name: str) -> None:
    x, up = normal(1, 63, dtype=torch.float64), normal(2, 63, dtype=torch.float64)
    inner = {"swiglu": "silu", "geglu": "gelu"}.get(name, name)
    expected = torch.tensor([_formula(inner, value) for value in x.tolist()], dtype=torch.float64)
    actual = activation(torch.cat([x, up]), name) if name in GATED else activation(x, name)
    torch.testing.assert_close(actual, expected * up if name in GATED else expected, rtol=1e-13, atol=1e-15)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'gelo' is not known: expected None or one of gelu, gelu_tanh"):
        check_activation("gelo")
    with pytest.raises(ValueError, match="not known"):
        activation(torch.zeros(2), "gelo")
