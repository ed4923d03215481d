"""Values of ring_attention_backward, with and without exchanged blocks, beside autograd's gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.kernels.block_exchange import BlockExchange
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.ring_attention_backward import (
    ring_attention_backward,
    ring_attention_delta,
    ring_attention_dkdv,
    ring_attention_dq,
)
from tpfuse.ops.dropout import keep_mask
from tpfuse.ops.ring_attention.layout import BALANCES, SequenceLayout
from tpfuse.ops.ring_attention.visibility import VisibleRange, visible_ranges
from tpfuse.testing.compare import Expected, check_error
from tpfuse.testing.explore import RoundRobin, SimulatedMemory, explore
from tpfuse.testing.inputs import normal
from tpfuse.testing.tiers import exhaustive

DROPOUT, KEY, WIDTH = 0.3, -(2**61) - 7, 200
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Ring:
    """Attention of a whole sequence, the tensors of each rank, and the gradients that they must have."""

    world: int = 2
    balance: Any = "zigzag"
    length: int = 70
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None
    heads: int = 1
    kv_heads: int = 1
    size: int = 16
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0
    batch: int = 1
    seed: int = 0

    @property
    def layout(self) -> SequenceLayout:
        return SequenceLayout(self.length, self.world, self.balance)

    def visible_ranges(self, rank: int) -> tuple[VisibleRange, VisibleRange]:
        cu_seqlens = None if self.documents is None else torch.tensor(self.documents, dtype=torch.int32)
        return visible_ranges(self.layout.positions(rank), self.length, self.causal, self.window, cu_seqlens)

    def hidden(self) -> Tensor:
        """Returns [T, T], where queries do not see keys, computed pair by pair from the definition."""
        bounds = torch.tensor(self.documents or (0, self.length))
        position = torch.arange(self.length)
        document = torch.bucketize(position, bounds, right=True)
        distance = position.unsqueeze(1) - position
        hidden = (document.unsqueeze(1) != document) | (document == len(bounds)) | ((distance < 0) & self.causal)
        return hidden | (distance.abs() >= (self.window or self.length))

    def tensors(self) -> dict[str, Tensor]:
        """Returns q, k, v and the output's gradient."""
        heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads, "grad_out": self.heads}
        return {
            name: normal(10 * self.seed + seed, self.batch, count, self.length, self.size, dtype=self.dtype)
            for seed, (name, count) in enumerate(heads.items())
        }

    def head_rows(self) -> Tensor:
        return torch.arange(self.batch * self.heads).view(self.batch, self.heads) * 3 + 2**33

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (out, log-sum-exp)."""
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        hidden = self.hidden()
        scores = (q @ k.transpose(2, 3) * self.size**-0.5).masked_fill(hidden, -torch.inf)
        p = scores.softmax(dim=3).masked_fill(hidden.all(dim=1, keepdim=True), 0)
        if self.dropout_p:
            rows = self.head_rows().unsqueeze(-1) * WIDTH + torch.arange(self.length)
            keep = keep_mask(rows, WIDTH, self.dropout_p, KEY)[..., : self.length]
            p = p * (keep / (1 - self.dropout_p)).to(p.dtype)
        return p @ v, scores.logsumexp(dim=3)

    def counters(self) -> Tensor:
        """Returns dropout's counters, [world, B, H, n]."""
        positions = torch.stack([self.layout.positions(rank) for rank in range(self.world)])
        return (self.head_rows().unsqueeze(-1) * WIDTH + positions[:, None, None]) * WIDTH

    def dropout(self) -> dict[str, Any]:
        return {"dropout_p": self.dropout_p, "dropout_key": torch.tensor(KEY)} if self.dropout_p else {}

    def given(self) -> dict[str, list[Tensor]]:
        """Returns each rank's part of all tensors."""
        tensors = self.tensors()
        out, lse = self.attention(*(tensors[name].double() for name in "qkv"))
        tensors |= {"out": out.to(self.dtype)}
        layout, ranks = self.layout, range(self.world)
        parts = {name: [layout.shard(x, rank, 2) for rank in ranks] for name, x in tensors.items()}
        return parts | {"lse": [layout.shard(lse.float(), rank, 2, -torch.inf) for rank in ranks]}

    def check(self, ranks: list[Gradients]) -> None:
        """Compares the ranks' gradients, put together, with those of the whole sequence.

        Besides the error that plain torch makes, the log-sum-exp is rounded between forward and backward, which is a
        relative error of the probabilities.
        """
        inputs = self.tensors()
        grad = inputs.pop("grad_out")
        expected = Expected(lambda **x: self.attention(**x)[0], inputs, grad)
        lse = self.attention(*(inputs[name].double() for name in "qkv"))[1]
        rounding = lse[lse.isfinite()].abs().max().item() * torch.finfo(torch.float32).eps
        for name, parts in zip("qkv", zip(*ranks, strict=True), strict=True):
            whole = self.layout.whole(torch.stack(parts), 2).to(self.dtype)
            truth = expected.float64[name]
            bound = expected.bound(name) + rounding * truth.abs().max().item()
            check_error(name, whole, expected.same_dtype[name], truth, bound)


