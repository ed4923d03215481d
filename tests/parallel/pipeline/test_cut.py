"""Each cut of layers into stages is the best of all cuts, ranks with several stages have equal work, and refusals."""

import itertools
import random
from collections.abc import Sequence

import pytest

from tpfuse.parallel.pipeline.cut import Cost, Stage, cut_layers, explicit_cut, whole_model
from tpfuse.parallel.pipeline.order import stage_ranks

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
            found = counts_of(cut_layers(layers, before, after, range(stages)))
            assert found == best_by_trial(layers, before, after, stages), (seed, stages)


def busiest(counts: Sequence[int], layers: Sequence[Cost], before: Cost, after: Cost, rank_of: Sequence[int]) -> int:
    """Return the operations of the rank that has the most."""
    ranks = [0] * (max(rank_of) + 1)
    for cost, rank in zip(costs_of(counts, layers, before, after), rank_of, strict=True):
        ranks[rank] += cost.flops
    return max(ranks)


OWNERS = [stage_ranks("interleaved_1f1b", 2, 2), stage_ranks("interleaved_1f1b", 2, 3), stage_ranks("zbv", 3, 2)]


@pytest.mark.parametrize("rank_of", OWNERS)
@pytest.mark.parametrize("equal", [True, False])
def test_ranks_with_several_stages_have_equal_work(rank_of: tuple[int, ...], equal: bool) -> None:
    """If all layers cost the same, the busiest rank has as few operations as in the best of all cuts."""
    for seed in range(30):
        draw = random.Random(seed)
        count = draw.randint(len(rank_of), 11)
        layers = [Cost(6, 1)] * count if equal else [Cost(draw.randint(3, 9), 1) for _ in range(count)]
        before, after = Cost(draw.randint(0, 3), 1), Cost(draw.randint(0, 30), 1)
        counts = counts_of(cut_layers(layers, before, after, rank_of))
        cuts = itertools.combinations(range(1, count), len(rank_of) - 1)
        tried = ([b - a for a, b in itertools.pairwise((0, *cut, count))] for cut in cuts)
        best = min(busiest(each, layers, before, after, rank_of) for each in tried)
        found = busiest(counts, layers, before, after, rank_of)
        assert found == best if equal else found <= best + max(layer.flops for layer in layers), (seed, counts)


def test_a_large_head_moves_layers_to_other_ranks() -> None:
    """The head of gpt2-350m counts as 3.5 blocks. Stages of equal cost would give two of the ranks 8 blocks each."""
    rank_of = stage_ranks("zbv", 4, 2)
    counts = counts_of(cut_layers([Cost(10, 10)] * 24, NOTHING, Cost(35, 35), rank_of))
    assert counts == [2, 3, 3, 3, 4, 4, 4, 1], "3 blocks with the head, and three times 7 blocks"


def test_equal_stages_and_layers_without_operations() -> None:
    assert counts_of(cut_layers([Cost(1, 1)] * 7, NOTHING, NOTHING, (0, 1, 0, 1))) == [1, 2, 2, 2], "late stages"
    assert counts_of(cut_layers([Cost(0, 1)] * 6, NOTHING, NOTHING, (0, 1, 0, 1))) == [2, 2, 1, 1], "no operations"


def test_stages_know_their_layers_and_the_ends_of_the_model() -> None:
    first, middle, last = cut_layers([Cost(1, 1)] * 6, NOTHING, NOTHING, range(3))
    assert first == Stage(0, range(2), True, False)
    assert middle == Stage(1, range(2, 4), False, False)
    assert last == Stage(2, range(4, 6), False, True)
    whole = cut_layers([Cost(1, 1)] * 6, NOTHING, NOTHING, range(1))
    assert whole == [whole_model(6)] == [Stage(0, range(6), True, True)]


def test_cuts_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^2 layers cannot be cut into 3 pipeline stages: expected at least one"):
        cut_layers([Cost(1, 1)] * 2, NOTHING, NOTHING, range(3))
    for text, message in (
        ("3,x,2", "'3,x,2': expected a number of layers for each stage, such as 3,5,4,4$"),
        ("3,3", "3,3 has 2 stages and 6 layers: expected 3 stages of at least one layer and 6 layers together$"),
        ("3,1,1", "3,1,1 has 3 stages and 5 layers: "),
        ("4,-1,3", "4,-1,3 has 3 stages and 6 layers: "),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            explicit_cut(text, 6, 3)
