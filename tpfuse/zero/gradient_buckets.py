"""Flat buckets of parameters and gradients, which data-parallel ranks reduce during the backward pass.

One engine implements ZeRO's stages 0, 1 and 2 (arXiv:1910.02054). Parameters are packed into flat buffers in the
reverse of their order in the model, which is about the order in which their gradients arrive (the scheme of PyTorch's
DDP, arXiv:2006.15704). A hook takes each gradient. When a bucket has all its gradients in a backward pass that is
reduced, its reduction starts while the pass continues. All ranks reduce the buckets in the same order, even if
gradients arrive in another order or not at all. Gradients are summed, not averaged: the loss is already divided by the
number of tokens of the whole batch.

At stages 0 and 1 the last micro-batch of a step is reduced. At stage 2 each one is, and its sum is added to that of the
rank's shard, unless gradients accumulate whole. The buckets are then reduced once in each backward pass; in a pipeline
those that have a parameter of the pass's stage. A pass ends by a callback of autograd, so that a rank knows when no
more gradients come. The next pass computes while its last reductions run.

A parameter that the first and the last stage of a pipeline share is in a bucket of the replicas of both stages, and
accumulates whole. Its reduction starts in `finish()`, after all others, which belong to ranks of one stage: these are
at the same point of the schedule whenever they wait for each other (`backward_pass`). The ranks of both ends are not: a
rank that waited for the other end before sending its last gradient could deadlock, because the other end may be waiting
for that gradient. It costs no time, because the first stage is the last to compute.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tpfuse.choices import Accumulate, GradientDtype
from tpfuse.comm.layout import is_sharded, model_device
from tpfuse.comm.mesh import rank_and_size
from tpfuse.comm.sum_order import REAL_RANKS, VirtualRanks
from tpfuse.comm.traffic import Traffic
from tpfuse.layers.local_parameter import offer_head, offer_leaf, withdraw_leaf
from tpfuse.zero.broadcast_start import broadcast_model
from tpfuse.zero.bucket import Bucket
from tpfuse.zero.bucket_layout import BUCKET_BYTES, KINDS, BucketLayout, Kind, plan_buckets
from tpfuse.zero.engine import Engine, RankGroups, StepState, trained_parameters
from tpfuse.zero.muon_matrices import HiddenMatrix
from tpfuse.zero.parameter_takeover import (
    EngineHook,
    GradientPlace,
    check_own_sums,
    in_backward,
    in_nested_backward,
    local_gradient,
    move_,
    take_context_sums,
    take_partial_gradients,
)
from tpfuse.zero.reducer.base import BucketSpec, GradientReducer
from tpfuse.zero.reducer.dispatch import make_reducer
from tpfuse.zero.reducer.gradient_norm import bounded
from tpfuse.zero.reducer.inter_node import Compression

_WITHOUT_GRADIENT = (
    "{name}.grad is in the memory of ZeRO's gradient buckets: with ZeroOptimizer call its zero_grad() after each step,"
    " put earlier backward passes of a step into its no_sync(), clip by its clip_grad_norm_(), and train in bfloat16,"
    " which needs no torch.amp.GradScaler; without it call start() before each backward pass; after finish() each"
    " bucket.reduced_shard has this rank's sums"
)
_ARRIVED_AGAIN = (
    "{name} got another gradient, from a checkpoint with use_reentrant=True, which is a backward pass of its own for"
    " each forward pass: give checkpoints use_reentrant=False (with transformers in gradient_checkpointing_kwargs), or"
    ' use ZeRO\'s stage 2 or 3 with accumulate="sharded"; earlier backward passes of a step belong in no_sync()'
)


class _Passes(Enum):
    """The progress of a micro-batch's backward passes. It begins with LOCAL or WAITING."""

    LOCAL = auto()  # its gradients stay whole on this rank until a later pass is reduced
    WAITING = auto()  # no gradient has arrived
    ARRIVED = auto()  # gradients wait for the next `start` or `finish`
    BACKWARD = auto()  # gradients of a backward pass have arrived, which autograd's callback reduces at its end
    REDUCED = auto()  # the gradients of all passes so far are reduced; another pass may follow
    IN_STAGE = auto()  # within a marked pass of a pipeline, whose end reduces its gradients
    AFTER_STAGE = auto()  # between two of them, or after the last one


