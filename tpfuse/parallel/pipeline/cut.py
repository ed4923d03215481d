"""Cuts the layers of a model into pipeline stages."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline: consecutive layers, with what comes before the first layer or after the last one."""

    index: int
    layers: range  # the numbers of its layers in the model
    first: bool  # whether it has the model's input
    last: bool  # whether it has the model's output


def whole_model(layers: int) -> Stage:
    """Return the only stage of a model that is not cut."""
    return Stage(0, range(layers), True, True)


@dataclass(frozen=True)
class Cost:
    """The cost of a part of a model."""

    flops: int  # floating-point operations for a token
    parameters: int  # number of parameters

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.parameters + other.parameters)


class Cuttable(Protocol):
    """The description of a model that a pipeline cuts."""

    def part_costs(self) -> tuple[list[Cost], Cost, Cost]:
        """Return the costs of each layer, of what comes before the first one, and of what comes after the last one."""


def cut_layers(layers: Sequence[Cost], before: Cost, after: Cost, rank_of: Sequence[int]) -> list[Stage]:
    """Return the cut in which the largest excess of a stage's operations over its share (`_shares`) is the smallest.

    If each rank has one stage, all shares are 0, and so the most expensive stage has the fewest operations. Of several
    such cuts, the result is one whose largest stage has the fewest parameters, and of these the one whose first stage
    has the most layers; the stages after it are chosen from the rest by the same rule. Each stage has at least one
    layer.

    before, after: the costs of what comes before the first layer and after the last one. rank_of: the pipeline rank of
    each stage. Raise ValueError for fewer layers than stages.
    """
    count, stages = len(layers), len(rank_of)
    if count < stages:
        raise ValueError(
            f"{count} layers cannot be cut into {stages} pipeline stages: expected at least one layer each"
        )
    cost, shares = _costs_of_ranges(layers, before, after), _shares(layers, before, after, rank_of)

    # A cut is found from its end: best[start] is (the largest value of the stages from layer `start` on, their starts).
    def best_cut(largest_excess: int | None) -> tuple[int, tuple[int, ...]]:
        best: dict[int, tuple[int, tuple[int, ...]]] = {count: (0, ())}
        for left in range(1, stages + 1):
            found: dict[int, tuple[int, tuple[int, ...]]] = {}
            for start in range(stages - left, count - left + 1) if left < stages else range(1):
                for stop in range(start + 1, count - left + 2):
                    part = cost(start, stop)
                    excess = part.flops - shares[stages - left]
                    value = excess if largest_excess is None else part.parameters
                    if largest_excess is not None and excess > largest_excess:
                        break
                    if start in found and value > found[start][0]:
                        break  # a longer stage costs even more
                    if stop in best and (start not in found or max(value, best[stop][0]) <= found[start][0]):
                        found[start] = max(value, best[stop][0]), (start, *best[stop][1])
            best = found
        return best[0]

    largest, _ = best_cut(None)
    _, starts = best_cut(largest)
    return _staged([b - a for a, b in itertools.pairwise((*starts, count))])


def _shares(layers: Sequence[Cost], before: Cost, after: Cost, rank_of: Sequence[int]) -> list[int]:
    """Return the operations that each stage should have so that all ranks have about equally many.

    If each rank has one stage, they are 0. Otherwise each layer counts as their mean, and each stage begins with one.
    Each of the other layers goes to the rank that has the fewest operations so far, into its stage with the fewest. Of
    equal stages the latest takes it, since short early stages let the later ranks begin earlier.
    """
    stages = range(len(rank_of))
    if len(set(rank_of)) == len(stages):
        return [0 for _ in stages]
    mean = max(1, sum(layer.flops for layer in layers) // len(layers))
    shares = [mean for _ in stages]
    shares[0] += before.flops
    shares[-1] += after.flops
    ranks = [0] * (max(rank_of) + 1)
    for share, rank in zip(shares, rank_of, strict=True):
        ranks[rank] += share
    for _ in range(len(layers) - len(stages)):
        chosen = min(stages, key=lambda stage: (ranks[rank_of[stage]], shares[stage], -stage))
        shares[chosen] += mean
        ranks[rank_of[chosen]] += mean
    return shares


def explicit_cut(text: str, layers: int, stages: int) -> list[Stage]:
    """Return the stages with as many layers as `text` says, such as 3,5,4,4. Raise ValueError for another text."""
    try:
        counts = [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r}: expected a number of layers for each stage, such as 3,5,4,4") from None
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise ValueError(
            f"{text} has {len(counts)} stages and {sum(counts)} layers: expected {stages} stages of at least one layer"
            f" and {layers} layers together"
        )
    return _staged(counts)


def stage_costs(stages: Sequence[Stage], layers: Sequence[Cost], before: Cost, after: Cost) -> list[Cost]:
    """Return the cost of each stage. layers, before, after: as for `cut_layers`."""
    cost = _costs_of_ranges(layers, before, after)
    return [cost(stage.layers.start, stage.layers.stop) for stage in stages]


def _costs_of_ranges(layers: Sequence[Cost], before: Cost, after: Cost) -> Callable[[int, int], Cost]:
    """Return a function that gives the cost of a stage with the layers from `start` to `stop`, without `stop`."""
    count, sums = len(layers), list(itertools.accumulate(layers, initial=Cost(0, 0)))

    @functools.cache
    def cost(start: int, stop: int) -> Cost:
        flops, parameters = sums[stop].flops - sums[start].flops, sums[stop].parameters - sums[start].parameters
        inner = Cost(flops, parameters)
        inner = before + inner if start == 0 else inner
        return inner + after if stop == count else inner

    return cost


def _staged(counts: Sequence[int]) -> list[Stage]:
    starts = list(itertools.accumulate(counts, initial=0))
    return [
        Stage(index, range(start, stop), index == 0, index == len(counts) - 1)
        for index, (start, stop) in enumerate(itertools.pairwise(starts))
    ]
