"""ring_attention: one rank, whose blocks are present or copied by its copiers, and launches that reach every row."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.block_exchange import BlockExchange
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.ring_attention_forward import ring_attention_forward
from tpfuse.kernels.sequence_runs import SequenceRuns
from tpfuse.testing.inputs import normal
from tpfuse.tools.operator import CallCost, Draw, Given, Operator, Shape, Tensors

_EPOCHS = 3


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


def _alone(blocks: Tensor) -> BlockExchange:
    """Return the block exchange of a group of one rank."""
    slot_bytes = -(-blocks.nbytes // 64) * 64
    slots = torch.empty(2, slot_bytes, dtype=torch.uint8, device=blocks.device)
    flags, state, abort, ready = (torch.zeros(n, dtype=torch.int32, device=blocks.device) for n in (8, 2, 1, 8))
    addresses = [torch.tensor([memory.data_ptr()], device=blocks.device) for memory in (slots, flags)]
    end = Endpoint(0, 1, addresses[0], slot_bytes, addresses[1], len(flags), state, abort, programs=4)
    return BlockExchange(end, ready, ring=True)


def _brought(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Launch several times in a ring of one rank, which has both ends of the sequence; return the last output."""
    runs = SequenceRuns(q.shape[2], 1, 2, q.shape[2] // 2, q.shape[2] // 2, 1)
    blocks = torch.stack([k, v])
    exchange = _alone(blocks)
    for _ in range(_EPOCHS):
        out, _ = ring_attention_forward(q, blocks, runs, 0, _causal(runs.positions(0, q.device)), exchange=exchange)
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


def _case(name: str, function: Callable[..., Tensor]) -> Given:
    """Return a case of causal attention of two heads that share one of keys and values."""

    def constant(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.no_grad():
                out = function(q, k, v)
            return out + 0 * (q + k.sum() + v.sum())  # the kernel has no gradient of its own

        return call

    def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: normal(seed, 1, heads, 72, 24, dtype=dtype) for seed, (name, heads) in enumerate(_HEADS, 1)}

    return Given(name, constant(function), constant(_reference), inputs)


_HEADS = (("q", 2), ("k", 1), ("v", 1))


def _reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference.attention(q, k, v)[0]


CASES = (
    _case("forward, one rank and its copiers", _brought),
    _case("forward, zigzag of two ranks", partial(_here, runs=SequenceRuns(72, 2, 2, 18, 18, 1))),
    _case("forward, stripes of three ranks", partial(_here, runs=SequenceRuns(72, 3, 1, 24, 1, 3))),
)


def launches(dtype: torch.dtype) -> None:
    """Launch every head size alone, with dropout and with blocks present, in groups of several sizes (meta tensors)."""
    _launches_forward(dtype)


def _launches_forward(dtype: torch.dtype) -> None:
    for size in (64, 128, 256):
        _launch_forward(dtype, size, 8)
        _launch_forward(dtype, size, 8, dropout_p=0.1)
        _launch_forward(dtype, size, 4, sources=(3, 2, 1, 0))
    _launch_forward(dtype, 80, 2, ring=False)
    _launch_forward(dtype, 128, 4, sources=(1,), out_dtype=torch.float32)
    _launch_forward(dtype, 256, 4, sources=(1,), dropout_p=0.1)


def _launch_forward(
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
    slots, flags = (torch.empty(world, dtype=torch.int64, device="meta") for _ in range(2))
    state, abort, ready = (torch.empty(n, dtype=torch.int32, device="meta") for n in (2, 1, 16 * world))
    end = Endpoint(world - 1, world, slots, 1 << 30, flags, 16 * world**2, state, abort, programs=108)
    return BlockExchange(end, ready, ring)


OPERATOR = Operator("ring_attention", launches, CASES)
