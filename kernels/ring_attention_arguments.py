"""ring_attention_arguments: checks the arguments of ring attention's launchers, and builds those of its kernels."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor

from tpfuse.kernels.attention_scores import check_heads, check_scores
from tpfuse.kernels.block_exchange import BlockExchange
from tpfuse.kernels.checks import check_device, check_tensor
from tpfuse.kernels.dropout import threshold
from tpfuse.kernels.sequence_runs import SequenceRuns


def ring_arguments(
    operator: str,
    q: Tensor,
    blocks: Tensor,
    runs: SequenceRuns,
    rank: int,
    visible_range: tuple[Tensor, Tensor],
    exchange: BlockExchange | None,
    sources: Sequence[int] | None,
    scale: float | None,
    dropout_p: float,
    counters: Tensor | None,
    dropout_key: Tensor | None,
) -> dict[str, Any]:
    """Check the arguments of a loop over blocks of keys, and return those of its kernel.

    For the arguments see `ring_attention_forward`. Raise ValueError that names the argument, what was received and
    what is accepted.
    """
    order = _order(operator, q, runs, rank, exchange, sources)
    block = _block(operator, blocks, sources)
    check_heads(operator, q, block[0], block[1], None, None)
    check_scores(operator, q, q.shape[0], None, scale, 0.0, None, None)
    heads, tokens, size = q.shape[1:]
    for name, length in (("q", tokens), ("blocks", block.shape[3])):
        if length != runs.local_length:
            raise ValueError(f"{operator}: {name} has {length} tokens: expected {runs.local_length}, as runs")
    for name, x in zip(("visible_range[0]", "visible_range[1]"), visible_range, strict=True):
        check_tensor(operator, name, x, (tokens,), (torch.int32,), ("q", q))
    _check_dropout(operator, q, dropout_p, counters, dropout_key)
    first, last = visible_range
    return {
        "q_ptr": q,
        "blocks_ptr": blocks,
        "first_ptr": first.contiguous(),
        "last_ptr": last.contiguous(),
        "counters_ptr": None if counters is None or dropout_p == 0.0 else counters.contiguous(),
        "dropout_key_ptr": None if dropout_p == 0.0 else dropout_key,
        "heads": heads,
        "group": heads // max(block.shape[2], 1),
        "run_count": runs.count,
        "run_size": runs.size,
        "run_unit": runs.unit,
        "run_step": runs.step,
        "stride_v": block[0].numel(),
        **dict(zip(("source_first", "source_step", "steps"), order, strict=True)),
        "scale": size**-0.5 if scale is None else scale,
        "dropout_threshold": threshold(dropout_p),
        "dropout_scale": 1.0 / (1.0 - dropout_p),
        "HEAD_SIZE": size,
        "BLOCK_D": triton.next_power_of_2(size),
        "DROPOUT": dropout_p > 0.0,
    }


def without_exchange(rank: int, runs: SequenceRuns) -> dict[str, Any]:
    """Return the arguments that replace `BlockExchange.arguments` and COPIERS where all blocks are here."""
    pointers = ("words", "ready", "slots", "flags", "state", "abort", "trace")
    numbers = {"words": 0, "block_words": 0, "slot_bytes": 0, "rank": rank, "WORLD": runs.world}
    return dict.fromkeys((f"{name}_ptr" for name in pointers), None) | numbers | {"COPIERS": 0, "RING": False}


def _order(
    operator: str,
    q: Tensor,
    runs: SequenceRuns,
    rank: int,
    exchange: BlockExchange | None,
    sources: Sequence[int] | None,
) -> tuple[int, int, int]:
    """Return the order of the blocks: (the first rank, the distance to the next one, how many)."""
    world = runs.world
    if not 0 <= rank < world:
        raise ValueError(f"{operator}: rank {rank} of {world}: expected 0 <= rank < world")
    if exchange is not None:
        end = exchange.endpoint
        if sources is not None:
            raise ValueError(
                f"{operator}: sources {tuple(sources)}: expected None with exchange, which copies all blocks"
            )
        if (end.rank, end.world) != (rank, world):
            raise ValueError(f"{operator}: rank {rank} of {world}: the channel's is {end.rank} of {end.world}")
        check_device(operator, "the channel", end.slots, "q", q)
        return rank, world - 1, world
    if not sources or any(not 0 <= source < world for source in sources):
        raise ValueError(f"{operator}: sources {sources}: expected ranks from 0 to {world - 1}, or exchange")
    step = (sources[1] - sources[0]) % world if len(sources) > 1 else 0
    if any((source + step) % world != following for source, following in pairwise(sources)):
        raise ValueError(f"{operator}: sources {tuple(sources)}: expected ranks that are equally far from each other")
    return sources[0], step, len(sources)


def _block(operator: str, blocks: Tensor, sources: Sequence[int] | None) -> Tensor:
    """Check blocks and return one of them, [2, B, Hk, n, D]."""
    leading = (2,) if sources is None else (len(sources), 2)
    if blocks.dim() != len(leading) + 4 or tuple(blocks.shape[: len(leading)]) != leading:
        expected = ", ".join(map(str, leading))
        raise ValueError(f"{operator}: blocks has shape {tuple(blocks.shape)}: expected [{expected}, B, Hk, n, D]")
    if not blocks.is_contiguous() or blocks.data_ptr() % 16:
        where = f"strides {blocks.stride()} and address {blocks.data_ptr():#x}"
        raise ValueError(f"{operator}: blocks has {where}: expected contiguous, at a multiple of 16 bytes")
    if sources is None:
        return blocks
    if len(sources) > 1 and blocks[0].numel() >= 2**31:
        raise ValueError(
            f"{operator}: blocks has {blocks[0].numel()} elements for each source: expected fewer than 2^31, which"
            " kernels count in 32 bits, or one source in each call"
        )
    return blocks[0]


def _check_dropout(
    operator: str, q: Tensor, dropout_p: float, counters: Tensor | None, dropout_key: Tensor | None
) -> None:
    """Raise ValueError unless dropout's probability, counters and key fit q."""
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{operator}: dropout_p {dropout_p}: expected 0 <= dropout_p < 1")
    if dropout_p == 0.0:
        return
    for name, x, shape in (("counters", counters, tuple(q.shape[:3])), ("dropout_key", dropout_key, ())):
        if x is None:
            raise ValueError(f"{operator}: {name} is None: dropout needs it")
        check_tensor(operator, name, x, shape, (torch.int64,), ("q", q))
