"""The candidates of ZeRO's benchmark compute the same result, or are not timed."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import zero_training
from benchmarks.bench_zero import measure
from benchmarks.zero_training import ALONE, CANDIDATES, STAGES, Training
from tpfuse.testing.ranks import pool

TRAINING = Training(1, 24, 3, 8, 2)


def _settings() -> None:
    torch.use_deterministic_algorithms(True)


@pytest.mark.exhaustive
def test_candidates_of_training_take_turns() -> None:
    """Every candidate is compared with plain AdamW; `measure` raises where one differs."""
    times, others = measure(TRAINING, pool(2), rounds=2, seconds=0.01)
    pool(2).run(_settings)
    assert list(times) == list(CANDIDATES) and set(STAGES) < times.keys()
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())
    assert math.isnan(others) or -0.5 < others < 1.5  # the kernel counts in hundredths of a second


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


def test_a_candidate_that_takes_other_steps_is_not_timed() -> None:
    assert pool(2).run(_error_of, "DDP") == ["", ""]
    assert all(error.startswith("DDP: norms ") for error in pool(2).run(_error_of, "DDP", "sum"))
    assert all(error.startswith("DDP: ") for error in pool(2).run(_error_of, "DDP", "clip"))
    for error in pool(2).run(_error_of, "DDP", "decay"):
        assert error.startswith("DDP: ") and error.endswith(" of the way from where plain AdamW comes to")
