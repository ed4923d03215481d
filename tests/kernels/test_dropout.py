"""Values of the dropout launcher beside the explicit mask."""

import math

import pytest
import torch

from tests.support.cases import refusals
from tpfuse.kernels.dropout import dropout_forward
from tpfuse.ops.dropout import dropout_key, keep_mask
from tpfuse.testing.inputs import integers, normal

KEY = torch.tensor(dropout_key(1, 2, 3))


@pytest.mark.parametrize("c", [1, 16, 63, 64, 100, 257])
@pytest.mark.parametrize("m", [1, 63, 100])
def test_masks_of_every_size(m: int, c: int) -> None:
    x, rows = integers(1, m, c, low=1, high=9), torch.arange(m) * 3 + 2**33
    assert torch.equal(dropout_forward(x, 0.5, rows, KEY), 2 * x * keep_mask(rows, c, 0.5, KEY))


def test_strides_and_empty_tensors() -> None:
    x, rows = integers(1, 40, 80, low=1, high=9), torch.arange(20)
    for view in (x[::2, 3:64], x[:20].t()[:20], x[:1].expand(20, 80)):
        expected = 2 * view * keep_mask(rows, view.shape[1], 0.5, KEY)
        assert torch.equal(dropout_forward(view, 0.5, rows, KEY), expected)
    assert dropout_forward(x[:0], 0.5, rows[:0], KEY).shape == (0, 80)
    assert dropout_forward(x[:20, :0], 0.5, rows, KEY).shape == (20, 0)


def test_nan_passes_where_torchs_product_lets_it() -> None:
    x, rows = normal(1, 10, 64), torch.arange(10)
    x[3], x[4] = math.nan, math.inf
    out = dropout_forward(x, 0.5, rows, KEY)
    mask = keep_mask(rows, 64, 0.5, KEY)
    assert torch.equal(out.isnan(), (x * (mask / 0.5)).isnan())


test_bad_input_is_named = refusals(
    dropout_forward,
    {"x": torch.zeros(4, 4), "p": 0.5, "rows": torch.arange(4), "key": KEY},
    "",
    ({"x": torch.zeros(4)}, r"x has shape \(4,\): expected \[M, C\]"),
    ({"x": torch.zeros(4, 4, dtype=torch.int32)}, "x is torch.int32"),
    ({"p": 1.0}, "p 1.0: expected 0 <= p < 1"),
    ({"rows": torch.arange(3)}, "rows has shape"),
    ({"rows": torch.zeros(4)}, "rows is torch.float32: expected int64"),
    ({"key": torch.zeros(2, dtype=torch.int64)}, "key has shape"),
)
