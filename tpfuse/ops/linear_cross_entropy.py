"""linear_cross_entropy: Σ weights[m] * cross_entropy(x Wᵀ)[m], without the logits of all tokens in memory at once.

The tokens are processed in chunks. The sum's gradient with respect to a chunk's logits, (softmax - one_hot) weights,
depends on later results only by one factor, the upstream gradient of the sum. So forward writes the gradient over the
chunk's logits while they are in memory, multiplies it to get dX and dW, and continues with the next chunk; backward
scales both (Liger-Kernel, arXiv:2410.10989). That makes three products, as many as without chunks; computing the logits
again in backward would make four. It is also why the result is a weighted sum: if each loss had an upstream gradient of
its own, forward could not know it.

A chunk has an eighth of the tokens, but 4096 to 16,384 (1024 on a CPU). dW is added to a float32 buffer in every chunk:
12 bytes of traffic for each entry of W against 2 operations for each token of the chunk, so that 4096 tokens make 680
operations for each byte, while an H100 needs 300 to be bound by arithmetic; more tokens leave less of that traffic. The
logits of 4096 tokens take 8 KiB for each entry of the vocabulary, 0.4 GB for GPT-2's, and an eighth of all logits is
little beside what else a large micro-batch keeps. A call with one chunk has no buffer: dW is stored in its own dtype.

GPT-2's vocabulary of 50257 tokens is no multiple of 16. On GPUs the rows of logits begin at multiples of 16 entries,
and each product is one of the first 50256 tokens and a small one of the others: the operands of the large one have the
sizes and strides for which cuBLAS takes tensor cores (its documentation, "Tensor Core Usage"), and no weight is copied.

The vocabulary V may be sharded. On each of R ranks, with M tokens in chunks of m:

    x [M, C], equal on all    W [V / R, C], this rank's rows    target [M]    losses [M], equal on all

    forward    logits [m, V / R] of a chunk = x Wᵀ; loss    all-gather of three numbers per token, once a chunk
    dgrad      dx [M, C], this rank's partial sum           none here: whoever gave x sums it
    wgrad      dW [V / R, C], this rank's                   none
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfuse.comm.layout import check_local
from tpfuse.comm.mesh import check_group, named_group, rank_and_size, shard_range
from tpfuse.comm.sum_order import summed_dtype
from tpfuse.ops.autograd import autocast, once_differentiable, registered, wanted_gradients
from tpfuse.ops.cross_entropy import as_torch, check_target, gradient_, is_ignored, losses
from tpfuse.switches import use_triton

_LEAST_CHUNK, _LARGEST_CHUNK, _CHUNKS = 4096, 16384, 8  # tokens on a GPU, and the number of chunks between both
_ALIGNMENT = 16  # entries: TMA, wide loads, store masks and cuBLAS need rows of logits at multiples of 32 bytes


def chunk_of(tokens: int) -> int:
    """Return the number of tokens of a chunk on a GPU, by default."""
    return min(max(-(-tokens // _CHUNKS), _LEAST_CHUNK), _LARGEST_CHUNK)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    vocabulary: int,
    group: dist.ProcessGroup | None = None,
    *,
    weights: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (Σ weights[m] loss[m], the losses [M] in nats), equal on all ranks; the losses have no gradient.

    x: [M, C], all tokens on every rank; weight: [this rank's slice of the vocabulary, C], of x's dtype; target: [M]
    int64 global token numbers, -1 or -100 for no loss; weights: [M], the factor of each loss, None for 1 (pass loss
    scale / tokens for a scaled mean). Both results are float32, float64 for float64. chunk_tokens: the number of tokens
    whose logits are in memory at once, equal on all ranks; default: see the module.

    The gradients of x and weight have the dtypes of x and weight. With a group, x's gradient is this rank's *partial*
    sum, that of its slice of the vocabulary. So x must come from `ops.collectives.all_gather` of sequence shards, whose
    backward reduce-scatters, or from `replicate`, whose backward all-reduces: they sum it. weight's gradient is this
    rank's own and complete. Gradients are computed in forward, if x or weight require them: to keep float16 from
    underflow, scale `weights`, not the upstream gradient, which comes later.

    Raise ValueError for shapes, dtypes or devices that do not match and, as `cross_entropy` does, for a target outside
    the vocabulary.
    """
    x_, weight_ = autocast(x, weight)
    check_local("linear_cross_entropy", target=target)
    _check(x_, weight_, vocabulary, group, weights, chunk_tokens)
    check_target(target, x, vocabulary)
    chunk = chunk_tokens or (1024 if x.device.type == "cpu" else chunk_of(len(x)))
    weights = None if weights is None else weights.to(summed_dtype(x_.dtype))
    grad = torch.is_grad_enabled()
    needs = (grad and x_.requires_grad, grad and weight_.requires_grad)
    name = None if group is None else group.group_name
    total, each, *_ = _forward(x_, weight_, target, weights, vocabulary, name, chunk, *needs)
    return total, each


