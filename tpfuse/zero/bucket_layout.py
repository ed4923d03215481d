"""Which parameters share a flat bucket, where they lie in it, and which part of it is whose shard: arithmetic alone.

Three kinds of parameters must not share a bucket:

| kind       | example                     | gradients summed over | in the norm            |
|------------|-----------------------------|-----------------------|------------------------|
| sharded    | linear weights, embeddings  | dp                    | each rank's part       |
| replicated | row-parallel biases         | dp                    | once                   |
| partial    | norms, positions on shards  | dp and tp             | once                   |

Buckets hold one dtype each. What is decayed stands before what is not, and a bucket is padded until its ranks have
equal shards; so nothing here needs memory, and `tpfuse memory` counts with the same numbers as training.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tpfuse.comm.layout import is_sharded, local_tensor
from tpfuse.comm.rank_order import summed_dtype

Kind = Literal["sharded", "replicated", "partial"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BUCKET_BYTES = 25 * 2**20  # of float32 gradients, where nothing else is said: torch DDP's default
ALIGNMENT = 16  # elements: every parameter and every shard starts on a cache line


@dataclass(frozen=True)
class Segment:
    """One parameter's place in its bucket; shape: of this rank's part of it."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    decay: bool


@dataclass(frozen=True)
class BucketLayout:
    """A bucket of `size` elements, those before `decay_end` decayed, cut into equal shards for `world` ranks."""

    kind: Kind
    dtype: torch.dtype
    segments: tuple[Segment, ...]
    size: int
    decay_end: int
    world: int

    def shard(self, rank: int) -> range:
        """The elements that rank `rank` of the bucket's group owns where the bucket is sharded."""
        part = self.size // self.world
        return range(rank * part, (rank + 1) * part)

    @property
    def state_dtype(self) -> torch.dtype:
        """Of master and moments: float32 for the half types."""
        return summed_dtype(self.dtype)

    def view(self, flat: Tensor, segment: Segment) -> Tensor:
        """The segment of a flat buffer [size] in its parameter's (local) shape."""
        return flat[segment.start : segment.stop].view(segment.shape)

    def segments_in(self, part: range) -> Iterator[tuple[Segment, range]]:
        """The segments that lie in `part` of the bucket, and which of its elements are theirs."""
        for segment in self.segments:
            overlap = range(max(part.start, segment.start), min(part.stop, segment.stop))
            if len(overlap):
                yield segment, overlap


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay is for matrices: not for norms, nor for biases (which may be packed in two dimensions)."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def kind_of(name: str, parameter: Tensor, partial: Iterable[str]) -> Kind:
    """partial: the names of the parameters whose gradients are partial sums over the tensor-parallel ranks."""
    return "partial" if name in partial else "sharded" if is_sharded(parameter) else "replicated"


def plan_buckets(
    parameters: Iterable[tuple[str, Tensor]], partial: Iterable[str], worlds: Mapping[Kind, int], bucket_bytes: int
) -> list[BucketLayout]:
    """The buckets of `parameters`, which come in the order of their gradients' arrival; on any device, also meta.

    worlds: ranks that share each kind. bucket_bytes: a bucket is full when its gradients in float32 take as much.
    """
    names = frozenset(partial)
    layouts: list[BucketLayout] = []
    pending: dict[tuple[Kind, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, parameter in parameters:
        kind = kind_of(name, parameter, names)
        members = pending.setdefault((kind, parameter.dtype), [])
        members.append((name, parameter))
        if sum(local_tensor(p).numel() for _, p in members) * 4 >= bucket_bytes:
            layouts.append(_layout(kind, parameter.dtype, members, worlds[kind]))
            del pending[kind, parameter.dtype]
    for (kind, dtype), members in pending.items():
        layouts.append(_layout(kind, dtype, members, worlds[kind]))
    return layouts


def _layout(kind: Kind, dtype: torch.dtype, members: list[tuple[str, Tensor]], world: int) -> BucketLayout:
    segments: list[Segment] = []
    decay_end = end = 0
    for name, parameter in sorted(members, key=lambda member: not decays(*member)):
        shape, decay = local_tensor(parameter).shape, decays(name, parameter)
        segments.append(Segment(name, shape, end, end + shape.numel(), decay))
        end = _rounded_up(end + shape.numel(), ALIGNMENT)
        decay_end = end if decay else decay_end
    return BucketLayout(kind, dtype, tuple(segments), _rounded_up(end, world * ALIGNMENT), decay_end, world)


def _rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
