"""Flat buckets of parameters and gradients, exchanged between the data-parallel ranks during the backward pass.

Data-parallel are all ranks with the same parameters and other tokens, whether of other sequences or, with context
parallelism, of the same ones. One engine serves ZeRO's stages 0, 1 and 2 (arXiv:1910.02054):

| stage | gradients                                     | AdamW's state and float32 masters |
|-------|-----------------------------------------------|-----------------------------------|
| 0     | whole sums on every rank                      | whole on every rank               |
| 1     | whole until the update, sums of a shard       | of a shard                        |
| 2     | freed bucket by bucket, sums of a shard       | of a shard                        |

Parameters are packed into flat buffers in the reverse of their order in the model, which is about the order in which
their gradients arrive (the scheme of PyTorch's DDP, arXiv:2006.15704). A hook takes each gradient; when the last one of
a bucket is there in the last micro-batch, its reduction starts while backward goes on. Buckets are sent in one order on
all ranks, even where ranks get their gradients in different ones, or some do not get a gradient at all. Gradients are
summed, not averaged: the loss is already divided by the number of tokens of the whole batch.

Parameters in a half type have float32 masters in the optimizer (`tpfuse.zero.flat_adamw`), and their gradients are
accumulated and summed in float32 unless less is asked for. What is exchanged how: `tpfuse.zero.reducer.base`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tpfuse.choices import GradientDtype
from tpfuse.comm.layout import is_sharded, local_tensor
from tpfuse.comm.mesh import rank_and_size
from tpfuse.comm.traffic import Traffic
from tpfuse.layers.parameter import offer_leaf, withdraw_leaf
from tpfuse.zero.bucket import Bucket
from tpfuse.zero.bucket_layout import BUCKET_BYTES, KINDS, BucketLayout, Kind, plan_buckets
from tpfuse.zero.equal_start import broadcast_model
from tpfuse.zero.micro_batches import MicroBatches
from tpfuse.zero.reducer.backend import make_reducer
from tpfuse.zero.reducer.base import BucketSpec, GradientReducer
from tpfuse.zero.reducer.inter_node import Compression
from tpfuse.zero.taken_parameters import move_, take_partial_gradients, taken_gradient

_WITHOUT_GRADIENT = (
    "{name}.grad is in the memory of GradientBuckets: with ZeroOptimizer(buckets) call its zero_grad() after each step,"
    " put earlier backward passes of a step into its no_sync(), and clip by its clip_grad_norm_(); without it call"
    " start() before each backward pass, and after finish() bucket.reduced_shard is the gradient"
)


class GradientBuckets(MicroBatches):
    """Takes over the parameters of `model`: their storage, and their gradients until the optimizer step.

    model: parameters plain or DTensors on one tensor-parallel mesh; modules with a true `sum_gradients`
    (`tpfuse.layers.layer_norm`) leave the sum over the mesh to the buckets from here on. stage: 0 to 2. data_group:
    ranks with the same parameters and other tokens, which get the parameters and buffers of the first of them, as under
    DDP, frozen ones too; world_group: all ranks of data × tensor parallelism.
    bucket_bytes: of float32 gradients; torch DDP's default. gradient_dtype: in which gradients are accumulated and
    kept; reduce_dtype: in which they travel, by default the same. "float32" means float64 for float64, "parameter" is
    half as much where parameters are a half type; sums are float32 in any case, but for the whole ones of stage 0,
    which are of the dtype that travels. compression: of what passes between nodes (`tpfuse.zero.compression`).

    Use: hand them to `tpfuse.zero.optimizer.ZeroOptimizer`; or, for an optimizer of your own, call for each
    micro-batch `start(last=…)` and backward; then `finish()`, after which `bucket.reduced_shard` is there. A parameter that
    took no part has gradient zero; one that is frozen (requires_grad False) stays out of the buckets, and so out of
    the optimizer. Every rank makes and uses its buckets in the same order.

    Parameters stay the objects that they are, with their hooks (a post-accumulate hook sees the gradient of a
    micro-batch if it was registered before the buckets were made); `trained` has those of the buckets by name. Their
    `.grad` is not there: what computes with it, as torch's optimizers and clip_grad_norm_ do, raises ValueError.

    A copy of the model (copy.deepcopy, torch.optim.swa_utils.AveragedModel, torch.save) is a plain model whose
    parameters are its own and in no buckets.

    Raises ValueError for another stage, where nothing requires a gradient, for complex parameters, where data-parallel
    ranks have parameters of other names, shapes or dtypes, or `world_group` is missing but needed.
    """

    _advice = "make new buckets and a new optimizer of the changed model"

    def __init__(
        self,
        model: nn.Module,
        *,
        stage: int = 0,
        data_group: dist.ProcessGroup | None = None,
        world_group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        gradient_dtype: GradientDtype = "float32",
        reduce_dtype: GradientDtype | None = None,
        compression: Compression | None = None,
    ) -> None:
        if stage not in (0, 1, 2):
            raise ValueError(f"stage {stage}: expected 0, 1 or 2 (stage 3: tpfuse.zero.fully_sharded.FullySharded)")
        super().__init__(model)
        self.stage, self.data_ranks = stage, rank_and_size(data_group)[1]
        self.compression = compression
        self._world_group = data_group if world_group is None else world_group
        self._gradient_dtype, self._reduce_dtype = gradient_dtype, reduce_dtype or gradient_dtype
        self._next = 0
        partial = take_partial_gradients(model)
        if partial and world_group is None:
            raise ValueError(f"world_group is missing: gradients such as {min(partial)}'s are partial sums")
        trained = _trained(model)
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient")
        broadcast_model(model, data_group)
        first = next(iter(trained.values()))
        groups = _groups(data_group, world_group)
        layouts = plan_buckets(
            reversed(trained.items()),
            partial,
            {kind: rank_and_size(group)[1] for kind, group in groups.items()},
            bucket_bytes,
        )
        self.reasons: list[str] = []
        self.buckets = self._open(layouts, groups, local_tensor(first).device, compression)
        self._model_rank = max(_mesh_rank(parameter) for parameter in trained.values())  # plain ones say 0
        self._unknown_world = world_group is None and any(
            _is_on_several_ranks(parameter) for parameter in trained.values()
        )
        self.trained = trained
        self._taken_gradients = {
            name: taken_gradient(p, _WITHOUT_GRADIENT.format(name=name)) for name, p in trained.items()
        }
        for bucket in self.buckets:
            self._move_parameters(bucket)
        for bucket in self.buckets:
            if bucket.reducer.keeps_gradients:
                buffer, dtype = bucket.reducer.gradient_buffer(bucket.index), self._dtype(bucket.layout, gradient_dtype)
                bucket.accumulated = buffer if buffer.dtype == dtype else torch.zeros_like(buffer, dtype=dtype)
        self._record_parameters()

    def _open(
        self,
        layouts: list[BucketLayout],
        groups: dict[Kind, dist.ProcessGroup | None],
        device: torch.device,
        compression: Compression | None,
    ) -> list[Bucket]:
        """One exchange for the buckets of one group and dtype; the buckets in the order of `layouts`."""
        families: dict[tuple[dist.ProcessGroup | None, torch.dtype], list[BucketLayout]] = {}
        for layout in layouts:
            sent = self._dtype(layout, self._reduce_dtype if layout.world > 1 else self._gradient_dtype)
            families.setdefault((groups[layout.kind], sent), []).append(layout)
        reducer_of: dict[int, tuple[GradientReducer, int]] = {}
        self.reducers: list[GradientReducer] = []
        for (group, sent), family in families.items():
            specs = [_spec(layout, sent) for layout in family]
            reducer, reason = make_reducer(specs, self.stage, group, device, compression=compression)
            self.reducers.append(reducer)
            self.reasons.append(reason)
            reducer_of |= {id(layout): (reducer, index) for index, layout in enumerate(family)}
        return [Bucket(layout, *reducer_of[id(layout)]) for layout in layouts]

    @staticmethod
    def _dtype(layout: BucketLayout, choice: GradientDtype) -> torch.dtype:
        return layout.dtype if choice == "parameter" else layout.state_dtype

    def _move_parameters(self, bucket: Bucket) -> None:
        """The parameters move into the bucket, and a hook of each takes its gradients there."""
        for index, segment in enumerate(bucket.layout.segments):
            parameter = self.trained[segment.name]
            move_(parameter, bucket.layout.view(bucket.values, segment))
            hooks = parameter._post_accumulate_grad_hooks or {}
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Taking)]:
                del hooks[key]  # of buckets that had the parameter before
            taking = _Taking(self, bucket, index, parameter)
            parameter.register_post_accumulate_grad_hook(taking)  # type: ignore[no-untyped-call]
            if isinstance(parameter, DTensor):
                offer_leaf(parameter).register_post_accumulate_grad_hook(taking)  # type: ignore[no-untyped-call]

    def _take(self, bucket: Bucket, index: int, gradient: Tensor) -> None:
        """A gradient of the bucket's segment `index` has come."""
        segment = bucket.layout.segments[index]
        if gradient.layout is not torch.strided:
            raise ValueError(f"{segment.name} has a sparse gradient: expected a dense one (sparse=False)")
        if not self._accumulating or (self._last and index not in bucket.pending):
            raise ValueError(_WITHOUT_GRADIENT.format(name=segment.name))
        if bucket.accumulated is None and self._last:
            bucket.waiting[index] = gradient
            if bucket is self.buckets[self._next]:
                self._copy_waiting(bucket)  # and so its memory is free for the next ones
        else:
            sum_so_far = bucket.layout.view(self._accumulation_buffer(bucket), segment)
            if index in bucket.without_gradient:
                sum_so_far.copy_(gradient)
            else:
                sum_so_far.add_(gradient)
        bucket.without_gradient.discard(index)
        bucket.pending.discard(index)
        if self._last and not bucket.pending:
            self._start_reductions(complete=True)

    def _accumulation_buffer(self, bucket: Bucket) -> Tensor:
        if bucket.accumulated is None:
            dtype = self._dtype(bucket.layout, self._gradient_dtype)
            bucket.accumulated = torch.zeros(bucket.layout.size, dtype=dtype, device=bucket.values.device)
        return bucket.accumulated

    def _start_reductions(self, *, complete: bool) -> None:
        """Sends the buckets whose turn it is; all that are left, or those that are complete."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if complete and bucket.pending:
                return
            self._fill(bucket)
            bucket.reducer.start_reduce(bucket.index)
            self._next += 1

    def _fill(self, bucket: Bucket) -> None:
        layout, accumulated = bucket.layout, bucket.accumulated
        if accumulated is None:
            buffer = self._copy_waiting(bucket)
            ends = [0, *(segment.stop for segment in layout.segments)]
            starts = [*(segment.start for segment in layout.segments), layout.size]
            for start, end in zip(ends, starts, strict=True):  # what is between segments is in the norm too
                buffer[start:end].zero_()
        else:
            buffer = bucket.reducer.gradient_buffer(bucket.index)
        for index in bucket.without_gradient:
            layout.view(buffer if accumulated is None else accumulated, layout.segments[index]).zero_()
        if accumulated is not None and accumulated is not buffer:
            buffer.copy_(accumulated)
        if not bucket.reducer.keeps_gradients:
            bucket.accumulated = bucket.reduce_buffer = None

    def _copy_waiting(self, bucket: Bucket) -> Tensor:
        """What the bucket holds goes to its room, which is opened by that."""
        if bucket.reduce_buffer is None:
            bucket.reduce_buffer = bucket.reducer.gradient_buffer(bucket.index)
        for index, gradient in bucket.waiting.items():
            bucket.layout.view(bucket.reduce_buffer, bucket.layout.segments[index]).copy_(gradient)
        bucket.waiting.clear()
        return bucket.reduce_buffer

    def _begin_micro_batch(self, *, first: bool, last: bool) -> None:
        if first:
            for reducer in self.reducers:
                reducer.begin()
            self._next = 0
        for parameter in self.trained.values():
            parameter.grad = None
            if isinstance(parameter, DTensor) and _has_hooks(parameter):
                withdraw_leaf(parameter)
        for bucket in self.buckets:
            bucket.pending = set(range(len(bucket.layout.segments)))
            if first:
                bucket.without_gradient = set(bucket.pending)

    def _complete(self, *, sums: bool) -> None:
        try:
            self._start_reductions(complete=False)
            for reducer in self.reducers:
                reducer.end_backward()
            if sums:
                for bucket in self.buckets:
                    bucket.reducer.reduced_shard(bucket.index)
        finally:
            for bucket in self.buckets:
                bucket.waiting.clear()
                bucket.reduce_buffer = None
            for name, parameter in self.trained.items():
                parameter.grad = self._taken_gradients[name]

    def _reducing(self) -> bool:
        return any(len(bucket.pending) < len(bucket.layout.segments) for bucket in self.buckets)

    def _abandon(self, *, begun: bool) -> None:
        for reducer in self.reducers:
            reducer.abandon(begun=begun)
        self._drop()

    def _drop(self) -> None:
        for bucket in self.buckets:
            bucket.waiting.clear()
            bucket.reduce_buffer = None
            if not bucket.reducer.keeps_gradients:
                bucket.accumulated = None

    @property
    def traffic(self) -> Traffic:
        """Bytes that all exchanges have passed since the buckets were made."""
        total = Traffic()
        for reducer in self.reducers:
            total.add(reducer.traffic.sent, reducer.traffic.received)
        return total

    @property
    def across(self) -> list[list[int]]:
        """For each exchange between nodes the ranks of the world with which this rank sums across them."""
        groups = [reducer.across for reducer in self.reducers]
        return [dist.get_process_group_ranks(group) for group in groups if group is not None]

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """See `MicroBatches`."""
        if self._unknown_world:
            raise ValueError("world_group is missing: the norm of shards is a sum over tensor-parallel ranks too")
        return self._world_group

    def squared_norm(self) -> Tensor:
        """This rank's contribution to the squared norm of the whole gradient: the sum over `world_group` is it.

        float64 []. What several ranks have counts on one of them.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.buckets[0].values.device)
        for bucket in self.buckets:
            whole = self.stage == 0 and bucket.reducer.shard_index > 0
            twice = bucket.layout.kind == "replicated" and self._model_rank > 0
            if not (whole or twice):
                total += bucket.reducer.squared_norm(bucket.index)
        return total

    def is_owner(self, bucket: Bucket, index: int) -> bool:
        """Whether this rank saves what it holds of segment `index`: of the ranks with the same exactly one does."""
        if bucket.layout.kind == "replicated" and self._model_rank > 0:
            return False
        reducer = bucket.reducer
        return self.stage > 0 or index % reducer.world == reducer.shard_index

    def nonfinite(self) -> list[str]:
        """Names of the parameters with a gradient that is not finite in this rank's shards, in the order of buckets."""
        return [
            segment.name
            for bucket in self.buckets
            for segment, part in bucket.layout.segments_in(bucket.shard)
            if not bool(torch.isfinite(_within(bucket.reduced_shard, bucket.shard, part)).all())
        ]

    def close(self) -> None:
        """Gives symmetric memory back, parameters included: the model is of no use afterwards. Collective."""
        for reducer in self.reducers:
            reducer.free()


