"""The pictures of a profile show the numbers of the traces: not their pixels are tested, but what is drawn where."""

import dataclasses
import itertools
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from tpfuse.comm.trace import Kind, Launch, Span
from tpfuse.profile.appearance import COLOURS, duration, three_digits
from tpfuse.profile.pictures import breakdown, draw_breakdown, draw_waits, waits
from tpfuse.profile.summary import KINDS, summarise
from tpfuse.profile.timeline import timeline
from tpfuse.profile.trace_files import Node, RankTrace
from tpfuse.train.errors import UserError

US = 1000  # ns
LEFT, WIDE = 110, 986  # pixels: the timeline's left edge and width, of its first to its last ns
NAME, LAYER = "linear_reduce_scatter torch.float32 [8, 4]", "h.3.mlp.c_proj"


def spanned(
    kind: Kind, name: str, begin: float, end: float, *children: Node, peer: int | None = None, flow: str = ""
) -> Node:
    layer = LAYER if kind == "operator" else ""
    implementation = "direct" if kind == "operator" else ""
    return Node(Span(kind, name, implementation, peer, flow, layer, round(begin * US), round(end * US)), list(children))


def wait(begin: float, end: float, peer: int, flow: str = "") -> Node:
    return spanned("wait", "linear_reduce_scatter", begin, end, peer=peer, flow=flow)


def traced(
    rank: int, world: int, operators: Sequence[Node], signals: Mapping[str, float] | None = None, step: str = "step 4"
) -> RankTrace:
    steps = [spanned("step", step, 0, 10_000, *operators)]
    at = {flow: round(us * US) for flow, us in (signals or {}).items()}
    return RankTrace(rank, world, "id host", "cpu", {}, 0, steps, at)


def two_ranks() -> list[RankTrace]:
    """Returns traces in which rank 0 waits 1.2 ms for rank 1, which begins 1.1 ms later."""
    first = spanned(
        "operator", NAME, 1000, 2600, wait(1200, 2400, 1, "of 1"), spanned("communication", "sum", 2450, 2600)
    )
    second = spanned(
        "operator", NAME, 2100, 3000, wait(2500, 2504, 0, "of 0"), spanned("communication", "sum", 2600, 2900)
    )
    return [traced(0, 2, [first], {"of 0": 1190}), traced(1, 2, [second], {"of 1": 2390})]


def many_ranks(world: int) -> list[RankTrace]:
    """Returns traces in which each rank waits for the next, the last ones longest."""
    traces = []
    for rank in range(world):
        peer = (rank + 1) % world
        waited = 100 + 20 * rank
        operator = spanned("operator", NAME, 1000, 4000, wait(1500, 1500 + waited, peer, f"of {peer}"))
        signal = 1495 + 100 + 20 * ((rank - 1) % world)
        traces.append(traced(rank, world, [operator], {f"of {rank}": signal}))
    return traces


def bars(axes: Axes) -> dict[int, list[tuple[str, float, float]]]:
    """Returns (colour, left, width) of each segment of each row."""
    rows: dict[int, list[tuple[str, float, float]]] = {}
    for patch in axes.patches:
        assert isinstance(patch, Rectangle)
        row = round(patch.get_y() + patch.get_height() / 2)
        rows.setdefault(row, []).append((to_hex(patch.get_facecolor()).upper(), patch.get_x(), patch.get_width()))
    return rows


def test_bars_have_the_widths_of_the_document() -> None:
    document = summarise(two_ranks())
    upper, lower = breakdown(document).axes
    assert [label.get_text() for label in upper.get_yticklabels()] == ["rank 0", "rank 1"]
    for row, rank in enumerate(document["ranks"]):
        found = bars(upper)[row]
        expected = [(COLOURS[kind], rank[f"{kind}_s"] * 1e3) for kind in KINDS]
        assert [(colour, pytest.approx(width)) for colour, _, width in found] == expected
        assert [left for _, left, _ in found] == pytest.approx(
            list(itertools.accumulate((ms for _, ms in expected[:-1]), initial=0))
        )
    assert [label.get_text() for label in lower.get_yticklabels()] == [
        "rest of the step, other", "linear_reduce_scatter (direct)"
    ]  # fmt: skip
    means = [sum(rank["operators"][place]["computing_s"] for rank in document["ranks"]) / 2 * 1e3 for place in (0, 1)]
    assert [bars(lower)[row][0][2] for row in (0, 1)] == pytest.approx(means)
    texts = [text.get_text() for text in upper.texts]
    assert "1.20 for 1" in texts and "10.0" in texts  # "1.20 for rank 1" has no room


