"""The tolerance of every numerical test: it is computed from the error that plain torch makes, not picked by hand.

    |actual - float64|  <=  2 |same_dtype - float64| + rounding of the result

The norm is the maximum norm. `float64` is the result of a plain function in float64, and `same_dtype` the result of
the same function in the dtype under test; the output and every gradient are compared. The rounding is one unit in the
last place of the largest element, or of the largest term where terms are larger than their sum (`largest_term`, for a
log-sum-exp). If the dtype under test is itself float64, the float64 result has rounding errors of its own, and a
hundred units in the last place are allowed.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from tpfuse.comm.comparison import error_bound


class Expected:
    """The output and the gradients of a plain one-rank function, in float64 and in the dtype of its inputs."""

    def __init__(self, function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad: Tensor) -> None:
        """Call `function(**inputs)` and its backward pass with `grad`; only floating-point inputs have gradients."""
        self._inputs, self._grad = inputs, grad
        self.same_dtype = evaluate(function, inputs, grad)
        wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        self.float64 = evaluate(function, wide, grad.double())

    def bound(self, name: str, term: float = 0.0) -> float:
        """Return the error that "out", or the gradient of input `name`, may have.

        `term` is the largest term of the sums that the tensor consists of, if it may be larger than every sum.
        """
        plain, exact = self.same_dtype[name], self.float64[name]
        return error_bound(plain, exact, term)

    def check(self, name: str, actual: Tensor | None, part: object = ..., term: float = 0.0) -> None:
        """Compare "out", or the gradient of input `name`, with `part` (an index) of the expected tensor.

        `term` is passed to `bound`. Raise AssertionError, which names the element with the largest error, that error
        and the bound.
        """
        assert actual is not None, f"{name}: there is no gradient"
        check_error(name, actual, self.same_dtype[name][part], self.float64[name][part], self.bound(name, term))  # type: ignore[index]

    def check_function(self, function: Callable[..., Tensor]) -> None:
        """Compare the output and every gradient of `function`, called as the plain function was."""
        found = evaluate(function, self._inputs, self._grad)
        for name in self.same_dtype:
            self.check(name, found.get(name))

    def error(self, name: str, actual: Tensor | None) -> float:
        """Return the largest error of "out", or of the gradient of input `name`; inf if there is a NaN.

        Raise AssertionError if there is no gradient, or if its shape or dtype is another than expected.
        """
        assert actual is not None, f"{name}: there is no gradient"
        check_kind(name, actual, self.same_dtype[name])
        return largest_error(actual, self.float64[name])


def largest_term(scores: Tensor) -> float:
    """Return the largest of |max| and |log sum| of the rows of `scores`.

    The log-sum-exp of a row is max + log(sum(exp(row - max))). The two terms may cancel, and each is rounded by
    itself: the rounding of their sum is a unit in the last place of the larger one. scores: [..., n], in float64.
    Elements of -inf are left out, and so are rows that have no other elements.
    """
    if not scores.numel():
        return 0.0
    largest = scores.amax(dim=-1)
    rest = scores.logsumexp(dim=-1) - largest
    terms = torch.stack([largest, rest])[:, largest.isfinite()].abs()
    return terms.max().item() if terms.numel() else 0.0


def check_error(name: str, actual: Tensor, plain: Tensor, exact: Tensor, bound: float) -> None:
    """Raise AssertionError unless `actual` has the shape and dtype of `plain` and is within `bound` of `exact`."""
    check_kind(name, actual, plain)
    if not actual.numel():
        return
    errors = _errors(actual, exact).flatten()
    worst = int(errors.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape))
    assert errors[worst] <= bound, (
        f"{name}{list(index)} is {actual.flatten()[worst].item()}, expected {exact.flatten()[worst].item()}:"
        f" error {errors[worst].item():.3e}, allowed {bound:.3e}"
    )


def largest_error(actual: Tensor, exact: Tensor) -> float:
    """Return the largest error of an element; inf if there is a NaN."""
    errors = _errors(actual, exact)
    return errors.max().item() if errors.numel() else 0.0


def _errors(actual: Tensor, exact: Tensor) -> Tensor:
    """Return the error of each element: inf for NaN, and 0 for an infinity to which `exact` rounds."""
    errors = (actual.detach().double() - exact).abs().nan_to_num(nan=torch.inf)
    return errors.masked_fill(actual.isinf() & (exact.to(actual.dtype) == actual), 0.0)


def check_kind(name: str, actual: Tensor, plain: Tensor) -> None:
    assert actual.shape == plain.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(plain.shape)}"
    assert actual.dtype == plain.dtype, f"{name}: {actual.dtype}, expected {plain.dtype}"


@contextlib.contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """Make torch.empty return NaN in this context. Operations that have no deterministic algorithm run all the same."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def evaluate(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Return the output of `function(**inputs)` as "out" and, by input name, the gradients that inputs have."""
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    out = function(**leaves)
    out.backward(grad.to(out.dtype))  # type: ignore[no-untyped-call]
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    return {"out": out.detach()} | gradients
