"""The speed of a training run is that of its last steps, and the exit status is that of the run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training_speed
from benchmarks.training_speed import FIRST, STEPS, speed
from tpfuse.testing.patience import patient
from tpfuse.train.config import parse_train


def _row(step: int, tokens: float | None, memory: int = 5) -> dict[str, Any]:
    return {"step": step, "tokens_per_second": tokens, "mfu": tokens and tokens / 1000, "memory_bytes": memory}


def test_the_first_steps_do_not_count() -> None:
    rows = [_row(FIRST, 1.0), _row(FIRST + 5, 100.0), _row(FIRST + 6, None), _row(STEPS, 200.0, 7)]
    figures = speed(rows)
    assert figures["tokens_per_second"]["median"] == 150 and figures["mfu"]["median"] == pytest.approx(0.15)
    assert figures["memory_bytes"] == 7
    with pytest.raises(ValueError, match="no speed after its first 20 steps"):
        speed([_row(FIRST, 1.0)])


@pytest.mark.parametrize("status", [0, 2])
def test_a_run_is_kept_unless_it_fails(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[tuple[str, dict[str, Any]]] = []
    options = ["--model.preset", "gpt2-124m", "--parallel.tp", "2"]

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "tpfuse", "train"]
        parsed = parse_train(command[4:])
        assert parsed.model.n_embd == 768 and parsed.parallel.tp == 2
        assert parsed.train.steps == STEPS and parsed.train.eval_every == 0
        assert parsed.out is not None and not parsed.out.exists()
        parsed.out.mkdir()
        (parsed.out / "metrics.jsonl").write_text(
            '{"step": 40, "tokens_per_second": 100.0, "mfu": 0.5, "memory_bytes": 1048576}\n'
        )
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(training_speed.subprocess, "run", run)
    monkeypatch.setattr(training_speed, "keep", lambda name, row: kept.append((name, row)) or Path("file"))  # type: ignore[func-returns-value]
    monkeypatch.setattr(sys, "argv", ["training_speed.py", *options])
    assert training_speed.main() == status
    assert [(name, row["options"]) for name, row in kept] == ([] if status else [("training", options)])
    assert capsys.readouterr().out == ("" if status else "100 tokens/s, MFU 50.0%, 1 MiB\nkept in file\n")


@pytest.mark.processes
def test_a_real_run_has_a_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[dict[str, Any]] = []
    train = subprocess.run
    monkeypatch.setattr(training_speed.subprocess, "run", lambda command: train(command, timeout=patient(120)))
    monkeypatch.setattr(training_speed, "keep", lambda name, row: kept.append(row))
    sizes = "--model.n-layer 1 --model.n-embd 16 --model.n-head 2 --model.n-positions 16 --train.batch 2".split()
    monkeypatch.setattr(sys, "argv", ["training_speed.py", *sizes])
    assert training_speed.main() == 0
    assert kept[0]["tokens_per_second"]["median"] > 0 and kept[0]["memory_bytes"] > 0
