"""ring_attention: forward and backward, with blocks that are present or copied, and launches that reach every row."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.block_exchange import BlockExchange
from tpfuse.kernels.ring_attention_backward import ring_attention_backward, ring_attention_dkdv, ring_attention_dq
from tpfuse.kernels.ring_attention_forward import ring_attention_forward
from tpfuse.kernels.sequence_runs import SequenceRuns
from tpfuse.ops.autograd import apply
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.triton_blocks import KernelBackward, KernelForward
from tpfuse.testing.inputs import normal
from tpfuse.tools.operator import CallCost, Draw, Given, OneRank, Operator, Shape, Tensors, on_meta


@dataclass(frozen=True)
class RingAttentionShape(Shape):
    """Attention of the last of `world` ranks, with n tokens each, to the blocks of all ranks, which are present.

    The queries have H heads of size D, and H / Hk of them share a head of keys and values.
    """

    name: str
    world: int
    n: int
    H: int
    Hk: int
    D: int
    causal: bool = True

    def inputs(self, draw: Draw) -> Tensors:
        """Return q, a gradient of the result, and the blocks in the order of their ranks."""
        q, grad = (draw.normal(1, self.n, self.H, self.D).transpose(1, 2) for _ in range(2))
        return {"q": q, "grad": grad, "blocks": draw.normal(self.world, 2, 1, self.Hk, self.n, self.D)}

    def costs(self) -> dict[str, CallCost]:
        """Return the costs: two products in the forward pass, five in the backward pass."""
        n, keys = self.n, self.n * self.world
        pairs = n * (keys - n) + n * (n + 1) / 2 if self.causal else n * keys
        flops, of_q, of_kv = 4 * self.H * self.D * pairs, 2 * n * self.H * self.D, 4 * keys * self.Hk * self.D
        return {"forward": CallCost(flops, 2 * of_q + of_kv), "backward": CallCost(2.5 * flops, 4 * of_q + 2 * of_kv)}


class _Blocks(torch.autograd.Function):
    """Causal attention of two ranks, one after another, to one block of keys and values after another."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
        for rank, tokens in enumerate(_TOKENS):
            block = KernelForward(q[:, :, tokens], RingCall(_RUNS, rank, True, None, q.shape[3] ** -0.5))
            for source, keys in enumerate(_TOKENS):
                block.add(source, k[:, :, keys], v[:, :, keys])
            out[:, :, tokens], lse[:, :, tokens] = block.result()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros(x.shape, device=x.device) for x in (q, k, v))
        for rank, tokens in enumerate(_TOKENS):
            call = RingCall(_RUNS, rank, True, None, q.shape[3] ** -0.5)
            own = grad[:, :, tokens], q[:, :, tokens], out[:, :, tokens], lse[:, :, tokens]
            block = KernelBackward(*own, call)
            for source, keys in enumerate(_TOKENS):
                parts = torch.empty(2, *k[:, :, keys].shape, device=k.device)
                block.add(source, k[:, :, keys], v[:, :, keys], parts)
                dk[:, :, keys] += parts[0]
                dv[:, :, keys] += parts[1]
            dq[:, :, tokens] = block.dq()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return q of two heads that share one of k and v, 46 tokens."""
    heads = {"q": 2, "k": 1, "v": 1}
    return {name: normal(seed, 1, n, 46, 24, dtype=dtype) for seed, (name, n) in enumerate(heads.items(), 1)}


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference.attention(q, k, v)[0]


_RUNS = SequenceRuns(46, 2, 1, 23, 1, 2)  # stripes
_TOKENS = [slice(rank, None, 2) for rank in range(2)]
CASES = (
    OneRank("ring_attention"),
    Given("blocks of two ranks", lambda q, k, v: apply(_Blocks, q, k, v), _causal, _inputs),
)


def launches(dtype: torch.dtype) -> None:
    """Launch every head size alone, with dropout and with blocks present, in groups of several sizes (meta tensors)."""
    for size in (64, 128, 256):
        _launch(dtype, size, 8)
        _launch(dtype, size, 8, dropout_p=0.1)
        _launch(dtype, size, 4, sources=(3, 2, 1, 0))
    _launch(dtype, 80, 2, ring=False)
    _launch(dtype, 128, 4, sources=(1,), out_dtype=torch.float32)
    _launch(dtype, 256, 4, sources=(1,), dropout_p=0.1)
    for size in (64, 128, 256):
        _launch_backward(dtype, size, 8)
        _launch_backward(dtype, size, 8, dropout_p=0.1)
    _launch_backward(dtype, 80, 2, ring=False)
    for size in (64, 128):
        _launch_backward_of_present_blocks(dtype, size, 4)


def _launch(
    dtype: torch.dtype,
    size: int,
    world: int,
    ring: bool = True,
    sources: tuple[int, ...] | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> None:
    """Launch the last rank's 8192 tokens, in zigzag, with 32 heads of queries, and 8 of keys and values."""

    def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    runs = SequenceRuns(world * 8192, world, 2, 4096, 4096, 1)
    q, visible_keys = empty(1, 32, 8192, size), empty(2, 8192, kind=torch.int32)
    blocks = empty(*([] if sources is None else [len(sources)]), 2, 1, 8, 8192, size)
    if dropout_p:
        options |= {"counters": empty(1, 32, 8192, kind=torch.int64), "dropout_key": empty(kind=torch.int64)}
    ring_attention_forward(
        q,
        blocks,
        runs,
        world - 1,
        (visible_keys[0], visible_keys[1]),
        exchange=_exchange(world, ring) if sources is None else None,
        sources=sources,
        dropout_p=dropout_p,
        **options,
    )


def _exchange(world: int, ring: bool) -> BlockExchange:
    """Return the block exchange of the last rank of a group, on meta tensors."""
    ready = torch.empty(16 * world, dtype=torch.int32, device="meta")
    return BlockExchange(on_meta(world, flags=16 * world**2, programs=108), ready, ring)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _runs(world: int) -> SequenceRuns:
    return SequenceRuns(world * 2048, world, 2, 1024, 1024, 1)


def _launch_backward(dtype: torch.dtype, size: int, world: int, ring: bool = True, dropout_p: float = 0.0) -> None:
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


def _launch_backward_of_present_blocks(dtype: torch.dtype, size: int, world: int) -> None:
    """Launch with all blocks present, and with one block at a time."""
    q, sums = _empty(1, 16, 2048, size, dtype=dtype), _empty(1, 16, 2048 + 128, dtype=torch.float32)
    visible = (_empty(2048, dtype=torch.int32),) * 2
    blocks = _empty(world, 2, 1, 4, 2048, size, dtype=dtype)
    ring_attention_dq(q, q, sums, sums, blocks, _runs(world), 0, visible, range(world))
    ring_attention_dkdv(blocks[0], q, q, sums, sums, _runs(world), 0, 1, visible)


OPERATOR = Operator("ring_attention", launches, CASES)
