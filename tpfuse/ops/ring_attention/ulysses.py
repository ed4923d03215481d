"""Heads for tokens: ranks that have all heads of some tokens exchange them for all tokens of some heads, and back.

Ulysses does this before and after attention (arXiv:2309.14509). Several tensors are exchanged at once, and each
direction is the other's backward pass. In memory, as in models, the dimension of tokens comes before that of heads, so
that rows are moved.

CPU ranks that share memory write what each rank needs to their slots, and copy it from the slots of the others to its
destination, in one epoch of a channel (`tpfuse.comm.channel`). Other ranks use one all-to-all.
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
from tpfuse.comm.dispatch import choose_implementation
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.comm.trace import span
from tpfuse.ops.autograd import once_differentiable

TokenSlices = tuple[tuple[tuple[slice, slice], ...], ...]


def find_token_slices(positions: Tensor) -> TokenSlices:
    """Return for each rank pairs of slices (some of its tokens, where they are among all tokens by position).

    positions: [world, n] int64: the positions of each rank's tokens, all different.
    """
    order = positions.flatten().argsort().argsort().view(positions.shape)
    return tuple(_slices_of(row) for row in order.tolist())


def _slices_of(row: list[int]) -> tuple[tuple[slice, slice], ...]:
    slices, first = [], 0
    while first < len(row):
        step = row[first + 1] - row[first] if first + 1 < len(row) else 1
        stop = first + 1
        while stop < len(row) and row[stop] - row[stop - 1] == step:
            stop += 1
        slices.append((slice(first, stop), slice(row[first], row[stop - 1] + 1, step)))
        first = stop
    return tuple(slices)


def to_heads(
    tensors: Sequence[Tensor], token_slices: TokenSlices, group: dist.ProcessGroup, call: str = ""
) -> list[Tensor]:
    """Exchange each [B, H, n, D], this rank's tokens, for [B, H / world, world * n, D], all tokens by position.

    Each tensor has its own H, a multiple of world; all have one dtype. call: a description of the operation that needs
    the heads, which must be the same on every rank.
    """
    return list(_Exchange.apply(token_slices, group, call, True, *tensors))  # type: ignore[no-untyped-call]


def to_tokens(
    tensors: Sequence[Tensor], token_slices: TokenSlices, group: dist.ProcessGroup, call: str = ""
) -> list[Tensor]:
    """Exchange this rank's heads of all tokens for all heads of its tokens: the inverse of `to_heads`."""
    return list(_Exchange.apply(token_slices, group, call, False, *tensors))  # type: ignore[no-untyped-call]


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, token_slices: TokenSlices, group: dist.ProcessGroup, call: str, for_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.token_slices, ctx.group, ctx.call, ctx.for_heads = token_slices, group, call, for_heads
        return _exchanged(tensors, token_slices, group, call, for_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *_exchanged(grads, ctx.token_slices, ctx.group, ctx.call, not ctx.for_heads)


def _exchanged(
    tensors: Sequence[Tensor], token_slices: TokenSlices, group: dist.ProcessGroup, call: str, for_heads: bool
) -> tuple[Tensor, ...]:
    world, first = len(token_slices), tensors[0]
    tensors = [x.transpose(1, 2) for x in tensors]
    tokens = first.shape[2] * world if for_heads else first.shape[2] // world
    outs = [x.new_empty(x.shape[0], tokens, _heads(x, world, for_heads), x.shape[3]) for x in tensors]
    shapes = [(x.shape[0], min(x.shape[1], tokens), min(x.shape[2], out.shape[2]), x.shape[3])
              for x, out in zip(tensors, outs, strict=True)]  # fmt: skip
    choice = choose_implementation(first.device, first.dtype, group)
    if choice.implementation == "direct" and choice.memory is not None:
        _through_slots(choice.memory, call, tensors, outs, shapes, token_slices, for_heads)
    else:
        sent = first.new_empty(world, sum(map(math.prod, shapes)))
        for rank in range(world):
            _put(tensors, _parts(sent[rank], shapes), rank, token_slices[rank], for_heads)
        received = collectives.all_to_all(sent, group)
        for rank in range(world):
            _take(_parts(received[rank], shapes), outs, rank, token_slices[rank], for_heads)
    return tuple(out.transpose(1, 2) for out in outs)


def _heads(x: Tensor, world: int, for_heads: bool) -> int:
    return x.shape[2] // world if for_heads else x.shape[2] * world


def _through_slots(
    memory: SymmetricMemory,
    call: str,
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    token_slices: TokenSlices,
    for_heads: bool,
) -> None:
    world, own, dtype, op = memory.world, memory.rank, tensors[0].dtype, "exchange of heads"
    row = sum(map(math.prod, shapes))
    described = f"{op} {dtype} {[list(shape) for shape in shapes]} {call}"
    with memory.guard(described), span("communication", op):
        channel = memory.channel(Channel, "exchange of heads", slot_size(world * row * dtype.itemsize))
        slots = channel.next_slots(dtype, world, row)
        for rank in channel.others:
            _put(tensors, _parts(slots[own][rank], shapes), rank, token_slices[rank], for_heads)
        epoch = channel.signal()
        _keep(tensors, outs, own, token_slices[own], for_heads)
        for rank in channel.others:
            channel.wait_for(rank, epoch, op)
            _take(_parts(slots[rank][own], shapes), outs, rank, token_slices[rank], for_heads)


def _parts(row: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return views [B, n, h, D] of a row: the part of each tensor that one rank sends to another."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(torch.split(row, sizes), shapes, strict=True)]


def _put(
    tensors: Sequence[Tensor], parts: Sequence[Tensor], rank: int, slices: tuple[tuple[slice, slice], ...], heads: bool
) -> None:
    """Write to `parts` what `rank` needs of the tensors: its heads, or its tokens."""
    for x, part in zip(tensors, parts, strict=True):
        if heads:
            part.copy_(x[:, :, rank * part.shape[2] : (rank + 1) * part.shape[2]])
        else:
            for of_rank, of_all in slices:
                part[:, of_rank].copy_(x[:, of_all])


def _keep(
    tensors: Sequence[Tensor], outs: Sequence[Tensor], own: int, slices: tuple[tuple[slice, slice], ...], heads: bool
) -> None:
    """Copy from `tensors` to `outs` what stays on this rank."""
    for x, out in zip(tensors, outs, strict=True):
        count = min(x.shape[2], out.shape[2])
        own_heads = slice(own * count, (own + 1) * count)
        for of_rank, of_all in slices:
            if heads:
                out[:, of_all].copy_(x[:, of_rank, own_heads])
            else:
                out[:, of_rank, own_heads].copy_(x[:, of_all])


def _take(
    parts: Sequence[Tensor], outs: Sequence[Tensor], rank: int, slices: tuple[tuple[slice, slice], ...], heads: bool
) -> None:
    """Write to `outs` what came from `rank`: its tokens, or its heads."""
    for part, out in zip(parts, outs, strict=True):
        if heads:
            for of_rank, of_all in slices:
                out[:, of_all].copy_(part[:, of_rank])
        else:
            out[:, :, rank * part.shape[2] : (rank + 1) * part.shape[2]].copy_(part)
