"""cross_entropy: -log softmax(logits)[target] where each rank holds a slice of the vocabulary.

    loss = log Σ exp(logit - m) - (logit[target] - m)

The maximum m, the sum and the target's logit are reduced over ranks (arXiv:1909.08053, section 3) by one all-gather of
three numbers for each row and rank, instead of an all-reduce of the maxima and then one of the sums. A rank so waits
only once, and every rank adds in the order of ranks, so that all have the same bits with any backend. Backward needs no
communication: it computes softmax - one_hot on each slice.

The gradient is a new tensor and does not overwrite the logits: they belong to the caller, who may use them for a second
loss, for a metric or for another call of backward, which the operator cannot know. `linear_cross_entropy` owns its
logits and overwrites them.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfuse.comm import collectives
from tpfuse.comm.layout import check_local
from tpfuse.comm.mesh import check_group, named_group, rank_and_size, shard_range
from tpfuse.comm.sum_order import summed_dtype
from tpfuse.kernels.cross_entropy import (
    IGNORE,
    TORCH_IGNORE,
    cross_entropy_backward,
    cross_entropy_backward_,
    cross_entropy_combine,
    cross_entropy_forward,
)
from tpfuse.ops.autograd import once_differentiable, registered
from tpfuse.ops.checks import check_range
from tpfuse.switches import use_triton

__all__ = ["IGNORE", "TORCH_IGNORE", "cross_entropy", "is_ignored"]


def is_ignored(target: Tensor) -> Tensor:
    """Return which targets have no loss, bool, in the shape of `target`: those that are -1 or -100."""
    return (target == IGNORE) | (target == TORCH_IGNORE)


def cross_entropy(logits: Tensor, target: Tensor, vocabulary: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the loss of each position, in nats: [M], equal on all ranks, in the dtype of the computation.

    logits: [M, this rank's slice of the vocabulary], float32, float64 or a half type, which is computed in float32;
    target: [M] int64 global token numbers, -1 or -100 for no loss. Raise ValueError if the logits are not this rank's
    slice, for a target of another shape or dtype and, on CPUs, for a target outside the vocabulary. On CUDA that check
    would stop the stream, and under torch.compile break the graph: there the loss is NaN, or torch's own error if torch
    computes it for one rank.
    """
    check_group("cross_entropy", group)
    check_local("cross_entropy", logits=logits, target=target)
    rank, world = rank_and_size(group)
    start, stop = shard_range(vocabulary, rank, world)
    if logits.ndim != 2 or logits.shape[1] != stop - start:
        raise ValueError(f"logits {tuple(logits.shape)}: expected [M, {stop - start}] on rank {rank}")
    if not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype}: expected a float dtype")
    check_target(target, logits, vocabulary)
    if use_triton(logits):
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
    elif logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if group is None and not use_triton(logits):
        return F.cross_entropy(logits, as_torch(target), reduction="none")
    name = None if group is None else group.group_name
    loss: Tensor = _forward(logits, target, vocabulary, start, name)[0]
    return loss


def check_target(target: Tensor, rows: Tensor, vocabulary: int) -> None:
    """Raise ValueError unless target is [M] int64 for `rows` [M, …], on its device, of numbers of the vocabulary."""
    if target.shape != rows.shape[:1] or target.dtype != torch.int64:
        raise ValueError(f"target is {target.dtype} {tuple(target.shape)}: expected int64 ({rows.shape[0]},)")
    if target.device != rows.device:
        raise ValueError(f"target is on {target.device}: expected {rows.device}")
    expected = f"expected 0 to {vocabulary - 1}, or {IGNORE} or {TORCH_IGNORE} for no loss"
    message = f"targets from {{low}} to {{high}}: {expected}"
    check_range(target, vocabulary - 1, message, besides=(IGNORE, TORCH_IGNORE))


def as_torch(target: Tensor) -> Tensor:
    """Return the target for torch's functions, which by default ignore -100 alone."""
    return target.masked_fill(target == IGNORE, TORCH_IGNORE)


