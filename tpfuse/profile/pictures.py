"""Draws the summary of a profile: where the time of each rank goes, and how long ranks wait for each other."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tpfuse.profile.appearance import COLOURS, INK, three_digits
from tpfuse.profile.summary import KINDS, mean_operators

_MOST_RANKS = 16  # with bars of their own, and with numbers in the matrix
_MOST_PEERS = 8  # for each of which waiting is a segment of its own
_MOST_OPERATORS = 10
_BAR = 0.72  # of the height of a row
_ROW, _MARGIN = 0.36, 1.0  # inches: of a row, and of what is above and below a panel

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # on a new machine it reports that it builds its font cache


def draw_breakdown(document: Mapping[str, Any], path: Path) -> None:
    """Draws a bar for each rank, and beneath one for each of the operators that take longest, as a PNG.

    document: what `summarise` returns. Raises OSError if the file cannot be written.
    """
    _draw(breakdown, document, path)


def draw_waits(document: Mapping[str, Any], path: Path) -> None:
    """Draws how long each rank waits for each other, as a PNG. Raises OSError if the file cannot be written."""
    _draw(waits, document, path)


def _draw(figure: Callable[[Mapping[str, Any]], Figure], document: Mapping[str, Any], path: Path) -> None:
    with rc_context({"text.parse_math": False}):  # a $ in a name is no formula
        figure(document).savefig(path, format="png", bbox_inches="tight", pad_inches=0.2)


def breakdown(document: Mapping[str, Any]) -> Figure:
    """Returns the figure of `draw_breakdown`: the axes of the ranks, and those of the operators."""
    ranks, title = _shown(document["ranks"])
    operators = list(mean_operators(document).items())[:_MOST_OPERATORS]
    rows = (len(ranks) + 2, len(operators) + 2)
    figure = Figure(figsize=(12, 1 + 2 * _MARGIN + _ROW * sum(rows)), dpi=110)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.12)
    upper, lower = figure.subplots(2, 1, height_ratios=rows)
    figure.suptitle(document["sentences"][0], fontsize=14, fontweight="bold")
    several_hosts = len({row["host"] for row in document["ranks"]}) > 1
    by_peer = len(document["ranks"]) <= _MOST_PEERS
    bars = [
        (f"rank {row['rank']}" + (f" on {row['host']}" if several_hosts else ""), _segments(row, by_peer))
        for row in ranks
    ]
    _draw_bars(upper, bars, title)
    mean = " (mean over the ranks)" if len(document["ranks"]) > 1 else ""
    longest = f"The {len(operators)} operators and parts of a step that take longest{mean}"
    _draw_bars(lower, [(name, _segments(row, False)) for name, row in operators], longest)
    lower.set_xlabel("ms per step")
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=kind) for kind in KINDS], ncols=len(KINDS), frameon=False,
        loc="outside lower center",
    )  # fmt: skip
    return figure


def _shown(ranks: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Returns the ranks to draw, and a title that says which those are."""
    if len(ranks) <= _MOST_RANKS:
        return ranks, "Where the time of a step goes" + (" on each rank" if len(ranks) > 1 else "")
    # Ranks take steps together: a slow rank is one that works long and waits little.
    order = sorted(ranks, key=lambda row: float(row["waiting_s"] - row["wall_s"]))
    chosen = [*order[:4], order[len(order) // 2], *order[-4:]]
    title = (
        f"Where the time of a step goes on 9 of the {len(ranks)} ranks: the four slowest (they wait least), the median,"
        " and the four fastest"
    )
    return chosen, title


def _segments(row: Mapping[str, Any], by_peer: bool) -> list[tuple[str, float, str]]:
    """Returns (kind, ms, peer) of each segment of a bar; peer is empty except in waiting that is split by peer."""
    segments = []
    for kind in KINDS:
        if kind == "waiting" and by_peer:
            segments += [(kind, seconds * 1e3, peer) for peer, seconds in row["waits_s"].items()]
        else:
            segments.append((kind, row[f"{kind}_s"] * 1e3, ""))
    return segments


def _draw_bars(axes: Axes, bars: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], title: str) -> None:
    """Draws a stacked bar per row, from top to bottom, with values where there is room, and the sums behind them."""
    longest = max((sum(ms for _, ms, _ in segments) for _, segments in bars), default=0) or 1
    axes.set_title(title, loc="left", fontsize=12, pad=10)
    axes.set_xlim(0, 1.09 * longest)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    width = longest / 110  # about that of a character
    for row, (_, segments) in enumerate(bars):
        left = 0.0
        for kind, ms, peer in segments:
            axes.barh(row, ms, _BAR, left, color=COLOURS[kind], edgecolor="white", linewidth=0.6)
            value = three_digits(ms)
            labels = (f"{value} for rank {peer}", f"{value} for {peer}") if peer else ()
            label = next((label for label in (*labels, value) if len(label) * width < ms), None)
            if label is not None:
                axes.text(left + ms / 2, row, label, ha="center", va="center", fontsize=9, color=INK[kind])
            left += ms
        axes.text(left + width, row, three_digits(left), va="center", fontsize=10, fontweight="bold")


def waits(document: Mapping[str, Any]) -> Figure:
    """Returns the figure of `draw_waits`."""
    matrix = [[seconds * 1e3 for seconds in row] for row in document["wait_matrix"]]
    count = len(matrix)
    size = min(11.0, max(5.0, 0.62 * count + 2))
    figure = Figure(figsize=(size + 1.5, size), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = LinearSegmentedColormap.from_list("waiting", ["white", COLOURS["waiting"], "#7A3B00"])
    most = max(max(row) for row in matrix)
    image = axes.imshow(matrix, cmap=colours, vmin=0, vmax=most or 1)
    figure.colorbar(image, ax=axes, label="ms per step", shrink=0.8)
    axes.set_title(_title(document, matrix), fontsize=12, fontweight="bold")
    axes.set_xlabel("for rank")
    axes.set_ylabel("rank waits")
    axes.spines[:].set_color("#CCCCCC")
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.xaxis.set_label_position("top")
    if count <= _MOST_RANKS:
        axes.set_xticks(range(count))
        axes.set_yticks(range(count))
        for rank, row in enumerate(matrix):
            for peer, ms in enumerate(row):
                label = "–" if rank == peer and not ms else three_digits(ms) if ms else "0"
                ink = "white" if ms > 0.7 * most > 0 else "black" if ms else "#999999"
                axes.text(peer, rank, label, ha="center", va="center", color=ink)
    return figure


def _title(document: Mapping[str, Any], matrix: Sequence[Sequence[float]]) -> str:
    step = median(row["wall_s"] for row in document["ranks"]) * 1e3
    cells = [(ms, rank, peer) for rank, row in enumerate(matrix) for peer, ms in enumerate(row)]
    most, rank, peer = max(cells, key=lambda cell: cell[0])
    longest = f"rank {rank} waits longest for rank {peer}, {three_digits(most)} ms" if most else "no rank waits"
    return f"How long each rank waits for each other in a step\nof {three_digits(step)} ms: {longest}"
