"""A run of all benchmarks on a CPU keeps each row at once, reports failures, and names what it leaves out."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import apart, cpu
from benchmarks.apart import Row, Rows, Step, read
from benchmarks.cpu import BENCHMARKS, LEFT_OUT, OPERATORS, Files, run_benchmarks
from benchmarks.documents import table_lines

ROOT = Path(__file__).resolve().parents[2]
Benchmark = Callable[..., None]


def _row(candidate: str, median: float, **more: Any) -> Row:
    return {"benchmark": "toy", "case": "a", "mode": "step", "candidate": candidate, "median_ms": median, **more}


def test_the_table_has_tpfuse_beside_its_peers() -> None:
    rows = [
        _row("tpfuse", 0.0734),
        _row("torch | eager", 5.16),
        _row("one process", 635.4),
        _row("tpfuse ring", 12.0, case="a step of b", bus_gb_s=1.234),
        _row("tpfuse ulysses", 150.0, case="a step of b"),
        {"benchmark": "toy", "case": "c", "mode": "step", "candidate": "tpfuse", "error": "AssertionError: a | b"},
        {"benchmark": "toy", "case": "d", "error": "Traceback\nRuntimeError: no"},
    ]
    assert table_lines(rows) == [
        "| benchmark | case | tpfuse | peers |",
        "|---|---|---|---|",
        "| toy | a; step | 73 µs | 5.2 ms, torch \\| eager; 635 ms, one process |",
        "| toy | a step of b | 12.0 ms (1.2 GB/s), ring; 150 ms, ulysses |  |",
        "| toy | c; step | failed: AssertionError: a \\| b |  |",
        "| toy | d | failed: RuntimeError: no | |",
    ]


def test_every_benchmark_runs_or_is_left_out_with_a_reason() -> None:
    existing = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert existing <= BENCHMARKS.keys() | LEFT_OUT.keys()
    assert not BENCHMARKS.keys() & LEFT_OUT.keys() and set(OPERATORS) <= existing


def test_an_operator_is_checked_and_timed_by_torch(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        BENCHMARKS["layer_norm"](Rows(tmp_path, "layer_norm", float("inf")), quick=True)
    finally:
        torch.set_num_threads(threads)
    (kept,) = read(tmp_path)
    rows = cpu.rows_of(kept)
    assert [(row["mode"], row["candidate"]) for row in rows] == [
        (mode, candidate) for mode in ("forward", "backward") for candidate in ("tpfuse", "eager")
    ]
    for row in rows:
        assert row["benchmark"] == "layer_norm" and row["case"] == "1558m, 1024 x 1600" and row["rounds"] == 1
        assert row["processes"] == 1 and row["threads"] == cpu.cores() and 0 < row["median_ms"] < 1e3
    assert cpu.failed(rows) == []


def inline(step: Step, folder: Path, until: float, deadline: float, shown: Any) -> tuple[int, str]:
    """Run the step in this process, and show each row as soon as it is written."""
    rows = Rows(folder, step.name, until)
    write = rows.write

    def write_and_show(name: str, outcome: Row) -> None:
        write(name, outcome)
        shown.look()

    rows.write = write_and_show  # type: ignore[method-assign]
    step.call(rows)
    return 0, ""


def test_failures_are_rows_of_a_run_and_a_peers_failure_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows before an interruption are kept, and a benchmark for which no time is left is a failure."""

    def fail(error: BaseException) -> Row:
        raise error

    def benchmark(case: str, work: Callable[[], Row]) -> Benchmark:
        return lambda rows, quick: rows.each(case, work)

    peer = [_row("tpfuse", 1.0), _row("torch", 1.0) | {"error": "no"}]
    toys = {
        "right": benchmark("a", lambda: {"measurements": peer}),
        "wrong": benchmark("b", lambda: fail(RuntimeError("no memory"))),
        "killed": benchmark("c", lambda: fail(KeyboardInterrupt())),
    }
    monkeypatch.setattr(apart, "_process", inline)
    monkeypatch.setattr(cpu, "BENCHMARKS", toys)
    assert run_benchmarks(["right"], Files(tmp_path, quick=False)) == 0
    files = Files(tmp_path, quick=False)
    with pytest.raises(KeyboardInterrupt):
        run_benchmarks(["right", "wrong", "killed"], files)
    document = json.loads((tmp_path / f"{files.stem}.json").read_text())
    assert {"what", "machine", "date", "python", "torch", "triton", "commit", "command"} <= document.keys()
    assert [row["case"] for row in document["rows"]] == ["a", "a", "b"]
    page = (tmp_path / f"{files.stem}.md").read_text()
    assert "\n| wrong | b | failed: RuntimeError: no memory | |\n" in page
    assert all(f"| {name} | left out | | {reason} |" in page for name, reason in LEFT_OUT.items())
    assert run_benchmarks(["wrong"], Files(tmp_path, quick=False)) == 1
    assert "benchmarks.cpu: failed: wrong, b: " in capsys.readouterr().err
    late = Files(tmp_path, quick=False)
    assert run_benchmarks(["right"], late, minutes=0) == 1
    assert late.rows == [{"benchmark": "right", "case": "all", "error": "not done after 0 minutes"}]


@pytest.mark.parametrize("part", [["--only", "gemm"], ["--quick"]])
def test_a_part_of_a_run_replaces_no_committed_file(
    part: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--keep", *part])
    with pytest.raises(SystemExit, match="2"):
        cpu.main()
    assert "--keep replaces the files of a whole run" in capsys.readouterr().err
