"""The work of one rank in `tpfuse train`: the loop around the steps, from joining the other ranks to the last line."""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpfuse._version import __version__
from tpfuse.checkpoint import checkpoint
from tpfuse.comm.agreement import agreement, exchange
from tpfuse.comm.autotune import autotune
from tpfuse.comm.decisions import Decision, as_json, from_json, machine
from tpfuse.comm.limits import core_time, repeat_bits, set_threads
from tpfuse.comm.mesh import build_mesh, tensor_mesh
from tpfuse.comm.settings import set_settings
from tpfuse.comm.stacks import offered_stack
from tpfuse.errors import CheckpointError, RunError, UserError, ending_run
from tpfuse.parallel.pipeline.timeline import Timeline
from tpfuse.switches import use
from tpfuse.train.batches import Windows
from tpfuse.train.config import resolved
from tpfuse.train.continuation import check_loss
from tpfuse.train.hardware import (
    expand_segments,
    held_bytes,
    keep_freed_memory,
    memory_bytes,
    name_and_memory,
    peak_flops,
)
from tpfuse.train.initial_weights import load_weights
from tpfuse.train.launch import RankInfo, StopRequest, device_of, in_group, join
from tpfuse.train.messages import program, say, warn
from tpfuse.train.metrics import Reporter, Row, draw_losses
from tpfuse.train.micro_batch import with_micro_batch
from tpfuse.train.model_options import ulysses_ranks
from tpfuse.train.pipeline_options import predicted_timeline
from tpfuse.train.predicted import prediction
from tpfuse.train.report import conclude, introduce, measured
from tpfuse.train.saved_state import saved_state
from tpfuse.train.schedule import long_warmup
from tpfuse.train.setup import PreparedRun
from tpfuse.train.step_profile import StepProfile
from tpfuse.train.tokenizer import document_start
from tpfuse.train.trainer import StepResult, Trainer

_MEASURE_SECONDS = 20.0  # on GPUs, by default
_RECENT = 5  # the last intervals between rows, from which the remaining time is estimated