def _check(
    x: Tensor,
    weight: Tensor,
    vocabulary: int,
    group: dist.ProcessGroup | None,
    weights: Tensor | None,
    chunk_tokens: int | None,
) -> None:
    operator = "linear_cross_entropy"
    check_group(operator, group)
    check_local(operator, x=x, weight=weight, weights=weights)
    rank, world = rank_and_size(group)
    start, stop = shard_range(vocabulary, rank, world)
    if x.ndim != 2:
        raise ValueError(f"{operator}: x has shape {tuple(x.shape)}: expected [M, C]")
    if not x.is_floating_point():
        raise ValueError(f"{operator}: x is {x.dtype}: expected a float dtype")
    if weight.shape != (stop - start, x.shape[1]):
        expected = (stop - start, x.shape[1])
        raise ValueError(f"{operator}: weight has shape {tuple(weight.shape)}: expected {expected} on rank {rank}")
    if weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(
            f"{operator}: weight is {weight.dtype} on {weight.device}: expected {x.dtype} on {x.device}, as x"
        )
    if weights is not None and (weights.shape != x.shape[:1] or not weights.is_floating_point()):
        raise ValueError(
            f"{operator}: weights is {weights.dtype} {tuple(weights.shape)}: expected float32 ({x.shape[0]},)"
        )
    if weights is not None and weights.device != x.device:
        raise ValueError(f"{operator}: weights is on {weights.device}: expected {x.device}, as x")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"{operator}: chunk_tokens {chunk_tokens}: expected at least 1")


