"""Figures are computed from the right rows, and their verdicts report missing measurements."""

from typing import Any

import pytest

from benchmarks import contact_products, contact_training
from benchmarks.bench_operators import CASES
from benchmarks.figures import FIGURES, Target, cost, speedup
from benchmarks.harness import OURS, Row

FASTER = Target("toy / peer", "toy", "forward", 1.1, "peer", speedup)


def _row(candidate: str, case: str = "a", median: float | None = None, **more: Any) -> Row:
    row: Row = {"operator": "toy", "case": case, "mode": "forward", "candidate": candidate, "asked": True, **more}
    return row if median is None else row | {"median_us": median}


PASSED = [_row(OURS, "a", 10.0), _row("peer", "a", 15.0)]
BACKWARD = [row | {"mode": "backward"} for row in PASSED]


@pytest.mark.parametrize(
    ("rows", "verdict", "got", "missing"),
    [
        (PASSED, "pass", 1.5, 0),
        ([*PASSED, _row(OURS, "b", 10.0), _row("peer", "b", 12.0)], "pass", 1.2, 0),
        ([*PASSED, _row(OURS, "b", 10.0), _row("peer", "b", 10.9)], "miss", 1.09, 0),
        ([*PASSED, _row(OURS, "b", 10.0), _row("other", "b", 1.0)], "pass", 1.5, 0),  # no case of this figure
        ([*PASSED, _row(OURS, "b", error="wrong"), _row("peer", "b", 9.0)], "pass, but not all measured", 1.5, 1),
        ([*PASSED, _row(OURS, "b", error="no") | {"mode": ""}], "pass, but not all measured", 1.5, 1),
        ([*PASSED, _row(OURS, "all that follow", error="no") | {"mode": ""}], "pass, but not all measured", 1.5, 1),
        ([], "not measured yet", None, 0),
        ([_row(OURS, median=10.0)], "not measured yet", None, 0),
        ([_row("peer", median=10.0)], "not measured yet", None, 1),
        ([_row(OURS, error="wrong"), _row("peer", median=10.0)], "not measured yet", None, 1),
        ([_row(OURS, median=10.0), _row("peer", error="absent")], "not measured yet", None, 1),
        ([_row(OURS, error="no") | {"mode": ""}, _row("peer", median=20.0)], "not measured yet", None, 1),
        ([row | {"asked": False} for row in PASSED], "not measured yet", None, 0),
        (BACKWARD, "not measured yet", None, 0),
    ],
)
def test_outcome_of_rows(rows: list[Row], verdict: str, got: float | None, missing: int) -> None:
    outcome = FASTER.outcome(rows, 1.0)
    assert (outcome["verdict"], outcome["got"], outcome["missing"]) == (verdict, got, missing)
    assert outcome["case"] == (None if got is None else "a" if got == 1.5 else "b")


def test_the_slowest_of_several_peers_counts() -> None:
    figure = Target("toy / slower", "toy", "forward", 1.05, ("peer", "other"), cost)
    ours, peer, other = _row(OURS, median=20.0), _row("peer", median=20.0), _row("other", median=10.0)
    absent = _row("other", error="no")
    for rows in ([ours, peer, other], [ours, other, peer]):
        assert (figure.outcome(rows, 1.0)["got"], figure.outcome(rows, 1.0)["verdict"]) == (1.0, "pass")
    for rows in ([ours, peer, absent], [ours, absent, peer]):
        assert figure.outcome(rows, 1.0)["verdict"] == "not measured yet"


def test_every_figure_has_its_cases() -> None:
    asked = {operator: [case.name for case in cases(False) if case.asked] for operator, cases in CASES.items()}
    asked |= {"epilogues": [case.name for case in contact_products.cases(False)]}
    asked |= {"speed_124m": contact_training.cases()}
    for figure in FIGURES:
        assert any(figure.case in name for name in asked[figure.operator]), figure.name
    for names in (asked["epilogues"], [case.name for case in CASES["gemm"](False)]):
        assert len(names) == len(set(names)) > 10
    named = {"epilogues": contact_products.CANDIDATES, "speed_124m": contact_training.CANDIDATES}
    for figure in FIGURES:
        assert set(figure.peers) <= set(named.get(figure.operator, figure.peers)), figure.name
