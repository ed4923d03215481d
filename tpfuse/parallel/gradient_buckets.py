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

Parameters in a half type have float32 masters in the optimizer (`tpfuse.parallel.flat_adamw`), and their gradients are
accumulated and summed in float32 unless less is asked for. What is exchanged how: `tpfuse.ops.bucket_exchange`.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpfuse.comm.layout import local_tensor
from tpfuse.comm.mesh import rank_and_size
from tpfuse.comm.traffic import Traffic
from tpfuse.layers.parameter import offer_leaf
from tpfuse.ops.bucket_exchange import BucketSpec, Exchange
from tpfuse.ops.node_hop import Compression
from tpfuse.ops.open_exchange import open_exchange
from tpfuse.parallel.bucket import Bucket
from tpfuse.parallel.bucket_layout import BUCKET_BYTES, KINDS, BucketLayout, Kind, plan_buckets
from tpfuse.parallel.micro_batches import MicroBatches
from tpfuse.parallel.trained_parameters import Member, rebuilt, take_partial_gradients, trained_parameters

GradientDtype = Literal["float32", "parameter"]


class GradientBuckets(MicroBatches):
    """Takes over the parameters of `model`: their storage, and their gradients until the optimizer step.

    model: equal on all ranks, parameters plain or DTensors on one tensor-parallel mesh; modules with a true
    `sum_gradients` (`tpfuse.layers.layer_norm`) leave the sum over the mesh to the buckets from here on. stage: 0 to 2.
    data_group: ranks with the same parameters and other tokens; world_group: all ranks of data × tensor parallelism.
    bucket_bytes: of float32 gradients; torch DDP's default. gradient_dtype: in which gradients are accumulated and
    kept; reduce_dtype: in which they travel, by default the same. "float32" means float64 for float64, "parameter" is
    half as much where parameters are a half type; sums are float32 in any case, but for the whole ones of stage 0,
    which are of the dtype that travels. compression: of what passes between nodes (`tpfuse.parallel.compression`).

    Use: for each micro-batch `start(last=…)` and backward; then `finish()`, after which `bucket.sums` are there. A
    parameter that took no part has gradient zero; one that is frozen (requires_grad False) stays out of the buckets,
    and so out of the optimizer. Every rank makes and uses its buckets in the same order.

    Raises ValueError for another stage, where nothing requires a gradient, or `world_group` is missing but needed.
    """

    _cure = "make new buckets, which take it in or out"

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
            raise ValueError(f"stage {stage}: expected 0, 1 or 2 (stage 3: tpfuse.parallel.fully_sharded.FullySharded)")
        super().__init__(model)
        self.stage = stage
        self._gradient_dtype, self._reduce_dtype = gradient_dtype, reduce_dtype or gradient_dtype
        self._next = 0
        partial = take_partial_gradients(model)
        if partial and world_group is None:
            raise ValueError(f"world_group is missing: gradients such as {min(partial)}'s are partial sums")
        members = {member.name: member for member in reversed(trained_parameters(model))}
        if not members:
            raise ValueError("the model has no parameter that requires a gradient")
        groups = _groups(data_group, world_group)
        layouts = plan_buckets(
            [(member.name, member.parameter) for member in members.values()],
            partial,
            {kind: rank_and_size(group)[1] for kind, group in groups.items()},
            bucket_bytes,
        )
        device = local_tensor(next(iter(members.values())).parameter).device
        self.reasons: list[str] = []
        self.buckets = self._open(layouts, groups, device, compression)
        self._model_rank = max(_mesh_rank(member.parameter) for member in members.values())  # plain ones say 0
        for bucket in self.buckets:
            self._move_in(bucket, members)
        for bucket in self.buckets:
            if bucket.exchange.keeps_gradients:
                room, kept = bucket.exchange.room(bucket.index), self._dtype(bucket.layout, gradient_dtype)
                bucket.kept = room if room.dtype == kept else torch.zeros_like(room, dtype=kept)
        self._watch()

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
        places: dict[int, tuple[Exchange, int]] = {}
        self.exchanges: list[Exchange] = []
        for (group, sent), family in families.items():
            specs = [_spec(layout, sent) for layout in family]
            exchange, reason = open_exchange(specs, self.stage, group, device, compression=compression)
            self.exchanges.append(exchange)
            self.reasons.append(reason)
            places |= {id(layout): (exchange, index) for index, layout in enumerate(family)}
        return [Bucket(layout, *places[id(layout)]) for layout in layouts]

    @staticmethod
    def _dtype(layout: BucketLayout, choice: GradientDtype) -> torch.dtype:
        return layout.dtype if choice == "parameter" else layout.state_dtype

    def _move_in(self, bucket: Bucket, members: dict[str, Member]) -> None:
        """The parameters move into the bucket, and a hook of each takes its gradients there."""
        layout = bucket.layout
        for number, segment in enumerate(layout.segments):
            member = members.pop(segment.name)  # what it leaves is free
            storage = layout.view(bucket.values, segment)
            storage.copy_(local_tensor(member.parameter))
            replacement = rebuilt(member.parameter, storage)
            for module, attribute in member.owners:
                module.register_parameter(attribute, replacement)
            leaves: list[Tensor] = [replacement]
            if isinstance(replacement, DTensor):
                leaves.append(offer_leaf(replacement))
            for leaf in leaves:
                leaf.register_post_accumulate_grad_hook(self._hook(bucket, number))  # type: ignore[no-untyped-call]

    def _hook(self, bucket: Bucket, number: int) -> Callable[[Tensor], None]:
        segment = bucket.layout.segments[number]

        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = local_tensor(parameter.grad)
            parameter.grad = None
            if not self._accumulating or (self._last and number not in bucket.missing):
                raise ValueError(f"a gradient of {segment.name} that no start() announced: one backward pass for each")
            if bucket.kept is None and self._last:
                bucket.held[number] = gradient
                if bucket is self.buckets[self._next]:
                    self._put(bucket)  # and so its memory is free for the next ones
            else:
                place = bucket.layout.view(self._kept(bucket), segment)
                if number in bucket.untouched:
                    place.copy_(gradient)
                else:
                    place.add_(gradient)
            bucket.untouched.discard(number)
            bucket.missing.discard(number)
            if self._last and not bucket.missing:
                self._send(complete=True)

        return take

    def _kept(self, bucket: Bucket) -> Tensor:
        if bucket.kept is None:
            dtype = self._dtype(bucket.layout, self._gradient_dtype)
            bucket.kept = torch.zeros(bucket.layout.size, dtype=dtype, device=bucket.values.device)
        return bucket.kept

    def _send(self, *, complete: bool) -> None:
        """Sends the buckets whose turn it is; all that are left, or those that are complete."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if complete and bucket.missing:
                return
            self._fill(bucket)
            bucket.exchange.send(bucket.index)
            self._next += 1

    def _fill(self, bucket: Bucket) -> None:
        layout, kept = bucket.layout, bucket.kept
        if kept is None:
            room = self._put(bucket)
            ends = [0, *(segment.stop for segment in layout.segments)]
            starts = [*(segment.start for segment in layout.segments), layout.size]
            for start, end in zip(ends, starts, strict=True):  # what is between segments is in the norm too
                room[start:end].zero_()
        else:
            room = bucket.exchange.room(bucket.index)
        for number in bucket.untouched:
            layout.view(room if kept is None else kept, layout.segments[number]).zero_()
        if kept is not None and kept is not room:
            room.copy_(kept)
        if not bucket.exchange.keeps_gradients:
            bucket.kept = bucket.room = None

    def _put(self, bucket: Bucket) -> Tensor:
        """What the bucket holds goes to its room, which is opened by that."""
        if bucket.room is None:
            bucket.room = bucket.exchange.room(bucket.index)
        for number, gradient in bucket.held.items():
            bucket.layout.view(bucket.room, bucket.layout.segments[number]).copy_(gradient)
        bucket.held.clear()
        return bucket.room

    def _announce(self, *, first: bool, last: bool) -> None:
        if first:
            for exchange in self.exchanges:
                exchange.begin()
            self._next = 0
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.layout.segments)))
            if first:
                bucket.untouched = set(bucket.missing)

    def _complete(self, *, sums: bool) -> None:
        try:
            self._send(complete=False)
            for exchange in self.exchanges:
                exchange.end_backward()
            if sums:
                for bucket in self.buckets:
                    bucket.exchange.sums(bucket.index)
        finally:
            for bucket in self.buckets:
                bucket.held.clear()
                bucket.room = None

    @property
    def traffic(self) -> Traffic:
        """Bytes that all exchanges have passed since the buckets were made."""
        total = Traffic()
        for exchange in self.exchanges:
            total.add(exchange.traffic.sent, exchange.traffic.received)
        return total

    def squared_norm(self) -> Tensor:
        """This rank's contribution to the squared norm of the whole gradient: the sum over `world_group` is it.

        float64 []. What several ranks have counts on one of them.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.buckets[0].values.device)
        for bucket in self.buckets:
            whole = self.stage == 0 and bucket.exchange.place > 0
            twice = bucket.layout.kind == "replicated" and self._model_rank > 0
            if not (whole or twice):
                total += bucket.exchange.squared_norm(bucket.index)
        return total

    def writes(self, bucket: Bucket, number: int) -> bool:
        """Whether this rank saves what it holds of segment `number`: of the ranks with the same exactly one does."""
        if bucket.layout.kind == "replicated" and self._model_rank > 0:
            return False
        exchange = bucket.exchange
        return self.stage > 0 or number % exchange.world == exchange.place

    def nonfinite(self) -> list[str]:
        """Names of the parameters with a gradient that is not finite in this rank's shards, in the order of buckets."""
        return [
            segment.name
            for bucket in self.buckets
            for segment, part in bucket.layout.inside(bucket.shard)
            if not bool(torch.isfinite(_within(bucket.sums, bucket.shard, part)).all())
        ]

    def close(self) -> None:
        """Gives symmetric memory back, parameters included: the model is of no use afterwards. Collective."""
        for exchange in self.exchanges:
            exchange.free()


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


def _mesh_rank(parameter: Tensor) -> int:
    return parameter.device_mesh.get_local_rank() if isinstance(parameter, DTensor) else 0
