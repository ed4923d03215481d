"""The metrics of a run. metrics.jsonl holds the rows, and the console, TensorBoard and loss.png show them."""

import contextlib
import json
import logging
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from tpfuse.checkpoint.durable import replace_file
from tpfuse.checkpoint.untrusted import Unreadable, parsed_json, read_bytes, reading
from tpfuse.train.messages import say, warn

_BAR = 20  # columns of the progress bar


@dataclass(frozen=True)
class Row:
    """A line of metrics.jsonl. Losses are in nats per token. A row of an evaluation alone has only a val_loss."""

    step: int
    loss: float | None = None
    # None between evaluations.
    val_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    # In [0, 1]; on CPUs relative to the best rate so far.
    mfu: float | None = None
    # The most bytes that torch has allocated on a GPU, or that the process has held on CPUs.
    memory_bytes: int = 0
    # Since this start of the run.
    seconds: float = 0.0
    # Gradients and parameters that the first rank exchanged with data-parallel ranks in this step.
    sent_bytes: int | None = None
    received_bytes: int | None = None
    # Over the steps since the previous row.
    mean_loss: float | None = None
    # For each rank, its idle share of the pipeline's time since the previous row; None on GPUs.
    pipeline_idle: list[float] | None = None
    # That share as predicted for the GPU, or from operation counts if the GPU is not known.
    predicted_idle: list[float] | None = None
    # Since the first start of the run, the pauses between its starts included.
    wall_seconds: float = 0.0
    # The share of wall_seconds that passed in training steps whose updates the run still has.
    goodput: float = 0.0
    # When the row was written, in seconds since 1970.
    time: float = 0.0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a metrics.jsonl, and no rows if there is no file.

    A line may be incomplete if the run was killed or the disk was full. Raise UserError if the path is not a readable
    file.
    """
    if not path.exists():
        return []
    with reading(path):
        lines = read_bytes(path, None).splitlines()
    rows = []
    for line in lines:
        with contextlib.suppress(Unreadable):
            rows.append(parsed_json(line, {"step": int}))
    return rows


def described(row: Row, steps: int, holder: str, width: int | None = None) -> str:
    """Return the row in words for the console, without its least important values if it exceeds `width` columns.

    holder: a word for whose memory `memory_bytes` counts.
    """
    parts: dict[str, str] = {"step": f"step {row.step}/{steps}"}
    if row.loss is not None and row.grad_norm is not None and row.lr is not None:
        parts |= {"loss": f"loss {row.loss:.4f}", "norm": f"grad norm {row.grad_norm:.2f}", "lr": f"lr {row.lr:.1e}"}
    if row.val_loss is not None:
        parts["val"] = f"val loss {row.val_loss:.4f}"
    if row.tokens_per_second is not None and row.mfu is not None:
        parts |= {"speed": f"{row.tokens_per_second / 1000:.1f}k tokens/s", "mfu": f"MFU {row.mfu:.0%}"}
    parts["memory"] = f"{holder} {row.memory_bytes / 2**20:.0f} MiB"
    for least in ("memory", "norm", "lr", "mfu", "speed"):
        if width is not None and len("  ".join(parts.values())) > width:
            parts.pop(least, None)
    return "  ".join(parts.values())


def clock(seconds: float) -> str:
    """Return a duration as m:ss or h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _scalars(values: dict[str, Any]) -> dict[str, float]:
    """Return the values of a row that are numbers; of a list there is one for each rank, NAME/RANK."""
    scalars: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            scalars |= {f"{name}/{rank}": share for rank, share in enumerate(value)}
        elif isinstance(value, int | float):
            scalars[name] = value
    return scalars