class GradientBuckets(Engine):
    """An engine that takes over the parameters of `model`: their storage, and their gradients until the optimizer step.

    `tpfuse.zero.shard` makes it and documents the arguments. The ranks of `groups.data` get the parameters and buffers
    of the first of them, frozen ones too, as under DDP. If a module has a true `sum_gradients`
    (`tpfuse.layers.layer_norm`), the buckets sum its gradients over tensor-parallel ranks from now on. uses, tied:
    those of `SharedParameters`.

    Call `start(last=…)` and a backward pass for each micro-batch, then `finish()`; after that each bucket has its
    `reduced_shard`. If `accumulate` is "sharded", further passes may follow that of a micro-batch, each of which is
    reduced; every rank must run as many. A parameter that took no part has gradient zero. A frozen parameter
    (requires_grad False) is in no bucket, so the optimizer does not have it. Every rank must make and use its buckets
    in the same order.

    Parameters stay the same objects with their hooks (a post-accumulate hook sees the gradient of a micro-batch if it
    was registered before the buckets were made). `trained` maps names to the parameters of the buckets. Their `.grad`
    holds no gradient: code that computes with it, such as torch's optimizers and clip_grad_norm_, raises ValueError.

    A copy of the model (copy.deepcopy, torch.optim.swa_utils.AveragedModel, torch.save) is a plain model with its own
    parameters, which are in no buckets.
    """

    _advice = "make a new engine and a new optimizer of the changed model"

    def __init__(
        self,
        model: nn.Module,
        groups: RankGroups,
        *,
        stage: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        gradient_dtype: GradientDtype = "float32",
        reduce_dtype: GradientDtype | None = None,
        accumulate: Accumulate = "sharded",
        compression: Compression | None = None,
        uses: Mapping[str, int] | None = None,
        pipelined: bool = False,
        tied: Iterable[str] = (),
        matrices: Sequence[HiddenMatrix] = (),
        virtual: VirtualRanks = REAL_RANKS,
    ) -> None:
        super().__init__(model, virtual, uses or {})
        self.stage, self.stage_group, self.matrices = stage, groups.stage, matrices
        self.data_ranks = rank_and_size(groups.data)[1] // take_context_sums(model, groups.data)
        self.compression, self.world_group = compression, groups.world
        self.matrix_traffic = Traffic()  # of Muon's matrices
        self._gradient_dtype, self._reduce_dtype = gradient_dtype, reduce_dtype or gradient_dtype
        self.accumulate = accumulate if stage == 2 and compression is None and not virtual.number else "whole"
        self._uses = uses or {}
        self._pipelined, self._last_stage = pipelined, False
        self._turns: list[Bucket] = []  # the buckets whose next reductions have not begun, in order
        self._passes = _Passes.WAITING
        self._more = False  # whether another micro-batch of the step follows
        self._ended: set[Parameter] = set()  # the parameters of which no later pass of a pipeline computes gradients
        if virtual.number:  # the modules sum each micro-batch over tensor-parallel ranks, as at stage 3
            check_own_sums(model)
        partial, tied = set() if virtual.number else take_partial_gradients(model), frozenset(tied)
        trained = trained_parameters(model)
        _check_tied(tied, trained)
        broadcast_model(model, groups.data, tied, groups.ends)
        self.device = model_device(model)
        group_of: dict[Kind, dist.ProcessGroup | None] = dict.fromkeys(KINDS, groups.data)
        group_of |= {"partial": groups.stage, "tied": groups.ends}
        layouts = plan_buckets(
            reversed(trained.items()),
            partial,
            {kind: rank_and_size(group)[1] for kind, group in group_of.items()},
            bucket_bytes,
            tied,
            {matrix.name for matrix in matrices},
            self._twice,
        )
        if stage == 2 and accumulate != self.accumulate:
            self.reasons.append("gradients accumulate whole, since compression is that of a step's sum")
        self.buckets = self._open(layouts, group_of, groups.dp)
        sharded = self.accumulate == "sharded"
        self._in_passes = [bucket for bucket in self.buckets if not sharded or bucket.shards_gradients]
        self._at_end = [bucket for bucket in self.buckets if sharded and not bucket.shards_gradients]
        self._model_rank = groups.tensor_rank
        self.trained = trained
        self._places: dict[str, GradientPlace] = {}
        for bucket in self.buckets:
            self._move_parameters(bucket)
        for bucket in self.buckets:
            bucket.keep_gradients()
        self._record_parameters()

    def _open(
        self, layouts: list[BucketLayout], group_of: Mapping[Kind, dist.ProcessGroup | None], dp: int
    ) -> list[Bucket]:
        """Make one reducer for the buckets of each group and dtype; return the buckets in the order of `layouts`.

        Only at stage 2 can a reducer add up several sums of a bucket, as those of a parameter with two uses.
        """
        families: dict[tuple[dist.ProcessGroup | None, torch.dtype, int], list[BucketLayout]] = {}
        for layout in layouts:
            sent = self._dtype(layout, self._reduce_dtype if layout.world > 1 else self._gradient_dtype)
            stage = 2 if self._uses_of(layout) > 1 else self.stage
            families.setdefault((group_of[layout.kind], sent, stage), []).append(layout)
        opened: dict[int, Bucket] = {}  # by the layout's id, since layouts may be equal
        self.reducers: list[GradientReducer] = []
        counts = Counter[dist.ProcessGroup | None]()
        data = rank_and_size(group_of["replicated"])[1]
        for (group, sent, stage), family in families.items():
            specs = [BucketSpec(layout.size, layout.dtype, sent, layout.matrices) for layout in family]
            inner = (rank_and_size(group)[1] if family[0].kind == "partial" else data) // dp
            reducer, reason = make_reducer(
                specs, stage, group, self.device, compression=self.compression, first_bucket=counts[group],
                dp=dp, inner=inner, ordered=self.virtual.number > 0,
            )  # fmt: skip
            counts[group] += len(family)
            self.reducers.append(reducer)
            self.reasons.append(reason)
            for index, layout in enumerate(family):
                dtype = self._dtype(layout, self._gradient_dtype)
                opened[id(layout)] = Bucket(layout, reducer, index, dtype, self.virtual, self._uses_of(layout))
        return [opened[id(layout)] for layout in layouts]

    def _uses_of(self, layout: BucketLayout) -> int:
        return 2 if any(segment.name in self._twice for segment in layout.segments) else 1

    @staticmethod
    def _dtype(layout: BucketLayout, choice: GradientDtype) -> torch.dtype:
        return layout.dtype if choice == "parameter" else layout.state_dtype

    def _move_parameters(self, bucket: Bucket) -> None:
        for index, segment in enumerate(bucket.layout.segments):
            parameter = self.trained[segment.name]
            move_(parameter, bucket.layout.view(bucket.values, segment))
            hooks = parameter._post_accumulate_grad_hooks or {}
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Taking)]:
                del hooks[key]  # left by buckets that had the parameter before
            message = _WITHOUT_GRADIENT.format(name=segment.name)
            place = self._places[segment.name] = GradientPlace(parameter, message, accumulates=True)
            taking = _Taking(self, bucket, index, place)
            parameter.register_post_accumulate_grad_hook(taking)  # type: ignore[no-untyped-call]
            if isinstance(parameter, DTensor):
                offer_leaf(parameter).register_post_accumulate_grad_hook(taking)  # type: ignore[no-untyped-call]
            if segment.name in self._twice and not self._pipelined:
                offer_head(parameter, partial(self._take, bucket, index, 1))

    def _take(self, bucket: Bucket, index: int, use: int, gradient: Tensor) -> None:
        """Take a gradient of the bucket's segment `index`, which has arrived. use: of its parameter."""
        name = bucket.layout.segments[index].name
        if gradient.layout is not torch.strided:
            raise ValueError(f"{name} has a sparse gradient: expected a dense one (sparse=False)")
        reduces = self._passes is not _Passes.LOCAL
        if not self.accumulating or ((reduces or self.virtual.number) and not bucket.awaits(index)):
            raise ValueError((_ARRIVED_AGAIN if in_nested_backward() else _WITHOUT_GRADIENT).format(name=name))
        leaf = self.virtual.of_micro_batch(self._micro_batch)
        bucket.take(index, gradient, reduces=reduces, leaf=leaf, use=use)
        self._places[name].leave(taken=not bucket.awaits(index))  # several backward passes may come before a reduction
        if not reduces:
            return
        if self._passes not in (_Passes.BACKWARD, _Passes.IN_STAGE):
            self._passes = _Passes.ARRIVED
            if self.accumulate == "sharded" and in_backward():
                # A checkpoint with use_reentrant=True is a pass of its own only if it has the first gradient: otherwise
                # what arrives in it belongs to the pass around it, whose callback has been queued.
                Variable._execution_engine.queue_callback(self._end_pass)
                self._passes = _Passes.BACKWARD
        if self._turns and bucket is self._turns[0]:
            bucket.copy_waiting()  # so that its memory is free for the next gradients
        if bucket.complete:
            self._start_reductions(complete=True)

    def _start_reductions(self, *, complete: bool) -> None:
        """Start the next reductions in order.

        complete: stop at the first bucket that lacks a gradient or is tied, whose reduction starts in `finish()`.
        """
        while self._turns:
            bucket = self._turns[0]
            if complete and (not bucket.complete or bucket.layout.kind == "tied"):
                return
            more = self._more
            if self._passes is _Passes.IN_STAGE:
                more = any(self.trained[segment.name] not in self._ended for segment in bucket.layout.segments)
            bucket.start_reduce(more=more)
            self._turns.pop(0)

    @contextmanager
    def backward_pass(
        self, parameters: set[Parameter], complete: set[Parameter], *, split: bool, micro_batch: int, last_stage: bool
    ) -> Iterator[None]:
        self._micro_batch, self._last_stage = micro_batch, last_stage
        self._ended |= complete
        sharded = self.accumulate == "sharded"
        if sharded:
            self._passes, self._turns = _Passes.IN_STAGE, []
            for bucket in self._in_passes:
                of_pass = [self.trained[segment.name] in parameters for segment in bucket.layout.segments]
                if any(of_pass):
                    bucket.begin(of_pass, first=False)
                    self._turns.append(bucket)
                    for segment in compress(bucket.layout.segments, of_pass):
                        self._places[segment.name].leave(taken=False)
        yield
        for bucket in self.buckets if complete else ():
            bucket.end_arrivals({i for i, s in enumerate(bucket.layout.segments) if self.trained[s.name] in complete})
        self._start_reductions(complete=not sharded)
        if sharded:
            self._passes = _Passes.AFTER_STAGE

    def _begin_micro_batch(self, *, first: bool, last: bool, reduces: bool, backwards: int) -> None:
        if first:
            for reducer in self.reducers:
                reducer.begin()
        self._begin_pass(first=first, backwards=backwards)
        for name, parameter in self.trained.items():
            if first:
                self._places[name].leave(taken=False)
            if isinstance(parameter, DTensor):
                hooks = (parameter._post_accumulate_grad_hooks or {}).values()
                if parameter._backward_hooks or any(not isinstance(hook, _Taking) for hook in hooks):
                    withdraw_leaf(parameter)
        self._passes = _Passes.WAITING if reduces else _Passes.LOCAL
        self._more, self._ended = not last, set()

    def _begin_pass(self, *, first: bool = False, backwards: int = 1) -> None:
        for bucket in self.buckets:
            arrivals = [backwards * self._uses.get(segment.name, 1) for segment in bucket.layout.segments]
            bucket.begin(arrivals, first=first)
        self._turns = [*self._in_passes]

    def _end_pass(self) -> None:
        """Reduce the gradients of a backward pass, of which those that are missing are zero. Another one may follow."""
        self._start_reductions(complete=False)
        self._begin_pass()
        self._passes = _Passes.REDUCED

    @property
    def _has_unreduced_pass(self) -> bool:
        """Return whether this micro-batch is to be reduced and no pass has done it, or gradients came after that."""
        return self._passes in (_Passes.WAITING, _Passes.ARRIVED, _Passes.BACKWARD)

    def _end_micro_batch(self) -> None:
        if self.accumulate == "sharded" and self._has_unreduced_pass:
            self._end_pass()

    def _complete(self, *, sums: bool) -> None:
        try:
            if self.accumulate == "sharded":
                self._end_micro_batch()
                self._turns = [*self._at_end]
            self._start_reductions(complete=False)
            for reducer in self.reducers:
                reducer.end_backward()
            if sums:
                for bucket in self.buckets:
                    _ = bucket.reduced_shard
        finally:
            for bucket in self.buckets:
                bucket.end_backward()
            for place in self._places.values():
                if place.intact:
                    place.leave(taken=True)

    def discard(self) -> None:
        """See `Engine`. NaN replaces the gradients that are missing here: compression keeps its remainders then.

        No rank uses the sums.
        """
        if self.state is StepState.ACCUMULATING and self.accumulate == "sharded":
            self.state = StepState.REDUCING  # others may wait for the sums of this micro-batch
            if self._passes is _Passes.LOCAL:
                self._passes = _Passes.ARRIVED
        if self.state is StepState.REDUCING and self._has_unreduced_pass:
            for bucket in self._turns:
                bucket.fill_missing(torch.nan)
        super().discard()

    @property
    def unused(self) -> bool:
        return self._passes in (_Passes.WAITING, _Passes.REDUCED)

    def _abandon(self, *, begun: bool) -> None:
        unsent = [*self._turns, *self._at_end] if begun else self.buckets
        for reducer in self.reducers:
            buckets = [bucket for bucket in unsent if bucket.reducer is reducer]
            reducer.abandon(begun=begun, unsent=[each.index for each in buckets for _ in range(each.reductions)])
        self._drop()

    def _drop(self) -> None:
        for bucket in self.buckets:
            bucket.drop()
        if self.compression is not None:
            self.compression.drop_pending()

    def take_all(self) -> None:
        """Treat the gradients of all parameters as taken, after `start(last=True)`: a replayed CUDA graph wrote them.

        At stage 2 buckets have other memory in each step, which a graph cannot write.
        """
        for bucket in self.buckets:
            bucket.take_all()
        self._passes = _Passes.ARRIVED

    @property
    def traffic(self) -> Traffic:
        """Return the bytes that the reducers and Muon have sent and received since the buckets were made."""
        total = replace(self.matrix_traffic)
        for reducer in self.reducers:
            total.add(reducer.traffic.sent, reducer.traffic.received)
        return total

    @property
    def across(self) -> list[list[int]]:
        """Return, for each reducer that sums between nodes, the ranks of the world with which this rank sums there."""
        groups = [reducer.across for reducer in self.reducers]
        return [dist.get_process_group_ranks(group) for group in groups if group is not None]

    def _counted(self) -> Iterator[Bucket]:
        for bucket in self.buckets:
            whole = bucket.reducer.stage == 0 and bucket.reducer.shard_index > 0
            twice = bucket.layout.kind == "replicated" and self._model_rank > 0
            if not (whole or twice):
                yield bucket

    def _counted_shards(self) -> Iterator[Tensor]:
        return (bucket.reduced_shard for bucket in self._counted())

    def squares(self) -> Tensor:
        return bounded([bucket.reducer.squares(bucket.index) for bucket in self._counted()], self.device)

    def is_owner(self, bucket: Bucket, index: int) -> bool:
        """Return whether this rank saves its data of segment `index`; exactly one rank with the same data does."""
        if bucket.layout.kind == "replicated" and self._model_rank > 0:
            return False
        reducer = bucket.reducer
        return reducer.stage > 0 or index % reducer.world == reducer.shard_index

    def nonfinite(self) -> list[str]:
        """See `Engine`; the names are in the buckets' order."""
        return [
            segment.name
            for bucket in self.buckets
            for segment, part in bucket.layout.segments_in(bucket.shard)
            if not bool(torch.isfinite(bucket.reduced_shard[part.start - bucket.shard.start :][: len(part)]).all())
        ]

    def close(self) -> None:
        """Free the symmetric memory, including the parameters: the model must not be used afterwards. Collective."""
        for reducer in self.reducers:
            reducer.free()


