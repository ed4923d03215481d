"""The picture of a pipeline's step shows each computation where it was, and a run writes one."""

import itertools
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from tpfuse.parallel.pipeline.order import Kind, order
from tpfuse.parallel.pipeline.timeline import Timeline, timeline, usual_seconds
from tpfuse.testing.ranks import pool
from tpfuse.testing.training import new_trainer, options_of
from tpfuse.train.pipeline_picture import NAME, draw_pipeline, picture, shade


def _boxes(axes: Axes) -> list[list[tuple[float, float]]]:
    """Return (start, end) of the boxes of each row of a panel."""
    rows = [collection for collection in axes.collections if isinstance(collection, PolyCollection)]
    return [[(box.get_extents().x0, box.get_extents().x1) for box in row.get_paths()] for row in rows]


def _texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def _luma(colour: tuple[float, float, float]) -> float:
    """Return the lightness of a colour in grey (ITU-R BT.601)."""
    return sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), colour, strict=True))


def test_boxes_are_the_intervals_and_idle_shares_stand_beside_them() -> None:
    predicted = timeline(order("zbv", 3, 2, 6), lambda action: usual_seconds(action) * (1 + action.stage**2))
    assert len({predicted.idle_share(rank) for rank in range(3)}) == 3
    measured = timeline(predicted.order, lambda action: 0.002 * usual_seconds(action), delay=0.003)
    figure = picture(predicted, measured, 7)
    assert figure.get_suptitle() == "zbv: 6 micro-batches on 3 pipeline ranks with 2 stages each"
    for axes, played in zip(figure.axes, (predicted, measured), strict=True):
        expected = [[(each.start, each.end) for each in row] for row in played.intervals]
        for row, of_rank in zip(_boxes(axes), expected, strict=True):
            np.testing.assert_allclose(row, of_rank, rtol=1e-12)
        shares = [text for text in _texts(axes) if text.endswith("idle")]
        assert shares == [f"{played.idle_share(rank):.1%} idle" for rank in range(3)]
        assert axes.get_xlim() == (0, played.length)
    assert [axes.get_title(loc="left")[:9] for axes in figure.axes] == ["Predicted", "Measured "]
    formatter = cast(Any, figure.axes[1].xaxis.get_major_formatter())
    assert formatter(0.25, 0) == "250", "ms"
    formatter = cast(Any, figure.axes[0].xaxis.get_major_formatter())
    assert formatter(predicted.length / 2, 0) == "50", "per cent"
    (legend,) = figure.legends
    labels = [text.get_text().partition("  ")[0] for text in legend.get_texts()]
    assert labels == ["forward", "input gradient", "weight gradient"]


def test_numbers_of_micro_batches_stand_in_boxes_that_have_room() -> None:
    few = [t for t in _texts(picture(timeline(order("1f1b", 2, 1, 4)), None, 1).axes[0]) if not t.endswith("idle")]
    assert sorted(few) == sorted("0123" * 4), "a forward and a backward pass on each rank"
    many = _texts(picture(timeline(order("1f1b", 2, 1, 64)), None, 1).axes[0])
    numbers = [text for text in many if not text.endswith("idle")]
    assert sorted(numbers) == sorted(2 * "0123456789"), "two digits have no room in a box"


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_kinds_differ_in_lightness_and_stages_in_shade(turns: int) -> None:
    whole = [Kind.FORWARD, Kind.BACKWARD]
    for kinds in (whole, [Kind.FORWARD, Kind.INPUT, Kind.WEIGHT]):
        shades = [[_luma(shade(kind, turn, turns)) for turn in range(turns)] for kind in kinds]
        for one in shades:
            assert one == sorted(set(one))
        for darker, lighter in itertools.pairwise(shades):
            assert min(lighter) - max(darker) > 0.09
        assert max(shades[-1]) < 0.96, "idle time is white"


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    draw_pipeline(tmp_path / "missing", timeline(order("gpipe", 2, 1, 2)), None, 1)
    assert f"cannot write {tmp_path / 'missing' / NAME}: No such file or directory" in capfd.readouterr().err
    draw_pipeline(tmp_path, timeline(order("gpipe", 2, 1, 2)), None, 1)
    assert (tmp_path / NAME).read_bytes().startswith(b"\x89PNG")


def _measured() -> tuple[Timeline | None, Timeline | None]:
    trainer, windows = new_trainer(options_of(accumulation=4, pp=2))
    before = trainer.measured_timeline()
    trainer.train_step(windows, lambda: False)
    return before, trainer.measured_timeline()


def test_the_measured_step_of_all_ranks_is_in_the_order_of_cause_and_effect() -> None:
    for before, found in pool(2).run(_measured):
        assert before is None
        assert found is not None
        assert [[each.action for each in row] for row in found.intervals] == [list(row) for row in found.order.actions]
        ended = {each.action: each.end for row in found.intervals for each in row}
        started = {each.action: each.start for row in found.intervals for each in row}
        assert min(started.values()) >= 0
        for action, start in started.items():
            for other, end in ended.items():
                if action.micro_batch == other.micro_batch and action.kind is other.kind:
                    later = action.stage - other.stage == (1 if action.kind is Kind.FORWARD else -1)
                    # A rank sends its result shortly before the action ends.
                    assert not later or start > started[other], (action, start, end)
