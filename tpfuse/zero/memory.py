"""What a rank holds when it trains: bytes of parameters, gradients and AdamW's state by ZeRO's stage, arithmetic alone.

| kind       | stage 0       | stage 1       | stage 2                          | stage 3                           |
|------------|---------------|---------------|----------------------------------|-----------------------------------|
| parameters | whole buckets | whole buckets | whole buckets                    | shards, which are the masters     |
| gradients  | whole buckets | whole buckets | sums of shards, a bucket unsent  | sums of shards, a unit unsent     |
| master     | whole         | shards        | shards                           |                                   |
| moments    | two, whole    | two of shards | two of shards                    | two of shards                     |
| buffers    |               |               | up to three rooms for buckets    | gathered units, one that is sent  |

Masters are there where parameters are a half type, in float32. With several micro-batches whole gradients are there
besides at stages 2 and 3: only the last one communicates. A bucket of one rank is held as at stage 1, of one shard.
Buckets are padded until ranks have equal shards (`tpfuse.zero.bucket_layout`), and `fully_shard` pads the
dimension of each parameter that it cuts; all that is counted.

Counted is what lives through a step, and of what comes and goes by turns as much as is there at once. Not counted are
workspaces of operators, slots of small collectives, and what an allocator keeps for itself. ZeRO: arXiv:1910.02054.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch

from tpfuse.comm.rank_order import HALF, summed_dtype
from tpfuse.zero.bucket_layout import BucketLayout
from tpfuse.zero.fully_sharded import shard_dim
from tpfuse.zero.reducer.direct import GRADIENT_BUFFERS

STAGES = (0, 1, 2, 3)
Width = Literal["float32", "parameter"]


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes that one rank holds, by kind.

    padding: of `parameters`, what is of no element: at stage 3 beyond an equal part of all.
    """

    parameters: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    buffers: int = 0
    activations: int = 0
    padding: int = 0

    @property
    def total(self) -> int:
        """Of all kinds; padding is in the parameters."""
        return self.parameters + self.gradients + self.master + self.moments + self.buffers + self.activations

    def __add__(self, other: "MemoryAccount") -> "MemoryAccount":
        """Kind by kind."""
        return MemoryAccount(*(getattr(self, kind.name) + getattr(other, kind.name) for kind in fields(self)))


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: parameter; gradient, as it is kept whole; summed, as a shard of it is; master, 0 for none;
    moment, of each of the two."""

    parameter: int
    gradient: int
    summed: int
    master: int
    moment: int


ZERO_PAPER = Widths(parameter=2, gradient=2, summed=2, master=4, moment=4)
"""Of the ZeRO paper, section 3.1: half-precision parameters and gradients, K = 12 bytes of float32 state."""


def states(whole: int, shard: int, stage: int, widths: Widths) -> MemoryAccount:
    """Of `whole` elements, of which this rank's shard is `shard`, what has to be held at a stage of ZeRO.

    Without what only passes by. Raises ValueError for a stage that does not exist.
    """
    check_stage(stage)
    state = shard if stage >= 1 else whole
    return MemoryAccount(
        parameters=(shard if stage >= 3 else whole) * widths.parameter,
        gradients=shard * widths.summed if stage >= 2 else whole * widths.gradient,
        master=state * widths.master,
        moments=2 * state * widths.moment,
    )


def check_stage(stage: int) -> None:
    """Raises ValueError for one that does not exist."""
    if stage not in STAGES:
        raise ValueError(f"stage {stage}: expected 0, 1, 2 or 3")


def account(
    layouts: Sequence[BucketLayout],
    stage: int,
    gradient_dtype: Width = "float32",
    reduce_dtype: Width | None = None,
    *,
    accumulating: bool = False,
    activations: int = 0,
) -> MemoryAccount:
    """What a rank holds of these buckets at stage 0, 1 or 2, to the byte.

    gradient_dtype, reduce_dtype: of `tpfuse.zero.gradient_buckets`. accumulating: whether a step has several
    micro-batches. activations: bytes, which are passed on. Raises ValueError for another stage.
    """
    check_stage(stage)
    if stage == 3:
        raise ValueError("stage 3 has no buckets: account_sharded counts it")
    total = MemoryAccount(activations=activations)
    sizes_of_reducers: dict[tuple[bool, torch.dtype], list[int]] = {}  # the buckets of each exchange, in bytes
    unsent = 0
    for layout in layouts:
        kept = _dtype(layout.dtype, gradient_dtype)
        sent = _dtype(layout.dtype, reduce_dtype or gradient_dtype)
        one_rank = layout.world == 1
        total += _bucket(layout, min(stage, 1) if one_rank else stage, kept, sent)
        if stage == 2 and not one_rank:
            key = layout.kind == "partial", sent
            sizes_of_reducers.setdefault(key, []).append(layout.size * sent.itemsize)
            if accumulating:  # and so none is unsent but there
                total += MemoryAccount(gradients=layout.size * kept.itemsize)
            else:
                unsent = max(unsent, _elements(layout) * layout.dtype.itemsize)
    reduce_buffers = [min(GRADIENT_BUFFERS, len(sizes)) * max(sizes) for sizes in sizes_of_reducers.values()]
    return total + MemoryAccount(gradients=unsent, buffers=sum(reduce_buffers))


def account_sharded(
    units: Sequence[Sequence[tuple[int, ...]]],
    world: int,
    dtype: torch.dtype,
    reduce_dtype: Width = "float32",
    *,
    accumulating: bool = False,
    activations: int = 0,
) -> MemoryAccount:
    """What a rank holds at stage 3, by `tpfuse.zero.fully_sharded`.

    units: shapes of the parameters of each, as this rank would hold them whole (its tensor-parallel part); the last one
    is the model itself, which has what the others have not. world: ranks that share them. dtype: of the parameters.
    reduce_dtype, accumulating, activations: as in `account`.

    Gathered at once are, of each block that computes, it and the next one, and the model's own parameters all the time.
    Of gradients those of one unit are whole: as they come, and as they are sent.
    """
    state = summed_dtype(dtype)
    sent = _dtype(dtype, reduce_dtype)
    sizes = [sum(map(math.prod, unit)) for unit in units]
    padded = [sum(_padded_shard(shape, world) for shape in unit) for unit in units]
    whole, shard = sum(sizes), sum(padded)
    total = states(whole, shard, 3, Widths(state.itemsize, sent.itemsize, state.itemsize, 0, state.itemsize))
    if world == 1:
        gathered = 0 if dtype == state else whole
    else:
        gathered = padded[-1] * world + sum(sorted((size * world for size in padded[:-1]), reverse=True)[:2])
    largest = max(sizes, default=0)
    return total + MemoryAccount(
        gradients=largest * dtype.itemsize + (whole * sent.itemsize if accumulating else 0),
        buffers=gathered * dtype.itemsize + max(padded, default=0) * world * sent.itemsize,
        activations=activations,
        padding=(shard - whole // world) * state.itemsize,
    )


def _padded_shard(shape: tuple[int, ...], world: int) -> int:
    """Elements that stage 3 has on each rank."""
    size = shape[shard_dim(shape, world)]
    return -(-size // world) * (math.prod(shape) // size)


def _bucket(layout: BucketLayout, stage: int, kept: torch.dtype, sent: torch.dtype) -> MemoryAccount:
    """What is held of one bucket all the time."""
    state = layout.state_dtype.itemsize
    widths = Widths(layout.dtype.itemsize, kept.itemsize, state, state if layout.dtype in HALF else 0, state)
    size, shard = layout.size, layout.size // layout.world
    buffers = size * sent.itemsize if stage < 2 and sent != kept else 0
    if stage == 1 and layout.world > 1 and sent != layout.state_dtype:
        buffers += shard * state  # sums of what travels in less than float32 have a place of their own
    padding = (size - _elements(layout)) * layout.dtype.itemsize
    return states(size, shard, stage, widths) + MemoryAccount(buffers=buffers, padding=padding)


def _elements(layout: BucketLayout) -> int:
    """That belong to parameters."""
    return sum(segment.stop - segment.start for segment in layout.segments)


def _dtype(dtype: torch.dtype, choice: Width) -> torch.dtype:
    return summed_dtype(dtype) if choice == "float32" else dtype
