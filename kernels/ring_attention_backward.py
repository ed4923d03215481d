"""ring_attention_backward: the gradients of attention over a ring, where every rank has a part of the sequence.

There are two launches. The launch of `ring_attention_dq` copies the blocks of all ranks in two parts, [K | V] and [Q |
grad_out | log2_sum | delta], and computes dq from the first parts as they come. The launch of `ring_attention_dkdv`
finds the second parts in this rank's slot and computes dk and dv of this rank's keys from them. So each gradient is one
sum in float32 in registers, complete at its owner. Scores are computed twice, as in `attention_backward`; and queries
travel beside keys, but in the dtype of the inputs, and no partial sums travel in float32.

Where blocks are already here the same kernels run without an exchange, and return the part of the gradients that one
rank's keys, or queries, contribute, in float32, for callers that add these parts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels.attention_backward import backward_row
from tpfuse.kernels.attention_backward_delta import PADDING, attention_backward_delta
from tpfuse.kernels.attention_scores import aligned
from tpfuse.kernels.block_exchange import BlockExchange, part_starts
from tpfuse.kernels.checks import check_dtype, check_floats, check_shape, check_tensor
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.ring_attention_arguments import ring_arguments, without_exchange
from tpfuse.kernels.ring_attention_dkdv import ring_attention_dkdv_kernel
from tpfuse.kernels.ring_attention_dq import ring_attention_dq_kernel
from tpfuse.kernels.sequence_runs import SequenceRuns

VisibleRange = tuple[Tensor, Tensor]


def ring_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: SequenceRuns,
    rank: int,
    visible_keys: VisibleRange,
    visible_queries: VisibleRange,
    *,
    exchange: BlockExchange,
    scale: float | None = None,
    dropout_p: float = 0.0,
    counters_of_all: Tensor | None = None,
    dropout_key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `ring_attention_forward`'s q, keys and values, from queries and keys of all ranks.

    grad_out, q, out: [B, H, n, D], k, v: [B, Hk, n, D], any strides; lse: [B, H, n] float32; out and lse as forward
    returned them, for the keys of all ranks. visible_keys: as there; visible_queries: (first, last), int32 [n] each:
    the positions of the queries that see a key, in the same form. counters_of_all: int64 [WORLD, B, H, n], every rank's
    counters. All ranks of the channel call this, with the same shapes, dtype, runs, dropout_p and number of words of
    ready.

    Return dq, dk, dv in the shapes and the dtype of q, k, v, as views of [B, n, H, D]; the same bits in every run, and
    by either route of the blocks. A query that sees no key adds nothing. Where a wait was cut short the results must
    not be used. Raise ValueError that names the argument, what was received and what is accepted.
    """
    operator = "ring_attention_backward"
    for name, x in (("k", k), ("v", v)):
        check_floats(operator, q=q, **{name: x})
        check_shape(operator, name, x, tuple(k.shape))
    counters = None
    if dropout_p > 0.0 and counters_of_all is not None:
        check_dtype(operator, "counters_of_all", counters_of_all, (torch.int64,))
        check_shape(operator, "counters_of_all", counters_of_all, (runs.world, *q.shape[:3]))
        counters_of_all = counters_of_all.contiguous()
        counters = counters_of_all[rank]
    log2_sum, delta = ring_attention_delta(grad_out, out, lse)
    words, *queries = _packed(operator, q, grad_out, log2_sum, delta)
    block = torch.stack([k, v])
    shared = (runs, rank, scale, dropout_p, counters, dropout_key)
    dq = _launch_dq(operator, queries, block, visible_keys, None, exchange, words, q.dtype, *shared)
    gradients = block.new_empty((2, k.shape[0], k.shape[2], k.shape[1], k.shape[3])).transpose(2, 3)
    everywhere: dict[str, Any] = {}
    if runs.world > 1:
        parts = [block.nbytes // 4, len(words)]
        end = exchange.arguments(parts)
        everywhere = {name: end[name] for name in ("slots_ptr", "state_ptr", "slot_bytes", "block_words")}
        everywhere |= {"queries_start": part_starts(parts)[1], "EXCHANGE": True, "counters_ptr": counters_of_all}
        everywhere |= {"source_first": 0, "source_step": 1, "steps": runs.world}
    _launch_dkdv(operator, queries, block, visible_queries, rank, gradients, everywhere, *shared)
    return dq, gradients[0], gradients[1]


def ring_attention_delta(grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log2_sum, delta), [B, H, n + PADDING] float32, from `attention_backward_delta`.

    grad_out, out: [B, H, n, D], any strides, of one dtype; lse: [B, H, n] float32. Raise ValueError for others.
    """
    operator = "ring_attention_backward"
    check_floats(operator, out=out, grad_out=grad_out)
    check_shape(operator, "grad_out", grad_out, tuple(out.shape))
    _check_sums(operator, out, lse=(lse, 0))
    sums = attention_backward_delta(aligned(grad_out), aligned(out), lse, None, None, out.shape[0], out.shape[2])
    return sums["log2_sum_ptr"], sums["delta_ptr"]


def queries_words(q: Tensor) -> int:
    """Return the int32 words in the second part of a block of queries q [B, H, n, D]: a multiple of 16 bytes."""
    sums = 2 * q.shape[0] * q.shape[1] * (q.shape[2] + int(PADDING.value))
    return -(-(2 * q.nbytes // 4 + sums) // 4) * 4


def ring_attention_dq(
    q: Tensor,
    grad_out: Tensor,
    log2_sum: Tensor,
    delta: Tensor,
    blocks: Tensor,
    runs: SequenceRuns,
    rank: int,
    visible_keys: VisibleRange,
    sources: Sequence[int],
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    counters: Tensor | None = None,
    dropout_key: Tensor | None = None,
) -> Tensor:
    """Return what the keys of some ranks add to dq of rank `rank`'s queries, in float32.

    q, grad_out: [B, H, n, D], any strides (contiguous ones are not copied); log2_sum, delta: from
    `ring_attention_delta`, for the keys of all ranks; the other arguments as in `ring_attention_forward` without
    exchange. The result is [B, H, n, D], a view of [B, n, H, D].
    """
    operator = "ring_attention_dq"
    queries = _queries(operator, q, grad_out, log2_sum, delta)
    shared = (runs, rank, scale, dropout_p, counters, dropout_key)
    return _launch_dq(operator, queries, blocks, visible_keys, sources, None, None, torch.float32, *shared)


def ring_attention_dkdv(
    block: Tensor,
    q: Tensor,
    grad_out: Tensor,
    log2_sum: Tensor,
    delta: Tensor,
    runs: SequenceRuns,
    rank: int,
    source: int,
    visible_queries: VisibleRange,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    counters: Tensor | None = None,
    dropout_key: Tensor | None = None,
) -> Tensor:
    """Return what the queries of rank `rank` add to dk and dv of the keys of rank `source`: [2, B, Hk, n, D] float32.

    block: [2, B, Hk, n, D], contiguous: keys and values of `source`; visible_queries: for these keys, as in
    `ring_attention_backward`; the other arguments as in `ring_attention_dq`.
    """
    operator = "ring_attention_dkdv"
    queries = _queries(operator, q, grad_out, log2_sum, delta)
    gradients = torch.empty(block.shape, dtype=torch.float32, device=block.device)
    shared = (runs, source, scale, dropout_p, counters, dropout_key)
    _launch_dkdv(operator, queries, block, visible_queries, rank, gradients, {}, *shared)
    return gradients


def _queries(operator: str, q: Tensor, grad_out: Tensor, log2_sum: Tensor, delta: Tensor) -> list[Tensor]:
    """Return all four tensors, contiguous. Raise ValueError unless they fit."""
    check_floats(operator, q=q, grad_out=grad_out)
    check_shape(operator, "grad_out", grad_out, tuple(q.shape))
    _check_sums(operator, q, log2_sum=(log2_sum, PADDING.value), delta=(delta, PADDING.value))
    return [aligned(q.contiguous()), aligned(grad_out.contiguous()), log2_sum.contiguous(), delta.contiguous()]


def _check_sums(operator: str, q: Tensor, **sums: tuple[Tensor, int]) -> None:
    """Raise ValueError unless each is float32 [B, H, n + padding], on q's device."""
    for name, (x, padding) in sums.items():
        check_tensor(operator, name, x, (*q.shape[:2], q.shape[2] + padding), (torch.float32,), ("q", q))


def _packed(operator: str, *queries: Tensor) -> list[Tensor]:
    """Return [Q | grad_out | log2_sum | delta] as int32 words, a multiple of 16 bytes, and the four in these words."""
    queries = tuple(_queries(operator, *queries))
    sizes = [x.nbytes // 4 for x in queries]
    words = torch.empty(queries_words(queries[0]), dtype=torch.int32, device=queries[0].device)
    parts = words[: sum(sizes)].split(sizes)
    views = [part.view(x.dtype).view(x.shape) for part, x in zip(parts, queries, strict=True)]
    for view, x in zip(views, queries, strict=True):
        view.copy_(x)
    return [words, *views]


def _launch_dq(
    operator: str,
    queries: Sequence[Tensor],
    blocks: Tensor,
    visible_keys: VisibleRange,
    sources: Sequence[int] | None,
    exchange: BlockExchange | None,
    words: Tensor | None,
    dtype: torch.dtype,
    runs: SequenceRuns,
    rank: int,
    scale: float | None,
    dropout_p: float,
    counters: Tensor | None,
    dropout_key: Tensor | None,
) -> Tensor:
    """Compute dq in `dtype`; words: the second part of this rank's block, with an exchange."""
    q, grad_out, log2_sum, delta = queries
    # fmt: off
    arguments = ring_arguments(operator, q, blocks, runs, rank, visible_keys, exchange, sources, scale, dropout_p,
                               counters, dropout_key)
    # fmt: on
    batch, heads, tokens, size = q.shape
    row = backward_row("ring_attention_dq", arguments)
    programs = tiles = batch * heads * runs.count * cdiv(runs.size, row.blocks["BLOCK_M"])
    copying = without_exchange(rank, runs) | {"queries_start": 0, "queries_words": 0}
    slices = {"SLICE_D": min(row.blocks["SLICE_D"], arguments["BLOCK_D"])}
    if exchange is not None:
        assert words is not None
        keys = blocks.view(-1).view(torch.int32)
        parts = [len(keys), len(words)]
        copiers = exchange.copiers(operator, parts, row.blocks["COPIERS"], row.blocks["BLOCK_COPY"])
        programs = exchange.programs(operator, copiers, tiles)
        copying = {"words_ptr": keys, "words": len(keys), "COPIERS": copiers, **exchange.arguments(parts)}
        copying |= {"queries_start": part_starts(parts)[1], "queries_words": len(words)}
    dq = torch.empty((batch, tokens, heads, size), dtype=dtype, device=q.device)
    launch(
        ring_attention_dq_kernel,
        (programs,),
        grad_out_ptr=grad_out,
        log2_sum_ptr=log2_sum,
        delta_ptr=delta,
        queries_ptr=words,
        dq_ptr=dq,
        tiles=tiles,
        **arguments,
        **row.options | copying | slices,
    )
    return dq.transpose(1, 2)


def _launch_dkdv(
    operator: str,
    queries: Sequence[Tensor],
    block: Tensor,
    visible_queries: VisibleRange,
    queries_rank: int,
    gradients: Tensor,
    everywhere: dict[str, Any],
    runs: SequenceRuns,
    rank: int,
    scale: float | None,
    dropout_p: float,
    counters: Tensor | None,
    dropout_key: Tensor | None,
) -> None:
    """Compute dk and dv into `gradients` [2, B, Hk, n, D].

    everywhere: the kernel's arguments for the queries of all ranks in the slot; empty for the queries of one rank.
    """
    q, grad_out, log2_sum, delta = queries
    # fmt: off
    arguments = ring_arguments(operator, q, block.unsqueeze(0), runs, rank, visible_queries, None, [queries_rank],
                               scale, dropout_p, counters, dropout_key)
    # fmt: on
    row = backward_row("ring_attention_dkdv", arguments)
    tiles = block.shape[1] * block.shape[2] * runs.count * cdiv(runs.size, row.blocks["BLOCK_N"])
    here = {"slots_ptr": None, "state_ptr": None, "slot_bytes": 0, "block_words": 0, "queries_start": 0}
    # One launch computes both, or one launch each if the sums of both do not fit in the registers.
    for wanted in ("DK DV",) if row.blocks["TOGETHER"] else ("DV", "DK"):
        launch(
            ring_attention_dkdv_kernel,
            (tiles,),
            num_warps=row.num_warps,
            num_stages=row.num_stages,
            grad_out_ptr=grad_out,
            log2_sum_ptr=log2_sum,
            delta_ptr=delta,
            dk_ptr=gradients[0],
            dv_ptr=gradients[1],
            batch=q.shape[0],
            stride_b=gradients.stride(1),
            stride_h=gradients.stride(2),
            stride_t=gradients.stride(3),
            rank=rank,
            WORLD=runs.world,
            **{**arguments, **here, "EXCHANGE": False, **everywhere},
            BLOCK_M=row.blocks["BLOCK_M"],
            BLOCK_N=row.blocks["BLOCK_N"],
            SLICE_D=min(row.blocks["SLICE_D"], arguments["BLOCK_D"]),
            DK="DK" in wanted,
            DV="DV" in wanted,
        )
