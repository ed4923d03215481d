"""The step with optimizer state on disk: its state is counted first, its goal is reported, and an error is one line."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import offload_step
from tpfuse.zero import offload


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return the command with the tiny model, in this process; here temporary files may be in memory."""
    monkeypatch.setattr(offload, "_IN_MEMORY", ())
    monkeypatch.setattr(offload_step, "keep_freed_memory", lambda: None)

    def main(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["offload_step.py", "--preset", "tiny", "--tokens", "8", *flags])
        return offload_step.main()

    return main


def test_a_step_of_the_tiny_model(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--folder", str(tmp_path), "--steps", "2", "--limit", "1000") == 0
    *_, losses, goal = capsys.readouterr().out.splitlines()
    first, second = (float(x) for x in losses.partition(": ")[2].partition(";")[0].split(", "))
    assert second < first, "the update has done nothing"
    assert goal.startswith("goal met: ")
    assert run("--folder", str(tmp_path), "--limit", "0.01") == 1
    assert not list(tmp_path.iterdir())
