"""The benchmark of CPU ranks' collectives checks and times each collective."""

import sys

import pytest

from benchmarks import bench_collectives
from benchmarks.harness import Row


@pytest.mark.processes
def test_every_collective_is_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[Row] = []
    monkeypatch.setattr(bench_collectives, "SIZES", (2**12,))
    monkeypatch.setattr(bench_collectives, "keep", lambda name, row: kept.append(row))
    monkeypatch.setattr(sys, "argv", ["bench_collectives.py", "--ranks", "2", "--rounds", "1"])
    bench_collectives.main()
    assert [row["op"] for row in kept] == ["all_gather", "reduce_scatter", "all_reduce"]
    for row in kept:
        assert row["ranks"] == 2 and all(row[f"{name}_us"]["median"] > 0 for name in ("tpfuse", "gloo", "copy"))
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3
