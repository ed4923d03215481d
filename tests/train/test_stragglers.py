"""The seconds for which each rank works and waits, and the ranks that the others wait for."""

import json
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest
import torch

from tests.support.command import Command, Commands
from tests.support.tiers import exhaustive
from tests.support.training import new_trainer, options_of
from tpfuse.backend import Implementation, implementation
from tpfuse.testing.patience import patient
from tpfuse.testing.ranks import pool
from tpfuse.train.batches import Windows
from tpfuse.train.metrics import Reporter, Row, draw_losses, read_metrics
from tpfuse.train.stragglers import STEPS, StepClock, Straggler, Stragglers
from tpfuse.train.watch import rows_of

DELAY = 0.1  # seconds by which one rank is slower in each step


def _found(stragglers: Stragglers, worked: Sequence[float], steps: int) -> list[tuple[int, Straggler]]:
    """Returns (number of the step, straggler) of each that is found in `steps` equal steps."""
    return [(step, found) for step in range(1, steps + 1) for found in stragglers.add(worked)]


def test_a_slow_rank_is_named_once_and_again_after_it_was_not_slow() -> None:
    stragglers, even, slow = Stragglers(0.2), [1.0, 1.0, 1.0, 1.0], [1.0, 1.1, 1.0, 1.5]
    assert _found(stragglers, even, 2 * STEPS) == []
    assert _found(stragglers, slow, 5 * STEPS) == [(STEPS, Straggler(3, pytest.approx(0.5)))]
    assert stragglers.present == {3}
    assert _found(stragglers, even, STEPS - 1) == [] and stragglers.present == {3}
    assert _found(stragglers, slow, 5 * STEPS) == [], "it was not slow in too few steps"
    assert _found(stragglers, even, STEPS) == [] and stragglers.present == set()
    assert _found(stragglers, slow, 5 * STEPS) == [(STEPS, Straggler(3, pytest.approx(0.5)))]


def test_only_successive_steps_count() -> None:
    stragglers = Stragglers(0.2)
    for _ in range(5):
        assert _found(stragglers, [1.0, 1.0, 2.0], STEPS - 1) == []
        assert _found(stragglers, [1.0, 1.0, 1.1], 1) == []


