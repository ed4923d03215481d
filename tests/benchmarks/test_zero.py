"""The candidates of ZeRO's benchmark compute the same result, or are not timed; figures find their rows."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import zero_training, zero_update
from benchmarks.bench_zero import FIGURES, measure, report, rows
from benchmarks.zero_training import ALONE, CANDIDATES, STAGES, Training
from benchmarks.zero_update import NORM_FIRST, PIECES, SWEEP, WHOLE, Update
from tests.support.tiers import exhaustive
from tpfuse.testing.ranks import pool

TRAINING, UPDATE = Training(1, 24, 3, 8, 2), Update(2, 16)


def _settings() -> None:
    torch.use_deterministic_algorithms(True)


@pytest.mark.exhaustive
def test_candidates_of_training_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Every candidate is compared with plain AdamW; `measure` raises where one differs."""
    times, others = measure(TRAINING, pool(2), rounds=2, seconds=0.01)
    pool(2).run(_settings)
    assert list(times) == list(CANDIDATES) and set(STAGES) < times.keys()
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())
    assert math.isnan(others) or -0.5 < others < 1.5  # the kernel counts in hundredths of a second
    row = report("training", TRAINING, 2, times, others)
    assert row["baseline"] == ALONE and row["ratios"][ALONE] == 1.0 and row["n_embd"] == 24
    assert f"x {ALONE}" in capsys.readouterr().out
    _figures_of("training", rows("training", 2, times))


@pytest.mark.parametrize("world", [2, *exhaustive(3)])
def test_candidates_of_the_update_take_turns(world: int) -> None:
    times, others = measure(Update(3, 16), pool(world), rounds=1, seconds=0.01)
    pool(world).run(_settings)
    assert list(times) == [WHOLE, PIECES, SWEEP, NORM_FIRST]
    assert report("update", UPDATE, world, times, others)["baseline"] == WHOLE
    _figures_of("update", rows("update", world, times))


def _figures_of(mode: str, rows_of_mode: list[dict[str, object]]) -> None:
    outcomes = [figure.outcome(rows_of_mode, 0.0) for figure in FIGURES if figure.mode == mode]
    assert outcomes and all(outcome["got"] is not None and not outcome["missing"] for outcome in outcomes)


def _error_of(name: str, changed: str = "") -> str:
    """Return the error where only this candidate takes part, and is changed after the plain AdamW was computed."""
    expected = [zero_training._plain(TRAINING, ranks) for ranks in (range(dist.get_world_size()), [dist.get_rank()])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_training, "CANDIDATES", {name: CANDIDATES[ALONE if changed == "sum" else name]})
        patch.setattr(zero_training, "_plain", lambda subject, ranks: expected[len(ranks) == 1])
        if changed == "clip":
            right = nn.utils.clip_grad_norm_
            patch.setattr(nn.utils, "clip_grad_norm_", lambda x, limit, foreach: right(x, math.inf))
        if changed == "decay":
            patch.setattr(zero_training, "DECAY", 0.0)
        try:
            TRAINING.calls()
        except AssertionError as error:
            return str(error)
        finally:
            _settings()
    return ""


@pytest.mark.parametrize("name", ["DDP", *exhaustive(STAGES[1])])
def test_a_candidate_that_takes_other_steps_is_not_timed(name: str) -> None:
    assert pool(2).run(_error_of, name) == ["", ""]
    assert all(error.startswith(f"{name}: norms ") for error in pool(2).run(_error_of, name, "sum"))
    if name == "DDP":
        assert all(error.startswith(f"{name}: ") for error in pool(2).run(_error_of, name, "clip"))
    for error in pool(2).run(_error_of, name, "decay"):
        assert error.startswith(f"{name}: ") and error.endswith(" of the way from where plain AdamW comes to")


def _wrong_sum() -> str:
    right = zero_update._by_gloo
    zero_update._by_gloo = lambda before, gradient, pieces: right(before, gradient * (1 + 1e-2), pieces)
    try:
        UPDATE.calls()
    except AssertionError as error:
        return str(error)
    finally:
        zero_update._by_gloo = right
        _settings()
    return ""


def test_an_update_with_another_sum_is_not_timed() -> None:
    assert all(error.startswith(f"{WHOLE}: ") for error in pool(2).run(_wrong_sum))
