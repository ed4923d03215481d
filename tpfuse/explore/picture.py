"""The steps of a run as text or as a figure: a column for each rank, time downward."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpfuse.explore.sites import Site, text_of

_WIDTH = 100  # characters, of all columns
_MOST = 24  # lines


def picture(steps: Sequence[Site], message: str = "") -> str:
    """Return the last steps of a run, such as an error's `steps`: a step that is repeated at once is shown once.

    message: of the error; the steps that it names are marked with an arrow. The allocation of buffers is left out.
    """
    shown, columns, width = _shown(steps)
    lines = [" | ".join(f"rank {rank}".ljust(width) for rank in columns)]
    if len(shown) > _MOST:
        lines.append(f"… {len(shown) - _MOST} earlier steps")
    for step in shown[-_MOST:]:
        cell = ("→ " if message and str(step) in message else "  ") + _text(step)
        cells = [(cell if rank == step.rank else "")[:width].ljust(width) for rank in columns]
        lines.append(" | ".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def drawn(steps: Sequence[Site], message: str = "") -> Any:
    """Return a figure of matplotlib with the steps that `picture` shows; a red line joins those that are at fault."""
    from matplotlib import pyplot

    shown, columns, width = _shown(steps)
    shown = shown[-_MOST:]
    named = {step: row for row, step in enumerate(shown) if message and str(step) in message}
    figure, axes = pyplot.subplots(figsize=(7.5, 0.34 * len(shown) + 0.7), layout="constrained")
    boxes = []
    for row, step in enumerate(shown):
        edge, face = ("red", "mistyrose") if named.get(step) == row else ("lightgray", "white")
        style = {"boxstyle": "round", "edgecolor": edge, "facecolor": face}
        text, place = _text(step)[:width], (columns.index(step.rank), row)
        boxes.append(axes.text(*place, text, ha="center", va="center", family="monospace", fontsize=8, bbox=style))
    if len(named) > 1:
        first, last = sorted(named.values())[-2:]
        ends = {"patchA": boxes[first].get_bbox_patch(), "patchB": boxes[last].get_bbox_patch()}
        line = {"arrowstyle": "-", "color": "red", "linewidth": 1.5} | ends
        axes.annotate("", boxes[last].get_position(), boxes[first].get_position(), arrowprops=line, zorder=1)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(shown) - 0.5, -0.5), yticks=[], ylabel="← time")
    axes.set_xticks(range(len(columns)), [f"rank {rank}" for rank in columns])
    axes.xaxis.tick_top()
    return figure


def _shown(steps: Sequence[Site]) -> tuple[list[Site], list[int], int]:
    """Return the steps that are shown, the ranks that have a column, and how many characters one is wide."""
    shown = [step for step, _ in itertools.groupby(steps) if not step.operation.startswith('barrier "buffer ')]
    ranks = sorted({step.rank for step in shown})
    return shown, ranks, max(_WIDTH // max(len(ranks), 1) - 3, 12)


def _text(step: Site) -> str:
    program = "" if step.program is None else f" {step.program[0]}"
    file, line = step.lines[0]
    _, _, code = text_of(step.lines[0]).partition(": ")
    return f"{step.operation}{program}  {Path(file).name.removesuffix('.py')}:{line} {code}"
