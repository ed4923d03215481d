"""Flat buckets of parameters and gradients, reduced over the data-parallel ranks during the backward pass.

Data-parallel are all ranks with the same parameters and other tokens, whether of other sequences or, with context
parallelism, of the same ones.

Parameters are packed into flat buffers in the reverse of their order in the model, which is about the order
in which their gradients arrive. A hook copies each gradient into its bucket; when the last one of a bucket is
there in the last micro-batch, the bucket's all-reduce starts while backward goes on (the scheme of PyTorch's
DDP, arXiv:2006.15704). Gradients are summed, not averaged: the loss is already divided by the number of
tokens of the whole batch.

Three kinds of parameters must not share a bucket:

| kind       | example                     | gradients summed over | in the norm            |
|------------|-----------------------------|-----------------------|------------------------|
| sharded    | linear weights, embeddings  | dp                    | each rank's part       |
| replicated | row-parallel biases         | dp                    | once                   |
| partial    | norms, positions on shards  | dp and tp             | once                   |

Parameters in a half type have a float32 master copy here and their gradients are accumulated and reduced in
float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tpfuse.comm import collectives
from tpfuse.comm.handle import Handle
from tpfuse.comm.layout import from_local, is_sharded, local_tensor
from tpfuse.layers.parameter import offer_leaf

_ALIGNMENT = 16  # elements: every parameter starts on a cache line


@dataclass
class Segment:
    """One parameter's place in its bucket."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    decay: bool


@dataclass
class Bucket:
    """Flat buffers of one kind of parameters; `master` is `values` itself unless those are a half type."""

    sharded: bool
    group: dist.ProcessGroup | None
    segments: list[Segment]
    values: Tensor
    master: Tensor
    gradients: Tensor
    missing: set[int] = field(default_factory=set)
    untouched: set[int] = field(default_factory=set)
    handle: Handle | None = None

    def view(self, flat: Tensor, segment: Segment) -> Tensor:
        """The segment of a flat buffer in its parameter's (local) shape."""
        return flat[segment.start : segment.stop].view(segment.shape)

    def halves(self, flat: Tensor) -> Iterator[tuple[bool, Tensor]]:
        """(decay, part of a flat buffer): what is decayed stands before what is not."""
        border = next((s.start for s in self.segments if not s.decay), flat.numel())
        for decay, part in ((True, flat[:border]), (False, flat[border:])):
            if part.numel():
                yield decay, part


