"""Two training steps with each implementation are close to float64, and a wrong gradient is detected."""

from typing import Any

import pytest
import torch

from tpfuse.testing.ranks import RankError
from tpfuse.tools import training
from tpfuse.tools.training import TrainingRun, train_each

# These tests start pools of ranks; the tests of layers and engines compare implementations too.
PROCESSES = pytest.mark.processes


@pytest.fixture(scope="module")
def runs() -> list[TrainingRun]:
    return train_each()


@PROCESSES
@pytest.mark.timeout(300)
def test_all_implementations_train_alike(runs: list[TrainingRun]) -> None:
    assert [run.name for run in runs] == ["one rank, torch", "fused", "direct", "collective"]
    assert [run.failure for run in runs] == [""] * 4
    first = runs[0].losses
    assert first[1] < first[0] - 1e-3, "it learns"
    for run in runs:
        assert run.passed and 0 < run.difference < run.distance < run.allowed
        assert run.losses == pytest.approx(first, abs=2e-6)


@PROCESSES
def test_a_wrong_gradient_is_detected(runs: list[TrainingRun]) -> None:
    """A weight that is wrong by a hundredth of the update of two steps exceeds the allowed distance."""
    rate = 1e-3 / 100  # lr / warmup, the rate of the first step
    off = torch.full((128, 128), 1e-2 * rate)
    _, distance = training._distances({"w": off}, {"w": torch.zeros(128, 128)})
    assert distance > runs[0].allowed


@pytest.mark.parametrize("gpu", [False, True])
def test_an_error_of_one_rank_becomes_one_line(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks on GPUs are those of the pool whose ranks may share a GPU."""

    class Broken:
        def __init__(self, world: int, timeout: float) -> None:
            pass

        def run(self, *args: Any) -> None:
            raise RankError("rank 0: Traceback\nRuntimeError: CUBLAS_WORKSPACE_CONFIG")

        def close(self) -> None:
            pass

    monkeypatch.setattr(training, "GpuRankPool" if gpu else "RankPool", Broken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert train_each() == [TrainingRun("one rank, torch", failure="RuntimeError: CUBLAS_WORKSPACE_CONFIG")]
