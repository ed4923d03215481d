import warnings

import pytest
import torch
import torch.nn.functional as F

from tpfuse.testing.compare import Expected, unwritten_memory_is_nan
from tpfuse.testing.inputs import integers, normal


def _expected(dtype: torch.dtype) -> tuple[Expected, torch.Tensor]:
    inputs = {"x": normal(1, 63, 100, dtype=dtype), "weight": normal(2, 9, 100, dtype=dtype)}
    expected = Expected(lambda x, weight: F.linear(x, weight), inputs, torch.ones(63, 9, dtype=dtype))
    return expected, F.linear(inputs["x"], inputs["weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_error_of_the_dtype_passes_and_more_does_not(dtype: torch.dtype) -> None:
    expected, out = _expected(dtype)
    expected.check("out", out)
    expected.check("out", out[7:9], slice(7, 9))
    out[5, 3] += 300 * torch.finfo(dtype).eps * out.abs().max()
    with pytest.raises(AssertionError, match=r"out\[5, 3\] is .*, expected .*: error .*, allowed"):
        expected.check("out", out)
    out[5, 3] = float("nan")
    with pytest.raises(AssertionError, match=r"out\[5, 3\] is nan"):
        expected.check("out", out)


def test_the_error_beside_its_bound() -> None:
    expected, out = _expected(torch.bfloat16)
    assert 0 < expected.error("out", out) <= expected.bound("out")
    out[5, 3] += 1
    assert 0.5 < expected.error("out", out) < 1.5
    out[5, 3] = float("nan")
    assert expected.error("out", out) == torch.inf
    with pytest.raises(AssertionError, match="there is no gradient"):
        expected.error("x", None)


def test_infinity_is_right_only_where_the_exact_result_rounds_to_it() -> None:
    inputs = {"x": torch.tensor([1.0, 2e38])}
    expected = Expected(lambda x: 2 * x, inputs, torch.ones(2))
    expected.check("out", torch.tensor([2.0, torch.inf]))
    for wrong in ([torch.inf, torch.inf], [2.0, -torch.inf], [2.0, torch.nan], [2.0, 3e38]):
        with pytest.raises(AssertionError, match=r"^out\["):
            expected.check("out", torch.tensor(wrong))


def test_shape_dtype_and_presence_are_checked() -> None:
    expected, out = _expected(torch.float32)
    with pytest.raises(AssertionError, match=r"shape \(62, 9\), expected \(63, 9\)"):
        expected.check("out", out[1:])
    with pytest.raises(AssertionError, match=r"torch.float64, expected torch.float32"):
        expected.check("out", out.double())
    with pytest.raises(AssertionError, match="there is no gradient"):
        expected.check("x", None)


def test_inputs_follow_the_seed() -> None:
    assert torch.equal(normal(1, 5, dtype=torch.float64).float(), normal(1, 5))
    assert not torch.equal(normal(1, 5), normal(2, 5))
    x = integers(1, 1000, low=-2, high=3, dtype=torch.bfloat16)
    assert x.dtype == torch.bfloat16 and set(x.tolist()) == set(range(-2, 4))


def test_unwritten_memory_is_nan_only_in_its_context() -> None:
    torch.use_deterministic_algorithms(False)
    try:
        with warnings.catch_warnings(action="error"), pytest.raises(KeyError), unwritten_memory_is_nan():
            assert torch.empty(3).isnan().all()
            torch.zeros(2).put_(torch.tensor([1]), torch.ones(1))  # this operation has no deterministic algorithm
            raise KeyError
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(True)