def test_the_excess_is_that_of_the_recent_steps() -> None:
    stragglers = Stragglers(0.2)
    assert _found(stragglers, [1.0, 1.0, 1.0], 2 * STEPS) == []
    assert _found(stragglers, [1.0, 2.0, 1.0], STEPS // 2) == []
    assert _found(stragglers, [2.0, 3.0, 2.0], STEPS)[0][1] == Straggler(1, pytest.approx(2 / 3))  # 75 / 45 - 1


@pytest.mark.parametrize(
    ("share", "worked", "ranks"),
    [
        (0.2, [1.0, 1.3], [1]),  # of two ranks the median rank is the faster one
        (0.2, [1.3, 1.0], [0]),
        (0.2, [1.0, 1.19], []),
        (0.2, [1.3, 1.0, 1.0, 1.4], [0, 3]),
        (0.2, [0.5, 1.0, 1.0], []),  # a fast rank makes no other rank slow
        (0.2, [1.0], []),
        (0.0, [1.0, 9.0], []),
        (1.0, [1.0, 1.9], []),
    ],
)
def test_ranks_are_compared_with_the_median_rank(share: float, worked: list[float], ranks: list[int]) -> None:
    assert [found.rank for _, found in _found(Stragglers(share), worked, 2 * STEPS)] == ranks


@pytest.mark.parametrize(
    ("pipeline", "worked", "found"),
    [
        (2, [1.0, 1.0, 2.0, 2.0], []),  # the second stage has more work
        (2, [1.0, 1.0, 2.0, 3.0], [(3, 0.5)]),
        (2, [1.5, 1.0, 9.0, 9.0], [(0, 0.5)]),
        (3, [2.0, 2.0, 1.0, 1.0, 4.0, 5.0], [(5, 0.25)]),
        (4, [1.0, 2.0, 3.0, 4.0], []),  # no other rank has the same stage
    ],
)
def test_ranks_of_a_pipeline_are_compared_with_those_of_the_same_stage(
    pipeline: int, worked: list[float], found: list[tuple[int, float]]
) -> None:
    expected = [(STEPS, Straggler(rank, pytest.approx(excess))) for rank, excess in found]
    assert _found(Stragglers(0.2, pipeline), worked, 2 * STEPS) == expected


@pytest.mark.parametrize(("kind", "world"), [("cuda", 8), ("cpu", 1)])
def test_gpus_and_a_single_rank_are_not_measured(kind: str, world: int) -> None:
    clock = StepClock(torch.device(kind), world)
    with clock:
        pass
    assert clock.last is None and not clock.measures


class _SlowWindows(Windows):
    """Batches whose tokens take DELAY longer to read."""

    def sequences(self, *arguments: int | torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(DELAY)
        return super().sequences(*arguments)  # type: ignore[arg-type]


def _times(layout: dict[str, int], name: Implementation, slow: int) -> list[tuple[tuple[float, ...], ...]]:
    """Returns (worked, waited) of all steps but the first two, in which only rank `slow` reads slowly."""
    trainer, windows = new_trainer(options_of(**layout))
    if trainer.rank == slow:
        windows.__class__ = _SlowWindows
    with implementation(name):
        results = [trainer.train_step(windows, lambda: False) for _ in range(12)]
    assert (results[0].worked, results[0].waited) == ((), ()), "no step was before it"
    return [(result.worked, result.waited) for result in results[2:]]


@pytest.mark.parametrize(
    ("layout", "name", "slow"),
    [
        ({"tp": 2}, "direct", 1),
        ({"dp": 2}, "collective", 1),
        *exhaustive(({"tp": 2}, "direct", 0), ({"dp": 2, "stage": 3}, "auto", 1)),
    ],
)
def test_work_and_waits_of_ranks(layout: dict[str, int], name: Implementation, slow: int) -> None:
    """The slow rank works longer by its delay, and the other one waits for that time."""
    first, second = pool(2).run(_times, layout, name, slow)
    assert first == second, "all ranks know the times of all"
    noise = min(0.1 * DELAY + patient(0.01), 0.6 * DELAY)
    for kind, longer in ((0, slow), (1, 1 - slow)):
        difference = median(times[kind][longer] - times[kind][1 - longer] for times in first)
        assert difference == pytest.approx(DELAY, abs=noise), ("worked", "waited")[kind]


# This program trains on ranks of which rank 1 is slow.
PROGRAM = """
import sys, time
from tpfuse.train import loop
from tpfuse.train.batches import Windows

train, read = loop.train_rank, Windows.sequences

def slowly(*arguments):
    time.sleep({delay})
    return read(*arguments)

def rank(info, run):
    if info.rank == 1:
        Windows.sequences = slowly
    return train(info, run)

if __name__ == "__main__":
    from tpfuse.cli import run
    loop.train_rank = rank
    sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.processes
def test_a_run_names_its_straggler_once(tmp_path: Path, flags: list[str]) -> None:
    delay = min(patient(DELAY), 3 * DELAY)
    (tmp_path / "slow.py").write_text(PROGRAM.format(delay=delay))
    more = f"--parallel.tp 2 --train.steps {2 * STEPS} --train.log-every 4 --train.eval-every 0 --train.save-every 0"
    arguments = [*flags, *more.split(), "--out", str(tmp_path / "run")]
    _, err = Command([str(tmp_path / "slow.py"), "train", *arguments]).end()
    told = rf"tpfuse: warning: rank 1 on {socket.gethostname()} has worked \d+% longer than the median rank in the"
    assert re.fullmatch(rf"{told} last {STEPS} steps: the others wait for it\n", err), err
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == STEPS // 2
    assert rows[0]["stragglers"] == [] and rows[-1]["stragglers"] == [1]
    worked, waited = rows[-1]["worked_seconds"], rows[-1]["waited_seconds"]
    assert worked[1] - worked[0] == pytest.approx(delay, rel=0.6)
    assert waited[0] - waited[1] == pytest.approx(delay, rel=0.6)


def test_metrics_without_these_times_are_read(copied: Path, commands: Commands) -> None:
    """Runs of former versions have no such entries in their rows."""
    path, new = copied / "metrics.jsonl", ("worked_seconds", "waited_seconds", "stragglers")
    rows = read_metrics(path)
    assert all(row.pop(name) is None for row in rows for name in new), "a single rank has no such times"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rows_of(copied)["rows"] == rows
    draw_losses(copied, None)
    commands.do("train", "--resume", "--out", copied, "--train.steps", "14")
    assert read_metrics(path)[: len(rows)] == rows and read_metrics(path)[-1]["step"] == 14


def test_tensorboard_has_a_curve_for_each_rank(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reporter = Reporter(tmp_path, 1, 0, "process")
    times = {"worked_seconds": [0.25, 0.5], "waited_seconds": [0.25, 0.0], "stragglers": [1]}
    reporter.add(Row(1, 1.0, None, 0.1, 0.5, 100.0, 0.1, 1000, 1.0, **times), None)  # type: ignore[arg-type]
    reporter.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert {name: row[name] for name in times} == times
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    found = {tag: read.Scalars(tag)[0].value for tag in read.Tags()["scalars"] if "worked" in tag or "strag" in tag}
    assert found == {"worked_seconds/0": 0.25, "worked_seconds/1": 0.5}


@pytest.mark.parametrize("share", ["-0.1", "nan", "inf"])
def test_a_bad_share_is_refused(commands: Commands, share: str) -> None:
    assert f"--train.straggler-share {share}: expected" in commands.fail_to_train("--train.straggler-share", share)
