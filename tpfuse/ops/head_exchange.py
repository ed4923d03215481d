"""Heads for tokens: ranks that have all heads of some tokens come to have all tokens of some heads, and back.

What Ulysses does before attention and behind it (arXiv:2309.14509). Several tensors go in one all-to-all, and each
direction is the other's backward pass. In memory tokens are in front of heads, as models have them, so that what goes
to a rank, and what is put in order, are rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm import collectives
from tpfuse.ops.autograd import once_differentiable


def to_heads(tensors: Sequence[Tensor], places: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Each [B, H, n, D], this rank's tokens -> [B, H / world, world * n, D], all ranks' tokens in order.

    H: each tensor's own, a multiple of world. places: [world, n] int64, where each rank's tokens are in that order.
    """
    return list(_Exchange.apply(places, group, True, *tensors))  # type: ignore[no-untyped-call]


def to_tokens(tensors: Sequence[Tensor], places: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The inverse of `to_heads`."""
    return list(_Exchange.apply(places, group, False, *tensors))  # type: ignore[no-untyped-call]


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, places: Tensor, group: dist.ProcessGroup, for_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(places)
        ctx.group, ctx.for_heads = group, for_heads
        return _exchanged(tensors, places, group, for_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return None, None, None, *_exchanged(grads, places, ctx.group, not ctx.for_heads)


def _exchanged(
    tensors: Sequence[Tensor], places: Tensor, group: dist.ProcessGroup, for_heads: bool
) -> tuple[Tensor, ...]:
    exchange = _heads_of_tokens if for_heads else _tokens_of_heads
    return exchange([x.transpose(1, 2) for x in tensors], places, group)


def _heads_of_tokens(tensors: Sequence[Tensor], places: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """[B, n, H, D] each -> [B, H / world, world * n, D] each."""
    world, length = places.shape
    shares = [x.shape[2] // world for x in tensors]
    batch, size = tensors[0].shape[0], tensors[0].shape[3]
    sent = tensors[0].new_empty(world, batch, length, sum(shares), size)
    for rank in range(world):
        parts = [x[:, :, rank * share : (rank + 1) * share] for x, share in zip(tensors, shares, strict=True)]
        torch.cat(parts, 2, out=sent[rank])
    received = collectives.all_to_all(sent, group)
    whole = tensors[0].new_empty(batch, world * length, sum(shares), size)
    for rank in range(world):
        whole.index_copy_(1, places[rank], received[rank])
    return tuple(x.transpose(1, 2) for x in whole.split(shares, 2))


def _tokens_of_heads(tensors: Sequence[Tensor], places: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """[B, world * n, h, D] each -> [B, world * h, n, D] each."""
    world, length = places.shape
    shares = [x.shape[2] for x in tensors]
    whole = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), 2)
    batch, size = whole.shape[0], whole.shape[3]
    sent = whole.new_empty(world, batch, length, sum(shares), size)
    for rank in range(world):
        torch.index_select(whole, 1, places[rank], out=sent[rank])
    received = collectives.all_to_all(sent, group)
    found = []
    for part in received.split(shares, 3):
        tokens = part.permute(1, 2, 0, 3, 4).reshape(batch, length, world * part.shape[3], size)
        found.append(tokens.transpose(1, 2))
    return tuple(found)