def here(ring: Ring) -> list[Gradients]:
    """Returns every rank's gradients from blocks that are here: dq at once, dk and dv added in rank order."""
    given, ranks = ring.given(), range(ring.world)
    blocks = torch.stack([torch.stack([given["k"][rank], given["v"][rank]]) for rank in ranks])
    queries = []
    for rank in ranks:
        sums = ring_attention_delta(given["grad_out"][rank], given["out"][rank], given["lse"][rank])
        queries.append((given["q"][rank], given["grad_out"][rank], *sums))
    results = []
    for rank in ranks:
        order = [(rank - step) % ring.world for step in ranks]
        seen, seen_by = ring.visible_ranges(rank)
        options = ring.dropout()
        counters = ring.counters() if ring.dropout_p else [None] * ring.world
        dq = ring_attention_dq(
            *queries[rank], blocks[order], ring.layout.runs, rank, seen, order, counters=counters[rank], **options
        )
        assert dq.dtype == torch.float32 and dq.transpose(1, 2).is_contiguous()
        dkdv = torch.zeros(blocks[rank].shape)
        for source in ranks:
            dkdv += ring_attention_dkdv(
                blocks[rank], *queries[source], ring.layout.runs, source, rank, seen_by, counters=counters[source],
                **options,
            )  # fmt: skip
        results.append((dq, dkdv[0], dkdv[1]))
    return results


CASES = (
    Ring(world=2, balance="striped", length=37, heads=4),
    Ring(world=2, balance="contiguous", length=34, window=11, size=40),
    Ring(world=3, balance="contiguous", length=40, causal=False, window=9),
    Ring(world=2, length=60, documents=(0, 20, 21, 43, 55)),
    Ring(world=2, balance="contiguous", length=40, heads=2, dropout_p=DROPOUT),
)
MORE = (
    Ring(world=1, length=33),
    Ring(world=1, length=40, balance="contiguous", causal=False, heads=2),
    Ring(world=2, length=75, heads=2),
    Ring(world=2, balance="contiguous", length=37, heads=4),
    *(Ring(world=2, balance=balance, length=34, window=11, size=40) for balance in ("zigzag", "striped")),
    *(Ring(world=3, balance=balance, length=40, causal=False, window=9) for balance in ("zigzag", "striped")),
    *(Ring(world=2, balance=balance, length=60, documents=(0, 20, 21, 43, 55)) for balance in BALANCES[1:]),
    Ring(world=2, length=30, causal=False, batch=2, heads=2, kv_heads=2),
    Ring(world=4, length=9),  # fewer tokens than a tile has, and padding in most runs
    Ring(world=2, length=40, size=64),
    *(Ring(world=2, balance=balance, length=40, heads=2, batch=2, dropout_p=DROPOUT) for balance in BALANCES),
)


