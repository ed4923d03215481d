"""The candidates of ring attention compute the same result; a candidate that does not is not timed."""

import math

import pytest
import torch

from benchmarks import bench_ring_attention as bench
from benchmarks.bench_ring_attention import PLAIN, TEMPLATES, CpSubject, PlainRing, measure
from benchmarks.cpu_ranks import ALONE, report
from tpfuse.testing.ranks import pool

SCHEDULES = ("ring", "all_gather", "ulysses", "ulysses_ring")


def _settings() -> None:
    torch.use_deterministic_algorithms(True)


@pytest.mark.exhaustive
def test_candidates_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Every candidate is compared with the whole sequence on one rank; `measure` raises where one differs."""
    times, others = measure(CpSubject(64, 4, 16), pool(4), pool(1), rounds=2, seconds=0.01)
    expected = {f"tpfuse {schedule} {name}" for schedule in SCHEDULES for name in ("direct", "collective")}
    assert times.keys() == expected | {ALONE, TEMPLATES, PLAIN}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())
    assert math.isnan(others) or -0.5 < others < 1.5  # the kernel counts in hundredths of a second
    row = report("4 ranks", times, others, ALONE)
    assert row["baseline"] == ALONE and row["ratios"][ALONE] == 1.0 and row["ms"].keys() == times.keys()
    assert f"x {ALONE}" in capsys.readouterr().out
    pool(4).run(_settings)
    pool(1).run(_settings)


def _wrong_ring() -> str:
    """Return the error if a result is wrong by a thousandth; all candidates are right before."""
    assert PLAIN in bench.prepare(CpSubject(64, 4, 16), False)
    before = PlainRing.forward
    PlainRing.forward = staticmethod(lambda *args: before(*args) * 1.001)
    try:
        with pytest.raises(AssertionError) as caught:
            bench.prepare(CpSubject(64, 4, 16), False)
    finally:
        PlainRing.forward = staticmethod(before)
        _settings()
    return str(caught.value)


def test_a_candidate_that_is_wrong_by_a_thousandth_is_not_timed() -> None:
    for error in pool(2).run(_wrong_ring):
        assert error.startswith(f"{PLAIN}: Tensor-likes are not close")
