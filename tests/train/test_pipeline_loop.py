"""A whole run of a pipeline: what it prints and writes, the picture of a step, and how one rank uses the run."""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from tests.support.command import Commands, losses
from tests.support.training import looped, new_trainer, options_of, prepared
from tpfuse import cli
from tpfuse.parallel.pipeline.order import Kind, order
from tpfuse.parallel.pipeline.timeline import Timeline, timeline, usual_seconds
from tpfuse.testing.ranks import pool
from tpfuse.train import loop, pipeline_picture
from tpfuse.train.metrics import read_metrics
from tpfuse.train.pipeline_options import pipeline_order
from tpfuse.train.pipeline_picture import NAME, draw_pipeline, picture
from tpfuse.train.predicted import prediction
from tpfuse.train.setup import PreparedRun

DOUBLE = "--train.dtype float64 --model.dropout 0.1 --model.n-layer 4"
ZBV = "--parallel.pp 2 --parallel.pp-schedule zbv --train.micro-batch 2"
ROOT = Path(__file__).resolve().parents[2]


def _boxes(axes: Axes) -> list[list[tuple[float, float]]]:
    """Return (start, end) of the boxes of each row of a panel."""
    rows = [collection for collection in axes.collections if isinstance(collection, PolyCollection)]
    return [[(box.get_extents().x0, box.get_extents().x1) for box in row.get_paths()] for row in rows]


def _texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_boxes_are_the_intervals_and_idle_shares_stand_beside_them() -> None:
    predicted = timeline(order("zbv", 3, 2, 6), lambda action: usual_seconds(action) * (1 + action.stage**2))
    assert len({predicted.idle_share(rank) for rank in range(3)}) == 3
    measured = timeline(predicted.order, lambda action: 0.002 * usual_seconds(action), delay=0.003)
    figure = picture(predicted, measured, 7)
    assert figure.get_suptitle() == "zbv: 6 micro-batches on 3 pipeline ranks with 2 stages each"
    for axes, drawn in zip(figure.axes, (predicted, measured), strict=True):
        expected = [[(each.start, each.end) for each in row] for row in drawn.intervals]
        for row, of_rank in zip(_boxes(axes), expected, strict=True):
            np.testing.assert_allclose(row, of_rank, rtol=1e-12)
        shares = [text for text in _texts(axes) if text.endswith("idle")]
        assert shares == [f"{drawn.idle_share(rank):.1%} idle" for rank in range(3)]
        assert axes.get_xlim() == (0, drawn.length)
    assert [axes.get_title(loc="left")[:9] for axes in figure.axes] == ["Predicted", "Measured "]
    formatter = cast(Any, figure.axes[1].xaxis.get_major_formatter())
    assert formatter(0.25, 0) == "250", "ms"
    formatter = cast(Any, figure.axes[0].xaxis.get_major_formatter())
    assert formatter(predicted.length / 2, 0) == "50", "per cent"
    (legend,) = figure.legends
    labels = [text.get_text().partition("  ")[0] for text in legend.get_texts()]
    assert labels == ["forward", "input gradient", "weight gradient"]


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    draw_pipeline(tmp_path / "missing", timeline(order("gpipe", 2, 1, 2)), None, 1)
    assert f"cannot write {tmp_path / 'missing' / NAME}: No such file or directory" in capfd.readouterr().err
    draw_pipeline(tmp_path, timeline(order("gpipe", 2, 1, 2)), None, 1)
    assert (tmp_path / NAME).read_bytes().startswith(b"\x89PNG")


Drawn = tuple[Timeline, Timeline | None, int, str]


def _drawn(run: PreparedRun, stop_after: int, gpu: tuple[str, int] = ("", 0)) -> tuple[Drawn | None, str]:
    """Train until rank 1 is asked to stop, as by SIGTERM, after some steps of this call.

    Return what rank 0 draws, and what the run prints. gpu: the name and the memory of the device.
    """
    steps = itertools.count(1)
    with (
        mock.patch.object(loop, "name_and_memory", return_value=gpu),
        mock.patch.object(pipeline_picture, "draw_pipeline", wraps=draw_pipeline) as draw,
    ):
        printed = looped(run, lambda: next(steps) >= stop_after and dist.get_rank() == 1)
    assert draw.call_count <= 1
    return draw.call_args.args[1:] if draw.called else None, printed


