"""Programs that are started by hand, at small sizes: each checks what it times, and prints and keeps its figures."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_nanogpt, collectives, long_context, offload_step, training_speed
from benchmarks.harness import Row
from benchmarks.training_speed import FIRST, STEPS, speed
from tests.support.saved_bytes import SavedBytes
from tpfuse.testing.patience import patient
from tpfuse.zero import offload


def test_bus_bandwidths_count_the_bytes_that_a_rank_sends() -> None:
    assert collectives.bus_factor("all_reduce", 4) == 1.5
    assert [collectives.bus_factor(op, 4) for op in ("all_gather", "reduce_scatter", "all_to_all")] == [0.75] * 3


@pytest.mark.processes
def test_every_collective_is_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[Row] = []
    monkeypatch.setattr(collectives, "SIZES", (2**12,))
    monkeypatch.setattr(collectives, "write_row", lambda name, row, keep: kept.append(row))
    monkeypatch.setattr(sys, "argv", ["collectives.py", "--ranks", "2", "--rounds", "1"])
    collectives.main()
    assert [row["op"] for row in kept] == list(collectives.OPERATIONS)
    for row in kept:
        assert row["ranks"] == 2 and all(row[f"{name}_us"]["median"] > 0 for name in ("tpfuse", "gloo", "copy"))
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.processes
def test_two_ranks_save_half_and_have_the_same_loss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["long_context", "--tokens", "256", "--cp", "2"])
    assert long_context.main() == 0
    title, head, alone, shared, last = capsys.readouterr().out.splitlines()
    assert "256 tokens" in title and "saved by a rank" in head
    assert alone.split()[:4] == ["cp", "1", "1", "x"] and shared.split()[:4] == ["cp", "2", "2", "x"]
    losses = ([float(x) for x in row.split()[5:7]] for row in (alone, shared))
    assert next(losses) == pytest.approx(next(losses), abs=2e-4), "those of two steps, with four digits"
    assert last.startswith("goal met: losses differ by ")


def test_every_storage_is_counted_once_and_parameters_never() -> None:
    weight, x = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    saved = SavedBytes([weight])
    with saved.hooks:
        y = (x @ weight.t()).exp()  # this saves x, weight and its own result
        (y * y).sum()  # this saves y again
    assert saved.total == 4 * (5 * 4 + 5 * 3)


PEER = """
import sys
from pathlib import Path
assert "--max_iters=22" in sys.argv and Path("data/text/train.bin").stat().st_size == 2 * 900
for step in range(23):
    print(f"iter {step}: loss 4.0, time {1000 + step}.00ms, mfu 1%")
"""


@pytest.mark.processes
def test_both_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checkout, text, kept = tmp_path / "nanogpt", tmp_path / "input.txt", dict[str, Row]()
    (checkout / "config").mkdir(parents=True)
    for name in ("model.py", "configurator.py"):
        (checkout / name).write_text("")
    (checkout / "train.py").write_text(PEER)
    text.write_text("abcdefghij" * 100)
    monkeypatch.setattr(bench_nanogpt, "write_row", lambda name, row, keep: kept.update({name: row}))
    small = {"--train.eval-batches": "1", "--model.n-layer": "1", "--model.n-embd": "16"}
    pairs = zip(["", *bench_nanogpt.OURS], bench_nanogpt.OURS, strict=False)
    monkeypatch.setattr(bench_nanogpt, "OURS", [small.get(flag, value) for flag, value in pairs])
    flags = ["--nanogpt", str(checkout), "--text", str(text), "--rounds", "1", "--turn", "22", "--steps", "0"]
    monkeypatch.setattr(sys, "argv", ["bench_nanogpt.py", *flags])
    bench_nanogpt.main()
    row = kept["nanogpt"]
    assert row["nanogpt_ms"] == {"median": 1021.0, "p20": 1020.4, "p80": 1021.6}, "the first 20 steps do not count"
    assert row["speedup"] == pytest.approx(1021.0 / row["tpfuse_ms"]["median"], rel=0.01)
    assert "step of 768 tokens" in capsys.readouterr().out


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


def _steps_of(step: int, tokens: float | None, memory: int = 5) -> dict[str, Any]:
    return {"step": step, "tokens_per_second": tokens, "mfu": tokens and tokens / 1000, "memory_bytes": memory}


def test_the_first_steps_do_not_count() -> None:
    rows = [_steps_of(FIRST, 1.0), _steps_of(FIRST + 5, 100.0), _steps_of(FIRST + 6, None), _steps_of(STEPS, 200.0, 7)]
    figures = speed(rows)
    assert figures["tokens_per_second"]["median"] == 150 and figures["mfu"]["median"] == pytest.approx(0.15)
    assert figures["memory_bytes"] == 7
    with pytest.raises(ValueError, match="no speed after its first 20 steps"):
        speed([_steps_of(FIRST, 1.0)])


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


@pytest.mark.processes
def test_verify_tune_and_benchmarks_do_not_import_the_command_lines_packages() -> None:
    """Machines with GPUs do not always have tyro and tomli_w installed."""
    program = """
import sys
sys.modules |= dict.fromkeys(("tyro", "tomli_w"))
import benchmarks.first_contact, benchmarks.node, tpfuse.tools.tune, tpfuse.tools.verify
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
