"""Every benchmark of the whole run on tiny shapes, interpreted: it works, however fast anything is."""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import bench_adamw, gpu
from benchmarks.gpu import FIGURES, SHARES, Plan, measure_operator, run_apart
from benchmarks.harness import OURS, Row, command
from benchmarks.timing import Ceilings
from tpfuse.testing.tiers import exhaustive

ROOT = Path(__file__).resolve().parents[2]
PLAN = Plan("tiny", 0, Ceilings(1e12, 1e12))
QUICK = ("layer_norm", "adamw", "sharded_adamw", "cross_entropy")


@pytest.mark.parametrize("operator", [*QUICK, *exhaustive(*(x for x in SHARES if x not in QUICK))])
def test_a_benchmark_checks_and_times_everything(operator: str, tmp_path: Path) -> None:
    """The names that figures look for are those that the benchmark writes."""
    measure_operator(operator, True, 3600.0, PLAN, tmp_path / "rows.jsonl")
    rows = _rows(tmp_path / "rows.jsonl")
    assert [row for row in rows if "median_us" not in row] == []
    assert {row["operator"] for row in rows} == {operator}
    assert {row["check"] for row in rows if row["contender"] == OURS} == {"within the bound"}
    written = {(row["mode"], row["contender"]) for row in rows}
    for figure in (figure for figure in FIGURES if figure.operator == operator):
        for contender in (OURS, *figure.peers):
            if contender not in ("SDPA cudnn", "SDPA flash"):  # which only a GPU has
                assert (figure.mode, contender) in written, figure.name
        assert any(figure.case in row["case"] for row in rows), figure.name


def test_the_run_keeps_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times of the interpreter say nothing about figures, and stay out of the folder of results."""
    monkeypatch.setattr(gpu, "run_apart", lambda function, path, label, seconds: function())
    monkeypatch.setattr(sys, "argv", ["gpu.py", "adamw", "cross_entropy", "--interpreted", "--out", str(tmp_path)])
    before = set((ROOT / "benchmarks" / "results").iterdir())
    assert gpu.main() == 0
    (path,) = tmp_path.glob("gpu-*.json")
    document = json.loads(path.read_text())
    assert {row["operator"] for row in document["rows"]} == {"adamw", "cross_entropy"}
    assert {"machine", "torch", "triton", "commit", "sources", "date", "seed", "ceilings"} <= document.keys()
    out = capsys.readouterr().out
    assert out.count("not measured yet") == len(FIGURES) and out.rstrip().endswith(".json")
    assert set((ROOT / "benchmarks" / "results").iterdir()) == before


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.processes
def test_what_crashes_or_hangs_leaves_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    run_apart(partial(signal.raise_signal, signal.SIGSEGV), path, ("gemm", True), 600.0)
    run_apart(partial(os._exit, 3), path, ("gemm", True), 600.0)
    run_apart(partial(time.sleep, 10**6), path, ("rope", False), 1.0)
    run_apart(partial(int, "seven"), path, ("adamw", True), 600.0)
    errors = [(row["operator"], row["case"], row["asked"], row["error"]) for row in _rows(path)]
    assert errors == [
        ("gemm", "all that follow", True, "the process ended with SIGSEGV"),
        ("gemm", "all that follow", True, "the process ended with exit status 3"),
        ("rope", "all that follow", False, "ended: not done after 1 s"),
        ("adamw", "all", True, "ValueError: invalid literal for int() with base 10: 'seven'"),
    ]


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("benchmarks.gpu: error: there is no CUDA GPU here") and error.count("\n") == 1


def test_one_benchmark_by_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_adamw.py", "--interpreted", "--seed", "7"])
    assert command("adamw", bench_adamw.cases) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 4 + 1 and json.loads(lines[-1])["seed"] == 7
    monkeypatch.setattr(sys, "argv", ["bench_adamw.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command("adamw", bench_adamw.cases) == 2
    assert capsys.readouterr().err.startswith("benchmarks.bench_adamw: error: there is no CUDA GPU here")
