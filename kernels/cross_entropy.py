"""cross_entropy: -log softmax(logits)[target], for one shard of the vocabulary at a time.

    maximum_r = max logit,  total_r = Σ exp(logit - maximum_r)             of each shard r, in one pass over its row
    maximum = max maximum_r,  total = Σ total_r exp(maximum_r - maximum)   of all shards, in the order of their ranks
    loss = log total - (target's logit - maximum)
    d loss / d logit = exp(logit - maximum) / total - [logit is the target's]

Each lane keeps its own running maximum and sum (Milakov and Gimelshein, arXiv:1805.02867), so that threads combine once
per row, not once per block. With d = logit - maximum one exponential, exp(-|d|), serves both cases: it scales the sum,
or it is the term that is added. The backward pass takes maximum and total rather than their log-sum-exp: at logits of
10^4 the rounding of a log-sum-exp is an error of 10^-3 in every probability, which this avoids.

Rows are read in place. A vocabulary of 50257 gives every row another alignment. Each row is therefore cut into a body
of whole 32-byte pieces, which vectors of 16 bytes read and write without a mask inside them, and at most 15 elements on
either side. Half types are upcast in registers; no float32 copy of the logits exists.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_dtype, check_floats, check_shape, check_tensor
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.launch import Launch, cdiv, planned
from tpfuse.kernels.tiles import product, rounded

IGNORE, TORCH_IGNORE = -1, -100  # the targets of rows that have no loss: ours, and the default of torch

_IGNORE: tl.constexpr = tl.constexpr(IGNORE)
_TORCH_IGNORE: tl.constexpr = tl.constexpr(TORCH_IGNORE)
# Elements of a piece: 16 bytes or more of every type; Triton specialises strides for multiples of it.
_PIECE: tl.constexpr = tl.constexpr(16)
_UNROLL: tl.constexpr = tl.constexpr(3)  # blocks whose loads overlap; with 4 blocks ptxas spills registers
_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # the lowest float32: -inf - _LOWEST is -inf, not NaN


@triton.jit
def is_ignored(target):
    """Return whether a row with this target has no loss."""
    return (target == _IGNORE) | (target == _TORCH_IGNORE)


@triton.jit
def aligned_body(row, width):
    """Return the part of rows of `width` elements at offsets `row` that consists of whole pieces.

    The result is (offset of its first element, int64; columns before it; its length), from the first to the last
    multiple of _PIECE.
    """
    first = (row + _PIECE - 1) // _PIECE * _PIECE
    head = (first - row).to(tl.int32)
    length = tl.maximum(width - head, 0) // _PIECE * _PIECE
    return first, head, length


@triton.jit
def edge_columns(width, head, length):
    """Return the columns before and after the body, [BLOCK_M, 2 _PIECE], and which of them exist."""
    lane = tl.arange(0, 2 * _PIECE)[None, :]
    before = lane < _PIECE
    columns = tl.where(before, lane, (head + length)[:, None] + lane - _PIECE)
    return columns, (columns < width[:, None]) & ((lane >= _PIECE) | (lane < head[:, None]))


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr,  # [M, V] bf16, read
    target_ptr,  # [M] int64, read
    statistics_ptr,  # [3, M] float32, written: maximum, total, target's logit
    M,
    V,
    start,
    stride_m,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    row = offs_m.to(tl.int64) * stride_m
    width = tl.where(mask_m, V, 0)
    first, head, length = aligned_body(row, width)
    offs_v = tl.arange(0, BLOCK_V)

    lane_maximum = tl.full((BLOCK_M, BLOCK_V), _LOWEST, tl.float32)
    lane_total = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for block in tl.range(0, V, BLOCK_V, loop_unroll_factor=_UNROLL):
        offs = block + offs_v[None, :]
        x = tl.load(logits_ptr + first[:, None] + offs, mask=offs < length[:, None], other=float("-inf")).to(tl.float32)
        distance = x - lane_maximum
        share = tl.exp(-tl.abs(distance))
        lane_total = tl.where(distance > 0, lane_total * share + 1.0, lane_total + share)
        lane_maximum = tl.maximum(lane_maximum, x)

    columns, mask = edge_columns(width, head, length)
    edge = tl.load(logits_ptr + row[:, None] + columns, mask=mask, other=float("-inf")).to(tl.float32)
    maximum = tl.maximum(tl.max(lane_maximum, 1), tl.max(edge, 1))
    total = tl.sum(product(lane_total, tl.exp(lane_maximum - maximum[:, None])), 1)
    total += tl.sum(tl.exp(edge - maximum[:, None]), 1)
    maximum = tl.where(total == 0.0, float("-inf"), maximum)

    column = tl.load(target_ptr + offs_m, mask=mask_m, other=_IGNORE) - start
    in_shard = (column >= 0) & (column < width)
    target_logit = tl.load(logits_ptr + row + column, mask=in_shard, other=0.0).to(tl.float32)
    tl.store(statistics_ptr + offs_m, maximum, mask=mask_m)
    tl.store(statistics_ptr + M + offs_m, total, mask=mask_m)
    tl.store(statistics_ptr + 2 * M + offs_m, target_logit, mask=mask_m)


def cross_entropy_forward(logits: Tensor, target: Tensor, start: int) -> Tensor:
    """Return [3, M] float32: for each row the maximum, the sum of exp(logit - maximum) and the target's logit.

    logits: [M, V] float32, float16 or bfloat16, the vocabulary's entries from `start` on, rows of adjacent elements at
    any stride; target: [M] int64, indices into the whole vocabulary. The target's logit is 0 where the target is not
    among these V, or is -1 or -100. A shard without entries, and a row that is -inf throughout, give -inf, 0 and 0 (the
    target's logit is -inf if it is in such a row); a NaN or +inf in a row makes its sum NaN. Raise ValueError for
    other shapes, dtypes or devices.
    """
    plan = _plan_forward(logits, target, start)
    statistics = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    plan.run(logits_ptr=logits, target_ptr=target.contiguous(), statistics_ptr=statistics)
    return statistics


@planned
def _plan_forward(logits: Tensor, target: Tensor, start: int) -> Launch:
    _check("cross_entropy_forward", logits, target)
    return _over_rows(cross_entropy_forward_kernel, logits, start)


def _over_rows(kernel: Any, logits: Tensor, start: int) -> Launch:
    """Return the launch of a kernel whose programs take the rows of checked logits."""
    rows, width = logits.shape
    row = choose_configuration("cross_entropy", logits.device, logits.dtype, V=width)
    grid = (cdiv(rows, row.blocks["BLOCK_M"]),)
    return row.launch(kernel, grid, M=rows, V=width, start=start, stride_m=logits.stride(0))


@triton.jit
def cross_entropy_combine_kernel(
    statistics_ptr,  # [world, 3, M] float32, read
    target_ptr,  # [M] int64, read
    loss_ptr,  # [M] float32, written
    normalizer_ptr,  # [2, M] float32, written: maximum and total of all shards
    M,
    world,
    vocabulary,
    BLOCK_M: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for rank in range(world):
        shard_ptr = statistics_ptr + tl.cast(rank, tl.int64) * 3 * M
        maximum = tl.maximum(maximum, tl.load(shard_ptr + offs_m, mask=mask_m, other=0.0))
    total = tl.zeros((BLOCK_M,), tl.float32)
    target_logit = tl.zeros((BLOCK_M,), tl.float32)
    for rank in range(world):
        shard_ptr = statistics_ptr + tl.cast(rank, tl.int64) * 3 * M
        share = tl.exp(tl.load(shard_ptr + offs_m, mask=mask_m, other=0.0) - maximum)
        total += tl.load(shard_ptr + M + offs_m, mask=mask_m, other=1.0) * share
        target_logit += tl.load(shard_ptr + 2 * M + offs_m, mask=mask_m, other=0.0)
    target = tl.load(target_ptr + offs_m, mask=mask_m, other=_IGNORE)
    ignored = is_ignored(target)
    total = tl.where(ignored | ((target >= 0) & (target < vocabulary)), total, float("nan"))
    loss = tl.log(total) - (target_logit - maximum)
    tl.store(loss_ptr + offs_m, tl.where(ignored, 0.0, loss), mask=mask_m)
    tl.store(normalizer_ptr + offs_m, maximum, mask=mask_m)
    tl.store(normalizer_ptr + M + offs_m, total, mask=mask_m)


def cross_entropy_combine(statistics: Tensor, target: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the losses [M] and, for the backward pass, maximum and total [2, M] of the whole vocabulary, in float32.

    statistics: [world, 3, M] float32 of `cross_entropy_forward` on each shard, added in this order; target: [M] int64.
    A target of -1 or -100 has loss 0. Another target that is not in the vocabulary has loss NaN and makes its row's
    gradient NaN, because a kernel cannot raise. Raise ValueError for other shapes, dtypes or devices.
    """
    plan = _plan_combine(statistics, target, vocabulary)
    loss = torch.empty(len(target), dtype=torch.float32, device=target.device)
    normalizer = torch.empty(2, len(target), dtype=torch.float32, device=target.device)
    plan.run(
        statistics_ptr=statistics.contiguous(), target_ptr=target.contiguous(), loss_ptr=loss, normalizer_ptr=normalizer
    )
    return loss, normalizer


@planned
def _plan_combine(statistics: Tensor, target: Tensor, vocabulary: int) -> Launch:
    operator = "cross_entropy_combine"
    check_tensor(operator, "target", target, (target.numel(),), (torch.int64,), ("statistics", statistics))
    check_dtype(operator, "statistics", statistics, (torch.float32,))
    check_shape(operator, "statistics", statistics, (*statistics.shape[:1], 3, len(target)))
    row = choose_configuration("cross_entropy_combine", target.device, torch.float32)
    grid = (cdiv(len(target), row.blocks["BLOCK_M"]),)
    sizes = {"M": len(target), "world": len(statistics), "vocabulary": vocabulary}
    return row.launch(cross_entropy_combine_kernel, grid, **sizes)


@triton.jit
def logit_gradient(x, columns, column, maximum, inverse, scale, ignored):
    """Return (exp(x - maximum) / total - [columns == column]) scale for logits x [BLOCK_M, _]; 0 where `ignored`."""
    gradient = tl.exp(x.to(tl.float32) - maximum[:, None]) * inverse[:, None]
    gradient = tl.where(columns == column[:, None], gradient - 1.0, gradient)
    return tl.where(ignored[:, None], 0.0, gradient * scale[:, None])


@triton.jit
def cross_entropy_backward_kernel(
    logits_ptr,  # [M, V] bf16, read
    target_ptr,  # [M] int64, read
    normalizer_ptr,  # [2, M] float32, read: maximum and total
    scale_ptr,  # [M] float32, read; or None
    out_ptr,  # [M, V] bf16, written, strides of logits; in place it is logits
    M,
    V,
    start,
    stride_m,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    row = offs_m.to(tl.int64) * stride_m
    width = tl.where(mask_m, V, 0)
    first, head, length = aligned_body(row, width)
    offs_v = tl.arange(0, BLOCK_V)

    target = tl.load(target_ptr + offs_m, mask=mask_m, other=_IGNORE)
    ignored = is_ignored(target)
    column = tl.where((target >= start) & (target < start + width), target - start, -1).to(tl.int32)
    maximum = tl.load(normalizer_ptr + offs_m, mask=mask_m, other=0.0)
    inverse = 1.0 / tl.load(normalizer_ptr + M + offs_m, mask=mask_m, other=1.0)
    scale = tl.full((BLOCK_M,), 1.0, tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + offs_m, mask=mask_m, other=0.0)

    for block in tl.range(0, V, BLOCK_V, loop_unroll_factor=_UNROLL):
        offs = block + offs_v[None, :]
        mask = offs < length[:, None]
        x = tl.load(logits_ptr + first[:, None] + offs, mask=mask, other=0.0)
        gradient = logit_gradient(x, head[:, None] + offs, column, maximum, inverse, scale, ignored)
        tl.store(out_ptr + first[:, None] + offs, rounded(gradient, out_ptr.dtype.element_ty), mask=mask)

    columns, mask = edge_columns(width, head, length)
    x = tl.load(logits_ptr + row[:, None] + columns, mask=mask, other=0.0)
    gradient = logit_gradient(x, columns, column, maximum, inverse, scale, ignored)
    # These are fewer elements than threads: several warps read the same ones, and one of them stores, perhaps in place.
    tl.debug_barrier()
    tl.store(out_ptr + row[:, None] + columns, rounded(gradient, out_ptr.dtype.element_ty), mask=mask)


def cross_entropy_backward(
    logits: Tensor, target: Tensor, start: int, normalizer: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Compute `cross_entropy_backward_` into a new, contiguous tensor; the logits are not changed."""
    operator = "cross_entropy_backward"
    plan = _plan_backward(operator, logits, target, start, normalizer, scale)
    if not logits.is_contiguous():
        return cross_entropy_backward_(logits.contiguous(), target, start, normalizer, scale)
    return _run_backward(plan, logits, target, normalizer, scale, torch.empty_like(logits))


def cross_entropy_backward_(
    logits: Tensor, target: Tensor, start: int, normalizer: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Replace the logits by scale (exp(logit - maximum) / total - [target]), rounded to their dtype; return them.

    logits, target, start: as in `cross_entropy_forward`; normalizer: [2, M] float32 of `cross_entropy_combine`; scale:
    [M] float32, the factor of each row's gradient, 1 where it is None. Rows whose target is -1 or -100 become 0,
    even if they contain NaN. Raise ValueError for other shapes, dtypes or devices.
    """
    plan = _plan_backward("cross_entropy_backward_", logits, target, start, normalizer, scale)
    return _run_backward(plan, logits, target, normalizer, scale, logits)


@planned
def _plan_backward(
    operator: str, logits: Tensor, target: Tensor, start: int, normalizer: Tensor, scale: Tensor | None
) -> Launch:
    _check(operator, logits, target)
    if operator == "cross_entropy_backward_" and len(logits) > 1 and logits.stride(0) < logits.shape[1]:
        raise ValueError(f"{operator}: logits has strides {logits.stride()}: expected rows that are disjoint")
    for name, x, shape in (("normalizer", normalizer, (2, len(logits))), ("scale", scale, (len(logits),))):
        check_tensor(operator, name, x, shape, (torch.float32,), ("logits", logits))
    return _over_rows(cross_entropy_backward_kernel, logits, start)


def _run_backward(
    plan: Launch, logits: Tensor, target: Tensor, normalizer: Tensor, scale: Tensor | None, out: Tensor
) -> Tensor:
    plan.run(
        logits_ptr=logits,
        target_ptr=target.contiguous(),
        normalizer_ptr=normalizer.contiguous(),
        scale_ptr=None if scale is None else scale.contiguous(),
        out_ptr=out,
    )
    return out


def _check(operator: str, logits: Tensor, target: Tensor) -> None:
    check_floats(operator, logits=logits)
    if logits.ndim != 2:
        raise ValueError(f"{operator}: logits has shape {tuple(logits.shape)}: expected [M, V]")
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"{operator}: logits has strides {logits.stride()}: expected rows of adjacent elements")
    check_tensor(operator, "target", target, (logits.shape[0],), (torch.int64,), ("logits", logits))
