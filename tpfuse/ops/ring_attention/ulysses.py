"""Heads for tokens: ranks that have all heads of some tokens exchange them for all tokens of some heads, and back.

Ulysses does this before and after attention (arXiv:2309.14509), and the other way round in backward. Several tensors
are exchanged together. In memory, as in models, the dimension of tokens comes before that of heads, so that rows move.

CPU ranks that share memory write what each rank needs to their slots, and copy it from the slots of the others to its
destination, in one epoch of a channel (`tpfuse.comm.channel`). Other ranks use one all-to-all.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import collectives
from tpfuse.comm.channel import Channel, slot_size
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.comm.trace import span

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


@dataclass(frozen=True)
class HeadExchange:
    """The exchange of heads for tokens among the ranks of a group, for one call of attention."""

    # Where each rank's tokens are among the tokens of all ranks.
    token_slices: TokenSlices
    group: dist.ProcessGroup
    # The memory that the ranks share, through which they exchange; None for an all-to-all.
    memory: SymmetricMemory | None
    # The number of heads of keys.
    kv_heads: int
    # The group, and the groups with whose ranks its ranks attend afterwards.
    together: tuple[dist.ProcessGroup, ...]

    def compare(self, call: str, device: torch.device) -> None:
        """Raise Disagreement, on every rank, unless all ranks have the same description of the call."""
        collectives.compare(call, device, *self.together)

    def own(self, heads: int) -> slice:
        """Return which of `heads` heads this rank gets."""
        count = heads // self.group.size()
        return slice(self.group.rank() * count, (self.group.rank() + 1) * count)

    def repeated(self, x: Tensor) -> Tensor:
        """Return keys or values [B, Hk, n, D] with their heads repeated, if necessary, so that each rank gets one."""
        world = self.group.size()
        return x if self.kv_heads % world == 0 else x.repeat_interleave(world // self.kv_heads, 1)

    def summed(self, grad: Tensor) -> Tensor:
        """Return the gradient [B, Hk, n, D] of the argument of `repeated`."""
        batch, repeated, tokens, size = grad.shape
        return grad if repeated == self.kv_heads else grad.reshape(batch, self.kv_heads, -1, tokens, size).sum(2)

    def to_heads(self, call: str, *tensors: Tensor) -> list[Tensor]:
        """Exchange each [B, H, n, D], this rank's tokens, for [B, H / world, world * n, D], all tokens by position.

        Each tensor has its own H, a multiple of world; all have one dtype. call: a description of the operation that
        needs the heads, which must be the same on every rank.
        """
        return self._exchanged(call, tensors, for_heads=True)

    def to_tokens(self, call: str, *tensors: Tensor) -> list[Tensor]:
        """Exchange this rank's heads of all tokens for all heads of its tokens: the inverse of `to_heads`."""
        return self._exchanged(call, tensors, for_heads=False)

    def _exchanged(self, call: str, tensors: Sequence[Tensor], *, for_heads: bool) -> list[Tensor]:
        world, first, slices = len(self.token_slices), tensors[0], self.token_slices
        tensors = [x.transpose(1, 2) for x in tensors]
        tokens = first.shape[2] * world if for_heads else first.shape[2] // world
        heads = [x.shape[2] // world if for_heads else x.shape[2] * world for x in tensors]
        outs = [x.new_empty(x.shape[0], tokens, h, x.shape[3]) for x, h in zip(tensors, heads, strict=True)]
        shapes = [(x.shape[0], min(x.shape[1], tokens), min(x.shape[2], out.shape[2]), x.shape[3])
                  for x, out in zip(tensors, outs, strict=True)]  # fmt: skip
        if self.memory is not None:
            _through_slots(self.memory, call, tensors, outs, shapes, slices, for_heads)
        else:
            sent = first.new_empty(world, sum(map(math.prod, shapes)))
            for rank in range(world):
                _put(tensors, _parts(sent[rank], shapes), rank, slices[rank], for_heads)
            received = collectives.all_to_all(sent, self.group)
            for rank in range(world):
                _take(_parts(received[rank], shapes), outs, rank, slices[rank], for_heads)
        return [out.transpose(1, 2) for out in outs]


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


def _pairs(
    x: Tensor, part: Tensor, rank: int, slices: tuple[tuple[slice, slice], ...], *, by_heads: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (a view of x, the same elements in `part`) for what `rank` has of x: its heads, or its tokens."""
    if by_heads:
        count = part.shape[2]
        yield x[:, :, rank * count : (rank + 1) * count], part
    else:
        for of_rank, of_all in slices:
            yield x[:, of_all], part[:, of_rank]


def _put(tensors: Sequence[Tensor], parts: Sequence[Tensor], rank: int, slices: Any, heads: bool) -> None:
    """Write to `parts` what `rank` needs of the tensors: its heads, or its tokens."""
    for x, part in zip(tensors, parts, strict=True):
        for source, target in _pairs(x, part, rank, slices, by_heads=heads):
            target.copy_(source)


def _keep(tensors: Sequence[Tensor], outs: Sequence[Tensor], own: int, slices: Any, heads: bool) -> None:
    """Copy from `tensors` to `outs` what stays on this rank."""
    for x, out in zip(tensors, outs, strict=True):
        count = min(x.shape[2], out.shape[2])
        whole, part = (out, x) if heads else (x, out)
        for of_all, of_rank in _pairs(whole, part[:, :, own * count : (own + 1) * count], own, slices, by_heads=False):
            (of_all if heads else of_rank).copy_(of_rank if heads else of_all)


def _take(parts: Sequence[Tensor], outs: Sequence[Tensor], rank: int, slices: Any, heads: bool) -> None:
    """Write to `outs` what came from `rank`: its tokens, or its heads."""
    for part, out in zip(parts, outs, strict=True):
        for target, source in _pairs(out, part, rank, slices, by_heads=not heads):
            target.copy_(source)
