"""Two training steps with each implementation: near to float64 where they are right, and seen where they are not."""

import pytest
import torch

from tpfuse.profile import training
from tpfuse.profile.training import TrainingRun, train_each

pytestmark = pytest.mark.processes  # pools of their own; the tests of layers and engines compare implementations


@pytest.fixture(scope="module")
def runs() -> list[TrainingRun]:
    return train_each()


@pytest.mark.timeout(300)
def test_all_implementations_train_alike(runs: list[TrainingRun]) -> None:
    assert [run.name for run in runs] == ["one rank, torch", "fused", "direct", "collective"]
    assert [run.failure for run in runs] == [""] * 4
    first = runs[0].losses
    assert first[1] < first[0] - 1e-3, "it learns"
    for run in runs:
        assert run.passed and 0 < run.difference < run.distance < run.allowed
        assert run.losses == pytest.approx(first, abs=2e-6)


def test_a_gradient_that_is_wrong_is_seen(runs: list[TrainingRun]) -> None:
    """A weight that is off by a hundredth of what two steps move it by is beyond what is allowed."""
    rate = 1e-3 / 100  # lr / warmup, of the first step
    off = torch.full((128, 128), 1e-2 * rate)
    _, distance = training._distances({"w": off}, {"w": torch.zeros(128, 128)})
    assert distance > runs[0].allowed


def test_what_raises_is_one_line() -> None:
    nothing = train_each(["nothing"])[1]  # type: ignore[list-item]
    assert not nothing.passed and nothing.failure.endswith("expected one of auto, fused, direct, collective")
