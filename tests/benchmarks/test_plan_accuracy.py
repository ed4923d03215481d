"""The model of cost predicts iterations that others measured, of models that its fit has not seen."""

import functools

import numpy as np
import pytest

from benchmarks.harness import Row
from benchmarks.plan_accuracy import DATA, constant_rate, pure_dp, read_vtrain, regrets, scores
from benchmarks.plan_page import newest


@functools.cache
def _ours() -> Row:
    return scores(DATA)[0][0]


def test_the_measurements_are_complete() -> None:
    rows = read_vtrain(DATA)
    assert len(rows) == 1147 and len({each.model for each in rows}) == 8
    assert all(
        each.layout.batch == each.layout.micro_batches * each.layout.dp * each.layout.micro_batch for each in rows
    )


def test_regret_is_what_a_choice_loses() -> None:
    rows = read_vtrain(DATA)
    measured = np.array([each.seconds for each in rows])
    assert np.all(regrets(rows, measured) == 0)
    assert np.mean(regrets(rows, -measured)) > 0.5
    assert np.mean(regrets(rows, pure_dp(rows))) > 0.04
    assert np.mean(regrets(rows, constant_rate(rows, bubble=True))) > 0.05


@pytest.mark.exhaustive
def test_errors_and_regrets() -> None:
    ours = _ours()
    kept = newest()["vtrain"]["table"][0]
    figures = [key for key in ours if key != "planner"]
    assert [ours[key] for key in figures] == pytest.approx([kept[key] for key in figures], rel=1e-3)
    assert ours["error_folds"] <= 8 and ours["error_to_8_gpus"] <= 8
    assert ours["regret_median"] <= 2 and ours["regret_mean"] <= 4


@pytest.mark.exhaustive
@pytest.mark.xfail(
    strict=True, reason="tp 4 of width 2,048 with 2 sequences is faster than its neighbours; see the module"
)
def test_the_worst_regret() -> None:
    assert _ours()["regret_worst"] <= 20
