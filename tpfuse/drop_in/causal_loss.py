"""The loss of causal language models of transformers, from shards of the tokens and slices of the vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpfuse.drop_in.sharded_tokens import ForwardPass, current
from tpfuse.ops.collectives import all_reduce
from tpfuse.ops.cross_entropy import IGNORE, TORCH_IGNORE, cross_entropy, is_ignored


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = TORCH_IGNORE,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the loss of transformers' causal language models, equal on all ranks that compute it together.

    It is the sum over all tokens divided by num_items_in_batch (None for the number of labels), in float32, or float64
    for float64. In a forward pass of `ParallelForward` the logits may be those of this rank's tokens and slice of
    the vocabulary.
    """
    running = current.now or ForwardPass(None)
    if running.targets is not None:
        target, num_items_in_batch = running.targets, running.items
    elif shift_labels is not None:
        target = shift_labels
    else:
        target = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = target.reshape(-1).to(logits.device)
    target = counted(target, ignore_index)
    group = None if running.head is None else running.head.group
    logits = logits.reshape(-1, logits.shape[-1])
    losses = cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target, vocab_size, group)
    items = (~is_ignored(target)).sum() if num_items_in_batch is None else num_items_in_batch
    loss = losses.sum() / (items.to(losses.device) if isinstance(items, Tensor) else items)
    if running.tokens is None:
        return loss
    context = running.tokens.sharded.context
    for context_group in context.groups:
        loss = all_reduce(loss, context_group)
    return context.leave(loss)


def counted(labels: Tensor, ignore_index: int) -> Tensor:
    """Return the labels, -1 for those that the caller's `ignore_index` leaves out."""
    return labels if ignore_index == TORCH_IGNORE else labels.masked_fill(labels == ignore_index, IGNORE)
