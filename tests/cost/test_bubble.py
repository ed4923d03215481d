"""The played length of a pipeline's step, its extension to many micro-batches, and the cut into stages."""

import pytest

from tpfuse.choices import PipelineSchedule
from tpfuse.cost.bubble import StageTimes, cut, played, step_length
from tpfuse.cost.sizes import ModelSizes

EVEN: StageTimes = ((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
UNEVEN: StageTimes = ((1.125, 2.125), (1.0, 2.0), (1.5, 3.0))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 4, 50])
def test_the_bubble_of_equal_stages(schedule: PipelineSchedule, micro_batches: int) -> None:
    """Narayanan et al., arXiv:2104.04473, section 2.2: (p - 1) passes of idle time besides m."""
    assert step_length(schedule, 4, 1, micro_batches, EVEN) == pytest.approx(3.0 * (micro_batches + 3))


@pytest.mark.parametrize(
    "schedule, turns", [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zbv", 2)]
)
@pytest.mark.parametrize("times", [EVEN, UNEVEN])
def test_the_extension_equals_the_full_play(schedule: PipelineSchedule, turns: int, times: StageTimes) -> None:
    assert step_length(schedule, 4, turns, 40, times) == pytest.approx(played(schedule, 4, turns, 40, times), rel=1e-9)


def test_rounded_ratios_change_little() -> None:
    times: StageTimes = ((1.03, 1.97), (0.99, 2.04), (1.51, 3.3))
    assert step_length("1f1b", 4, 1, 16, times) == pytest.approx(played("1f1b", 4, 1, 16, times), rel=0.01)


def test_the_last_stage_has_fewer_blocks() -> None:
    """A head of a large vocabulary costs as much as several blocks."""
    sizes = ModelSizes("toy", 24, 1024, 16, 16, 64, 4096, False, 50304, 1024)
    assert cut(sizes, 4, True) == (6.0, 6.0)
    middle, last = cut(sizes, 4, False)
    assert last < 6 < middle and 3 * middle + last >= 24
