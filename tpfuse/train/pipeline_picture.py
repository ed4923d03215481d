"""Draw a step of a pipeline as RUN/pipeline.png: what each rank computes when, as predicted and as measured.

A box is a computation, and the number in it that of the micro-batch. Where there is no box, the rank is idle.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tpfuse.parallel.pipeline.order import Kind, Order
from tpfuse.parallel.pipeline.timeline import Interval, Timeline
from tpfuse.train.messages import warn

NAME = "pipeline.png"
# The kinds differ in lightness too, so that readers can distinguish them in grey; a rank's later stages are paler. No
# picture has whole and split backward passes.
COLOURS = {Kind.FORWARD: "#00598F", Kind.BACKWARD: "#D98200", Kind.INPUT: "#D98200", Kind.WEIGHT: "#F0E442"}
_BY_OPERATIONS = "Predicted: passes take time by their operations alone, and messages take none"
_WIDTH, _DPI = 14.0, 110  # inches, and dots per inch
_ROW, _MARGIN = 0.42, 0.95  # inches: a row; the space above and below the rows of a panel
_BAR = 0.84  # of the height of a row
_FONT = 8.0  # points, of the numbers in boxes
_CHARACTER = 7.5 / 1250  # of the width of a panel, roughly: a digit and a part of the space around it

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # on a new machine it reports that it builds its font cache


def draw_pipeline(folder: Path, predicted: Timeline, measured: Timeline | None, step: int, gpus: str = "") -> None:
    """Draw the picture into the folder of a run. If the disk is full, a warning is printed.

    The arguments are those of `picture`.
    """
    try:
        with rc_context({"text.parse_math": False}):
            picture(predicted, measured, step, gpus).savefig(folder / NAME, bbox_inches="tight", pad_inches=0.2)
    except OSError as error:
        warn(f"cannot write {folder / NAME}: {error.strerror}")


def picture(predicted: Timeline, measured: Timeline | None, step: int, gpus: str = "") -> Figure:
    """Return the figure of `draw_pipeline`: a panel of the predicted step and one of the measured step.

    gpus: those for which `predicted` is in seconds, such as "8 x h100"; "" if it counts operations. measured: in
    seconds, of step `step`; None if nothing was measured.
    """
    order = predicted.order
    title = f"Predicted for {gpus}: {predicted.length * 1e3:.4g} ms" if gpus else _BY_OPERATIONS
    panels = [(title, predicted)]
    if measured is not None:
        panels.append((f"Measured in step {step}", measured))
    figure = Figure(figsize=(_WIDTH, 0.9 + len(panels) * (_MARGIN + _ROW * order.ranks)), dpi=_DPI)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.1)
    turns = order.stages // order.ranks
    stages = f" with {turns} stages each" if turns > 1 else ""
    text = f"{order.schedule}: {order.micro_batches} micro-batches on {order.ranks} pipeline ranks{stages}"
    figure.suptitle(text, fontsize=14, fontweight="bold")
    (column,) = figure.subplots(len(panels), 1, squeeze=False).T
    for axes, (title, timeline) in zip(column, panels, strict=True):
        _draw_panel(axes, timeline, title)
    column[0].set_xlabel("% of the step")
    scale = 100 / predicted.length
    column[0].xaxis.set_major_formatter(lambda x, _: f"{x * scale:.0f}")
    column[0].set_xticks([predicted.length * tenth / 10 for tenth in range(11)])
    if measured is not None:
        column[1].set_xlabel("ms")
        column[1].xaxis.set_major_formatter(lambda x, _: f"{x * 1e3:g}")
    _draw_legend(figure, order)
    return figure


def _draw_panel(axes: Axes, timeline: Timeline, title: str) -> None:
    """Draw a row of boxes for each rank, the first rank above, and the idle share behind each row."""
    order, length = timeline.order, timeline.length
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlim(0, length)
    axes.set_ylim(order.ranks - 0.5, -0.5)
    axes.set_yticks(range(order.ranks))
    axes.set_ylabel("pipeline rank")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for rank, row in enumerate(timeline.intervals):
        _draw_row(axes, rank, row, order.stages_of(rank), length)
        share = f"{timeline.idle_share(rank):.1%} idle"
        axes.text(1.008, rank, share, va="center", fontsize=10, transform=axes.get_yaxis_transform())


def _draw_row(axes: Axes, rank: int, row: Sequence[Interval], stages: Sequence[int], length: float) -> None:
    """Draw the boxes of a rank, whose stages are `stages`, with numbers where there is room."""
    boxes = [(interval.start, interval.end - interval.start) for interval in row]
    opacity = {stage: 1 - 0.6 * turn / len(stages) for turn, stage in enumerate(stages)}
    colours = [to_rgba(COLOURS[each.action.kind], opacity[each.action.stage]) for each in row]
    axes.broken_barh(boxes, (rank - _BAR / 2, _BAR), facecolors=colours, edgecolors="#404040", linewidths=0.3)
    for interval, (start, width) in zip(row, boxes, strict=True):
        number = str(interval.action.micro_batch)
        if (len(number) + 0.4) * _CHARACTER * length < width:
            ink = "white" if interval.action.kind is Kind.FORWARD else "black"
            axes.text(start + width / 2, rank, number, ha="center", va="center_baseline", fontsize=_FONT, color=ink)


def _draw_legend(figure: Figure, order: Order) -> None:
    """Draw the colours that occur."""
    found = {action.kind for actions in order.actions for action in actions}
    handles = [Patch(color=COLOURS[kind], label=kind.value) for kind in Kind if kind in found]
    note = "the later a rank's stage, the paler" if order.stages > order.ranks else None
    figure.legend(handles=handles, ncols=len(handles), frameon=False, loc="outside lower center", title=note)
