"""A run of all benchmarks on a CPU keeps each row at once, reports failures, and names what it leaves out."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import apart, bench_zero, collectives, cpu
from benchmarks.apart import Row, Rows, Step, read
from benchmarks.cpu import BENCHMARKS, LEFT_OUT, OPERATORS, RANKS, Files, Run, measurements, run_benchmarks
from benchmarks.documents import document_of, slug, table_lines

ROOT = Path(__file__).resolve().parents[2]
Benchmark = Callable[[Run, Rows], None]


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


def test_a_document_has_a_line_for_each_row() -> None:
    head, rows = {"machine": "CPU", "left_out": {"x": "why"}}, [_row("tpfuse", 1.0), _row("torch", 2.0)]
    text = document_of(head, rows)
    assert json.loads(text) == head | {"rows": rows}
    assert sum("median_ms" in line for line in text.splitlines()) == 2
    assert json.loads(document_of(head, [])) == head | {"rows": []}


def test_a_machine_is_named_by_a_slug() -> None:
    assert slug("Intel(R) Xeon(R) Processor, 2 cores") == "intel-xeon-processor-2-cores"


def test_rows_say_how_many_processes_and_threads_ran() -> None:
    times = {"tpfuse": [0.003, 0.001, 0.002], "one_process": [0.004]}
    ours, alone = measurements("a", "step", times, 0.0123, bytes=4)
    assert (ours["candidate"], ours["processes"], ours["threads"], ours["median_ms"]) == ("tpfuse", RANKS, 1, 2.0)
    assert (ours["p20_ms"], ours["p80_ms"], ours["rounds"]) == (1.4, 2.6, 3)
    assert (alone["candidate"], alone["processes"], alone["threads"]) == ("one process", 1, RANKS)
    assert ours["others"] == alone["others"] == 0.012 and ours["bytes"] == alone["bytes"] == 4
    assert measurements("a", "step", {"tpfuse": [1.0]}, float("nan"))[0]["others"] is None


def test_every_benchmark_runs_or_is_left_out_with_a_reason() -> None:
    existing = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert existing <= BENCHMARKS.keys() | LEFT_OUT.keys()
    assert not BENCHMARKS.keys() & LEFT_OUT.keys() and set(OPERATORS) <= existing


def test_an_operator_is_checked_and_timed_by_torch(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        BENCHMARKS["layer_norm"](Run(quick=True), Rows(tmp_path, "layer_norm", float("inf")))
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


class Pool:
    """A stand-in for a pool of ranks, on which a collective of S bytes takes S nanoseconds, and Gloo's four times."""

    closed = 0

    def __init__(self, world: int, timeout: float) -> None:
        self.world = world

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if function is not collectives.measure:
            return [0.0] * self.world
        _, nbytes, rounds = arguments
        return [{"tpfuse": [nbytes * 1e-9] * rounds, "gloo": [4e-9 * nbytes], "copy": [1e-9]}]

    def close(self) -> None:
        Pool.closed += 1


def test_collectives_have_bus_bandwidths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "RankPool", Pool)
    Pool.closed = 0
    BENCHMARKS["collectives"](Run(), Rows(tmp_path, "collectives", float("inf")))
    rows = [row for kept in read(tmp_path) for row in cpu.rows_of(kept)]
    assert Pool.closed == 2 and len(rows) == 3 * len(collectives.OPERATIONS) * len(collectives.SIZES)
    for row in rows:
        bus = collectives.bus_factor(row["mode"], RANKS)
        rate = {"tpfuse": bus, "gloo": bus / 4, "copy": None}[row["candidate"]]
        assert row.get("bus_gb_s") == (None if rate is None else pytest.approx(rate, rel=0.01))
        assert row["case"] == f"{row['mode']}, {row['bytes']} bytes"


def test_both_subjects_of_zero_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "RankPool", Pool)
    monkeypatch.setattr(bench_zero, "measure", lambda subject, *rest: ({"tpfuse stage 1": [0.5]}, 0.0))
    BENCHMARKS["zero"](Run(), Rows(tmp_path, "zero", float("inf")))
    training, update = (row for kept in read(tmp_path) for row in cpu.rows_of(kept))
    assert training["case"] == "GPT of 6 layers x 768, 4 x 64 tokens per rank" and training["median_ms"] == 500
    assert update["case"] == "12 matrices of 2048 x 2048" and update["mode"] == "update"


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


