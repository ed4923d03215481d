"""Heads for tokens: ranks that have all heads of some tokens come to have all tokens of some heads, and back.

What Ulysses does before attention and behind it (arXiv:2309.14509). Several tensors go at once, and each direction is
the other's backward pass. In memory tokens are in front of heads, as models have them, so that what is moved is rows.

CPU ranks that share memory put what is for each rank into their slots, and copy from the slots of the others to where
it belongs, in one round of a channel (`tpfuse.comm.channel`); others make one all-to-all of it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm import collectives
from tpfuse.comm.channel import Channel, slot_size
from tpfuse.comm.choice import choose_implementation
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.ops.autograd import once_differentiable

Places = tuple[tuple[tuple[slice, slice], ...], ...]


def places_of(positions: Tensor) -> Places:
    """For each rank runs of (which of its tokens, where they are among all by position).

    positions: [world, n] int64, of each rank's tokens, all different.
    """
    order = positions.flatten().argsort().argsort().view(positions.shape)
    return tuple(_runs(row) for row in order.tolist())


def _runs(row: list[int]) -> tuple[tuple[slice, slice], ...]:
    found, first = [], 0
    while first < len(row):
        step = row[first + 1] - row[first] if first + 1 < len(row) else 1
        stop = first + 1
        while stop < len(row) and row[stop] - row[stop - 1] == step:
            stop += 1
        found.append((slice(first, stop), slice(row[first], row[stop - 1] + 1, step)))
        first = stop
    return tuple(found)


def to_heads(tensors: Sequence[Tensor], places: Places, group: dist.ProcessGroup, call: str = "") -> list[Tensor]:
    """Each [B, H, n, D], this rank's tokens -> [B, H / world, world * n, D], all ranks' tokens by position.

    H: each tensor's own, a multiple of world; of one dtype. call: a description of what the heads are for, which must
    be the same on every rank.
    """
    return list(_Exchange.apply(places, group, call, True, *tensors))  # type: ignore[no-untyped-call]


def to_tokens(tensors: Sequence[Tensor], places: Places, group: dist.ProcessGroup, call: str = "") -> list[Tensor]:
    """The inverse of `to_heads`."""
    return list(_Exchange.apply(places, group, call, False, *tensors))  # type: ignore[no-untyped-call]


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, places: Places, group: dist.ProcessGroup, call: str, for_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.places, ctx.group, ctx.call, ctx.for_heads = places, group, call, for_heads
        return _exchanged(tensors, places, group, call, for_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *_exchanged(grads, ctx.places, ctx.group, ctx.call, not ctx.for_heads)


def _exchanged(
    tensors: Sequence[Tensor], places: Places, group: dist.ProcessGroup, call: str, for_heads: bool
) -> tuple[Tensor, ...]:
    world, first = len(places), tensors[0]
    tensors = [x.transpose(1, 2) for x in tensors]
    tokens = first.shape[2] * world if for_heads else first.shape[2] // world
    outs = [x.new_empty(x.shape[0], tokens, _heads(x, world, for_heads), x.shape[3]) for x in tensors]
    shapes = [(x.shape[0], min(x.shape[1], tokens), min(x.shape[2], out.shape[2]), x.shape[3])
              for x, out in zip(tensors, outs, strict=True)]  # fmt: skip
    choice = choose_implementation(first.device, first.dtype, group)
    if choice.implementation == "direct" and choice.memory is not None:
        _through_slots(choice.memory, call, tensors, outs, shapes, places, for_heads)
    else:
        sent = first.new_empty(world, sum(map(math.prod, shapes)))
        for rank in range(world):
            _put(tensors, _parts(sent[rank], shapes), rank, places[rank], for_heads)
        received = collectives.all_to_all(sent, group)
        for rank in range(world):
            _take(_parts(received[rank], shapes), outs, rank, places[rank], for_heads)
    return tuple(out.transpose(1, 2) for out in outs)


def _heads(x: Tensor, world: int, for_heads: bool) -> int:
    return x.shape[2] // world if for_heads else x.shape[2] * world


def _through_slots(
    memory: SymmetricMemory,
    call: str,
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    places: Places,
    for_heads: bool,
) -> None:
    world, own, dtype, op = memory.world, memory.rank, tensors[0].dtype, "exchange of heads"
    row = sum(map(math.prod, shapes))
    with memory.guard(f"{op} {dtype} {[list(shape) for shape in shapes]} {call}"):
        channel = memory.channel(Channel, "exchange of heads", slot_size(world * row * dtype.itemsize))
        slots = channel.next_slots(dtype, world, row)
        for rank in channel.others:
            _put(tensors, _parts(slots[own][rank], shapes), rank, places[rank], for_heads)
        epoch = channel.signal()
        _keep(tensors, outs, own, places[own], for_heads)
        for rank in channel.others:
            channel.wait_for(rank, epoch, op)
            _take(_parts(slots[rank][own], shapes), outs, rank, places[rank], for_heads)


def _parts(row: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """What one rank sends to another, of each tensor: [B, n, h, D]."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(torch.split(row, sizes), shapes, strict=True)]


def _put(
    tensors: Sequence[Tensor], parts: Sequence[Tensor], rank: int, runs: tuple[tuple[slice, slice], ...], heads: bool
) -> None:
    """What is for `rank`: its heads, or its tokens."""
    for x, part in zip(tensors, parts, strict=True):
        if heads:
            part.copy_(x[:, :, rank * part.shape[2] : (rank + 1) * part.shape[2]])
        else:
            for mine, where in runs:
                part[:, mine].copy_(x[:, where])


def _keep(
    tensors: Sequence[Tensor], outs: Sequence[Tensor], own: int, runs: tuple[tuple[slice, slice], ...], heads: bool
) -> None:
    """What stays on this rank."""
    for x, out in zip(tensors, outs, strict=True):
        share = min(x.shape[2], out.shape[2])
        mine_too = slice(own * share, (own + 1) * share)
        for mine, where in runs:
            if heads:
                out[:, where].copy_(x[:, mine, mine_too])
            else:
                out[:, mine, mine_too].copy_(x[:, where])


def _take(
    parts: Sequence[Tensor], outs: Sequence[Tensor], rank: int, runs: tuple[tuple[slice, slice], ...], heads: bool
) -> None:
    """What is from `rank`: its tokens, or its heads."""
    for part, out in zip(parts, outs, strict=True):
        if heads:
            for mine, where in runs:
                out[:, where].copy_(part[:, mine])
        else:
            out[:, :, rank * part.shape[2] : (rank + 1) * part.shape[2]].copy_(part)
