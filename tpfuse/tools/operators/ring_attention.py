"""ring_attention: one rank, whose blocks are present or copied by its copiers, and launches that reach every row."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.block_exchange import BlockExchange
from tpfuse.kernels.ring_attention_forward import ring_attention_forward
from tpfuse.kernels.sequence_runs import SequenceRuns
from tpfuse.testing.inputs import normal
from tpfuse.tools.endpoints import EPOCHS, of_one_rank, on_meta
from tpfuse.tools.operator import CallCost, Draw, Given, Operator, Shape, Tensors, without_gradient


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


def _causal(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the range of positions that each query sees, in a sequence without padding."""
    return torch.zeros_like(positions, dtype=torch.int32), positions.to(torch.int32)


def _brought(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Launch several times in a ring of one rank, which has both ends of the sequence; return the last output."""
    runs = SequenceRuns(q.shape[2], 1, 2, q.shape[2] // 2, q.shape[2] // 2, 1)
    blocks = torch.stack([k, v])
    endpoint, memory = of_one_rank(q.device, programs=4, slot_bytes=-(-blocks.nbytes // 64) * 64)
    exchange = BlockExchange(endpoint, torch.zeros(8, dtype=torch.int32, device=q.device), ring=True)
    for _ in range(EPOCHS):
        out, _ = ring_attention_forward(q, blocks, runs, 0, _causal(runs.positions(0, q.device)), exchange=exchange)
    del memory  # freed in the order of the stream, or at once if kernels are interpreted
    return out


def _here(q: Tensor, k: Tensor, v: Tensor, *, runs: SequenceRuns) -> Tensor:
    """Launch for every rank, one after another, with all blocks present."""
    tokens_of = [runs.positions(rank, q.device) for rank in range(runs.world)]
    blocks = torch.stack([torch.stack([k[:, :, tokens], v[:, :, tokens]]) for tokens in tokens_of])
    out = torch.empty_like(q)
    for rank, tokens in enumerate(tokens_of):
        order = [(rank - step) % runs.world for step in range(runs.world)]
        out[:, :, tokens] = ring_attention_forward(
            q[:, :, tokens], blocks[order], runs, rank, _causal(tokens), sources=order
        )[0]
    return out


def two_heads(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return q of two heads that share one of k and v, 72 tokens."""
    heads = {"q": 2, "k": 1, "v": 1}
    return {name: normal(seed, 1, n, 72, 24, dtype=dtype) for seed, (name, n) in enumerate(heads.items(), 1)}


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the reference's output."""
    return reference.attention(q, k, v)[0]


def _case(name: str, function: Callable[..., Tensor]) -> Given:
    return Given(name, without_gradient(function), without_gradient(causal_attention), two_heads)


CASES = (
    _case("forward, one rank and its copiers", _brought),
    _case("forward, zigzag of two ranks", partial(_here, runs=SequenceRuns(72, 2, 2, 18, 18, 1))),
    _case("forward, stripes of three ranks", partial(_here, runs=SequenceRuns(72, 3, 1, 24, 1, 3))),
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


OPERATOR = Operator("ring_attention", launches, CASES)