@pytest.mark.parametrize("ring", [*CASES, *exhaustive(*MORE)], ids=str)
def test_blocks_that_are_here(ring: Ring) -> None:
    ring.check(here(ring))


@pytest.mark.parametrize(
    "ring",
    [
        Ring(world=2, balance="striped", length=34, window=11, size=40, dtype=torch.bfloat16),
        *exhaustive(
            Ring(world=2, balance="contiguous", length=37, heads=4, dtype=torch.float16),
            Ring(world=3, length=40, causal=False, window=9, dtype=torch.bfloat16),
            Ring(world=2, balance="striped", length=40, heads=2, dropout_p=DROPOUT, size=64, dtype=torch.float16),
        ),
    ],
    ids=str,
)
def test_half_types(ring: Ring) -> None:
    ring.check(here(ring))


def connect(memory: SimulatedMemory, ring: bool) -> BlockExchange:
    """Returns a block exchange on a new channel."""
    world, slot_bytes, flag_count = memory.world, 1 << 17, 4 * memory.world**2
    slots, flags = memory.buffer("slots", (2, slot_bytes), torch.uint8), memory.signals("flags", flag_count)
    end = Endpoint(
        rank=memory.rank,
        world=world,
        slots=slots.addresses,
        slot_bytes=slot_bytes,
        flags=flags.addresses,
        flag_count=flag_count,
        state=memory.signals("state", 2).local,
        abort=memory.abort,
        programs=4,
    )
    return BlockExchange(end, memory.signals("ready", 4 * world).local, ring)


def exchanged(rings: list[Ring], way: bool) -> list[list[Gradients]]:
    """Returns every rank's gradients of calls one after another on one channel; way: blocks go around the ring."""
    world = rings[0].world
    given = [ring.given() for ring in rings]
    results: list[list[Any]] = [[None] * world for _ in rings]

    def program(memory: SimulatedMemory) -> None:
        exchange, rank = connect(memory, way), memory.rank
        for call, ring in enumerate(rings):
            tensors = {name: parts[rank] for name, parts in given[call].items()}
            seen, seen_by = ring.visible_ranges(rank)
            results[call][rank] = ring_attention_backward(
                **tensors, runs=ring.layout.runs, rank=rank, seen=seen, seen_by=seen_by, exchange=exchange,
                counters_of_all=ring.counters() if ring.dropout_p else None, **ring.dropout(),
            )  # fmt: skip
        assert exchange.endpoint.state.tolist() == [len(rings), 0]

    explore(program, world, schedules=[RoundRobin()])
    return results


CALLS = (
    Ring(length=37, heads=2),
    Ring(length=24, balance="striped", causal=False, dtype=torch.bfloat16),
    Ring(length=37, heads=2, seed=1),
    Ring(length=41, balance="contiguous", window=7, dropout_p=DROPOUT, size=40),
    Ring(length=30, documents=(0, 9, 26), heads=4, dtype=torch.float16, batch=1),
)


@pytest.mark.parametrize(
    ("world", "way", "calls"),
    [
        (2, False, (0, 3)),
        (3, True, (1,)),
        *exhaustive((1, True, (0, 1, 2)), (2, False, (0, 1, 2, 3, 4)), (3, True, (0, 1, 2)), (4, False, (1, 0))),
    ],
)
def test_blocks_that_are_exchanged(world: int, way: bool, calls: Sequence[int]) -> None:
    rings = [replace(CALLS[call], world=world) for call in calls]
    for ring, ranks in zip(rings, exchanged(rings, way), strict=True):
        for rank in ranks:
            for gradient in rank:
                assert gradient.dtype == ring.dtype and gradient.transpose(1, 2).is_contiguous()
        ring.check(ranks)


