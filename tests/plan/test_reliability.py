"""Expected losses of failures and stragglers are those of a simulation, and the interval of checkpoints is the best."""

import numpy as np
import pytest

from tpfuse.plan.reliability import daly_interval, lost_share, reliability, slowest

HOUR = 3600.0


def _simulated_loss(interval: float, checkpoint: float, restart: float, between: float) -> float:
    """Return the share of the time without progress in a long run whose failures are a Poisson process."""
    random, clock, segments = np.random.default_rng(0), 0.0, 20_000
    for _ in range(segments):
        needed = interval + checkpoint
        while (failure := random.exponential(between)) < needed:
            clock += failure
            needed = restart + interval + checkpoint  # a restart may fail too
        clock += needed
    return 1.0 - segments * interval / clock


@pytest.mark.parametrize(("checkpoint", "between"), [(60.0, HOUR), (10.0, 24 * HOUR), (300.0, 2 * HOUR)])
def test_dalys_interval_loses_the_least(checkpoint: float, between: float) -> None:
    def lost(interval: float) -> float:
        return lost_share(interval, checkpoint, 600.0, between)

    best = min(lost(interval) for interval in np.geomspace(checkpoint, between, 2000))
    assert lost(daly_interval(checkpoint, between)) <= best * 1.001


def test_the_lost_share_is_that_of_a_simulation() -> None:
    interval, checkpoint, restart, between = 900.0, 60.0, 300.0, 2 * HOUR
    expected = lost_share(interval, checkpoint, restart, between)
    assert _simulated_loss(interval, checkpoint, restart, between) == pytest.approx(expected, rel=0.02)


def test_checkpoints_that_take_longer_than_failures_allow_lose_everything() -> None:
    assert daly_interval(2 * HOUR, HOUR) == HOUR
    assert lost_share(HOUR, 1e6, 0.0, HOUR) == 1.0


@pytest.mark.parametrize("ranks", [2, 8, 1000])
def test_the_slowest_rank_is_that_of_draws(ranks: int) -> None:
    drawn = np.random.default_rng(0).normal(1.0, 0.02, (4000, ranks)).max(1).mean() - 1.0
    assert slowest(ranks, 0.02) == pytest.approx(drawn, rel=0.05)
    assert slowest(1, 0.02) == 0.0


def test_the_run_of_llama_3_is_interrupted_every_three_hours_and_more_than_nine_tenths_effective() -> None:
    """arXiv:2407.21783: 419 interruptions in 54 days; the time that was effective is that of failures alone."""
    found = reliability(16384, 2048, 12 * 405e9)
    assert found.between_failures == pytest.approx(54 * 24 * HOUR / 419)
    assert 0.85 < 1.0 - found.lost < 0.95
    assert found.effective < 1.0 - found.lost