def test_waiting_is_split_by_peer_among_few_ranks() -> None:
    operator = spanned("operator", NAME, 1000, 9000, wait(1100, 3100, 1), wait(3100, 6100, 2))
    idle = [traced(rank, 3, [spanned("operator", NAME, 1000, 9000)]) for rank in (1, 2)]
    upper, _ = breakdown(summarise([traced(0, 3, [operator]), *idle])).axes
    waiting = [width for colour, _, width in bars(upper)[0] if colour == COLOURS["waiting"]]
    assert waiting == pytest.approx([2, 3])
    assert {"2.00 for rank 1", "3.00 for rank 2"} <= {text.get_text() for text in upper.texts}


def test_of_64_ranks_the_slowest_and_the_fastest_are_shown(tmp_path: Path) -> None:
    document = summarise(many_ranks(64))
    upper, _ = breakdown(document).axes
    labels = [label.get_text() for label in upper.get_yticklabels()]
    # The slowest are those that wait least.
    assert labels == [f"rank {rank}" for rank in (0, 1, 2, 3, 32, 60, 61, 62, 63)]
    assert "9 of the 64 ranks" in upper.get_title(loc="left")
    draw_breakdown(document, tmp_path / "breakdown.png")
    draw_waits(document, tmp_path / "waits.png")
    for name in ("breakdown.png", "waits.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("world", [1, 4, 64])
def test_the_matrix_has_the_values_of_the_document(world: int) -> None:
    document = summarise(many_ranks(world))
    axes = waits(document).axes[0]
    image = axes.images[0].get_array()
    assert image is not None
    assert image.tolist() == [[pytest.approx(s * 1e3) for s in row] for row in document["wait_matrix"]]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("rank waits", "for rank")
    assert "in a step\nof 10.0 ms" in axes.get_title()
    cells = {(round(y), round(x)): text.get_text() for text in axes.texts for x, y in [text.get_position()]}
    if world == 4:
        assert cells[2, 3] == "0.14" and cells[3, 0] == "0.16" and cells[1, 1] == "–" and cells[0, 3] == "0"
        assert "rank 3 waits longest for rank 0, 0.16 ms" in axes.get_title()
    if world == 64:
        assert not cells


def drawn(traces: Sequence[RankTrace], path: Path, operator: str | None = None) -> ET.Element:
    assert timeline(traces, path, operator)
    return ET.parse(path).getroot()


def elements(root: ET.Element, name: str) -> list[ET.Element]:
    return list(root.iter("{http://www.w3.org/2000/svg}" + name))


def words(root: ET.Element) -> list[str]:
    return [text.text or "" for text in elements(root, "text")]


def blocks(root: ET.Element) -> list[ET.Element]:
    """Returns the rectangles of spans, which have tooltips."""
    return [rectangle for rectangle in elements(root, "rect") if len(rectangle)]


def arrows(root: ET.Element) -> list[tuple[float, float]]:
    """Returns the x of the signal and of the tip of each arrow."""
    groups = [group for group in elements(root, "g") if group.get("class") == "signal"]
    return [
        (float(group[0].get("x1", "")), float(group[1].get("d", "").removeprefix("M").split()[0])) for group in groups
    ]


def number(element: ET.Element, name: str) -> float:
    return float(element.get(name, "nan"))


def check_texts_do_not_overlap(root: ET.Element) -> None:
    """Compares estimated boxes of all texts, and that they are large enough and within the picture."""
    boxes = []
    for text in elements(root, "text"):
        size = number(text, "font-size")
        assert size >= 10
        width = (0.62 if text.get("font-weight") else 0.55) * size * len(text.text or "")
        left = number(text, "x") - {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
        assert left >= 0 and left + width <= number(root, "width"), text.text
        assert number(text, "y") < number(root, "height")
        boxes.append((left, left + width, number(text, "y") - 0.8 * size, number(text, "y") + 0.2 * size, text.text))
    for a, b in itertools.combinations(boxes, 2):
        assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2], (a, b)


def test_the_timeline_has_a_block_for_each_span(tmp_path: Path) -> None:
    root = drawn(two_ranks(), tmp_path / "timeline.svg")
    scale = WIDE / 2000  # pixels in a µs: the operator takes 2 ms, from 1000 µs on
    expected = [
        ("computing", 1000, 2600), ("waiting", 1200, 2400), ("communication", 2450, 2600),
        ("computing", 2100, 3000), ("waiting", 2500, 2504), ("communication", 2600, 2900),
    ]  # fmt: skip
    found = blocks(root)
    assert [block.get("class") for block in found] == [kind for kind, _, _ in expected]
    for block, (kind, begin, end) in zip(found, expected, strict=True):
        assert block.get("fill") == COLOURS[kind]
        assert number(block, "x") == pytest.approx(LEFT + (begin - 1000) * scale, abs=0.5)
        assert number(block, "width") == pytest.approx((end - begin) * scale, abs=0.5)
    tops = [number(block, "y") for block in found]
    assert len(set(tops[:3])) == len(set(tops[3:])) == 1 and tops[0] < tops[3]
    assert found[1][0].text == "rank 0, linear_reduce_scatter waits 1.20 ms for rank 1"
    title, statement = words(root)[:2]
    assert title == "linear_reduce_scatter of h.3.mlp.c_proj, step 4:"
    assert statement == "rank 0 waits 1.20 ms for rank 1, which begins 1.10 ms later"
    assert {"rank 0", "rank 1", "waits 1.20 ms for rank 1", "has not begun"} <= set(words(root))
    check_texts_do_not_overlap(root)


def test_an_arrow_leads_from_the_signal_to_the_wait_that_it_ends(tmp_path: Path) -> None:
    root = drawn(two_ranks(), tmp_path / "timeline.svg")
    # Rank 1's own wait found the signal there: nothing ended it.
    (arrow,) = arrows(root)
    assert arrow == pytest.approx((LEFT + 1390 * WIDE / 2000, LEFT + 1400 * WIDE / 2000), abs=0.5)
    four = drawn(many_ranks(4), tmp_path / "four.svg")
    assert len(arrows(four)) == 4
    check_texts_do_not_overlap(four)


def test_the_call_in_which_ranks_wait_longest_is_drawn(tmp_path: Path) -> None:
    def call(begin: float, waited: float) -> Node:
        return spanned("operator", NAME, begin, begin + 1000, wait(begin, begin + waited, 1))

    traces = [
        traced(0, 2, [call(0, 100), call(2000, 700), call(5000, 300)]),
        traced(1, 2, [spanned("operator", NAME, at, at + 900) for at in (50, 2050, 5050)]),
    ]
    traces[1].roots[0].children = [
        spanned("operator", NAME, at, at + 900, spanned("communication", "sum", at, at + 9)) for at in (50, 2050, 5050)
    ]
    root = drawn(traces, tmp_path / "timeline.svg")
    assert words(root)[0] == "linear_reduce_scatter of h.3.mlp.c_proj, step 4, call 2 of 3:"
    assert number(blocks(root)[0], "width") == pytest.approx(1000 * WIDE / 1000, abs=0.5)
    assert [block.get("class") for block in blocks(root)] == ["computing", "waiting", "computing", "communication"]


def test_a_rank_that_signals_before_it_begins_is_not_called_late(tmp_path: Path) -> None:
    first = spanned("operator", NAME, 1000, 2000, wait(1000, 1800, 1, "of 1"))
    second = spanned("operator", NAME, 1900, 2100, wait(1900, 1905, 0))
    root = drawn([traced(0, 2, [first]), traced(1, 2, [second], {"of 1": 1795})], tmp_path / "timeline.svg")
    assert words(root)[1] == "rank 0 waits 800 µs for rank 1"
    assert len(arrows(root)) == 1


def test_only_ranks_that_wait_for_each_other_share_a_timeline(tmp_path: Path) -> None:
    def rank(number: int, waited: float) -> RankTrace:
        peer = number ^ 1
        return traced(number, 4, [spanned("operator", NAME, 0, 1000, wait(0, waited, peer))])

    root = drawn([rank(0, 10), rank(1, 10), rank(2, 10), rank(3, 400)], tmp_path / "timeline.svg")
    assert "rank 2" in words(root) and "rank 3" in words(root)
    assert "rank 0" not in words(root)


def test_a_collective_waits_for_the_rank_that_begins_last(tmp_path: Path) -> None:
    def rank(number: int, begun: float) -> RankTrace:
        inner = spanned("communication", "all_reduce", begun, 1000, flow="c 1")
        return traced(number, 2, [spanned("operator", NAME, begun - 50, 1100, inner)], {"begin c 1": begun})

    root = drawn([rank(0, 100), rank(1, 900)], tmp_path / "timeline.svg")
    waiting = [block for block in blocks(root) if block.get("class") == "waiting"]
    scale = WIDE / 1050
    assert [number(block, "x") for block in waiting] == pytest.approx([LEFT + 50 * scale], abs=0.5)
    assert [number(block, "width") for block in waiting] == pytest.approx([800 * scale], abs=0.5)
    (arrow,) = arrows(root)
    assert arrow == pytest.approx((LEFT + 850 * scale, LEFT + 850 * scale), abs=0.5)
    assert words(root)[1] == "rank 0 waits 800 µs for rank 1, which begins 800 µs later"


def test_programs_of_a_kernel_have_lanes_of_their_own(tmp_path: Path) -> None:
    operator = spanned("operator", NAME, 0, 1000, spanned("communication", "stage", 0, 10))
    events = [(program, "waiting", 1, 100 * US, (150 + 50 * program) * US) for program in range(6)]
    launches = [Launch("gemm", 0, 6, 0, [*events, (5, "computing", -1, 500 * US, 600 * US)])]
    traces = [
        dataclasses.replace(traced(0, 2, [operator]), launches={id(operator.span): launches}),
        traced(1, 2, [spanned("operator", NAME, 0, 1000, wait(10, 20, 0))]),
    ]
    root = drawn(traces, tmp_path / "timeline.svg")
    # Those that wait longest.
    assert [word for word in words(root) if word.startswith("program")] == [f"program {n}" for n in (2, 3, 4, 5)]
    assert "of each rank the 4 programs that wait longest" in words(root)
    assert words(root)[1] == "rank 0 waits 300 µs for rank 1" and "its programs run" in words(root)
    heights = {block.get("height") for block in blocks(root) if block.get("class") == "waiting"}
    assert heights == {"30.00", "16.00"}
    last = blocks(root)[-3]  # before those of rank 1
    assert last.get("class") == "computing" and last.get("height") == "16.00"
    assert number(last, "x") == pytest.approx(LEFT + WIDE / 2, abs=0.5)
    assert number(last, "width") == pytest.approx(WIDE / 10, abs=0.5)
    check_texts_do_not_overlap(root)


def test_of_64_ranks_those_that_wait_longest_have_lanes(tmp_path: Path) -> None:
    root = drawn(many_ranks(64), tmp_path / "timeline.svg")
    lanes = [word for word in words(root) if word.startswith("rank ") and word.split()[1:] == [word.split()[-1]]]
    assert lanes == [f"rank {rank}" for rank in (0, *range(49, 64))]
    assert "16 of 64 ranks: those that wait longest, and for whom" in words(root)
    check_texts_do_not_overlap(root)


def test_an_operator_can_be_chosen(tmp_path: Path) -> None:
    other = spanned("operator", "all_gather torch.float32 [8]", 5000, 6000, wait(5000, 5010, 1))
    traces = two_ranks()
    traces[0].roots[0].children.append(other)
    assert words(drawn(traces, tmp_path / "a.svg", "all_gather"))[0] == "all_gather of h.3.mlp.c_proj, step 4:"
    with pytest.raises(UserError, match=r"'matmul': there are all_gather of h\.3\.mlp\.c_proj, linear_reduce_scatter"):
        timeline(traces, tmp_path / "b.svg", "matmul")
    assert not (tmp_path / "b.svg").exists()


def test_without_communication_there_is_no_timeline(tmp_path: Path) -> None:
    assert not timeline([traced(0, 1, [spanned("operator", NAME, 0, 9)])], tmp_path / "timeline.svg")
    assert not (tmp_path / "timeline.svg").exists()


def test_names_with_special_characters_are_drawn_as_they_are(tmp_path: Path) -> None:
    traces = two_ranks()
    for trace in traces:
        trace.steps[0].children[0].span.layer = "<a> & $b$ 'c'"
    assert words(drawn(traces, tmp_path / "timeline.svg"))[0] == "linear_reduce_scatter of <a> & $b$ 'c', step 4:"
    document: dict[str, Any] = summarise(traces)
    document["sentences"][0] = r"As a formula $\frac$ would be an error."
    document["ranks"][0]["operators"][0]["operator"] = r"$\frac$"
    draw_breakdown(document, tmp_path / "breakdown.png")


@pytest.mark.parametrize(
    ("ns", "text"), [(0, "0 µs"), (999_000, "999 µs"), (1_200_000, "1.20 ms"), (45_600_000, "45.6 ms"), (3e9, "3.00 s")]
)
def test_times_have_units(ns: float, text: str) -> None:
    assert duration(ns) == text
    assert [three_digits(value) for value in (1234.4, 99.96, 9.996, 0.004)] == ["1,234", "100", "10.0", "0.00"]