@dataclass
class _Member:
    """A parameter and the (module, attribute) pairs that hold it: several where weights are tied."""

    name: str
    parameter: Parameter
    owners: list[tuple[nn.Module, str]]


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay is for matrices: not for norms, nor for biases (which may be packed in two dimensions)."""
    return parameter.ndim >= 2 and not name.endswith("bias")


class GradientBuckets:
    """Takes over the parameters of `model`: their storage, and their gradients until the optimizer step.

    model: parameters plain or DTensors on one tensor-parallel mesh; modules with a true `sum_gradients`
    (`tpfuse.layers.layer_norm`) leave the sum over the mesh to the buckets from here on. data_group: ranks
    with the same parameters and other tokens; world_group: all ranks of data × tensor parallelism. bucket_bytes:
    of gradients; torch DDP's default.

    Use: for each micro-batch `start(last=…)` and backward; then `finish()`, after which `gradients` are the
    sums over all ranks. A parameter that took no part has gradient zero; one that is frozen (requires_grad
    False) stays out of the buckets, and so out of the optimizer. Buckets hold one dtype each.

    Raises ValueError where nothing requires a gradient, or `world_group` is missing but needed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        data_group: dist.ProcessGroup | None = None,
        world_group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        self.model = model
        self.buckets: list[Bucket] = []
        self._last = self._accumulating = False
        partial = self._take_partial_gradients(model)
        if partial and world_group is None:
            raise ValueError(f"world_group is missing: gradients such as {min(partial)}'s are partial sums")
        pending: dict[tuple[str, torch.dtype], list[_Member]] = {}
        for member in reversed(_trained_parameters(model)):
            parameter = member.parameter
            kind = "partial" if member.name in partial else "sharded" if is_sharded(parameter) else "replicated"
            waiting = pending.setdefault((kind, parameter.dtype), [])
            waiting.append(member)
            if sum(local_tensor(m.parameter).numel() for m in waiting) * 4 >= bucket_bytes:
                self._add_bucket(kind, world_group if kind == "partial" else data_group, waiting)
                del pending[kind, parameter.dtype]
        for (kind, _), waiting in pending.items():
            self._add_bucket(kind, world_group if kind == "partial" else data_group, waiting)
        if not self.buckets:
            raise ValueError("the model has no parameter that requires a gradient")

    @staticmethod
    def _take_partial_gradients(model: nn.Module) -> set[str]:
        names = set()
        for prefix, module in model.named_modules():
            if getattr(module, "sum_gradients", False):
                setattr(module, "sum_gradients", False)  # noqa: B010 (nn.Module's __setattr__ is typed for modules)
                names |= {name for name, _ in module.named_parameters(prefix, recurse=False)}
        return names

    def _add_bucket(self, kind: str, group: dist.ProcessGroup | None, members: list[_Member]) -> None:
        members = sorted(members, key=lambda member: not decays(member.name, member.parameter))
        segments, end = [], 0
        for member in members:
            shape = local_tensor(member.parameter).shape
            stop = end + shape.numel()
            segments.append(Segment(member.name, shape, end, stop, decays(member.name, member.parameter)))
            end = -(-stop // _ALIGNMENT) * _ALIGNMENT
        values = local_tensor(members[0].parameter).new_zeros(end)
        half = values.dtype in (torch.bfloat16, torch.float16)
        master = values.float() if half else values
        bucket = Bucket(kind == "sharded", group, segments, values, master, torch.zeros_like(master))
        for index, (segment, member) in enumerate(zip(segments, members, strict=True)):
            bucket.view(values, segment).copy_(local_tensor(member.parameter))
            bucket.view(master, segment).copy_(local_tensor(member.parameter))
            replacement = _rebuilt(member.parameter, bucket.view(values, segment))
            for module, attribute in member.owners:
                module.register_parameter(attribute, replacement)
            leaves: list[Tensor] = [replacement]
            if isinstance(replacement, DTensor):
                leaves.append(offer_leaf(replacement))
            for leaf in leaves:
                leaf.register_post_accumulate_grad_hook(self._hook(bucket, index))  # type: ignore[no-untyped-call]
        self.buckets.append(bucket)

    def _hook(self, bucket: Bucket, index: int) -> Callable[[Tensor], None]:
        place = bucket.view(bucket.gradients, bucket.segments[index])

        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = local_tensor(parameter.grad)
            parameter.grad = None
            if index in bucket.untouched:
                place.copy_(gradient)
                bucket.untouched.discard(index)
            else:
                place.add_(gradient)
            bucket.missing.discard(index)
            if self._last and not bucket.missing:
                self._reduce(bucket)

        return take

    def _reduce(self, bucket: Bucket) -> None:
        for index in bucket.untouched:
            bucket.view(bucket.gradients, bucket.segments[index]).zero_()
        bucket.handle = collectives.start_all_reduce(bucket.gradients, bucket.group)

    def start(self, *, last: bool) -> None:
        """Before each micro-batch; `last`: the one in whose backward the buckets are reduced.

        Raises ValueError after a last one that was not followed by `finish()`: its sums would be summed again.
        """
        if self._last:
            raise ValueError("start() after the last micro-batch: call finish() first")
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.segments)))
            if not self._accumulating:
                bucket.untouched = set(bucket.missing)
                bucket.handle = None
        self._accumulating, self._last = True, last

    def finish(self) -> None:
        """After the last micro-batch: waits until every bucket holds the sum over all ranks."""
        for bucket in self.buckets:
            if bucket.handle is None:
                self._reduce(bucket)
        for bucket in self.buckets:
            assert bucket.handle is not None
            bucket.handle.wait()
        self._accumulating = self._last = False

    def squared_norms(self) -> tuple[Tensor, Tensor]:
        """Σ g² over this rank's sharded gradients and over those that every tensor-parallel rank has whole."""
        sums: dict[bool, list[Tensor]] = {True: [], False: []}
        for bucket in self.buckets:
            sums[bucket.sharded].append(torch.linalg.vector_norm(bucket.gradients).square())
        zero = self.buckets[0].gradients.new_zeros(())
        return sum(sums[True], zero), sum(sums[False], zero)

    def scale_gradients(self, factor: float) -> None:
        """Multiplies every gradient, for clipping."""
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)

    def publish(self) -> None:
        """After the masters have been changed (by the optimizer or a checkpoint): rounds them into the parameters."""
        for bucket in self.buckets:
            if bucket.master is not bucket.values:
                bucket.values.copy_(bucket.master)

    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradient (on this rank) is not finite, in the order of the buckets."""
        return [
            segment.name
            for bucket in self.buckets
            for segment in bucket.segments
            if not bool(torch.isfinite(bucket.view(bucket.gradients, segment)).all())
        ]


def _trained_parameters(model: nn.Module) -> list[_Member]:
    """The parameters that require a gradient, in the model's order, each once."""
    members: dict[int, _Member] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            path, _, attribute = name.rpartition(".")
            member = members.setdefault(id(parameter), _Member(name, parameter, []))
            member.owners.append((model.get_submodule(path), attribute))
    return list(members.values())


def _rebuilt(parameter: Parameter, storage: Tensor) -> Parameter:
    """The same parameter (mesh, placement, requires_grad) on other storage."""
    mesh = getattr(parameter, "device_mesh", None)
    dim = next((p.dim for p in getattr(parameter, "placements", ()) if hasattr(p, "dim")), None)
    return Parameter(from_local(storage, mesh, dim, parameter.shape), requires_grad=parameter.requires_grad)
