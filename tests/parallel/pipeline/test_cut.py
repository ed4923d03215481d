"""The cut of layers into stages is the best of all cuts, and cuts that cannot be made are refused."""

import itertools
import random
from collections.abc import Sequence

import pytest

from tpfuse.parallel.pipeline.cut import Cost, Stage, cut_layers, explicit_cut, whole_model

NOTHING = Cost(0, 0)


def counts_of(stages: Sequence[Stage]) -> list[int]:
    """Return the number of layers of each stage."""
    return [len(stage.layers) for stage in stages]


def costs_of(counts: Sequence[int], layers: Sequence[Cost], before: Cost, after: Cost) -> list[Cost]:
    """Return the costs of the stages of a cut."""
    starts = itertools.accumulate(counts, initial=0)
    costs = [sum(layers[start : start + count], NOTHING) for start, count in zip(starts, counts, strict=False)]
    costs[0] += before
    costs[-1] += after
    return costs


def best_by_trial(layers: Sequence[Cost], before: Cost, after: Cost, stages: int) -> list[int]:
    """Return the best of all cuts."""

    def rank(counts: Sequence[int]) -> list[int]:
        costs = costs_of(counts, layers, before, after)
        later = [value for i, count in enumerate(counts) for value in (max(c.parameters for c in costs[i:]), -count)]
        return [max(c.flops for c in costs), *later]

    cuts = itertools.combinations(range(1, len(layers)), stages - 1)
    return min(([b - a for a, b in itertools.pairwise((0, *cut, len(layers)))] for cut in cuts), key=rank)


def test_a_cut_is_the_best_of_all_cuts() -> None:
    for seed in range(300):
        random_numbers = random.Random(seed)
        most = 1 + seed % 7  # few different costs, so that many cuts have the same largest one

        def cost(most: int = most, random_numbers: random.Random = random_numbers) -> Cost:
            return Cost(random_numbers.randint(0, most), random_numbers.randint(0, most))

        layers = [cost() for _ in range(random_numbers.randint(1, 8))]
        before, after = cost(), cost()
        for stages in range(1, min(4, len(layers)) + 1):
            found = counts_of(cut_layers(layers, before, after, stages))
            assert found == best_by_trial(layers, before, after, stages), (seed, stages)


def test_stages_know_their_layers_and_the_ends_of_the_model() -> None:
    first, middle, last = cut_layers([Cost(1, 1)] * 6, NOTHING, NOTHING, 3)
    assert first == Stage(0, range(2), True, False)
    assert middle == Stage(1, range(2, 4), False, False)
    assert last == Stage(2, range(4, 6), False, True)
    assert cut_layers([Cost(1, 1)] * 6, NOTHING, NOTHING, 1) == [whole_model(6)] == [Stage(0, range(6), True, True)]


def test_what_comes_before_and_after_the_layers_counts() -> None:
    layers = [Cost(1, 1)] * 8
    assert counts_of(cut_layers(layers, NOTHING, Cost(4, 4), 2)) == [6, 2]
    assert counts_of(cut_layers(layers, Cost(4, 4), NOTHING, 2)) == [2, 6]
    assert counts_of(cut_layers(layers, Cost(0, 3), NOTHING, 2)) == [4, 4], "operations count first"
    assert counts_of(cut_layers([Cost(1, 1)] * 7, Cost(0, 3), NOTHING, 2)) == [3, 4], "then parameters"
    assert counts_of(cut_layers([Cost(1, 1)] * 7, NOTHING, NOTHING, 3)) == [3, 2, 2], "early stages have more layers"


def test_an_explicit_cut() -> None:
    stages = explicit_cut("3,1,2", 6, 3)
    assert stages == [
        Stage(0, range(3), True, False),
        Stage(1, range(3, 4), False, False),
        Stage(2, range(4, 6), False, True),
    ]


def _refused(text: str) -> str:
    with pytest.raises(ValueError) as refused:
        explicit_cut(text, 6, 3)
    return str(refused.value)


def test_cuts_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^2 layers cannot be cut into 3 pipeline stages: expected at least one"):
        cut_layers([Cost(1, 1)] * 2, NOTHING, NOTHING, 3)
    assert _refused("3,x,2") == "'3,x,2': expected a number of layers for each stage, such as 3,5,4,4"
    assert _refused("") == "'': expected a number of layers for each stage, such as 3,5,4,4"
    expected = "expected 3 stages of at least one layer and 6 layers together"
    assert _refused("3,3") == f"3,3 has 2 stages and 6 layers: {expected}"
    assert _refused("3,1,1") == f"3,1,1 has 3 stages and 5 layers: {expected}"
    assert _refused("3,0,3") == f"3,0,3 has 3 stages and 6 layers: {expected}"
    assert _refused("4,-1,3") == f"4,-1,3 has 3 stages and 6 layers: {expected}"