@pytest.mark.exhaustive
def test_a_stopped_run_draws_the_step_that_it_has_taken_last(flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"

    def train(steps: int, stop_after: int = 99) -> Drawn | None:
        words = f"--train.eval-every 0 --train.steps {steps} --parallel.pp 2 --out {out}".split()
        run = prepared([*flags, *words, *(["--resume"] if out.exists() else [])], 2)
        (drawn, _), (other, _) = pool(2).run(_drawn, run, stop_after)
        assert other is None
        assert drawn is None or drawn[0].order == pipeline_order(run.options)
        return cast("Drawn | None", drawn)

    for steps, stop_after, step in ((9, 2, 2), (4, 99, 4)):
        drawn = train(steps, stop_after)
        assert drawn is not None
        predicted, measured, of_step, _ = drawn
        assert of_step == step and read_metrics(out / "metrics.jsonl")[-1]["step"] == step
        assert measured is not None and measured.order == predicted.order
        assert [[each.action for each in row] for row in measured.intervals] == list(map(list, predicted.order.actions))
    picture_of_step_4 = (out / NAME).read_bytes()
    assert picture_of_step_4.startswith(b"\x89PNG")
    assert train(4) is None, "a run that takes no step more keeps the picture of its last one"
    assert (out / NAME).read_bytes() == picture_of_step_4
    (out / NAME).unlink()
    drawn = train(4)
    assert drawn is not None and drawn[1] is None and (out / NAME).exists()


@pytest.mark.exhaustive
def test_a_run_on_a_known_gpu_is_predicted_by_the_model_of_cost(flags: list[str], tmp_path: Path) -> None:
    """Its first lines, its picture and its metrics say the same."""
    words = f"--train.steps 2 --parallel.pp 2 --out {tmp_path / 'run'}".split()
    run, gpu = prepared([*flags, *words], 2), ("NVIDIA H100 80GB HBM3", 85 * 10**9)
    (drawn, printed), _ = pool(2).run(_drawn, run, 99, gpu)
    expected = prediction(run.options, run.config, *gpu, 2)
    assert drawn is not None and expected is not None
    assert drawn[0] == expected.timeline
    assert drawn[3] == "2 x h100"
    (panel,) = picture(drawn[0], None, 0, drawn[3]).axes
    assert panel.get_title(loc="left") == f"Predicted for 2 x h100: {expected.timeline.length * 1e3:.4g} ms"
    assert f"plan     {expected.described()} (predicted, see tpfuse plan)\n" in printed
    idle = [expected.timeline.idle_share(rank) for rank in range(2)]
    assert re.search(rf"\n +0 +0 +{idle[0]:.1%} +", printed), printed
    assert read_metrics(tmp_path / "run/metrics.jsonl")[-1]["predicted_idle"] == pytest.approx(idle)


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


@pytest.mark.exhaustive
def test_a_run_explains_its_pipeline_as_the_page_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "pipeline.md").read_text()
    (shown,) = re.findall(r"The first command of this page prints:\n\n```\n(.*?)^```$", page, re.M | re.S)
    (words,) = re.findall(r"^tpfuse train (.*) --train.steps 50 (.*) --out runs/pipeline$", page, re.M)
    words = " ".join(words).replace("README.md", str(ROOT / "README.md"))
    run = prepared(f"{words} --train.steps 1 --train.eval-every 0 --out {tmp_path / 'run'}".split(), 2)
    assert shown in pool(2).run(looped, run)[0]


@pytest.mark.exhaustive
def test_a_pipeline_trains_and_is_used_as_a_run_of_one_rank(
    flags: list[str], tmp_path: Path, commands: Commands
) -> None:
    one, piped = tmp_path / "one", tmp_path / "piped"
    assert cli.run(["train", *flags, *DOUBLE.split(), "--out", str(one)]) == 0
    out = pool(2).run(looped, prepared([*flags, *DOUBLE.split(), *ZBV.split(), "--out", piped], 2))[0]
    assert "ranks    tp 1 x dp 1 x pp 2 on cpu" in out
    found = re.search(r"^pipeline zbv: 4 micro-batches of 2 sequences on 2 pipeline ranks with 2 stages each; predicted"
                      r" idle share at most (\d+)%$", out, re.MULTILINE)  # fmt: skip
    assert found and 0 < int(found[1]) < 60
    assert re.search(r"^memory   ZeRO stage 0, counted [\d.]+ MiB a rank: parameters ", out, re.MULTILINE)
    assert losses(piped) == pytest.approx(losses(one), rel=1e-9)
    rows = read_metrics(piped / "metrics.jsonl")
    for row in rows[1:]:
        for shares in (row["pipeline_idle"], row["predicted_idle"]):
            assert len(shares) == 2 and all(0 <= share <= 1 for share in shares)
    manifest = json.loads((piped / "step-12" / "manifest.json").read_text())
    assert manifest["state"]["layout"]["pp"] == 2 and len(manifest["files"]) == 2
    for words in ("sample {} --prompt the --tokens 40 --temperature 0", "evaluate {}"):
        texts = [commands.do(*words.format(run).split()).replace(str(run), "") for run in (one, piped)]
        assert texts[0] == texts[1]
    shutil.rmtree(piped / "step-12")
    commands.out = piped
    assert "continuing after step 10" in commands.resume("--parallel.pp", "1", "--parallel.pp-schedule", "1f1b")
    assert losses(piped) == pytest.approx(losses(one), rel=1e-9)
