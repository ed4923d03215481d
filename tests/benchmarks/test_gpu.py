"""The whole run on tiny shapes, interpreted: that every benchmark works, not how fast anything is."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import bench_adamw
from benchmarks.gpu import FIGURES, SHARES, run_apart
from benchmarks.harness import OURS, Row, command

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-m", "benchmarks.gpu", "--interpreted", "--minutes", "4", "--out", str(out)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True), out


def test_every_benchmark_checks_and_times_everything(
    outcome: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, out = outcome
    (path,) = out.glob("gpu-*.json")
    document = json.loads(path.read_text())
    rows: list[Row] = document["rows"]
    assert [row for row in rows if "median_us" not in row] == []
    assert done.returncode == 0, done.stderr
    assert {row["operator"] for row in rows} == SHARES.keys()
    assert {row["check"] for row in rows if row["contender"] == OURS} == {"within the bound"}
    assert {"machine", "torch", "triton", "commit", "sources", "date", "seed", "ceilings"} <= document.keys()


def test_what_is_interpreted_says_nothing_about_figures(
    outcome: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, out = outcome
    assert done.stdout.count("not measured yet") == len(FIGURES)
    assert done.stdout.rstrip().endswith(".json")
    (path,) = out.glob("gpu-*.json")
    assert path.name not in {x.name for x in (ROOT / "benchmarks" / "results").iterdir()}


def test_every_figure_finds_its_rows(outcome: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """The names that figures look for are those that the benchmarks write."""
    (path,) = outcome[1].glob("gpu-*.json")
    rows: list[Row] = json.loads(path.read_text())["rows"]
    written = {(row["operator"], row["mode"], row["contender"]) for row in rows}
    for figure in FIGURES:
        assert (figure.operator, figure.mode, OURS) in written, figure.name
        for peer in figure.peers:
            if peer != "SDPA flash":  # which only a GPU has
                assert (figure.operator, figure.mode, peer) in written, figure.name
        assert any(figure.case in row["case"] for row in rows if row["operator"] == figure.operator), figure.name


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_crashes_or_hangs_leaves_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    run_apart(partial(signal.raise_signal, signal.SIGSEGV), path, ("gemm", True), 60.0)
    run_apart(partial(os._exit, 3), path, ("gemm", True), 60.0)
    before = time.monotonic()
    run_apart(partial(time.sleep, 600), path, ("rope", False), 2.0)
    assert time.monotonic() - before < 30
    run_apart(partial(int, "seven"), path, ("adamw", True), 60.0)
    errors = [(row["operator"], row["case"], row["asked"], row["error"]) for row in _rows(path)]
    assert errors == [
        ("gemm", "all that follow", True, "the process ended with SIGSEGV"),
        ("gemm", "all that follow", True, "the process ended with exit status 3"),
        ("rope", "all that follow", False, "ended: not done after 2 s"),
        ("adamw", "all", True, "ValueError: invalid literal for int() with base 10: 'seven'"),
    ]


def test_without_a_gpu_it_is_one_line() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("benchmarks.gpu: error: there is no CUDA GPU here")


def test_one_benchmark_by_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_adamw.py", "--interpreted", "--seed", "7"])
    assert command("adamw", bench_adamw.cases) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 4 + 1 and json.loads(lines[-1])["seed"] == 7
    monkeypatch.setattr(sys, "argv", ["bench_adamw.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command("adamw", bench_adamw.cases) == 2
    assert capsys.readouterr().err.startswith("benchmarks.bench_adamw: error: there is no CUDA GPU here")
