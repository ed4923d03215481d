"""The summary counts every nanosecond once, and its sentences say what matters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tpfuse.comm.trace import LaunchMark, Span
from tpfuse.profile.summary import Place, summarise, table, times_of
from tpfuse.profile.trace_files import RankTrace, _nested

MS = 1_000_000


def _span(kind: Any, name: str, begin: float, end: float, level: int, **more: Any) -> Span:
    """Return a span between two times in ms."""
    more["idle"] = round(more.get("idle", 0) * MS)
    return Span(kind, name, begin=round(begin * MS), end=round(end * MS), level=level, **more)


def _trace(rank: int, world: int, spans: Sequence[Span], signals: dict[str, float] | None = None) -> RankTrace:
    """Return a trace. spans: in the order of their ends."""
    flows = {flow: round(ms * MS) for flow, ms in (signals or {}).items()}
    return RankTrace(rank, [*range(world)], "boot pid net node", "cpu", {"tp": world}, 0, _nested(list(spans)), flows)


OP = "linear_reduce_scatter torch.float32 [4, 8]"
SCATTER = Place("h.3", "linear_reduce_scatter", "direct")


def _pair() -> list[RankTrace]:
    """Two ranks in one operator of 10 ms. Rank 1 signals after 8 ms, and rank 0 waits from 5 ms to then."""
    waiting = [
        _span("communication", "stage", 1, 2, 2),
        _span("wait", OP, 5, 8, 2, peer=1, flow="a"),
        _span("operator", OP, 0, 10, 1, implementation="direct", layer="h.3", idle=0.5),
        _span("step", "step 7", 0, 12, 0, idle=1),
    ]
    late = [
        _span("wait", OP, 8, 8, 2, peer=0, flow="b"),
        _span("operator", OP, 0, 10, 1, implementation="direct", layer="h.3"),
        _span("phase", "update", 10, 12, 1),
        _span("step", "step 7", 0, 12, 0),
    ]
    return [_trace(0, 2, waiting, {"b": 4}), _trace(1, 2, late, {"a": 8})]


def test_each_ms_is_counted_once() -> None:
    first, second = times_of(_pair())
    times = first[SCATTER]
    assert (times.calls, times.computing, times.communication, times.idle) == (1, 5.5 * MS, 1 * MS, 0.5 * MS)
    assert dict(times.waits) == {1: 3 * MS} and times.total == 10 * MS and times.own == 7 * MS
    outside = first[Place("", "rest of the step", "")]
    assert (outside.computing, outside.idle, outside.calls) == (1 * MS, 1 * MS, 0)
    assert second[Place("", "update", "")].computing == 2 * MS
    assert Place("", "rest of the step", "") not in second or second[Place("", "rest of the step", "")].total == 0


def test_the_hidden_share_is_what_ranks_did_not_wait_for() -> None:
    """Rank 0 awaits data for 8 ms, of which it computes 5, and moves data for 1; rank 1 awaits 4 ms and waits never."""
    first, second = times_of(_pair())
    assert (first[SCATTER].in_flight, first[SCATTER].exposed) == (9 * MS, 4 * MS)
    assert (second[SCATTER].in_flight, second[SCATTER].exposed) == (4 * MS, 0)
    assert summarise(_pair())["hidden_share"] == pytest.approx(1 - 4 / 13)


@pytest.mark.parametrize(("device", "peer"), [("cpu", 1), ("cuda", None)])
def test_no_share_is_hidden_where_the_end_of_communication_is_not_known(device: str, peer: int | None) -> None:
    """Events of a GPU do not show it, and torch.distributed does not say when a message has come."""
    spans = [_span("communication", "receive", 2, 5, 1, peer=peer), _span("step", "step 1", 0, 10, 0)]
    document = summarise([replace(_trace(rank, 2, spans), device=device) for rank in range(2)])
    assert document["hidden_share"] is None
    assert document["sentences"][1] == "It is not known how much of the communication is hidden behind computation."


def test_sentences_name_operator_layer_and_ranks() -> None:
    document = summarise(_pair())
    assert document["wait_matrix"] == [[0.0, pytest.approx(3e-3)], [0.0, 0.0]]
    assert document["steps"] == ["step 7"] and document["layout"] == {"tp": 2}
    assert document["sentences"] == [
        "A step takes 12.0 ms on rank 0: 54% computing, 8% communication, 25% waiting, 12% idle.",
        "69% of the communication is hidden behind computation.",
        "Rank 1 works 3.0 ms a step longer than the others, which wait for it: 3.0 ms of that in"
        " linear_reduce_scatter of h.3.",
        "linear_reduce_scatter of h.3 waits 30% of its time on rank 0 for rank 1: 3.0 ms a step.",
    ]
    shown = table(document)
    assert "rank 1" in shown and "linear_reduce_scatter (direct)" in shown and "3.0 ms" in shown


@pytest.mark.parametrize(
    ("device", "longest", "wait", "copy"), [("cpu", 3, 2, 1), ("cuda", 3, 1, 0.5), ("cpu", 30, 10, 0)]
)
def test_waits_inside_kernels_are_waits(device: str, longest: float, wait: float, copy: float) -> None:
    """Interpreted programs run one after another, so their times are summed; for those of a GPU the mean counts.

    No wait is longer than its operator: the clocks of the host and of a GPU may differ.
    """
    operator = _span("operator", OP, 0, 10, 1, implementation="fused", layer="h.3", idle=3)
    events = [(0, "waiting", 1, 1, longest), (0, "computing", 1, 3, 5), (1, "copying", 1, 5, 6)]
    launch = LaunchMark("kernel", 0, 2, 51, [(*event[:3], event[3] * MS, event[4] * MS) for event in events])
    roots = _nested([operator, _span("step", "step 1", 0, 10, 0)])
    trace = RankTrace(0, [0, 1], "host", device, {}, 0, roots, {}, {id(operator): [launch]}, 1)
    (places,) = times_of([trace])
    times = places[Place("h.3", "linear_reduce_scatter", "fused")]
    assert dict(times.waits) == {1: wait * MS} and times.communication == copy * MS
    assert times.idle == pytest.approx(3 * MS * (10 - wait - copy) / 10) and times.total == 10 * MS
    assert times.exposed == times.in_flight == (wait + copy) * MS
    assert "no room for 1 launches and 51 further events of fused kernels" in summarise([trace])["sentences"][-1]


def test_times_are_means_over_steps() -> None:
    steps = [_span("step", "step 1", 0, 4, 0), _span("step", "step 2", 6, 14, 0)]
    document = summarise([_trace(0, 1, steps)])
    row = document["ranks"][0]
    assert row["wall_s"] == row["computing_s"] == pytest.approx(6e-3)  # what is between the steps does not count
    assert document["hidden_share"] is None
    assert document["sentences"] == ["A step takes 6.0 ms: 100% computing, 0% communication, 0% waiting, 0% idle."]


def test_a_collective_waits_for_the_rank_that_begins_last() -> None:
    """Rank 0 begins at 1 ms and blocks from 3 to 9; rank 1 begins at 6: 3 ms are waiting, and 3 communication."""
    flow = "[0, 1]: collective 5"

    def rank(number: int, begins: float, blocks: float) -> RankTrace:
        spans = [_span("communication", "all_gather", blocks, 9, 1, flow=flow), _span("step", "step 1", 0, 10, 0)]
        return _trace(number, 2, spans, {f"begin {flow}": begins, f"end {flow}": 9})

    first, second = times_of([rank(0, 1, 3), rank(1, 6, 6)])
    place = Place("", "rest of the step", "")
    assert (first[place].communication, dict(first[place].waits)) == (3 * MS, {1: 3 * MS})
    assert (second[place].communication, dict(second[place].waits)) == (3 * MS, {})
    assert (first[place].in_flight, first[place].exposed) == (8 * MS, 6 * MS)
    assert first[place].computing == 4 * MS
    # Clocks of two hosts may differ by a little: no rank waits longer than its collective takes.
    (first, _) = times_of([rank(0, 1, 3), rank(1, 11, 6)])
    assert (first[place].communication, dict(first[place].waits)) == (0, {1: 6 * MS})


def test_a_span_that_begins_before_its_elder_sibling_ends_is_nested_by_level() -> None:
    """Clocks have a resolution: a child may begin in the same ns as its parent, and siblings may touch."""
    spans = [
        _span("layer", "a", 0, 1, 1),
        _span("layer", "b", 1, 2, 1),
        _span("step", "step 1", 0, 2, 0),
        _span("layer", "c", 2, 3, 1),
        _span("step", "step 2", 2, 3, 0),
    ]
    roots = _nested(spans)
    assert [[child.span.name for child in root.children] for root in roots] == [["a", "b"], ["c"]]
    assert [root.exclusive for root in roots] == [0, 0]
    before = [_span("layer", "a", 0, 1, 1), _span("step", "step 1", 2, 3, 0)]  # it began before the recording
    assert [(root.span.name, root.children) for root in _nested(before)] == [("a", []), ("step 1", [])]


def test_few_differences_are_not_worth_a_sentence() -> None:
    def rank(number: int, wait: float) -> RankTrace:
        spans = [
            _span("wait", OP, 5, 5 + wait, 2, peer=1 - number),
            _span("operator", OP, 0, 10, 1, implementation="direct", layer="h.3"),
            _span("step", "step 1", 0, 12, 0),
        ]
        return _trace(number, 2, spans)

    assert len(summarise([rank(0, 0.2), rank(1, 0)])["sentences"]) == 2
    assert len(summarise([rank(0, 0.3), rank(1, 0)])["sentences"]) == 3
    assert len(summarise([rank(0, 0.5), rank(1, 0)])["sentences"]) == 4
