"""The tolerance of every numerical test: not a number picked by hand, but the error that plain torch makes.

    |actual - truth|  <=  2 |plain - truth| + rounding of the result

in the maximum norm, with truth computed in float64 and plain by the same function in the dtype under test,
for the output and every gradient. The rounding is a unit in the last place of the largest element, or of the largest
term where terms are larger than their sum (`largest_term`, for a log-sum-exp). Where the dtype is float64 itself the
truth has rounding errors of its own; a hundred units in the last place are allowed.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Yardstick:
    """The output and the gradients of a plain one-rank function, in float64 and in its inputs' dtype."""

    def __init__(self, function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad: Tensor) -> None:
        """Calls `function(**inputs)` and its backward with `grad`; inputs that are no floats have no gradient."""
        self.plain = evaluate(function, inputs, grad)
        wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        self.truth = evaluate(function, wide, grad.double())

    def bound(self, name: str, term: float = 0.0) -> float:
        """The error that "out", or the gradient of input `name`, may have. term: the largest that is added up to it."""
        plain, truth = self.plain[name], self.truth[name]
        error = (plain.double() - truth).abs().max().item() if truth.numel() else 0.0
        scale = max(truth.abs().max().item(), term) if truth.numel() else 0.0
        units = 100 if plain.dtype == torch.float64 else 1
        return 2 * error + units * torch.finfo(plain.dtype).eps * scale

    def check(self, name: str, actual: Tensor | None, part: object = ..., term: float = 0.0) -> None:
        """Compares "out", or the gradient of input `name`, with `part` (an index) of the whole. term: as in `bound`.

        Raises AssertionError that says by how much, and where.
        """
        assert actual is not None, f"{name}: there is no gradient"
        check_error(name, actual, self.plain[name][part], self.truth[name][part], self.bound(name, term))  # type: ignore[index]

    def error(self, name: str, actual: Tensor | None) -> float:
        """The largest error of "out", or of the gradient of input `name`; inf where there is a NaN.

        Raises AssertionError where there is no gradient, or one of another shape or dtype.
        """
        assert actual is not None, f"{name}: there is no gradient"
        _check_kind(name, actual, self.plain[name])
        errors = (actual.detach().double() - self.truth[name]).abs().nan_to_num(nan=torch.inf)
        return errors.max().item() if errors.numel() else 0.0


def largest_term(scores: Tensor) -> float:
    """The largest of |max| and |log sum| of the rows of `scores`, whose log-sum-exp is max + log(sum(exp(row - max))).

    The two may cancel, and each is rounded by itself: the rounding of their sum is a unit in the last place of the
    larger one. scores: [..., n], in float64; elements of -inf are left out, as are rows of nothing else.
    """
    if not scores.numel():
        return 0.0
    largest = scores.amax(dim=-1)
    rest = scores.logsumexp(dim=-1) - largest
    terms = torch.stack([largest, rest])[:, largest.isfinite()].abs()
    return terms.max().item() if terms.numel() else 0.0


def check_error(name: str, actual: Tensor, plain: Tensor, truth: Tensor, bound: float) -> None:
    """Raises AssertionError unless `actual` has plain's shape and dtype and is within `bound` of the truth."""
    _check_kind(name, actual, plain)
    if not actual.numel():
        return
    errors = (actual.detach().double() - truth).abs().flatten()
    worst = int(errors.nan_to_num(nan=torch.inf).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape))
    assert errors[worst] <= bound, (
        f"{name}{list(place)} is {actual.flatten()[worst].item()}, expected {truth.flatten()[worst].item()}:"
        f" error {errors[worst].item():.3e}, allowed {bound:.3e}"
    )


def _check_kind(name: str, actual: Tensor, plain: Tensor) -> None:
    assert actual.shape == plain.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(plain.shape)}"
    assert actual.dtype == plain.dtype, f"{name}: {actual.dtype}, expected {plain.dtype}"


def evaluate(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """The output of `function(**inputs)`, as "out", and by name the gradients of the inputs that have one."""
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    out = function(**leaves)
    out.backward(grad.to(out.dtype))  # type: ignore[no-untyped-call]
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    return {"out": out.detach()} | gradients