class TensorBoardWriter:
    """Write scalars for TensorBoard, one event per row. They supersede events after `start` of earlier starts."""

    def __init__(self, folder: Path, start: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb", buffering=0)
        self._writer = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        if start:
            self._write(Event(step=start + 1, session_log=SessionLog(status=SessionLog.START)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())

    def add(self, step: int, values: dict[str, float]) -> None:
        """Write the values of one step."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Reporter:
    """Write rows to the run folder and show them. Only the first rank has a reporter.

    On a terminal, one progress line shows the latest row, in as many columns as the terminal has, and each evaluation
    adds a permanent line above it. Elsewhere each row is a line. start: the step after which the run continues; rows of
    later steps, which it trains again, are dropped. holder: a word for whose memory the rows count.
    """

    def __init__(self, folder: Path, steps: int, start: int, holder: str) -> None:
        self.path = folder / "metrics.jsonl"
        self.steps, self.holder = steps, holder
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["step"] <= start] if start else []
        replace_file(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        now = time.time()
        self._began = min((row["time"] - row["wall_seconds"] for row in rows), default=now)
        self._trained = next((row["goodput"] * row["wall_seconds"] for row in kept[::-1]), 0.0)
        if rows and rows[-1]["step"] > start:
            since = next((row["time"] for row in kept[::-1]), self._began)
            say(f"lost     steps {start + 1} to {rows[-1]['step']} and {now - since:.0f} s since step {start}")
        # The file is unbuffered: a row that a full disk refuses is lost, and not written when the file is closed.
        self._file = self.path.open("ab", buffering=0)
        self._failed = False
        self._tensorboard = TensorBoardWriter(folder / "tensorboard", start)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._console = Console()
        if sys.stdout.isatty() and self._console.is_interactive:  # not in a dumb terminal, and not if colors are forced
            self._progress = Progress(BarColumn(_BAR), TextColumn("{task.description}"), console=self._console)
            self._task = self._progress.add_task("", total=steps, completed=start)
            self._progress.start()

    def goodput(self, trained: float) -> tuple[float, float]:
        """Return (the seconds since the run's first start, the share of them in steps whose updates it still has).

        trained: the seconds of the steps of this start.
        """
        wall = max(time.time() - self._began, 1e-9)
        return wall, min(1.0, (self._trained + trained) / wall)

    def add(self, row: Row, left: float | None, trained: float = 0.0) -> None:
        """Record a row. left: the seconds that the run will still take; None if unknown. trained: as for `goodput`."""
        wall, share = self.goodput(trained)
        values = asdict(replace(row, wall_seconds=wall, goodput=share, time=time.time()))
        if not isfinite(row.grad_norm or 0.0):
            values["grad_norm"] = None  # of a step that was skipped; JSON has no infinity
        try:
            # The row is written at once, and on a line of its own even if the last one is incomplete.
            self._file.write((("\n" if self._failed else "") + json.dumps(values) + "\n").encode())
            del values["step"], values["time"]
            self._tensorboard.add(row.step, _scalars(values))
            self._failed = False
        except OSError as error:
            if not self._failed:
                warn(f"cannot write metrics of step {row.step}: {error.strerror}; training continues")
            self._failed = True
        remaining = "" if left is None else f"{clock(left)} left  "
        if self._progress is not None and self._task is not None:
            if row.val_loss is not None:
                words = described(row, self.steps, self.holder, self._console.width)
                self._console.print(words, markup=False, highlight=False, soft_wrap=True)
            words = described(row, self.steps, self.holder, self._console.width - _BAR - 1 - len(remaining))
            self._progress.update(self._task, completed=row.step, description=remaining + words)
        else:
            say(f"{described(row, self.steps, self.holder)}  {remaining}".rstrip())

    def close(self) -> None:
        """End the progress line and close the files."""
        if self._progress is not None:
            self._progress.stop()
        self._file.close()
        self._tensorboard.close()


def draw_losses(folder: Path, unigram: float | None) -> None:
    """Draw RUN/loss.png from metrics.jsonl: training and validation loss over steps, and a unigram model's for scale.

    The training loss is the mean over the steps since the previous row, drawn at the middle of these steps, since the
    loss of one batch is noisy. If the disk is full, a warning is printed.
    """
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # on a new machine it reports that it builds its font cache
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_metrics(folder / "metrics.jsonl")
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    starts = [1, *(row["step"] + 1 for row in rows)]
    training = [((start + row["step"]) / 2, row.get("mean_loss")) for start, row in zip(starts, rows, strict=False)]
    validation = [(row["step"], row["val_loss"]) for row in rows]
    for label, line, points in (("training, mean of the steps", "-", training), ("validation", "o", validation)):
        known = [point for point in points if point[1] is not None]
        if known:
            axes.plot(*zip(*known, strict=True), line, label=label, markersize=5, linewidth=1)
    if unigram is not None:
        label = f"unigram model, {unigram:.2f}: knows only how often each token occurs"
        axes.axhline(unigram, color="gray", linestyle=":", linewidth=1, label=label)
    axes.set_title(f"Loss of {folder}", parse_math=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(folder / "loss.png")
    except OSError as error:
        warn(f"cannot write {folder / 'loss.png'}: {error.strerror}")
    plt.close(figure)
