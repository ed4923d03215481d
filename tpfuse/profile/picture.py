"""Draw the summary of a profile: where the time of each rank goes, and how long ranks wait for each other."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tpfuse.profile.summary import KINDS, mean_operators

# Four of the colours of Okabe and Ito, which colour-blind readers can distinguish, and a grey.
COLOURS = {"computing": "#0072B2", "communication": "#009E73", "waiting": "#E69F00", "idle": "#D0D0D0"}
_MOST_RANKS = 16  # that get bars of their own, and numbers in the matrix
_MOST_OPERATORS = 10

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # on a new machine it reports that it builds its font cache


def draw_profile(document: Mapping[str, Any], path: Path) -> None:
    """Draw what `summarise` returns as a PNG. Raise OSError if the file cannot be written."""
    with rc_context({"text.parse_math": False}):  # a $ in a name is no formula
        profile_figure(document).savefig(path, format="png")


def profile_figure(document: Mapping[str, Any]) -> Figure:
    """Return bars of the ranks, bars of the operators that take longest, and for several ranks the matrix of waits."""
    ranks, title = _shown(document["ranks"])
    operators = dict(list(mean_operators(document).items())[:_MOST_OPERATORS])
    several = len(document["ranks"]) > 1
    heights = [len(ranks) + 2, len(operators) + 2, *([min(18, len(ranks) + 5)] if several else [])]
    figure = Figure(figsize=(12, 1.5 + 0.36 * sum(heights)), dpi=110, layout="constrained")
    figure.suptitle(document["sentences"][0], fontweight="bold")
    upper, lower, *matrix = figure.subplots(len(heights), 1, height_ratios=heights)
    _draw_bars(upper, {f"rank {row['rank']} {row['host']}".rstrip(): row for row in ranks}, title)
    _draw_bars(lower, operators, "The operators and parts of a step that take longest, mean over the ranks")
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in KINDS]
    figure.legend(handles=handles, ncols=len(KINDS), frameon=False, loc="outside lower center")
    if several:
        _draw_waits(matrix[0], document["wait_matrix"])
    return figure


def _shown(ranks: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Return the ranks to draw, and a title that says which those are."""
    if len(ranks) <= _MOST_RANKS:
        return ranks, "Where the time of a step goes"
    # Ranks take steps together: a slow rank is one that works long and waits little.
    order = sorted(ranks, key=lambda row: float(row["waiting_s"] - row["wall_s"]))
    which = "the four slowest (they wait least), the median, and the four fastest"
    title = f"Where the time of a step goes on 9 of the {len(ranks)} ranks: {which}"
    return [*order[:4], order[len(order) // 2], *order[-4:]], title


def _draw_bars(axes: Axes, rows: Mapping[str, Mapping[str, Any]], title: str) -> None:
    """Draw a stacked bar for each row, from top to bottom, with its sum behind it."""
    lefts = [0.0] * len(rows)
    for kind in KINDS:
        widths = [1e3 * row[f"{kind}_s"] for row in rows.values()]
        axes.barh(range(len(rows)), widths, left=lefts, color=COLOURS[kind], edgecolor="white")
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for row, left in enumerate(lefts):
        axes.text(left, row, f" {left:,.3g}", va="center", fontweight="bold")
    axes.set_title(title, loc="left")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.margins(x=0.09)
    axes.set_xlabel("ms per step")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_waits(axes: Axes, matrix: Sequence[Sequence[float]]) -> None:
    ms = [[1e3 * seconds for seconds in row] for row in matrix]
    image = axes.imshow(ms, cmap="Oranges", vmin=0, vmax=max(map(max, ms)) or 1)
    axes.figure.colorbar(image, ax=axes, label="ms per step")
    axes.set(title="How long each rank waits for each other", xlabel="for rank", ylabel="rank waits")
    if len(ms) <= _MOST_RANKS:
        axes.set_xticks(range(len(ms)))
        axes.set_yticks(range(len(ms)))
        for rank, row in enumerate(ms):
            for peer, value in enumerate(row):
                axes.text(peer, rank, f"{value:.2g}", ha="center", va="center")
