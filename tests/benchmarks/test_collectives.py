"""The benchmark of collectives checks and times each of them, and counts bytes as usual."""

import sys

import pytest

from benchmarks import collectives
from benchmarks.harness import Row


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