def losses(
    logits: Tensor, target: Tensor, vocabulary: int, group: dist.ProcessGroup | None, *, triton: bool
) -> tuple[Tensor, Tensor]:
    """Return the losses [M] and, for `gradient_`, the maximum and total of all shards [2, M]; not differentiable.

    logits: this rank's slice, in the dtype of the computation. triton: whether Triton's kernels compute. The call is
    one collective of the group.
    """
    rank, world = rank_and_size(group)
    start, _ = shard_range(vocabulary, rank, world)
    statistics = cross_entropy_forward(logits, target, start) if triton else _statistics(logits, target, start)
    gathered = collectives.all_gather(statistics, group).view(world, 3, len(target))
    return cross_entropy_combine(gathered, target, vocabulary) if triton else _combined(gathered, target, vocabulary)


def gradient_(
    logits: Tensor, target: Tensor, start: int, normalizer: Tensor, scale: Tensor | None, *, triton: bool
) -> Tensor:
    """Replace this rank's logits by (softmax - one_hot) scale, rows without a loss by 0, and return them.

    scale: [M], None for 1.
    """
    if triton:
        return cross_entropy_backward_(logits, target, start, normalizer, scale)
    owned, column = _owned(target, start, logits.shape[1])
    maximum, total = normalizer
    scale = torch.where(is_ignored(target), 0, torch.ones_like(total) if scale is None else scale)
    logits.sub_(maximum.unsqueeze(1)).exp_().mul_((scale / total).unsqueeze(1))
    if logits.shape[1]:
        logits.scatter_add_(1, column.unsqueeze(1), torch.where(owned, -scale, 0).unsqueeze(1))
    return logits


def _owned(target: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return for each row whether its target is in the slice, and the target's column in it (0 for other rows)."""
    owned = (target >= start) & (target < start + width)
    return owned, torch.where(owned, target - start, 0)


def _statistics(logits: Tensor, target: Tensor, start: int) -> Tensor:
    """Compute `cross_entropy_forward` by torch, in the logits' dtype."""
    rows, width = logits.shape
    statistics = logits.new_zeros(3, rows)
    if not width:
        statistics[0] = -torch.inf
        return statistics
    owned, column = _owned(target, start, width)
    statistics[0] = logits.amax(1)
    lowest = torch.finfo(logits.dtype).min  # a row of -inf adds 0 to the total, not NaN
    statistics[1] = (logits - statistics[0].clamp(min=lowest).unsqueeze(1)).exp_().sum(1)
    statistics[2] = torch.where(owned, logits.gather(1, column.unsqueeze(1)).squeeze(1), 0)
    return statistics


def _combined(statistics: Tensor, target: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Compute `cross_entropy_combine` by torch."""
    maximum = statistics[:, 0].amax(0)
    total = (statistics[:, 1] * (statistics[:, 0] - maximum).exp()).sum(0)
    ignored = is_ignored(target)
    total = torch.where(ignored | ((target >= 0) & (target < vocabulary)), total, torch.nan)
    loss = total.log() - (statistics[:, 2].sum(0) - maximum)
    return torch.where(ignored, 0, loss), torch.stack([maximum, total])


@registered("tpfuse::cross_entropy_forward")
def _forward(
    logits: Tensor, target: Tensor, vocabulary: int, start: int, group_name: str | None
) -> tuple[Tensor, Tensor]:
    group = None if group_name is None else named_group(group_name)
    return losses(logits, target, vocabulary, group, triton=use_triton(logits))


@_forward.register_fake
def _(logits: Tensor, target: Tensor, vocabulary: int, start: int, group_name: str | None) -> tuple[Tensor, Tensor]:
    rows, dtype = logits.shape[0], summed_dtype(logits.dtype)
    return logits.new_empty(rows, dtype=dtype), logits.new_empty(2, rows, dtype=dtype)


@registered("tpfuse::cross_entropy_backward")
def _logits_gradient(logits: Tensor, target: Tensor, normalizer: Tensor, grad: Tensor, start: int) -> Tensor:
    if use_triton(logits):
        return cross_entropy_backward(logits, target, start, normalizer, grad)
    return gradient_(logits.clone(), target, start, normalizer, grad, triton=False)


@_logits_gradient.register_fake
def _(logits: Tensor, target: Tensor, normalizer: Tensor, grad: Tensor, start: int) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, _, ctx.start, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, target, output[1])


@once_differentiable
def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return _logits_gradient(*ctx.saved_tensors, grad, ctx.start), None, None, None, None


_forward.register_autograd(_backward, setup_context=_setup_context)
