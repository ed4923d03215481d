"""The plan of the flat buckets: which parameters share one, at which offsets, and each rank's shard. Arithmetic only.

Four kinds of parameters must not share a bucket:

| kind       | example                                  | gradients summed over        | in the norm       |
|------------|------------------------------------------|------------------------------|-------------------|
| sharded    | linear weights, embeddings               | dp                           | each rank's shard |
| replicated | row-parallel biases                      | dp                           | once              |
| partial    | norms, positions on shards               | dp and tp                    | once              |
| tied       | embedding of the first and of the last   | dp of both pipeline stages   | each rank's shard |
|            | pipeline stage                           |                              |                   |

Tied buckets are the last ones: `tpfuse.zero.gradient_buckets` says why they are reduced last.

A bucket holds parameters of one dtype, which have one moment if Muon updates them (`tpfuse.zero.muon`) or two if AdamW
does. Parameters with weight decay come before those without, and a bucket is padded until all ranks have equal shards.
This module allocates no memory, so `tpfuse memory` counts with the same numbers as training.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tpfuse.comm.layout import is_sharded, local_tensor
from tpfuse.comm.sum_order import summed_dtype

Kind = Literal["sharded", "replicated", "partial", "tied"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BUCKET_BYTES = 25 * 2**20  # the default size of a bucket's float32 gradients, as in torch's DDP
ALIGNMENT = 16  # elements; every parameter and every shard starts on a cache line


@dataclass(frozen=True)
class Segment:
    """A parameter in its bucket: elements [start, stop). shape: the shape of this rank's shard of the parameter."""

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
    muon: bool = False  # whether Muon updates its parameters

    def shard(self, rank: int) -> range:
        """Return the elements that rank `rank` of the bucket's group owns if the bucket is sharded."""
        part = self.size // self.world
        return range(rank * part, (rank + 1) * part)

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of the master and the moments: float32 for parameters of a half type."""
        return summed_dtype(self.dtype)

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """Return (first element, rows, columns) of the parameters that are matrices."""
        return [(s.start, s.shape[:-1].numel(), s.shape[-1]) for s in self.segments if len(s.shape) > 1]

    def view(self, flat: Tensor, segment: Segment) -> Tensor:
        """Return the segment of the flat buffer [size] as a view in its parameter's local shape."""
        return flat[segment.start : segment.stop].view(segment.shape)

    def segments_in(self, part: range) -> Iterator[tuple[Segment, range]]:
        """Yield each segment that overlaps `part` of the bucket, and the elements of the bucket that both contain."""
        for segment in self.segments:
            overlap = range(max(part.start, segment.start), min(part.stop, segment.stop))
            if len(overlap):
                yield segment, overlap


def decays(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter has weight decay: matrices have it; norms and biases do not."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def kind_of(name: str, parameter: Tensor, partial: Collection[str], tied: Collection[str] = ()) -> Kind:
    """Return the kind of a parameter. partial: names of those whose gradients are partial sums over the tp ranks.

    tied: names of those that another pipeline stage has too. Raise ValueError for a name in both.
    """
    if name in tied:
        if name in partial:
            raise ValueError(
                f"{name} is tied, and its gradients are partial sums over tensor-parallel ranks: expected one of both"
            )
        return "tied"
    return "partial" if name in partial else "sharded" if is_sharded(parameter) else "replicated"


def plan_buckets(
    parameters: Iterable[tuple[str, Tensor]],
    partial: Iterable[str],
    worlds: Mapping[Kind, int],
    bucket_bytes: int,
    tied: Iterable[str] = (),
    matrices: Collection[str] = (),
    apart: Collection[str] = (),
) -> list[BucketLayout]:
    """Return the buckets of `parameters`, which are given in the order in which their gradients arrive.

    parameters: on any device, also meta. partial, tied: names, as in `kind_of`. worlds: the number of ranks that share
    each kind. bucket_bytes: a bucket is full when its gradients take this many bytes in float32. matrices: the names of
    parameters that Muon updates. apart: the names of those that have a bucket of their own. Raise ValueError if Muon
    updates a tied one.
    """
    partial, tied = frozenset(partial), frozenset(tied)
    layouts: list[BucketLayout] = []
    pending: dict[tuple[Kind, torch.dtype, bool, str], list[tuple[str, Tensor]]] = {}
    for name, parameter in parameters:
        kind = kind_of(name, parameter, partial, tied)
        if kind == "tied" and name in matrices:
            raise ValueError(f"{name} is shared by stages of a pipeline: expected AdamW to update it, not Muon")
        key = kind, parameter.dtype, name in matrices, name if name in apart else ""
        members = pending.setdefault(key, [])
        members.append((name, parameter))
        if sum(local_tensor(p).numel() for _, p in members) * 4 >= bucket_bytes:
            layouts.append(_layout(*key[:3], pending.pop(key), worlds[kind]))
    for key, members in pending.items():
        layouts.append(_layout(*key[:3], members, worlds[key[0]]))
    return sorted(layouts, key=lambda layout: layout.kind == "tied")


def _layout(kind: Kind, dtype: torch.dtype, muon: bool, members: list[tuple[str, Tensor]], world: int) -> BucketLayout:
    segments: list[Segment] = []
    decay_end = end = 0
    for name, parameter in sorted(members, key=lambda member: not decays(*member)):
        shape, decay = local_tensor(parameter).shape, decays(name, parameter)
        segments.append(Segment(name, shape, end, end + shape.numel(), decay))
        end = _rounded_up(end + shape.numel(), ALIGNMENT)
        decay_end = end if decay else decay_end
    return BucketLayout(kind, dtype, tuple(segments), _rounded_up(end, world * ALIGNMENT), decay_end, world, muon)


def _rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
