"""A step that is computed again for other times is as long as its timeline, and shared cores make it longer."""

import random

import pytest

from tpfuse.choices import PipelineSchedule
from tpfuse.cost.played_order import KINDS, index_of, played_length, shared_length
from tpfuse.parallel.pipeline.order import order
from tpfuse.parallel.pipeline.timeline import timeline


@pytest.mark.parametrize(
    ("schedule", "ranks", "turns", "count"),
    [("gpipe", 4, 1, 5), ("1f1b", 4, 1, 9), ("interleaved_1f1b", 4, 3, 8), ("zero_bubble", 3, 2, 6), ("zbv", 4, 2, 9)],
)
def test_a_length_is_that_of_the_timeline(schedule: PipelineSchedule, ranks: int, turns: int, count: int) -> None:
    for seed in range(5):
        draw = random.Random(seed)
        seconds = [draw.uniform(0.1, 9.0) for _ in range(ranks * turns * len(KINDS))]
        made = order(schedule, ranks, turns, count)
        times = {action: seconds[index_of(action)] for row in made.actions for action in row}
        expected = timeline(made, times.__getitem__).length
        assert played_length(schedule, ranks, turns, count, seconds) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "ranks", "turns", "count"),
    [("gpipe", 4, 1, 5), ("1f1b", 4, 1, 9), ("interleaved_1f1b", 4, 3, 8), ("zero_bubble", 3, 2, 6), ("zbv", 4, 2, 9)],
)
def test_ranks_share_cores(schedule: PipelineSchedule, ranks: int, turns: int, count: int) -> None:
    draw, pipeline = random.Random(0), (schedule, ranks, turns, count)
    seconds = [draw.uniform(0.1, 9.0) for _ in range(ranks * turns * len(KINDS))]
    made = order(*pipeline)
    work = sum(seconds[index_of(action)] for row in made.actions for action in row)
    free = played_length(*pipeline, seconds)
    lengths = [shared_length(*pipeline, seconds, cores) for cores in (ranks, 2, 1.5, 1)]
    assert lengths[0] == pytest.approx(free) and lengths[-1] == pytest.approx(work)
    assert lengths == sorted(lengths) and lengths[1] >= max(free, work / 2)


def test_a_core_without_a_rank_that_computes_is_lost() -> None:
    """Three ranks on 1.5 cores, one micro-batch: only one rank computes at any time, whatever there is to share."""
    seconds = [1.0, 2.0, 1.0, 1.0] * 3
    assert shared_length("1f1b", 3, 1, 1, seconds, 1.5) == pytest.approx(9.0)
    # Two ranks, two micro-batches. By hand: F, then F beside F, then B of the last rank alone, then B beside F ...
    assert shared_length("1f1b", 2, 1, 2, seconds, 1.0) == pytest.approx(12.0)
    assert shared_length("1f1b", 2, 1, 2, seconds, 2.0) == pytest.approx(9.0)
