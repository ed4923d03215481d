"""The memory of a training rank: bytes of parameters, gradients and AdamW's state at each stage of ZeRO, by arithmetic.

| kind       | stage 0       | stage 1       | stage 2                          | stage 3                           |
|------------|---------------|---------------|----------------------------------|-----------------------------------|
| parameters | whole buckets | whole buckets | whole buckets                    | shards, which are the masters     |
| gradients  | whole buckets | whole buckets | sums of shards, a bucket unsent  | sums of shards, a unit unsent     |
| master     | whole         | shards        | shards                           |                                   |
| moments    | two, whole    | two of shards | two of shards                    | two of shards                     |
| buffers    |               |               | up to three gradient buffers     | gathered units, one that is sent  |

Parameters of a half type have float32 masters. With several micro-batches, stages 2 and 3 also hold whole gradients,
because only the last micro-batch communicates. A bucket of one rank is held as at stage 1, as one shard. Buckets are
padded until ranks have equal shards (`tpfuse.zero.bucket_layout`), and `fully_shard` pads the dimension of each
parameter that it cuts; this padding is counted.

The count has the buffers that exist during a whole step and, for buffers that come and go, the largest amount that
exists at once. It does not have the workspaces of operators, the slots of small collectives, and the memory that an
allocator caches. ZeRO: arXiv:1910.02054.
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
    """The bytes that one rank holds, by kind.

    padding: the bytes of `parameters` that belong to no element; at stage 3 those beyond an equal share of all.
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
        """Return the bytes of all kinds; the padding is part of the parameters."""
        return self.parameters + self.gradients + self.master + self.moments + self.buffers + self.activations

    def __add__(self, other: "MemoryAccount") -> "MemoryAccount":
        """Add two accounts kind by kind."""
        return MemoryAccount(*(getattr(self, kind.name) + getattr(other, kind.name) for kind in fields(self)))


@dataclass(frozen=True)
class Widths:
    """The bytes of one element.

    parameter: of a parameter. gradient: of a whole gradient. summed: of a summed shard. master: of a master, 0 if there
    are none. moment: of each of the two moments.
    """

    parameter: int
    gradient: int
    summed: int
    master: int
    moment: int


def states(whole: int, shard: int, stage: int, widths: Widths) -> MemoryAccount:
    """Return the bytes that a rank must hold at a stage of ZeRO, without temporary buffers.

    whole: the number of elements. shard: the number of elements of this rank's shard. Raises ValueError for a stage
    that does not exist.
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
    """Raise ValueError for a stage that does not exist."""
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
    """Return the exact bytes that a rank holds of these buckets at stage 0, 1 or 2.

    gradient_dtype, reduce_dtype: as in `tpfuse.zero.gradient_buckets`. accumulating: whether a step has several
    micro-batches. activations: bytes that are added to the result as they are. Raises ValueError for another stage.
    """
    check_stage(stage)
    if stage == 3:
        raise ValueError("stage 3 has no buckets: account_sharded counts it")
    total = MemoryAccount(activations=activations)
    sizes_of_reducers: dict[tuple[str, torch.dtype], list[int]] = {}  # bytes of the buckets of each reducer
    unsent = 0
    for layout in layouts:
        whole_dtype = _dtype(layout.dtype, gradient_dtype)
        sent = _dtype(layout.dtype, reduce_dtype or gradient_dtype)
        one_rank = layout.world == 1
        total += _bucket(layout, min(stage, 1) if one_rank else stage, whole_dtype, sent)
        if stage == 2 and not one_rank:
            key = layout.kind if layout.kind in ("partial", "tied") else "", sent  # each group has its reducers
            sizes_of_reducers.setdefault(key, []).append(layout.size * sent.itemsize)
            if accumulating:  # the gradients that are not sent yet are in this buffer
                total += MemoryAccount(gradients=layout.size * whole_dtype.itemsize)
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
    pipelined: bool = False,
    activations: int = 0,
) -> MemoryAccount:
    """Return the bytes that a rank holds at stage 3 (`tpfuse.zero.fully_sharded`).

    units: the shapes of each unit's parameters, unsharded over the data-parallel ranks (this rank's tensor-parallel
    shard of them); the last unit is the model itself, with the parameters that no other unit has. world: the number of
    ranks that share them. dtype: the parameters' dtype. reduce_dtype, accumulating, activations: as in `account`.
    pipelined: whether the rank is one of a pipeline.

    The unit that computes and the next one are gathered at the same time, and the model's own parameters always; in a
    step of a pipeline all units are. The gradients of one unit are whole: as they arrive, and as they are sent.
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
        at_once = sorted(padded[:-1], reverse=True)[: None if pipelined else 2]
        gathered = (padded[-1] + sum(at_once)) * world
    largest = max(sizes, default=0)
    return total + MemoryAccount(
        gradients=largest * dtype.itemsize + (whole * sent.itemsize if accumulating else 0),
        buffers=gathered * dtype.itemsize + max(padded, default=0) * world * sent.itemsize,
        activations=activations,
        padding=(shard - whole // world) * state.itemsize,
    )


def _padded_shard(shape: tuple[int, ...], world: int) -> int:
    """Return the number of elements, padding included, that each rank has of a parameter at stage 3."""
    size = shape[shard_dim(shape, world)]
    return -(-size // world) * (math.prod(shape) // size)


def _bucket(layout: BucketLayout, stage: int, whole_dtype: torch.dtype, sent: torch.dtype) -> MemoryAccount:
    """Return the bytes that a rank holds of one bucket all the time."""
    state = layout.state_dtype.itemsize
    widths = Widths(layout.dtype.itemsize, whole_dtype.itemsize, state, state if layout.dtype in HALF else 0, state)
    size, shard = layout.size, layout.size // layout.world
    buffers = size * sent.itemsize if stage < 2 and sent != whole_dtype else 0
    if stage == 1 and layout.world > 1 and sent != layout.state_dtype:
        buffers += shard * state  # sums of gradients that are sent in less than float32 have their own buffer
    padding = (size - _elements(layout)) * layout.dtype.itemsize
    return states(size, shard, stage, widths) + MemoryAccount(buffers=buffers, padding=padding)


def _elements(layout: BucketLayout) -> int:
    """Return the number of elements that belong to parameters, without padding."""
    return sum(segment.stop - segment.start for segment in layout.segments)


def _dtype(dtype: torch.dtype, choice: Width) -> torch.dtype:
    return summed_dtype(dtype) if choice == "float32" else dtype
