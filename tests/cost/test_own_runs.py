"""The model of cost orders the layouts of CPU ranks as they were measured, on the machine that was calibrated then."""

import pytest

from benchmarks.plan_own_runs import MACHINE, SUBJECTS, agreement, measured, predicted


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("ranks", [(1, 2, 4), (2,), (4,)])
def test_measured_layouts_are_in_the_predicted_order(name: str, ranks: tuple[int, ...]) -> None:
    times = {layout: seconds for layout, seconds in measured(name).items() if layout.ranks in ranks}
    predictions = [predicted(SUBJECTS[name], layout, str(MACHINE)).total for layout in times]
    correlation, place, regret = agreement([*times.values()], predictions)
    assert len(times) >= 12 and correlation >= 0.9
    assert place <= 2 or regret < 0.01, "layouts that differ by 1 % are equally fast"
