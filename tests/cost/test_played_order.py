"""The length of a step that is computed again for other times is that of its timeline."""

import random

import pytest

from tpfuse.choices import PipelineSchedule
from tpfuse.cost.played_order import KINDS, class_of, played_length
from tpfuse.parallel.pipeline.order import order
from tpfuse.parallel.pipeline.timeline import timeline


@pytest.mark.parametrize(
    ("schedule", "ranks", "turns", "count"),
    [("gpipe", 4, 1, 5), ("1f1b", 4, 1, 9), ("interleaved_1f1b", 4, 3, 8), ("zero_bubble", 3, 2, 6), ("zbv", 4, 2, 9)],
)
def test_a_length_is_that_of_the_timeline(schedule: PipelineSchedule, ranks: int, turns: int, count: int) -> None:
    for seed in range(5):
        draw = random.Random(seed)
        seconds = [draw.uniform(0.1, 9.0) for _ in range(3 * len(KINDS))]
        made = order(schedule, ranks, turns, count)
        times = {action: seconds[class_of(action, made.stages)] for row in made.actions for action in row}
        expected = timeline(made, times.__getitem__).length
        assert played_length(schedule, ranks, turns, count, seconds) == pytest.approx(expected, rel=1e-12)
