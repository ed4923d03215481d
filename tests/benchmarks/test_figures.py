"""Figures are computed from the right rows, and their verdicts report missing measurements."""

from typing import Any

import pytest

from benchmarks.figures import FIGURES, Target, cost, figures_table, memory, of_copy, speedup
from benchmarks.harness import OURS, Row

FASTER = Target("toy / peer", "toy", "forward", 1.1, "peer", speedup)


def _row(candidate: str, case: str = "a", median: float | None = None, **more: Any) -> Row:
    row: Row = {"operator": "toy", "case": case, "mode": "forward", "candidate": candidate, "asked": True, **more}
    return row if median is None else row | {"median_us": median}


def test_the_worst_case_counts() -> None:
    rows = [_row(OURS, "a", 10.0), _row("peer", "a", 15.0), _row(OURS, "b", 10.0), _row("peer", "b", 12.0)]
    found = FASTER.outcome(rows, 1.0)
    assert (found["got"], found["case"], found["verdict"], found["missing"]) == (1.2, "b", "pass", 0)
    assert FASTER.outcome([*rows, _row(OURS, "c", 10.0), _row("peer", "c", 10.9)], 1.0)["verdict"] == "miss"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [_row(OURS, median=10.0)],
        [_row("peer", median=10.0)],
        [_row(OURS, error="wrong"), _row("peer", median=10.0)],
        [_row(OURS, median=10.0), _row("peer", error="absent")],
        [_row(OURS, median=10.0, asked=False), _row("peer", median=20.0, asked=False)],
        [_row(OURS, median=10.0) | {"mode": "backward"}, _row("peer", median=20.0) | {"mode": "backward"}],
        [_row(OURS, error="no") | {"mode": ""}, _row("peer", median=20.0)],
    ],
)
def test_what_was_not_measured_is_no_number(rows: list[Row]) -> None:
    found = FASTER.outcome(rows, 1.0)
    assert found["got"] is None and found["verdict"] == "not measured yet"


@pytest.mark.parametrize(
    "missing",
    [
        [_row(OURS, "b", error="wrong"), _row("peer", "b", 9.0)],
        [_row(OURS, "b", error="not measured: no time left") | {"mode": ""}],
        [_row(OURS, "all that follow", error="ended") | {"mode": ""}],
    ],
)
def test_a_pass_says_what_is_missing(missing: list[Row]) -> None:
    found = FASTER.outcome([_row(OURS, "a", 10.0), _row("peer", "a", 15.0), *missing], 1.0)
    assert (found["verdict"], found["missing"]) == ("pass, but not all measured", 1)


def test_a_case_without_this_peer_is_none_of_its() -> None:
    rows = [_row(OURS, "a", 10.0), _row("peer", "a", 15.0), _row(OURS, "b", 10.0), _row("other", "b", 1.0)]
    assert FASTER.outcome(rows, 1.0)["verdict"] == "pass"


def test_the_slowest_of_several_peers_counts() -> None:
    figure = Target("toy / slower", "toy", "forward", 1.05, ("peer", "other"), cost, at_most=True)
    rows = [_row(OURS, median=21.0), _row("peer", median=20.0), _row("other", median=10.0)]
    assert (figure.outcome(rows, 1.0)["got"], figure.outcome(rows, 1.0)["verdict"]) == (1.05, "pass")
    assert figure.outcome([rows[0], rows[2], rows[1]], 1.0)["got"] == 1.05
    for order in ([0, 1, 2], [0, 2, 1]):
        broken = [rows[0], rows[1], _row("other", error="no")]
        assert figure.outcome([broken[i] for i in order], 1.0)["verdict"] == "not measured yet"


def test_memory_is_at_most() -> None:
    figure = Target("memory", "toy", "forward", 0.25, "peer", memory, at_most=True)
    rows = [_row(OURS, median=1.0, peak_bytes=20), _row("peer", median=1.0, peak_bytes=100)]
    assert figure.outcome(rows, 1.0)["verdict"] == "pass"
    rows[0]["peak_bytes"] = 26
    assert figure.outcome(rows, 1.0)["verdict"] == "miss"
    rows[0]["peak_bytes"] = None
    assert figure.outcome(rows, 1.0)["verdict"] == "not measured yet"


def test_part_of_the_copy_bandwidth() -> None:
    figure = Target("bandwidth", "toy", "forward", 0.85, None, of_copy)
    found = figure.outcome([_row(OURS, median=1000.0, bytes=2.7e9)], copy=3e12)
    assert found["got"] == pytest.approx(0.9) and found["verdict"] == "pass"


def test_the_table_has_a_line_for_every_figure() -> None:
    text = figures_table([figure.outcome([], 1.0) for figure in FIGURES])
    assert len(text.splitlines()) == len(FIGURES) + 1
    assert text.count("not measured yet") == len(FIGURES)
    assert "<= 0.25" in text and ">= 1.10" in text