@dataclass(eq=False)
class _Taking:
    """The hook that takes what arrives at a parameter, or at its leaf, to segment `index` of a bucket."""

    buckets: GradientBuckets
    bucket: Bucket
    index: int
    parameter: Parameter

    def __call__(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        gradient, leaf.grad = local_tensor(leaf.grad), None
        taken = self.buckets._taken_gradients[self.bucket.layout.segments[self.index].name]
        self.parameter.grad = taken if self.buckets._last else None  # several backward passes may come before the last
        self.buckets._take(self.bucket, self.index, gradient)


def _trained(model: nn.Module) -> dict[str, Parameter]:
    """The parameters that require a gradient, in the model's order. Raises ValueError for one that is complex."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}: expected parameters of a real floating dtype")
    return trained


def _has_hooks(parameter: Tensor) -> bool:
    """Whether the parameter has hooks besides the one that takes its gradient."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or any(not isinstance(hook, _Taking) for hook in hooks)


def _within(shard: Tensor, whole: range, part: range) -> Tensor:
    """The elements `part` of a bucket out of those that a shard of it holds."""
    return shard[part.start - whole.start : part.stop - whole.start]


def _groups(
    data_group: dist.ProcessGroup | None, world_group: dist.ProcessGroup | None
) -> dict[Kind, dist.ProcessGroup | None]:
    return {kind: world_group if kind == "partial" else data_group for kind in KINDS}


def _spec(layout: BucketLayout, sent: torch.dtype) -> BucketSpec:
    matrices = [(s.start, s.shape[:-1].numel(), s.shape[-1]) for s in layout.segments if len(s.shape) > 1]
    return BucketSpec(layout.size, layout.dtype, sent, tuple(matrices))


def _is_on_several_ranks(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1 and is_sharded(parameter)


def _mesh_rank(parameter: Tensor) -> int:
    return parameter.device_mesh.get_local_rank() if isinstance(parameter, DTensor) else 0