def train_rank(info: RankInfo, run: PreparedRun) -> int:
    """Join the other ranks, train, leave them and return 0. One rank alone needs no process group.

    Raise RunError if the run cannot continue, and PeerLost, which is a RunError, if other ranks do not answer.
    """
    stop = StopRequest(insistent=info.world == 1)
    use(implementation=run.options.parallel.impl, kernels=run.options.kernels)
    ordered = run.options.train.virtual_ranks > 0
    if run.options.train.deterministic or ordered:
        torch.use_deterministic_algorithms(True)
    comm, debug = run.options.comm, run.options.debug
    set_settings(timeout=comm.timeout, fingerprint=debug.fingerprint, flight_folder=run.folder)
    device = device_of(info)
    if device.type == "cpu":
        set_threads(core_time() / info.local_world)
        if ordered:
            repeat_bits()
        keep_freed_memory()
    elif run.options.train.expandable_segments:
        expand_segments()
    if info.world > 1 and not dist.is_initialized():  # under torchrun the ranks have joined already
        join(info, device, comm.timeout)
    loop: TrainingLoop | None = None
    cure = "use a smaller --train.micro-batch, --train.recompute full or more ranks"

    def when() -> str:
        return "preparation" if loop is None else f"step {loop.trainer.step}"

    with in_group(info, when, cure), ExitStack() as stack:
        if info.world > 1:
            stack.enter_context(offered_stack(run.folder))
        parallel, mesh = run.options.parallel, None
        if info.world > 1:
            ulysses = ulysses_ranks(parallel, run.config.n_head // parallel.tp)
            sizes = {"dp": parallel.data_ranks, "cp": parallel.cp, "tp": parallel.tp, "pp": parallel.pp}
            mesh = build_mesh(device.type, ulysses=ulysses, **sizes)
        loop = TrainingLoop(info, run, mesh, device, stop)
        if loop.trainer.graph is not None:
            stack.callback(loop.trainer.graph.release)
        loop.run_to_end()
    return 0


class TrainingLoop:
    """The training of a run on one rank. Only rank 0 prints and writes metrics."""

    def __init__(
        self, info: RankInfo, run: PreparedRun, mesh: DeviceMesh | None, device: torch.device, stop: StopRequest
    ) -> None:
        options, self.micro_batch = with_micro_batch(
            run.options, run.config, tensor_mesh(mesh), device, info.local_world, run.micro_batch
        )
        run = replace(run, options=options)
        self.info, self.run, self.options, self.device, self.stop = info, run, options, device, stop
        self.first = info.rank == 0
        train, data, length = run.options.train, run.options.data, run.config.n_positions
        tokens, val_tokens = run.data.open(data.val_fraction)
        self.windows = Windows(tokens, length, train.seed, "train", train.batch, data.order)
        self.val_windows = Windows(val_tokens, length, train.seed, "val", train.batch)
        self.held_before = held_bytes(device)  # by Python and torch themselves
        draw = run.checkpoint is None and run.weights is None
        try:
            self.trainer = Trainer(run.options, run.config, mesh, device, draw=draw)
        except ValueError as error:
            raise RunError(str(error), UserError.status) from error
        if data.documents == "mask":
            self.trainer.language_model.document_start = document_start(run.data.train.tokenizer)
        world = dist.group.WORLD if info.world > 1 else None
        self.prediction = prediction(run.options, run.config, *name_and_memory(device), info.local_world)
        self.predicted: Timeline | None = None  # the step of a pipeline
        if self.trainer.runner is not None:
            counted = None if self.prediction is None else self.prediction.timeline
            self.predicted = counted or predicted_timeline(run.options, run.config)
        self.decisions: dict[str, Decision] = {}  # the implementations by which the ranks compute their products
        if run.checkpoint is not None:
            self._resume(run.checkpoint)
        elif run.weights is not None:
            weights, shards = run.weights, self.trainer.shards()
            with agreement(f"loading {weights}", world, alike=RunError), ending_run():
                load_weights(weights, run.config, shards)
            self.trainer.optimizer.publish()
        trained = range(self.trainer.step + 1, train.steps + 1)
        if self.first and run.checkpoint is not None and not trained:
            warn(f"nothing is left to train: the run has {self.trainer.step} steps, --train.steps is {train.steps}")
        self.profile = StepProfile(
            run.options.profile, self.trainer.model, self.trainer.layout, world, device, train.compile, trained
        )
        self.peak = 0.0  # FLOP/s, once the run is introduced
        self.trained = 0.0  # seconds of this start's steps
        self.val_loss: float | None = None
        self.saved_step: int | None = self.trainer.step if run.checkpoint is not None else None
        # After a failed save: the step that saves again, and the steps from it to the next one if it fails too.
        self.retry_step, self.retry_delay = -1, 1

    def _resume(self, folder: Path) -> None:
        """Load the checkpoint; every rank reads its shards. Raise RunError on all ranks if one cannot."""
        with agreement(f"loading {folder}", self.trainer.world_group, alike=RunError), ending_run():
            saved = checkpoint.Checkpoint(folder)
            saved_state(saved)
            if not self.trainer.load(saved) and self.first:
                warn(f"{folder} has no remainders of PowerSGD for this layout: they start at zero")
        state = saved.state
        self.trainer.restore(state)
        self.windows.ahead = self.trainer.ahead // self.run.config.n_positions
        match state.get("decisions"):
            case {"machine": str(name), "cases": cases} if name == machine(self.device.type):
                self.decisions = from_json(cases)
        self._compare(saved)

    def _compare(self, saved: checkpoint.Checkpoint) -> None:
        """Compare what was loaded with what was saved. Raise RunError on all ranks if anything differs."""
        trainer, state = self.trainer, saved.state
        tensors = checkpoint.differing(saved, trainer.shards(), trainer.world_group)
        trainer.optimizer.release()
        more = f", and {len(tensors) - 3} more" if len(tensors) > 3 else ""
        differs = f"{', '.join(tensors[:3])}{more} differ from what was saved" if tensors else ""
        if not tensors:
            loss = trainer.evaluate(self.windows, 1, trainer.step)
            layers = self.run.config.n_layer
            differs = check_loss(state["proof"], self._proof(loss), self.options, state["config"], layers)
        with agreement(f"loading {saved.folder}", trainer.world_group, alike=RunError):
            if differs:
                raise RunError(f"{saved.folder} was not loaded as it was saved: {differs}", CheckpointError.status)

    def _proof(self, loss: float) -> dict[str, Any]:
        """Return what a resumed run compares before it continues. loss: the loss of the next batch.

        Its entry exact says whether the same run computes the same bits again. Measured implementations may have been
        others when the checkpoint was saved.
        """
        train = self.options.train
        tokens, _ = self.windows.sequences(self.trainer.step, 0, train.batch, torch.device("cpu"))
        return {
            "tokens": sha256(tokens.numpy().tobytes()).hexdigest(),
            "loss": loss,
            "exact": (self.device.type == "cpu" or train.deterministic or train.virtual_ranks > 0)
            and not self.decisions,
            "machine": f"{machine(self.device.type)}, {torch.get_num_threads()} threads a rank",
        }

    def run_to_end(self) -> None:
        """Train until the last step or until a rank is asked to stop, save, and print the result."""
        self.peak, source = peak_flops(self.device, self.trainer.compute_dtype)
        introduce(
            self.run, self.trainer, self.windows.tokens, self.info, peak=(self.peak, source),
            micro_batch=self.micro_batch, predicted=self.predicted, prediction=self.prediction,
        )  # fmt: skip
        started, steps = perf_counter(), self.options.train.steps
        tokens = self.options.train.batch * self.run.config.n_positions
        if self.first and self.run.checkpoint is None and (line := long_warmup(self.options.optim, steps, tokens)):
            say(line)
        holder = "process" if self.device.type == "cpu" else "GPU"  # whose memory the rows count
        reporter = Reporter(self.run.folder, steps, self.trainer.step, holder) if self.first else None
        try:
            with self.profile:
                stopped = self._loop(reporter, started)
        finally:
            if reporter is not None:
                reporter.close()
        if self.saved_step != self.trainer.step:
            self._save()
        picture = self._draw_pipeline()
        seconds = perf_counter() - started
        if stopped:
            if self.first:
                draw_losses(self.run.folder, None)
                say(
                    f"stopped at step {self.trainer.step} of {steps}; continue with:"
                    f" {program()} train --resume --out {self.run.folder}"
                )
        else:
            goodput = None if reporter is None else reporter.goodput(self.trained)
            conclude(
                self.run, self.trainer, self.windows.tokens, self.val_windows.tokens, val_loss=self.val_loss,
                saved_step=self.saved_step, seconds=seconds, goodput=goodput,
                pictures=["loss.png", *([picture] if picture else [])],
            )  # fmt: skip
        if self.saved_step != self.trainer.step:
            newest = "there is none" if self.saved_step is None else f"the newest is of step {self.saved_step}"
            raise RunError(f"the checkpoint of step {self.trainer.step} could not be written; {newest}")

    def _loop(self, reporter: Reporter | None, started: float) -> bool:
        """Run steps, evaluations and checkpoints. Return whether the run was stopped before its end."""
        options, trainer = self.options.train, self.trainer
        mark, mark_step = perf_counter(), trainer.step
        begun = trainer.step
        recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        results: list[StepResult] = []  # since the last row
        if options.eval_every and begun == 0:
            self._evaluate()
            if reporter is not None:
                memory, seconds = memory_bytes(self.device), perf_counter() - started
                reporter.add(Row(0, val_loss=self.val_loss, memory_bytes=memory, seconds=seconds), None)
            mark = perf_counter()
        while trainer.step < options.steps:
            step_began = perf_counter()
            with self.profile.step(trainer.step + 1):
                result = self._first_step() if trainer.step == begun else trainer.train_step(self.windows, self.stop)
            self.trained += perf_counter() - step_began
            step = trainer.step
            if step == begun + 1 and self.first:
                say(measured(self.device, self.held_before))
            last = step == options.steps
            if result.skipped and self.first:
                warn(f"step {step}: float16 overflow, loss scale now {trainer.loss_scale:g}, no update")
            results.append(result)
            due = step % options.log_every == 0 or last or result.stop
            evaluated = bool(options.eval_every) and (step % options.eval_every == 0 or last)
            if result.stop:
                evaluated, self.val_loss = False, None  # what there is belongs to an earlier step
            if due or evaluated:
                recent.append((step - mark_step, perf_counter() - mark))
                if evaluated:
                    self._evaluate()
                if reporter is not None:
                    row = self._row(results, recent[-1], evaluated, perf_counter() - started)
                    reporter.add(row, _seconds_a_step(recent) * (options.steps - step), self.trained)
                results.clear()
                mark, mark_step = perf_counter(), step
            save_due = bool(options.save_every) and step % options.save_every == 0
            if not last and (save_due or step == self.retry_step):
                self._save()
                mark, mark_step = perf_counter(), step
            if result.stop and not last:
                return True
        return False

    def _first_step(self) -> StepResult:
        """Run a step in which the ranks measure which implementations are the fastest here.

        A resumed run uses the implementations that it used before. With virtual ranks nothing is measured.
        """
        seconds = 0.0 if self.options.train.virtual_ranks else self.options.parallel.measure_seconds
        if seconds is None:
            seconds = _MEASURE_SECONDS if self.device.type == "cuda" else 0.0
        if self.info.world == 1 or not (seconds or self.decisions):
            return self.trainer.train_step(self.windows, self.stop)
        with autotune(seconds, known=self.decisions) as tuning:
            result = self.trainer.train_step(self.windows, self.stop)
        assert dist.group.WORLD is not None
        for cases in exchange(as_json(tuning.decisions), dist.group.WORLD, op="gathering decisions"):
            self.decisions |= from_json(cases)
        if self.first and self.decisions:
            counts = Counter(decision.taken for decision in self.decisions.values())
            taken = ", ".join(f"{count} {name}" for name, count in counts.items())
            say(f"auto     {taken}; measured in {tuning.spent:.1f} s")
        return result

    def _row(self, results: Sequence[StepResult], interval: tuple[int, float], evaluated: bool, seconds: float) -> Row:
        """Return the row of the last of the steps since the last row.

        interval: (steps, seconds) since the last row, without evaluation and saving.
        """
        result = results[-1]
        speed = self.options.train.batch * self.run.config.n_positions / _seconds_a_step([interval])
        flops = speed * self.trainer.language_model.flops_per_token() / self.info.world
        measured = zip(*(each.idle for each in results if each.idle), strict=True)  # for each rank, of each step
        measured_idle = [round(fmean(of_rank), 6) for of_rank in measured] or None
        idle: list[float] | None = None
        if self.predicted is not None:
            size = self.info.world // self.options.parallel.pp  # ranks with the same stages follow each other
            idle = [self.predicted.idle_share(rank // size) for rank in range(self.info.world)]
        if self.device.type == "cpu":
            self.peak = max(self.peak, flops)  # another process may have slowed down the probe
        return Row(
            self.trainer.step, result.loss, self.val_loss if evaluated else None, result.lr, result.grad_norm, speed,
            flops / self.peak, memory_bytes(self.device), seconds, result.sent, result.received,
            fmean(each.loss for each in results), measured_idle, idle,
        )  # fmt: skip

    def _evaluate(self) -> None:
        self.val_loss = self.trainer.evaluate(self.val_windows, self.options.train.eval_batches)

    def _save(self) -> None:
        """Save a checkpoint. After a failure, the next attempt is 1, 2, 4, … steps later."""
        trainer = self.trainer
        with agreement("saving a checkpoint", trainer.world_group, alike=RunError), ending_run():
            if not (self.run.folder / "config.toml").is_file():
                gone = f"the run's folder {self.run.folder} has been removed"
                raise RunError(f"step {trainer.step} was not saved: {gone}")
        loss = trainer.evaluate(self.windows, 1, trainer.step)  # a ruined model must not replace a good one
        if not isfinite(loss):
            raise RunError(
                f"step {trainer.step}: after the update the loss is {loss}; not saved, the last checkpoint is untouched"
            )
        state: dict[str, Any] = trainer.state()
        state["model"] = self.run.config.as_json()
        state["dtype"] = self.options.train.dtype
        state["data"] |= self.run.data.digests()
        state["proof"] = self._proof(loss)
        state["tokenizer"] = {"vocab_size": self.run.data.train.tokenizer.vocab_size}
        state["versions"] = {"tpfuse": __version__, "torch": torch.__version__, "numpy": np.__version__}
        state["config"] = resolved(self.options)
        state["decisions"] = {"machine": machine(self.device.type), "cases": as_json(self.decisions)}
        folder, keep, group = self.run.folder, self.options.train.keep, trainer.world_group
        saved = checkpoint.save(folder, trainer.step, trainer.shards(), state, keep=keep, group=group, warn=warn)
        trainer.optimizer.release()
        if saved is not None:
            self.saved_step, self.retry_delay = trainer.step, 1
        else:
            self.retry_step, self.retry_delay = trainer.step + self.retry_delay, 2 * self.retry_delay

    def _draw_pipeline(self) -> str:
        """Draw the last step of the first rank's pipeline; return the name of the file. Collective.

        A resumed run that has taken no step keeps the picture that it finds.
        """
        measured = self.trainer.measured_timeline()
        if not self.first or self.trainer.runner is None or self.predicted is None:
            return ""
        from tpfuse.train.pipeline_picture import NAME, draw_pipeline  # matplotlib takes long to import

        if not self.trainer.runner.intervals and (self.run.folder / NAME).exists():
            return NAME
        gpus = "" if self.prediction is None else f"{self.info.world:,} x {self.prediction.cluster.gpu.name}"
        draw_pipeline(self.run.folder, self.predicted, measured, self.trainer.step, gpus)
        return NAME


def _seconds_a_step(intervals: Collection[tuple[int, float]]) -> float:
    """Return the mean seconds that a step took, over intervals of (steps, seconds)."""
    return sum(seconds for _, seconds in intervals) / sum(steps for steps, _ in intervals)
