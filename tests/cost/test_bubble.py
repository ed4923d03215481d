"""The played length of a pipeline's step, its extension to many micro-batches, and the cut into stages."""

import pytest

from tpfuse.choices import PipelineSchedule
from tpfuse.cost.bubble import Cut, Stage, StageKind, cut_of, played, step_length, usual_cut
from tpfuse.cost.sizes import ModelSizes
from tpfuse.parallel.pipeline.order import stage_ranks

EVEN: list[Stage] = [(1.0, 2.0)] * 3
UNEVEN: list[Stage] = [(1.125, 2.125), (1.0, 2.0), (1.5, 3.0)]


def _cut(schedule: PipelineSchedule, turns: int) -> Cut:
    """Return a cut on 4 ranks whose stages are the first one, the last one, and those between."""
    return cut_of([1] * (4 * turns), stage_ranks(schedule, 4, turns))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 4, 50])
def test_the_bubble_of_equal_stages(schedule: PipelineSchedule, micro_batches: int) -> None:
    """Narayanan et al., arXiv:2104.04473, section 2.2: (p - 1) passes of idle time besides m."""
    length = step_length(schedule, 4, 1, micro_batches, _cut(schedule, 1), EVEN)
    assert length == pytest.approx(3.0 * (micro_batches + 3))


@pytest.mark.parametrize(
    "schedule, turns", [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zbv", 2)]
)
@pytest.mark.parametrize("times", [EVEN, UNEVEN])
def test_the_extension_equals_the_full_play(schedule: PipelineSchedule, turns: int, times: list[Stage]) -> None:
    cut = _cut(schedule, turns)
    full = played(schedule, 4, turns, 40, [times[index] for index in cut.of_stages])
    # 1.125 and 2.125 are not on the grid of sixteenths of 1.5.
    assert step_length(schedule, 4, turns, 40, cut, times) == pytest.approx(full, rel=1e-9 if times is EVEN else 2e-3)


def test_rounded_ratios_change_little() -> None:
    times = [(1.03, 1.97), (0.99, 2.04), (1.51, 3.3)]
    cut = _cut("1f1b", 1)
    full = played("1f1b", 4, 1, 16, [times[index] for index in cut.of_stages])
    assert step_length("1f1b", 4, 1, 16, cut, times) == pytest.approx(full, rel=0.01)


def test_a_head_of_a_large_vocabulary_costs_as_much_as_several_blocks() -> None:
    sizes = ModelSizes("toy", 24, 1024, 16, 16, 64, 4096, False, 50304, 1024)
    equal, usual = (usual_cut(sizes, "1f1b", 4, 1, equal) for equal in (True, False))
    assert [equal.kinds[index].blocks for index in equal.of_stages] == [6] * 4
    blocks = [usual.kinds[index].blocks for index in usual.of_stages]
    assert sum(blocks) == 24 and blocks[-1] < 6 < blocks[0] and usual.last_blocks == blocks[-1]


def test_a_cut_names_each_kind_of_stages_once_and_each_kind_of_ranks() -> None:
    cut = cut_of([2, 3, 3, 3, 3, 1], stage_ranks("zbv", 3, 2))
    first, middle, last = StageKind(2, True, False), StageKind(3, False, False), StageKind(1, False, True)
    assert cut == Cut((first, middle, last), (0, 1, 1, 1, 1, 2), ((0, 2), (1, 1)), (0, 2))
    assert cut.last_blocks == 3
    assert usual_cut(ModelSizes("toy", 5, 64, 4, 4, 16, 256, False, 128, 32), "zbv", 1, 1, False) == Cut(
        (StageKind(5, True, True),), (0,), ((0,),), (0,)
    )
