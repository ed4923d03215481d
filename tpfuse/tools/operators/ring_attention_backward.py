"""ring_attention_backward: one rank, with its copiers or with blocks present, and launches that reach every row."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.kernels.block_exchange import BlockExchange
from tpfuse.kernels.ring_attention_backward import (
    ring_attention_backward,
    ring_attention_delta,
    ring_attention_dkdv,
    ring_attention_dq,
)
from tpfuse.kernels.sequence_runs import SequenceRuns
from tpfuse.ops.autograd import apply
from tpfuse.ops.ring_attention.visibility import visible_ranges
from tpfuse.tools.endpoints import EPOCHS, of_one_rank, on_meta
from tpfuse.tools.operator import Given, Operator
from tpfuse.tools.operators.ring_attention import causal_attention, two_heads

_Backward = Callable[..., tuple[Tensor, ...]]


def _brought(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Launch several times in a ring of one rank, which has both ends of the sequence; return the last gradients."""
    half = q.shape[2] // 2
    runs = SequenceRuns(q.shape[2], 1, 2, half, half, 1)
    endpoint, memory = of_one_rank(q.device, programs=4)
    visible_keys, visible_queries = visible_ranges(runs.positions(0, q.device), runs.length, True, None, None)
    exchange = BlockExchange(endpoint, torch.zeros(8, dtype=torch.int32, device=q.device), ring=True)
    for _ in range(EPOCHS):
        gradients = ring_attention_backward(
            grad_out, q, k, v, out, lse, runs, 0, visible_keys, visible_queries, exchange=exchange
        )
    del memory  # freed in the order of the stream, or at once if kernels are interpreted
    return gradients


def _here(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, runs: SequenceRuns
) -> tuple[Tensor, ...]:
    """Launch for every rank, one after another, for the blocks of all ranks."""
    tokens_of = [runs.positions(rank, q.device) for rank in range(runs.world)]
    visible = [visible_ranges(tokens, runs.length, True, None, None) for tokens in tokens_of]
    blocks = torch.stack([torch.stack([k[:, :, tokens], v[:, :, tokens]]) for tokens in tokens_of])
    dq, dk, dv = (torch.zeros(x.shape, device=x.device) for x in (q, k, v))
    for rank, tokens in enumerate(tokens_of):
        sums = ring_attention_delta(grad_out[:, :, tokens], out[:, :, tokens], lse[:, :, tokens])
        queries = (q[:, :, tokens], grad_out[:, :, tokens], *sums)
        dq[:, :, tokens] = ring_attention_dq(*queries, blocks, runs, rank, visible[rank][0], range(runs.world))
        for source, keys in enumerate(tokens_of):
            parts = ring_attention_dkdv(blocks[source], *queries, runs, rank, source, visible[source][1])
            dk[:, :, keys] += parts[0]
            dv[:, :, keys] += parts[1]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Attention(torch.autograd.Function):
    """Causal attention. The kernel of one rank computes the output, and `backward` computes the gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, backward: _Backward) -> Tensor:
        out, lse = attention_forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.backward = backward
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.backward(grad, *ctx.saved_tensors), None


def _attention(q: Tensor, k: Tensor, v: Tensor, *, backward: _Backward) -> Tensor:
    return apply(_Attention, q, k, v, backward)


def _case(name: str, backward: _Backward) -> Given:
    return Given(name, partial(_attention, backward=backward), causal_attention, two_heads)


CASES = (
    _case("one rank and its copiers", _brought),
    _case("zigzag of two ranks", partial(_here, runs=SequenceRuns(72, 2, 2, 18, 18, 1))),
    _case("stripes of three ranks", partial(_here, runs=SequenceRuns(72, 3, 1, 24, 1, 3))),
)


def launches(dtype: torch.dtype) -> None:
    """Launch every head size alone, with dropout and with blocks present, in groups of several sizes (meta tensors)."""
    for size in (64, 128, 256):
        _launch(dtype, size, 8)
        _launch(dtype, size, 8, dropout_p=0.1)
    _launch(dtype, 80, 2, ring=False)
    for size in (64, 128):
        _launch_here(dtype, size, 4)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _runs(world: int) -> SequenceRuns:
    return SequenceRuns(world * 2048, world, 2, 1024, 1024, 1)


def _launch(dtype: torch.dtype, size: int, world: int, ring: bool = True, dropout_p: float = 0.0) -> None:
    """Launch the last rank's 2048 tokens, in zigzag, with 16 heads of queries, and 4 of keys and values."""
    q, k = _empty(1, 16, 2048, size, dtype=dtype), _empty(1, 4, 2048, size, dtype=dtype)
    visible = (_empty(2048, dtype=torch.int32),) * 2
    end = on_meta(world, flags=16 * world * max(world - 1, 1), programs=108)
    ring_attention_backward(
        q, q, k, k, q, _empty(1, 16, 2048, dtype=torch.float32), _runs(world), world - 1, visible, visible,
        exchange=BlockExchange(end, _empty(16 * world, dtype=torch.int32), ring),
        dropout_p=dropout_p,
        counters_of_all=_empty(world, 1, 16, 2048, dtype=torch.int64) if dropout_p else None,
        dropout_key=_empty(dtype=torch.int64) if dropout_p else None,
    )  # fmt: skip


def _launch_here(dtype: torch.dtype, size: int, world: int) -> None:
    """Launch with all blocks present, and with one block at a time."""
    q, sums = _empty(1, 16, 2048, size, dtype=dtype), _empty(1, 16, 2048 + 128, dtype=torch.float32)
    visible = (_empty(2048, dtype=torch.int32),) * 2
    blocks = _empty(world, 2, 1, 4, 2048, size, dtype=dtype)
    ring_attention_dq(q, q, sums, sums, blocks, _runs(world), 0, visible, range(world))
    ring_attention_dkdv(blocks[0], q, q, sums, sums, _runs(world), 0, 1, visible)


OPERATOR = Operator("ring_attention_backward", launches, CASES)
