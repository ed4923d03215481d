"""The training step, the evaluation, and the state between them, on one rank or on many.

The loss is the sum over all labels of the batch divided by their number, in every layout: data-parallel ranks have
different sequences, context-parallel ranks have different tokens of the same sequences, and gradients are summed over
both. At the end of each backward pass, the ranks sum one small vector: the squares of the gradient, the loss, the
number of labels, and whether a rank was asked to stop. So all ranks see the same numbers and take the same decision.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import fsum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.checkpoint.checkpoint import Checkpoint, Shard
from tpfuse.comm import collectives
from tpfuse.comm.agreement import exchange
from tpfuse.comm.collectives.collective import set_timeout
from tpfuse.comm.dispatch import connected
from tpfuse.comm.mesh import AXES, DATA_AXES, flat_group, rank_and_size
from tpfuse.comm.sum_order import summed_dtype
from tpfuse.comm.trace import span
from tpfuse.errors import RunError
from tpfuse.ops.cross_entropy import is_ignored
from tpfuse.ops.dropout import dropout_keys
from tpfuse.parallel.pipeline.runner import Runner
from tpfuse.parallel.pipeline.shared_parameters import SharedParameters
from tpfuse.parallel.pipeline.timeline import Interval, Timeline
from tpfuse.train.batches import MicroBatch, Windows
from tpfuse.train.compiled import compiler_errors
from tpfuse.train.diagnose import find_nonfinite
from tpfuse.train.language_model import Drawing
from tpfuse.train.muon_options import muon_options
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import micro_batch_size, pipeline_stages
from tpfuse.train.rank_model import (
    ModelConfig,
    blocks_of,
    language_model,
    outlined,
    pipeline_logits,
    pipeline_runner,
)
from tpfuse.train.schedule import learning_rate
from tpfuse.train.step_graph import StepGraph, replays
from tpfuse.zero import adamw, shard
from tpfuse.zero.compression import PowerSGDCompression, compression_of
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.muon_matrices import hidden_matrices

_FIRST_SCALE = 2.0**16  # the first loss scale in float16; it is halved at an overflow and doubled after 2000 good steps
_SCALE_INTERVAL = 2000
_TEMPERATURE = 0.8  # of the texts that a run generates


@dataclass(frozen=True)
class StepResult:
    """The result of a training step."""

    # Nats per token.
    loss: float
    # Before clipping.
    grad_norm: float
    lr: float
    # Whether any rank was asked to stop.
    stop: bool
    # Bytes of gradients and parameters exchanged with ranks that have the same parameters.
    sent: int = 0
    received: int = 0
    # Whether float16 overflowed, so that no update was made.
    skipped: bool = False
    # Idle share of each rank of a pipeline; empty without one and on GPUs.
    idle: tuple[float, ...] = ()


class Trainer:
    """The model, the buckets and the optimizer of this rank.

    mesh: the mesh of `tpfuse.comm.mesh.build_mesh`; None for a single rank. draw: whether to draw initial weights from
    `options.train.seed`; without them the parameters are uninitialised until the shards are loaded. dtype: the dtype of
    the parameters. compute_dtype: the dtype of matrix products, which differs under `options.train.autocast`. Raises
    ValueError for a model that the ranks cannot share.
    """

    def __init__(
        self,
        options: TrainCommand,
        config: ModelConfig,
        mesh: DeviceMesh | None,
        device: torch.device,
        *,
        draw: bool = True,
    ) -> None:
        self.options, self.config, self.mesh, self.device = options, config, mesh, device
        self.dtype: torch.dtype = getattr(torch, options.train.dtype)
        autocast = options.train.autocast
        self.compute_dtype: torch.dtype = self.dtype if autocast == "none" else getattr(torch, autocast)
        self.model_group = flat_group(mesh, "tp")
        self.replica_group = flat_group(mesh, *DATA_AXES)
        self.stage_group = flat_group(mesh, *DATA_AXES, "tp")
        self.pipeline_group = flat_group(mesh, "pp")
        self.world_group = flat_group(mesh, *AXES)
        self.dp_rank, self.dp = rank_and_size(flat_group(mesh, "dp"))
        self.tp_rank, self.tp = rank_and_size(self.model_group)
        _, self.replicas = rank_and_size(self.replica_group)
        self.rank, self.world = rank_and_size(self.world_group)
        self.language_model = language_model(config, options, mesh, device, self.dtype)
        self.model, self.context = self.language_model.module, self.language_model.context
        groups = self.model_group, self.replica_group, self.stage_group, self.pipeline_group, self.world_group
        for group in (*groups, *self.context.groups):
            if group is not None:
                set_timeout(group)
        self.runner: Runner | None = None
        if self.pipeline_group is not None:
            self.runner = pipeline_runner(self.language_model, options, self.pipeline_group, device, self._autocast)
        if draw:
            self.language_model.draw(options.train.seed)
        self.compression = compression_of(options.zero.compression, seed=options.train.seed)
        self.engine = self._engine()
        optim = options.optim
        try:
            self.optimizer = adamw(
                self.engine,
                betas=(optim.beta1, optim.beta2),
                weight_decay=optim.weight_decay,
                muon=muon_options(optim),
                state_dtype=optim.state_dtype,
            )
        except ValueError as error:
            raise RunError(str(error)) from None
        self.layout = self._layout()
        if options.train.compile:  # the hooks of fully_shard, around each unit, cannot be traced
            self.language_model.compile(one_graph=not isinstance(self.engine, FullySharded))
        self.graph: StepGraph | None = None
        if replays(options, device, self.world):
            assert isinstance(self.engine, GradientBuckets)  # `tpfuse.train.rules`
            self.graph = StepGraph(self.engine, device, self.model_group)
        self._powersgd = f"powersgd.{self.rank}."  # how the names of this rank's remainders begin
        self.step = 0
        self.ahead = 0  # tokens trained on, less those of `step` steps; not 0 if a run resumes with another batch
        self.loss_scale = _FIRST_SCALE if self._scales else 1.0
        self.steps_since_overflow = 0

    @property
    def _scales(self) -> bool:
        """Return whether the loss is scaled, against underflow in float16."""
        return self.compute_dtype is torch.float16

    def _autocast(self) -> AbstractContextManager[object]:
        if self.compute_dtype == self.dtype:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)

    def _engine(self) -> GradientBuckets | FullySharded:
        """Make ZeRO's engine."""
        zero = self.options.zero
        tied, ordered = self.config.tied, self.options.train.virtual_ranks > 0
        shared = None if self.runner is None else self.runner.shared_parameters(self.model, tied)
        if ordered and shared is None and not self.config.family:
            shared = SharedParameters(dict.fromkeys(tied, 2))  # as embedding and as head, which a pipeline has apart
        return shard(
            self.model,
            self.mesh,
            stage=zero.stage,
            units=blocks_of(self.model),
            replicas=self.options.parallel.replicas,
            shared=shared,
            gradient_dtype=zero.gradient_dtype,
            reduce_dtype=None if zero.reduce_dtype == "gradient" else zero.reduce_dtype,
            accumulate=zero.accumulate,
            compression=self.compression,
            virtual_ranks=self.options.train.virtual_ranks,
            micro_batches=max(1, self._micro_batches * self.dp // max(1, self.options.train.virtual_ranks)),
            matrices=hidden_matrices(self.model) if self.options.optim.name == "muon" else None,
            offload=zero.offload,
        )

    @property
    def _intervals(self) -> list[Interval]:
        """Return what this rank computed in the last step of a pipeline, in s; on GPUs the host does not know that."""
        return self.runner.intervals if self.runner is not None and self.device.type == "cpu" else []

    def measured_timeline(self) -> Timeline | None:
        """Return the measured timeline of this pipeline's last step, in seconds from its start.

        None without a pipeline, before a first step, and on GPUs, where the host does not wait for computations.
        Collective. Ranks of several hosts are compared by the hosts' clocks.
        """
        if self.runner is None or self.pipeline_group is None or not self._intervals:
            return None
        own = self.runner.began, self.runner.intervals
        rows = exchange(own, self.pipeline_group, op="times of a pipeline's step")
        first = min(began for began, _ in rows)
        shifted = (
            tuple(each._replace(start=each.start + began - first, end=each.end + began - first) for each in row)
            for began, row in rows
        )
        return Timeline(self.runner.order, tuple(shifted))

    @property
    def exchanged_by(self) -> str:
        """Return in words what exchanges gradients and parameters between data-parallel ranks, and why."""
        if isinstance(self.engine, FullySharded):
            # `tpfuse.zero.collectives_with_traffic` says more.
            by_nccl = "; NCCL gathers on multiprocessors, since ranks have no memory registered with it together"
            return f"fully_shard{by_nccl * (self.device.type == 'cuda')}"
        return ", ".join(dict.fromkeys(self.engine.reasons))

    @property
    def _micro_batches(self) -> int:
        """Return the number of this rank's micro-batches in a step."""
        return self.options.train.batch // self.dp // micro_batch_size(self.options)

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens of a batch."""
        return self.options.train.batch * self.config.n_positions

    def micro_batches(
        self, windows: Windows, number: int, weight: float = 1.0, at: tuple[int, int] | None = None
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches of batch `number`."""
        size, share = micro_batch_size(self.options), self.options.train.batch // self.dp
        return [
            MicroBatch(
                *windows.sequences(number, cut, cut + size, self.device), weight, at,
                torch.arange(cut, cut + size, device=self.device),
            )
            for cut in range(self.dp_rank * share, (self.dp_rank + 1) * share, size)
        ]  # fmt: skip

    def train_step(self, windows: Windows, stop_wanted: Callable[[], bool]) -> StepResult:
        """Train on batch `self.step` and increment the step.

        Raise RunError, which names the step and the layer, before the update if the loss or the gradient is not finite
        on any rank.
        """
        options, optim = self.options, self.options.optim
        tokens = self.tokens_per_step
        for memory in connected():
            memory.step = self.step
        before = self.engine.traffic
        sent, received = before.sent, before.received
        weight = self.loss_scale / tokens
        batches = self.micro_batches(windows, self.step, weight, (options.train.seed, self.step))
        with compiler_errors(self.step) if options.train.compile else nullcontext():
            if self.graph is not None:
                passes = partial(self._passes, weight=weight, reduce=False)
                losses = self.graph.run(self._with_keys(batches), passes, self.step)
            elif self.runner is None:
                losses = self._passes(batches, weight, reduce=True)
            else:
                self.engine.start(last=True, backwards=len(batches))
                losses = self._values(self.runner.train(batches, self.engine)) / weight
        with span("phase", "gradients"):
            self.engine.finish()
            squares, whole, labels, stop, idle = self._agree(losses, _labels(batches), stop_wanted())
        for memory in connected():
            memory.check()
        if not labels:
            raise RunError(f"step {self.step}: no target of the batch has a loss; the last checkpoint is untouched")
        share = tokens / labels  # `weight` is that of a batch in which every token has a label
        norm = self.engine.norm(squares) / self.loss_scale * share
        lr = learning_rate(optim, self.step, options.train.steps, tokens, self.ahead)
        result = StepResult(whole / labels, norm, lr, stop, idle=idle)
        if not (norm < float("inf") and abs(whole) < float("inf")):  # false for NaN too
            return self._overflow(result, batches)
        factor = share / self.loss_scale
        if optim.clip and norm > optim.clip:
            factor *= optim.clip / (norm + 1e-6)
        with span("phase", "update"):
            self.optimizer.step(lr, factor, optim.muon_lr and lr * optim.muon_lr / optim.lr)
        if self._scales:
            self.steps_since_overflow = (self.steps_since_overflow + 1) % _SCALE_INTERVAL
            if not self.steps_since_overflow:
                self._rescale(2.0)
        self.step += 1
        after = self.engine.traffic
        return replace(result, sent=after.sent - sent, received=after.received - received)

    def _passes(self, batches: list[MicroBatch], weight: float, *, reduce: bool) -> Tensor:
        """Run the passes of the micro-batches, and return their losses divided by the weight, float64 [micro-batches].

        reduce: whether the last backward pass begins to sum the gradients over ranks.
        """
        losses = []
        for index, batch in enumerate(batches):
            self.engine.start(last=reduce and index == len(batches) - 1)
            with span("micro_batch", f"micro-batch {index}"):
                with span("phase", "forward"), self._autocast():
                    loss = self.language_model.loss(batch)
                with span("phase", "backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss)
        return self._values(losses) / weight

    def _with_keys(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with the keys of the step's dropout, which the host makes."""
        keys = dropout_keys(batches[0].ids, self.options.train.seed, self.step, self.config.dropout_sites)
        return [batch._replace(at=keys) for batch in batches]

    def _values(self, losses: Sequence[Tensor]) -> Tensor:
        """Return losses, of which a pipeline's rank without its last stage has none, as one tensor, float64 [n]."""
        none = torch.zeros(0, dtype=torch.float64, device=self.device)
        return torch.cat([none, *(loss.detach().double().view(1) for loss in losses)])

    def _placed(self, losses: Tensor, share: int) -> Tensor:
        """Return the losses of all ranks' micro-batches, float64, with those of this rank alone; the others are zero.

        share: the number of a rank's micro-batches. The sum over ranks has no order, since each place is that of one
        micro-batch; only context-parallel ranks have several parts of its loss.
        """
        places = torch.zeros(self.dp, share, dtype=torch.float64, device=self.device)
        if len(losses) and self.tp_rank == 0:
            places[self.dp_rank] = losses
        return places.view(-1)

    def _agree(
        self, losses: Tensor, labels: Tensor, stop: bool
    ) -> tuple[tuple[float, float], float, float, bool, tuple[float, ...]]:
        """Return the argument of `Engine.norm`, the global sum of the loss, the global number of labels, whether any
        rank must stop, and `StepResult.idle`.
        """
        measures = self.runner is not None and self.device.type == "cpu"  # the same on all ranks
        counts = torch.stack([labels, labels.new_tensor(stop)]).double()
        times = torch.zeros(2, self.world * measures, dtype=torch.float64, device=self.device)
        if intervals := self._intervals:  # each rank fills in its own entries, and the sum has those of all ranks
            busy = sum(interval.end - interval.start for interval in intervals)
            times[:, self.rank] = torch.tensor((busy, intervals[-1].end), dtype=torch.float64)
        vector = torch.cat([self.engine.squares(), counts, times.view(-1), self._placed(losses, self._micro_batches)])
        square, bound, counted, stopping, *rest = collectives.all_reduce(vector, self.world_group).tolist()
        busy_s, ended, parts = rest[: times.shape[1]], rest[times.shape[1] : times.numel()], rest[times.numel() :]
        idle = tuple(1.0 - busy / max(ended) for busy in busy_s) if any(ended) else ()
        return (square, bound), fsum(parts), counted * self.dp / self.world, stopping > 0, idle

    def _overflow(self, result: StepResult, batches: list[MicroBatch]) -> StepResult:
        """Halve the loss scale and make no update in float16. Raise RunError if that cannot help."""
        if self._scales and result.loss == result.loss and self.loss_scale > 1.0:
            self._rescale(0.5)
            self.steps_since_overflow = 0
            self.step += 1
            return replace(result, skipped=True)
        batches = [batch._replace(weight=1.0) for batch in batches]
        whole = self.model if self.runner is None else outlined(self.config, None, self.dtype)
        layer = find_nonfinite(self.model, whole, self.engine, lambda: self._losses(batches), self.world_group)
        raise RunError(
            f"step {self.step}: loss {result.loss}, gradient norm {result.grad_norm}: {layer}; stopped before the"
            " update, so the last checkpoint is untouched"
        )

    def _rescale(self, factor: float) -> None:
        """Scale the loss scale by `factor`, and the compression's remainders, which have the old scale, too."""
        self.loss_scale *= factor
        if self.compression is not None:
            self.compression.scale_errors(factor)

    @torch.no_grad()
    def evaluate(self, windows: Windows, batches: int, first: int = 0) -> float:
        """Return the loss in nats per token over `batches` batches from number `first` on, without dropout.

        Raise RunError if no target of them has a loss.
        """
        labels = torch.zeros(1, dtype=torch.float64, device=self.device)
        losses: list[Tensor] = []
        for number in range(first, first + batches):
            micro_batches = self.micro_batches(windows, number)
            labels += _labels(micro_batches)
            losses += self._losses(micro_batches)
        vector = torch.cat([labels, self._placed(self._values(losses), batches * self._micro_batches)])
        counted, *parts = collectives.all_reduce(vector, self.world_group).tolist()
        if not counted:
            raise RunError("no target of the batches to evaluate has a loss")
        return float(fsum(parts) / (counted * self.dp / self.world))

    @torch.no_grad()
    def _losses(self, batches: list[MicroBatch]) -> Sequence[Tensor]:
        """Return the sums of the losses of micro-batches, which of a pipeline only the ranks of its last stage have."""
        if self.runner is not None:
            return self.runner.forward(batches)
        with self._autocast():
            return [self.language_model.loss(batch) for batch in batches]

    def generate(self, ids: Tensor, tokens: int) -> Tensor:
        """Return the texts `ids`, [sequences, tokens] int64, each with at most `tokens` more. All ranks call this."""
        logits = None if self.runner is None else partial(pipeline_logits, self.language_model, self.runner)
        return self.language_model.generate(ids, tokens, Drawing(_TEMPERATURE), logits=logits)

    def shards(self) -> dict[str, list[Shard]]:
        """Return the shards of this rank for checkpoints.

        Masters and moments are under `model.`, `exp_avg.` and `exp_avg_sq.` NAME, where Muon's matrices lack the last,
        and the remainders of PowerSGD under `powersgd.` RANK.
        """
        shards: dict[str, list[Shard]] = {}
        for piece in self.optimizer.rectangles():
            held = shards.setdefault(f"{piece.kind}.{piece.name}", [])
            stored = self.language_model.stored(piece.name, piece.tensor, piece.slices, piece.shape)
            for shape, tensor, slices in stored:
                held.append(Shard(shape, slices, tensor, piece.is_owner))
        remainders = {} if self.compression is None else self.compression.state_dict()
        for matrix, tensors in remainders.items():
            for kind, tensor in tensors.items():
                slices = tuple((0, size) for size in tensor.shape)
                shards[f"{self._powersgd}{matrix}.{kind}"] = [Shard(tuple(tensor.shape), slices, tensor, True)]
        return shards

    def _layout(self) -> dict[str, Any]:
        """Return how the ranks share the model, which is equal on all ranks. Collective.

        Its entry powersgd names the other values that the matrices of PowerSGD depend on; None if it is not in use.
        """
        powersgd: dict[str, Any] | None = None
        engine, compression, group = self.engine, self.compression, self.world_group
        if isinstance(engine, GradientBuckets) and isinstance(compression, PowerSGDCompression) and group is not None:
            across = exchange(engine.across, group, op="gathering the ranks of nodes")
            if any(across):  # the replicas of one stage of a pipeline may share a node, and those of another not
                powersgd = {"rank": compression.rank, "stage": engine.stage, "across": across}
                if self.runner is not None:  # another cut or schedule gives a rank other matrices
                    stages = pipeline_stages(self.options.parallel, self.config)
                    owned = zip(self.runner.order.rank_of, stages, strict=True)
                    powersgd["stages"] = [[owner, *stage.layers] for owner, stage in owned]
        sizes = {"dp": self.dp, "cp": self.context.size, "tp": self.tp, "pp": rank_and_size(self.pipeline_group)[1]}
        return {**sizes, "powersgd": powersgd}

    def load(self, saved: Checkpoint) -> bool:
        """Fill this rank's shards from a checkpoint. All ranks must call `restore` afterwards.

        Return False if PowerSGD starts without its remainders, because the checkpoint has none for this layout. Raise
        the errors of `Checkpoint.load`.
        """
        whole = self.layout["powersgd"] is None or saved.state.get("layout") == self.layout
        if whole and self.compression is not None:
            remainders: dict[str, dict[str, Tensor]] = {}
            for name, shape in saved.shapes(self._powersgd).items():
                matrix, _, kind = name.rpartition(".")
                empty = torch.empty(shape, dtype=summed_dtype(self.dtype), device=self.device)
                remainders.setdefault(matrix, {})[kind] = empty
            self.compression.load_state_dict(remainders)  # `shards` then returns them, and `load` fills them
        saved.load(self.shards())
        return whole

    def state(self) -> dict[str, Any]:
        """Return the state that is not a tensor.

        Batches and dropout masks are functions of (seed, step), so there is no other random state.
        """
        return {
            "step": self.step,
            "updates": self.optimizer.updates,
            "random": {"seed": self.options.train.seed, "step": self.step},
            "data": {"batch": self.step, "tokens": self.step * self.tokens_per_step + self.ahead},
            "loss_scale": self.loss_scale,
            "steps_since_overflow": self.steps_since_overflow,
            "layout": self.layout,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the other state after the shards have been loaded."""
        self.optimizer.publish()
        self.step = int(state["step"])
        self.ahead = int(state["data"]["tokens"]) - self.step * self.tokens_per_step
        scale = float(state["loss_scale"])
        # A saved run that did not scale has 1.0.
        self.loss_scale = (scale if scale > 1.0 else _FIRST_SCALE) if self._scales else 1.0
        if self.compression is not None and self.loss_scale != state["loss_scale"]:
            self.compression.scale_errors(self.loss_scale / float(state["loss_scale"]))
        self.steps_since_overflow = int(state["steps_since_overflow"])
        self.optimizer.updates = int(state["updates"])


def _labels(batches: list[MicroBatch]) -> Tensor:
    """Return the number of targets of these micro-batches that have a loss, int64 []."""
    return torch.stack([(~is_ignored(batch.targets)).sum() for batch in batches if batch.targets is not None]).sum()