@pytest.mark.parametrize("way", exhaustive(False, True))
def test_the_same_bits_in_every_run_and_either_way(way: bool) -> None:
    """The first run is around the ring."""
    rings = [Ring(world=3, length=37, dtype=torch.bfloat16)]
    for expected, actual in zip(exchanged(rings, True), exchanged(rings, way), strict=True):
        for ours, theirs in zip(expected, actual, strict=True):
            assert all(map(torch.equal, ours, theirs))


def test_an_exchange_gives_the_gradients_of_blocks_that_are_here() -> None:
    """dq is the same sum in the same order; dk and dv are added rank by rank, after each rank's part is complete."""
    ring = Ring(world=2, length=37)
    for ours, theirs in zip(exchanged([ring], True)[0], here(ring), strict=True):
        assert torch.equal(ours[0], theirs[0])
        for actual, expected in zip(ours[1:], theirs[1:], strict=True):
            torch.testing.assert_close(actual, expected)


def test_parts_of_sources_add_up() -> None:
    ring = Ring(world=3, length=50)
    given, runs = ring.given(), ring.layout.runs
    blocks = torch.stack([torch.stack([given["k"][rank], given["v"][rank]]) for rank in range(3)])
    sums = ring_attention_delta(given["grad_out"][1], given["out"][1], given["lse"][1])
    of = partial(ring_attention_dq, given["q"][1], given["grad_out"][1], *sums)
    seen = ring.visible_ranges(1)[0]
    whole = of(blocks, runs, 1, seen, (0, 1, 2))
    parts = sum(of(blocks[source : source + 1], runs, 1, seen, (source,)) for source in range(3))
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("batch", [0, 1])
def test_empty(batch: int) -> None:
    """Gradients are 0 and the epoch still advances without a batch, or with queries that see nothing."""
    ring = Ring(world=2, length=20, batch=batch, documents=(0, 0) if batch else None)
    for ranks in exchanged([ring, ring], True):
        for rank in ranks:
            assert not any(gradient.any() for gradient in rank)


def test_bad_input_is_refused() -> None:
    ring = Ring(world=1, length=20)
    given = {name: parts[0] for name, parts in ring.given().items()}
    seen, seen_by = ring.visible_ranges(0)
    words, table = torch.zeros(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    end = Endpoint(0, 1, table, 1 << 16, table, 64, words[:2], words[:1], programs=4)
    exchange = BlockExchange(end, words[:8], True)
    good: dict[str, Any] = given | {
        "runs": ring.layout.runs, "rank": 0, "seen": seen, "seen_by": seen_by, "exchange": exchange
    }  # fmt: skip
    for change, message in (
        ({"v": given["v"][:, :, 1:]}, "v has shape"),
        ({"k": given["k"].half()}, "k is torch.float16, q is torch.float32"),
        ({"out": given["out"][..., :8]}, "grad_out has shape"),
        ({"grad_out": given["grad_out"].half()}, "grad_out is torch.float16"),
        ({"lse": given["lse"].double()}, "lse is torch.float64: expected float32"),
        ({"lse": given["lse"][..., 1:]}, "lse has shape"),
        ({"rank": 1}, "rank 1 of 1"),
        ({"seen": (seen[0].long(), seen[1])}, r"seen\[0\] is torch.int64"),
        ({"seen_by": (seen[0], seen[1][1:])}, r"seen\[1\] has shape"),
        ({"dropout_p": 0.5}, "counters is None"),
        ({"dropout_p": 0.5, "counters_of_all": torch.zeros(2, 1, 1, 20, dtype=torch.int64)}, "counters_of_all has"),
        ({"exchange": replace(exchange, endpoint=replace(end, slot_bytes=256))}, "a slot holds 256"),
        ({"exchange": replace(exchange, endpoint=replace(end, programs=1))}, "a channel of 1 program"),
    ):
        with pytest.raises(
            ValueError, match=f"ring_attention_backward: {message}|ring_attention_backward: .*{message}"
        ):
            ring_attention_backward(**(good | change))
