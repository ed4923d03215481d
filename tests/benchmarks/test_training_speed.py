"""The speed of a training run is that of its last steps, and the exit status is that of the run."""

import subprocess
import sys
from typing import Any

import pytest

from benchmarks import training_speed
from benchmarks.training_speed import FIRST, STEPS, speed
from tpfuse.testing.patience import patient


def _row(step: int, tokens: float | None, memory: int = 5) -> dict[str, Any]:
    return {"step": step, "tokens_per_second": tokens, "mfu": tokens and tokens / 1000, "memory_bytes": memory}


def test_the_first_steps_do_not_count() -> None:
    rows = [_row(FIRST, 1.0), _row(FIRST + 5, 100.0), _row(FIRST + 6, None), _row(STEPS, 200.0, 7)]
    figures = speed(rows)
    assert figures["tokens_per_second"]["median"] == 150 and figures["mfu"]["median"] == pytest.approx(0.15)
    assert figures["memory_bytes"] == 7
    with pytest.raises(ValueError, match="no speed after its first 20 steps"):
        speed([_row(FIRST, 1.0)])


@pytest.mark.processes
def test_a_real_run_has_a_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[dict[str, Any]] = []
    train = subprocess.run
    monkeypatch.setattr(training_speed.subprocess, "run", lambda command: train(command, timeout=patient(120)))
    monkeypatch.setattr(training_speed, "write_row", lambda name, row, keep: kept.append(row))
    sizes = "--model.n-layer 1 --model.n-embd 16 --model.n-head 2 --model.n-positions 16 --train.batch 2".split()
    monkeypatch.setattr(sys, "argv", ["training_speed.py", *sizes])
    assert training_speed.main() == 0
    assert kept[0]["tokens_per_second"]["median"] > 0 and kept[0]["memory_bytes"] > 0