def chunks(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    weights: Tensor | None,
    vocabulary: int,
    group: dist.ProcessGroup | None,
    chunk: int,
    needs_x: bool,
    needs_weight: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weighted sum, the losses, and dX and dW for an upstream gradient of 1, empty if not needed."""
    tokens, computed, wanted = len(x), summed_dtype(x.dtype), needs_x or needs_weight
    parts = _parts(len(weight), triton)
    each = x.new_empty(tokens, dtype=computed)
    grad_x = x.new_empty(x.shape if needs_x else 0)
    one_chunk = 0 < tokens <= chunk
    grad_weight = x.new_empty(weight.shape if needs_weight else 0, dtype=x.dtype if one_chunk else computed)
    if not one_chunk:
        grad_weight.zero_()
    for first in range(0, tokens, chunk):
        rows = slice(first, first + chunk)
        logits = _logits(x[rows], weight, parts, triton)
        scale = None if weights is None else weights[rows]
        each[rows] = _losses_and_gradient_(logits, target[rows], scale, vocabulary, group, wanted, triton)
        if not wanted:
            continue
        grad_logits = logits.to(x.dtype)
        if needs_x:
            torch.mm(grad_logits[:, parts[0]], weight[parts[0]], out=grad_x[rows])
            for part in parts[1:]:
                grad_x[rows].addmm_(grad_logits[:, part], weight[part])
        if needs_weight:
            for part in parts:
                _weight_gradient(grad_logits[:, part], x[rows], grad_weight[part], add=not one_chunk)
        del logits, grad_logits  # before those of the next chunk are allocated
    total = (each if weights is None else each * weights).sum()
    return total, each, grad_x, grad_weight.to(x.dtype)


def _parts(width: int, triton: bool) -> list[slice]:
    """Return the parts of the vocabulary whose products are computed apart, see the module.

    The small part is first: in dX its sum is rounded before that of the large one is added.
    """
    large = width // _ALIGNMENT * _ALIGNMENT
    return [slice(large, width), slice(0, large)] if triton and 0 < large < width else [slice(0, width)]


def _logits(x: Tensor, weight: Tensor, parts: list[slice], triton: bool) -> Tensor:
    """Return x Wᵀ, rounded to x's dtype; torch computes losses of half types in float32."""
    if not triton:
        return (x @ weight.t()).to(summed_dtype(x.dtype))
    logits = x.new_empty(len(x), -(-len(weight) // _ALIGNMENT) * _ALIGNMENT)[:, : len(weight)]
    for part in parts:
        torch.mm(x, weight[part].t(), out=logits[:, part])
    return logits


def _losses_and_gradient_(
    logits: Tensor,
    target: Tensor,
    scale: Tensor | None,
    vocabulary: int,
    group: dist.ProcessGroup | None,
    wanted: bool,
    triton: bool,
) -> Tensor:
    """Return the losses of a chunk; if `wanted`, replace its logits by their gradient, times scale."""
    if triton or group is not None:
        start, _ = shard_range(vocabulary, *rank_and_size(group))
        each, normalizer = losses(logits, target, vocabulary, group, triton=triton)
        if wanted:
            gradient_(logits, target, start, normalizer, scale, triton=triton)
        return each
    log_softmax = F.log_softmax(logits, 1)  # for a whole vocabulary, torch's own function has fewer passes
    each = F.nll_loss(log_softmax, as_torch(target), reduction="none")
    if wanted:
        scale = torch.where(is_ignored(target), 0, torch.ones_like(each) if scale is None else scale).unsqueeze(1)
        torch.exp(log_softmax, out=logits).mul_(scale).scatter_add_(1, target.clamp(min=0).unsqueeze(1), -scale)
    return each


def _weight_gradient(grad: Tensor, x: Tensor, out: Tensor, *, add: bool) -> None:
    """Write gradᵀ x to out, or add it."""
    if not add:
        torch.mm(grad.t(), x, out=out)
    elif out.dtype == x.dtype:
        out.addmm_(grad.t(), x)
    else:
        out.add_(grad.t() @ x)


def _times(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad [] times x, computed in grad's dtype and rounded once.

    By torch's rules, a tensor of no dimensions is converted to the other's dtype before the product, and CUDA does
    that: 1 / tokens would be rounded to bfloat16, and a loss scale of 2^16 would be infinite in float16. A tensor of
    one dimension is not converted.
    """
    return torch.mul(x, grad.view(1), out=torch.empty_like(x))


@registered(
    "tpfuse::linear_cross_entropy_forward",
    schema="(Tensor x, Tensor weight, Tensor target, Tensor? weights, SymInt vocabulary, str? group_name, SymInt chunk,"
    " bool needs_x, bool needs_weight) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(x: Tensor, weight: Tensor, target: Tensor, weights: Any, *call: Any) -> tuple[Tensor, ...]:
    vocabulary, group_name, chunk, needs_x, needs_weight = call
    group = None if group_name is None else named_group(group_name)
    return chunks(x, weight, target, weights, vocabulary, group, chunk, needs_x, needs_weight, use_triton(x))


@_forward.register_fake
def _(x: Tensor, weight: Tensor, *call: Any) -> tuple[Tensor, ...]:
    needs_x, needs_weight = call[-2:]
    each = x.new_empty(x.shape[0], dtype=summed_dtype(x.dtype))
    return (
        each.new_empty(()),
        each,
        x.new_empty(x.shape if needs_x else (0,)),
        x.new_empty(weight.shape if needs_weight else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    # Only the gradient of `weights` needs the losses, which may otherwise be changed in place.
    ctx.save_for_backward(output[1] if ctx.needs_input_grad[3] else None, *output[2:])


@once_differentiable
def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    each, *gradients = ctx.saved_tensors
    needs = wanted_gradients(ctx)
    grad_x, grad_weight = (_times(grad, x) if need else None for need, x in zip(needs, gradients, strict=False))
    return grad_x, grad_weight, None, each * grad if needs[3] else None, *[None] * 5


_forward.register_autograd(_backward, setup_context=_setup_context)
