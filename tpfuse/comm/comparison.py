"""The comparison of a candidate's results with those of the usual candidate, before it may be taken.

    |candidate - usual|  <=  2 |usual - exact| + rounding of the result

The norm is the maximum norm; `exact` is computed in a wider dtype. It is the bound of `tpfuse verify` and of the tests
(`tpfuse.testing.compare`): the usual results are those of torch's products and collectives.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tpfuse.switches import use


class Differs(Exception):
    """The results of a candidate differ from those of the usual one by `largest`."""

    def __init__(self, text: str, largest: float = math.inf) -> None:
        super().__init__(text)
        self.largest = largest


class FirstResults:
    """The first results of the usual candidate, with which those of the others are compared."""

    def __init__(self, usual: str) -> None:
        self._usual, self._results, self._bounds = usual, list[Tensor | None](), list[float]()

    def keep(self, run: Callable[[], object]) -> None:
        """Run the usual candidate and keep its results."""
        self._results = list(tensors(run()))

    def find_bounds(self, exact: Callable[[], object]) -> None:
        """Compute the results in a wider dtype, by torch alone, for the differences that are allowed."""
        with use(kernels="torch"):
            wide = list(tensors(exact()))
        pairs = zip(self._results, wide, strict=True)
        self._bounds = [0.0 if x is None or y is None else error_bound(x, y) for x, y in pairs]

    def check(self, run: Callable[[], object]) -> None:
        """Run another candidate. Raise Differs if its results differ by more than is allowed."""
        results = list(tensors(run()))
        kinds, expected = [_kind(x) for x in results], [_kind(x) for x in self._results]
        if kinds != expected:
            raise Differs(f"its results are {', '.join(kinds)}; those of {self._usual} are {', '.join(expected)}")
        for number, (x, y, bound) in enumerate(zip(results, self._results, self._bounds, strict=True)):
            if x is not None and y is not None and (largest := _largest_difference(x, y)) > bound:
                place = f"result {number + 1} of {len(results)} " if len(results) > 1 else ""
                raise Differs(
                    f"{place}differs from that of {self._usual} by {largest:.3e}, allowed {bound:.3e}", largest
                )


def tensors(results: object) -> Iterator[Tensor | None]:
    """Yield the tensors of a result in order, with None for everything else in it."""
    if isinstance(results, tuple | list):
        for each in results:
            yield from tensors(each)
    else:
        yield results if isinstance(results, Tensor) else None


def _kind(x: Tensor | None) -> str:
    return "nothing" if x is None else f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def error_bound(plain: Tensor, exact: Tensor, term: float = 0.0) -> float:
    """Return the error that a result may have: twice that of plain torch in the same dtype, plus rounding.

    plain: what plain torch computes; exact: the same in a wider dtype, or in float64; term: the largest term of the
    sums that the result consists of, if it may be larger than every sum. Elements that are not finite do not count.
    """
    finite = plain.isfinite() & exact.isfinite()
    exact = exact.where(finite, 0)
    if not exact.numel():
        return 0.0
    error = (plain.to(exact.dtype).where(finite, 0) - exact).abs().max().item()
    units = 100 if plain.dtype == torch.float64 else 1  # the exact result has rounding errors of its own then
    return 2 * error + units * torch.finfo(plain.dtype).eps * max(exact.abs().max().item(), term)


def _largest_difference(x: Tensor, y: Tensor) -> float:
    """Return the largest difference where y is finite; a number that is not finite there differs by infinity."""
    if not x.numel():
        return 0.0
    wide = torch.float64 if y.dtype.itemsize > 2 else torch.float32
    difference = (x.to(wide) - y.to(wide)).abs().nan_to_num(nan=math.inf)
    return difference.where(y.isfinite(), 0).max().item()