@dataclass(eq=False)
class _Taking(EngineHook):
    """A hook that moves the gradient of a parameter, or of its leaf, to segment `index` of a bucket."""

    buckets: GradientBuckets
    bucket: Bucket
    index: int
    place: GradientPlace

    def __call__(self, leaf: Tensor) -> None:
        place = self.place
        added, place.taken.arrived = place.taken.arrived, None
        gradient = added if leaf.grad is place.placeholder else leaf.grad
        if gradient is None:  # a pipeline calls every hook after each pass, even for parameters that got no gradient
            return
        leaf.grad = None if added is None else place.placeholder
        if in_backward() and self.buckets.accumulating:  # a pass adds to the placeholder, if that is still there
            place.check(self.bucket.layout.segments[self.index].name)
        buckets, segment = self.buckets, self.bucket.layout.segments[self.index]
        use = int(buckets._last_stage and segment.name in buckets._twice)
        buckets._take(self.bucket, self.index, use, local_gradient(gradient, leaf))


def _check_tied(tied: Iterable[str], trained: Mapping[str, Parameter]) -> None:
    """Raise ValueError for a tied parameter that several tensor-parallel ranks would add to the norm."""
    on_several = any(isinstance(p, DTensor) and p.device_mesh.size() > 1 and is_sharded(p) for p in trained.values())
    for name in tied if on_several else ():
        if name in trained and not is_sharded(trained[name]):
            raise ValueError(f"{name} is tied and replicated: expected a shard on each tensor-parallel rank")