def right(run: Run, rows: Rows, candidate: str = "tpfuse") -> None:
    rows.each("a", lambda: {"measurements": [_row(candidate, 1.0)]})


def wrong(run: Run, rows: Rows) -> None:
    def work() -> Row:
        raise RuntimeError("no memory")

    rows.each("b", work)


def killed(run: Run, rows: Rows) -> None:
    def work() -> Row:
        raise KeyboardInterrupt

    rows.each("c", work)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    def peer(run: Run, rows: Rows) -> None:
        rows.each("a", lambda: {"measurements": [_row("tpfuse", 1.0), _row("torch", 1.0) | {"error": "no"}]})

    monkeypatch.setattr(apart, "_process", inline)
    monkeypatch.setattr(cpu, "BENCHMARKS", {"right": right, "wrong": wrong, "killed": killed, "peer": peer})


def test_a_failure_is_a_row_and_gives_status_1(tmp_path: Path, toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    files = Files(tmp_path, quick=False)
    assert run_benchmarks(["wrong", "right"], Run(), files) == 1
    document = json.loads((tmp_path / f"{files.stem}.json").read_text())
    assert {"what", "machine", "date", "python", "torch", "triton", "commit", "command"} <= document.keys()
    first, second = document["rows"]
    assert (first["benchmark"], first["case"]) == ("wrong", "b") and first["error"].endswith("RuntimeError: no memory")
    assert (second["benchmark"], second["candidate"]) == ("toy", "tpfuse")
    page = (tmp_path / f"{files.stem}.md").read_text()
    assert "\n| wrong | b | failed: RuntimeError: no memory | |\n" in page
    assert all(f"| {name} | left out | | {reason} |" in page for name, reason in LEFT_OUT.items())
    assert "benchmarks.cpu: failed: wrong, b: " in capsys.readouterr().err


def test_a_peer_that_fails_is_no_failure(toys: None) -> None:
    assert run_benchmarks(["right", "peer"], Run(), Files(None, quick=False)) == 0


def test_a_run_that_is_killed_keeps_its_rows(tmp_path: Path, toys: None) -> None:
    files = Files(tmp_path, quick=False)
    with pytest.raises(KeyboardInterrupt):
        run_benchmarks(["right", "killed"], Run(), files)
    assert [row["case"] for row in json.loads((tmp_path / f"{files.stem}.json").read_text())["rows"]] == ["a"]


def test_benchmarks_that_are_left_are_failures(tmp_path: Path, toys: None) -> None:
    files = Files(None, quick=False)
    assert run_benchmarks(["right"], Run(), files, minutes=0) == 1
    assert files.rows == [{"benchmark": "right", "case": "all", "error": "not done after 0 minutes"}]


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cpu.py", *arguments])
    return cpu.main()


@pytest.mark.parametrize("part", [["--only", "right"], ["--quick"]])
def test_only_a_whole_run_is_kept_among_the_results(
    part: list[str], tmp_path: Path, toys: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    monkeypatch.setattr(cpu, "RESULTS", results)
    monkeypatch.setattr(cpu, "BENCHMARKS", {"right": right, "again": partial(right, candidate="torch")})
    assert _main(monkeypatch, *part) == 0 and not results.exists()
    assert capsys.readouterr().out.endswith("nothing is kept without --out\n")
    assert _main(monkeypatch, *part, "--out", str(out)) == 0 and not results.exists()
    (document,) = (json.loads(path.read_text()) for path in out.glob("*.json"))
    assert len(document["rows"]) == (1 if part == ["--only", "right"] else 2)
    assert document["quick"] == (part == ["--quick"])
    assert document["command"] == f"python -m benchmarks.cpu {' '.join(part)} --out out"
    assert _main(monkeypatch) == 0 and len(list(results.iterdir())) == 2


def test_bad_options_are_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        _main(monkeypatch, "--only", "nothing")
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert _main(monkeypatch, "--out", str(tmp_path / "file")) == 2
    out, error = capsys.readouterr()
    assert out == "" and error == f"benchmarks.cpu: error: --out {tmp_path}/file: File exists\n"
