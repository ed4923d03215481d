"""The sum of the squares of a gradient has the same bits, whichever rank and block has which elements."""

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.switches import use
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks
from tpfuse.zero import shard
from tpfuse.zero.reducer.gradient_norm import Squares, bounded, exact_parts, exact_sum, of_rows, of_shard, rounded

CPU = torch.device("cpu")
TIE = 2**24 + 1  # between two numbers of 24 bits, of which the smaller one is even
TINY = 2.0**-15  # its square is less than half of the last bit of TIE in float64


def first(ranks: Sequence[Sequence[Tensor]], squares: Callable[[Tensor], Squares] = of_shard) -> float | None:
    """Return what the sums in float64 say, added in the order of the ranks."""
    sums = sum((bounded([squares(x) for x in shards], CPU) for shards in ranks), torch.zeros(2, dtype=torch.float64))
    return rounded(*sums.tolist(), len(ranks))


def second(ranks: Sequence[Sequence[Tensor]]) -> float:
    """Return the sum that needs no rounding test."""
    return exact_sum(torch.stack([exact_parts(shards, CPU) for shards in ranks]).sum(0))


def exact(x: Tensor) -> float:
    """Return the exact sum of squares, rounded half to even to 24 bits."""
    total = Fraction(sum(int(math.ldexp(each, 149)) ** 2 for each in x.tolist()), 2**298)
    unit = Fraction(2) ** (total.numerator.bit_length() - total.denominator.bit_length() - 24)
    while total >= unit * 2**24:
        unit *= 2
    return float(round(total / unit) * unit)


def spread(n: int, least: int, most: int) -> Tensor:
    """Return numbers of all magnitudes from 2^least to 2^most, and of both signs."""
    draw = random.Random(n)
    return torch.tensor([draw.choice((-1, 1)) * 2.0 ** draw.uniform(least, most) for _ in range(n)])


GRADIENTS = {
    "float32": normal(1, 150_000) * 1e-3,
    "bfloat16": normal(2, 70_001, dtype=torch.bfloat16),
    "float16": normal(3, 3001, dtype=torch.float16),
    "all exponents": spread(3000, -149, 128),
    "small exponents": spread(999, -149, -120),
    "subnormal numbers": spread(5, -149, -140),
    "mostly zeros": torch.cat([torch.zeros(1000), normal(4, 3)]),
    "zeros": torch.zeros(100),
    "one number": normal(5, 1),
    "a tie": torch.tensor([4096.0, 1.0]),
    "a tie, to be rounded up": torch.tensor([4096.0, 1.0, 1.0, 1.0]),
    "more than a tie": torch.tensor([4096.0, 1.0] + [TINY] * 1000),
    "less than a tie": torch.tensor([4096.0, 1.0, 1.0, 1.0 - 2.0**-24] + [TINY] * 127),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_is_the_exact_sum_rounded_once_in_every_layout(name: str) -> None:
    x, draw = GRADIENTS[name], random.Random(name)
    expected = exact(x)
    for world in (1, 3, 8):
        cuts = sorted(draw.randrange(len(x) + 1) for _ in range(3 * world))
        parts = [part for part in x[draw.sample(range(len(x)), len(x))].tensor_split(cuts) if len(part)]
        ranks = [parts[rank::world] for rank in range(world)]
        assert second(ranks) == expected
        assert first(ranks) in (expected, None)
        assert first(ranks, of_rows) in (expected, None)
    assert (first([[x]]) is None) == ("tie" in name), "exact sums are for ties"


@pytest.mark.parametrize("name", ["more than a tie", "less than a tie"])
def test_the_bound_is_that_of_every_order(name: str) -> None:
    """Squares of small numbers are lost beside large ones, and not if they are added first."""
    x = GRADIENTS[name].sort().values
    orders = x, x.flip(0)
    assert len({sum(each**2 for each in order.tolist()) for order in orders}) == 2
    for order in orders:
        assert first(order.view(-1, 1, 1).unbind()) in (exact(x), None)


def test_the_bound_counts_additions_in_shards_between_them_and_over_ranks() -> None:
    def near_a_tie(depth: int, parts: int, ranks: int) -> float | None:
        squares = Squares(torch.tensor([TIE - 2.0**-22] + [0.0] * parts, dtype=torch.float64), depth)
        return rounded(*bounded([squares], CPU).tolist(), ranks)

    assert of_rows(torch.ones(256 * 1000)).depth >= 1000 + 256
    assert near_a_tie(0, 0, 1) == TIE - 1
    assert near_a_tie(1000, 0, 1) is near_a_tie(0, 1000, 1) is near_a_tie(0, 0, 1000) is None


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_is_not_finite_if_the_gradient_is_not(value: float) -> None:
    found = first([[torch.ones(3)], [torch.tensor([1.0, value])]])
    assert found is not None and math.isnan(found) == math.isnan(value) and not math.isfinite(found)


@pytest.mark.parametrize("rest", [[], [torch.zeros(3)], [torch.zeros(3).double()]])
def test_is_not_rounded_if_a_rank_has_float64(rest: list[Tensor]) -> None:
    exact_here = torch.tensor([4096.0, 1.0])
    assert first([[exact_here.double()], rest]) == TIE
    assert first([rest, [exact_here]]) == (TIE if rest and rest[0].dtype == torch.float64 else None)


class Weighted(nn.Module):
    """A model whose gradient is what it is called with."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


@pytest.mark.parametrize(
    ("stage", "name"), [(3, "auto"), (2, "fused"), (0, "auto"), *exhaustive((1, "auto"), (1, "collective"))]
)
@on_ranks(2)
def test_ranks_agree_on_exact_sums(stage: int, name: Implementation) -> None:
    for dtype, gradient, expected in (
        (torch.float32, [4096, 1], TIE - 1),
        (torch.bfloat16, [4096, 1, 1, 1], TIE + 3),
        (torch.float64, [4096, 1], TIE),
    ):
        model = Weighted(len(gradient), dtype)
        with use(implementation=name):
            engine = shard(model, stage=stage)
            engine.start(last=True)
            model(torch.tensor(gradient, dtype=dtype) / 2).backward()
            engine.finish()
            assert engine.norm() == math.sqrt(expected)
