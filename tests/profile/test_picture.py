"""The picture of a profile shows the numbers of its summary: not its pixels are tested, but what is drawn and where."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from tpfuse.comm.trace import Span
from tpfuse.profile.picture import COLOURS, draw_profile, profile_figure
from tpfuse.profile.summary import KINDS, summarise
from tpfuse.profile.trace_files import RankTrace, SpanNode


def _summary(world: int) -> dict[str, Any]:
    """Return the summary of steps of 10 ms in which each rank waits for the next, the last ones longest."""
    traces = []
    for rank in range(world):
        begin, end = 1_500_000, 1_600_000 + 20_000 * rank
        wait = SpanNode(Span("wait", "linear", "", (rank + 1) % world, f"of {rank}", "", begin, end))
        operator = SpanNode(Span("operator", "linear", "direct", None, "", "h.3", 1_000_000, 9_000_000), [wait])
        step = SpanNode(Span("step", "step 4", "", None, "", "", 0, 10_000_000), [operator])
        traces.append(RankTrace(rank, [*range(world)], "id host", "cpu", {}, 0, [step], {}))
    return summarise(traces)


def _bars(axes: Axes) -> list[tuple[str, int, float, float]]:
    """Return (colour, row, left, width) of each bar."""
    found = []
    for patch in axes.patches:
        assert isinstance(patch, Rectangle)
        row = round(patch.get_y() + patch.get_height() / 2)
        found.append((to_hex(patch.get_facecolor()).upper(), row, patch.get_x(), patch.get_width()))
    return found


def test_bars_have_the_widths_of_the_document() -> None:
    document = _summary(2)
    upper, *_ = profile_figure(document).axes
    assert [label.get_text() for label in upper.get_yticklabels()] == ["rank 0 host", "rank 1 host"]
    expected = []
    for row, rank in enumerate(document["ranks"]):
        left = 0.0
        for kind in KINDS:
            expected.append((COLOURS[kind], row, pytest.approx(left), pytest.approx(rank[f"{kind}_s"] * 1e3)))
            left += rank[f"{kind}_s"] * 1e3
    assert sorted(_bars(upper), key=lambda bar: bar[1]) == expected


@pytest.mark.parametrize("world", [1, 4])
def test_the_matrix_has_the_values_of_the_document(world: int) -> None:
    document = _summary(world)
    _, _, *rest = profile_figure(document).axes
    if world == 1:
        assert not rest
        return
    image = rest[0].images[0].get_array()
    assert image is not None
    assert image.tolist() == [[pytest.approx(s * 1e3) for s in row] for row in document["wait_matrix"]]
    cells = {(round(y), round(x)): text.get_text() for text in rest[0].texts for x, y in [text.get_position()]}
    assert (len(cells), cells[2, 3], cells[3, 0], cells[0, 3]) == (16, "0.14", "0.16", "0")


def test_of_64_ranks_the_slowest_and_the_fastest_are_drawn_whatever_their_names(tmp_path: Path) -> None:
    document = _summary(64)
    upper = profile_figure(document).axes[0]
    labels = [label.get_text() for label in upper.get_yticklabels()]
    # The slowest are those that wait least.
    assert labels == [f"rank {rank} host" for rank in (0, 1, 2, 3, 32, 60, 61, 62, 63)]
    assert "9 of the 64 ranks" in upper.get_title(loc="left")
    document["sentences"][0] = r"As a formula $\frac$ would be an error."
    document["ranks"][0]["operators"][0]["operator"] = r"$\frac$"
    draw_profile(document, tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
