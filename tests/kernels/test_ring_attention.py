"""Values of ring attention with blocks that are here or are exchanged, beside attention by its definition."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import naming
from tests.support.channels import connect, explore_once, unconnected
from tests.support.tiers import exhaustive
from tpfuse.explore import SimulatedMemory
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.kernels.block_exchange import BlockExchange
from tpfuse.kernels.configurations import TABLE, read_table
from tpfuse.kernels.ring_attention_backward import (
    ring_attention_backward,
    ring_attention_delta,
    ring_attention_dkdv,
    ring_attention_dq,
)
from tpfuse.kernels.ring_attention_forward import ring_attention_forward
from tpfuse.ops.dropout import keep_mask
from tpfuse.ops.ring_attention.layout import BALANCES, SequenceLayout
from tpfuse.ops.ring_attention.visibility import VisibleRange, visible_ranges
from tpfuse.testing.compare import Expected, check_error
from tpfuse.testing.inputs import normal

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DROPOUT, KEY, WIDTH = 0.3, -(2**61) - 7, 200
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Ring:
    """Attention of a whole sequence, the arguments of each rank, and the results that they must give."""

    world: int = 2
    balance: Any = "zigzag"
    length: int = 70
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None  # where they begin, and where the last one ends
    heads: int = 1
    kv_heads: int = 1
    size: int = 16
    dtype: torch.dtype = F32
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
        """Return [T, T], where queries do not see keys, computed pair by pair from the definition."""
        bounds = torch.tensor(self.documents or (0, self.length))
        position = torch.arange(self.length)
        document = torch.bucketize(position, bounds, right=True)
        distance = position.unsqueeze(1) - position
        hidden = (document.unsqueeze(1) != document) | (document == len(bounds)) | ((distance < 0) & self.causal)
        return hidden | (distance.abs() >= (self.window or self.length))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Return q, k, v and the output's gradient."""
        heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads, "grad_out": self.heads}
        return {
            name: normal(10 * self.seed + seed, self.batch, count, self.length, self.size, dtype=self.dtype)
            for seed, (name, count) in enumerate(heads.items())
        }

    def head_rows(self) -> Tensor:
        return torch.arange(self.batch * self.heads).view(self.batch, self.heads) * 3 + 2**33

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out, log-sum-exp)."""
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
        """Return dropout's counters, [world, B, H, n]."""
        positions = torch.stack([self.layout.positions(rank) for rank in range(self.world)])
        return (self.head_rows().unsqueeze(-1) * WIDTH + positions[:, None, None]) * WIDTH

    def dropout(self) -> dict[str, Any]:
        return {"dropout_p": self.dropout_p, "dropout_key": torch.tensor(KEY)} if self.dropout_p else {}

    def block(self, rank: int) -> Tensor:
        """Return a rank's block [2, B, Hk, n, D]; padding may be any finite values."""
        return torch.stack([self.layout.shard(self.tensors[name], rank, 2, 7.0) for name in "kv"])

    def forward_arguments(self, rank: int) -> dict[str, Any]:
        """Return the arguments of a rank's forward launch, except the blocks and where they are."""
        visible_keys, _ = self.visible_ranges(rank)
        counters = {"counters": self.counters()[rank]} if self.dropout_p else {}
        q = self.layout.shard(self.tensors["q"], rank, 2)
        return (
            {"q": q, "runs": self.layout.runs, "rank": rank, "visible_keys": visible_keys} | counters | self.dropout()
        )

    @cached_property
    def shards(self) -> dict[str, list[Tensor]]:
        """Return each rank's part of all tensors of the backward pass."""
        out, lse = self.attention(*(self.tensors[name].double() for name in "qkv"))
        layout, ranks = self.layout, range(self.world)
        tensors = self.tensors | {"out": out.to(self.dtype)}
        parts = {name: [layout.shard(x, rank, 2) for rank in ranks] for name, x in tensors.items()}
        return parts | {"lse": [layout.shard(lse.float(), rank, 2, -torch.inf) for rank in ranks]}

    def backward_arguments(self, rank: int) -> dict[str, Any]:
        """Return the arguments of a rank's backward pass, except the exchange."""
        visible_keys, visible_queries = self.visible_ranges(rank)
        tensors = {name: parts[rank] for name, parts in self.shards.items()}
        counters = {"counters_of_all": self.counters() if self.dropout_p else None}
        where = {
            "runs": self.layout.runs,
            "rank": rank,
            "visible_keys": visible_keys,
            "visible_queries": visible_queries,
        }
        return tensors | where | counters | self.dropout()

    def check(self, ranks: Sequence[Tensors]) -> None:
        """Compare the ranks' (out, lse, dq, dk, dv), put together, with those of the whole sequence.

        Besides the error that plain torch makes, the log-sum-exp is rounded between forward and backward, which is a
        relative error of the probabilities.
        """
        inputs = {name: self.tensors[name] for name in "qkv"}
        expected = Expected(lambda **x: self.attention(**x)[0], inputs, self.tensors["grad_out"])
        lse = self.attention(*(x.double() for x in inputs.values()))[1]
        rounding = lse[lse.isfinite()].abs().max().item() * torch.finfo(F32).eps
        whole = [self.layout.whole(torch.stack(parts), 2) for parts in zip(*ranks, strict=True)]
        expected.check("out", whole[0])
        torch.testing.assert_close(whole[1].double(), lse, rtol=1e-5, atol=1e-5)
        for rank, (out, sums, *_) in enumerate(ranks):
            padding = self.layout.positions(rank) >= self.length
            assert not out[:, :, padding].any() and (sums[:, :, padding] == -torch.inf).all(), "padding"
        for name, gradient in zip("qkv", whole[2:], strict=True):
            truth = expected.float64[name]
            bound = expected.bound(name) + rounding * truth.abs().max().item()
            check_error(name, gradient.to(self.dtype), expected.same_dtype[name], truth, bound)


def attend_here(ring: Ring, rank: int, **changes: Any) -> tuple[Tensor, Tensor]:
    """Run forward with all blocks, in a ring's order."""
    order = [(rank - step) % ring.world for step in range(ring.world)]
    blocks = torch.stack([ring.block(source) for source in order])
    return ring_attention_forward(blocks=blocks, sources=order, **ring.forward_arguments(rank) | changes)


def queries_of(ring: Ring, rank: int) -> Tensors:
    """Return q, the output's gradient and the sums of a rank's queries."""
    q, grad_out, out, lse = (ring.shards[name][rank] for name in ("q", "grad_out", "out", "lse"))
    return q, grad_out, *ring_attention_delta(grad_out, out, lse)


def here(ring: Ring) -> list[Tensors]:
    """Return every rank's results from blocks that are here: dq at once, dk and dv added in rank order."""
    ranks, options = range(ring.world), ring.dropout()
    blocks = torch.stack([torch.stack([ring.shards[name][rank] for name in "kv"]) for rank in ranks])
    queries = [queries_of(ring, rank) for rank in ranks]
    counters = ring.counters() if ring.dropout_p else [None] * ring.world
    results: list[Tensors] = []
    for rank in ranks:
        order = [(rank - step) % ring.world for step in ranks]
        visible_keys, visible_queries = ring.visible_ranges(rank)
        dq = ring_attention_dq(
            *queries[rank],
            blocks[order],
            ring.layout.runs,
            rank,
            visible_keys,
            order,
            counters=counters[rank],
            **options,
        )
        assert dq.dtype == F32 and dq.transpose(1, 2).is_contiguous()
        dkdv = torch.zeros(blocks[rank].shape)
        for source in ranks:
            dkdv += ring_attention_dkdv(
                blocks[rank], *queries[source], ring.layout.runs, source, rank, visible_queries,
                counters=counters[source], **options,
            )  # fmt: skip
        results.append((*attend_here(ring, rank), dq, *dkdv))
    return results


CASES = (
    Ring(balance="striped", length=37, heads=4),
    Ring(world=3, balance="contiguous", length=40, causal=False, window=9),
    Ring(length=60, documents=(0, 20, 21, 43, 55)),
    Ring(balance="contiguous", length=40, heads=2, dropout_p=DROPOUT),
    Ring(balance="striped", length=34, window=11, size=40, dtype=BF16),
)
MORE = (
    Ring(world=3, balance="striped", length=37, causal=False, documents=(0, 20, 37)),
    Ring(length=40, heads=2, size=64, dtype=BF16),
    Ring(world=1, length=33),
    Ring(world=1, length=40, balance="contiguous", causal=False, heads=2),
    Ring(balance="contiguous", length=37, heads=4, dtype=F16),
    Ring(length=34, window=11, size=40),
    Ring(world=3, balance="striped", length=40, causal=False, window=9),
    Ring(world=3, length=40, causal=False, window=9, dtype=BF16),
    Ring(world=3, length=37, causal=False),
    *(Ring(balance=balance, length=60, documents=(0, 20, 21, 43, 55)) for balance in BALANCES[1:]),
    Ring(world=3, length=37, documents=(0, 11, 12, 30)),
    Ring(length=30, causal=False, batch=2, heads=2, kv_heads=2),
    Ring(world=4, length=9),  # fewer tokens than a tile has, and padding in most runs
    Ring(world=4, balance="contiguous", length=37),
    Ring(length=75, size=40, heads=4, kv_heads=4, dtype=F16),
    Ring(length=40, heads=2, batch=2, dropout_p=DROPOUT),
    Ring(balance="striped", length=40, heads=2, dropout_p=DROPOUT, size=64, dtype=F16),
)


@pytest.mark.parametrize("ring", [*CASES, *exhaustive(*MORE)], ids=str)
def test_blocks_that_are_here(ring: Ring) -> None:
    ring.check(here(ring))


@pytest.mark.parametrize("dtype", [BF16, *exhaustive(F16)])
def test_results_in_float32(dtype: torch.dtype) -> None:
    ring = Ring(length=75, heads=2, dtype=dtype)
    one = attend_here(ring, 1, out_dtype=F32)[0]
    assert one.dtype == F32 and torch.equal(one.to(dtype), attend_here(ring, 1)[0])


def test_blocks_of_whole_tiles_give_the_bits_of_one_rank() -> None:
    """The launch rounds nothing between blocks: in the order of positions it computes exactly what attention does."""
    ring = Ring(length=128, balance="contiguous", causal=False, heads=2, dtype=BF16)
    blocks = torch.stack([ring.block(0), ring.block(1)])
    out, lse = ring_attention_forward(blocks=blocks, sources=(0, 1), **ring.forward_arguments(1))
    q, k, v = (ring.tensors[name] for name in "qkv")
    expected = attention_forward(q[:, :, 64:], k, v, causal=False)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert out.transpose(1, 2).is_contiguous()


def test_strides_of_q() -> None:
    ring = Ring(length=40, heads=2)
    expected = attend_here(ring, 0)
    wide = torch.full((1, 20, 2, 24), torch.nan)[..., 8:].transpose(1, 2)
    odd = torch.full((1, 2, 20, 17), torch.nan)[..., 1:]
    for view in (wide, odd):
        view.copy_(ring.forward_arguments(0)["q"])
        assert all(map(torch.equal, attend_here(ring, 0, q=view), expected))


def test_scale() -> None:
    ring = Ring(length=20)
    doubled = {"q": 2 * ring.forward_arguments(0)["q"], "scale": ring.size**-0.5 / 2}
    assert all(map(torch.equal, attend_here(ring, 0, **doubled), attend_here(ring, 0)))


def test_ranks_whose_keys_no_query_sees() -> None:
    ring = Ring(length=32, balance="contiguous")
    out, lse = ring_attention_forward(blocks=ring.block(1).unsqueeze(0), sources=(1,), **ring.forward_arguments(0))
    assert not out.any() and (lse == -torch.inf).all()


def exchanged(rings: list[Ring], way: bool) -> list[list[Tensors]]:
    """Return every rank's results of calls one after another on one channel; way: blocks go around the ring."""
    world = rings[0].world
    results: list[list[Any]] = [[None] * world for _ in rings]

    def program(memory: SimulatedMemory) -> None:
        rank, end = memory.rank, connect(memory, slot_bytes=1 << 17, flag_count=4 * world**2, programs=4)
        exchange = BlockExchange(end, memory.signals("ready", 4 * world).local, way)
        for call, ring in enumerate(rings):
            forward = ring_attention_forward(blocks=ring.block(rank), exchange=exchange, **ring.forward_arguments(rank))
            backward = ring_attention_backward(exchange=exchange, **ring.backward_arguments(rank))
            results[call][rank] = (*forward, *backward)
        assert end.state.tolist() == [2 * len(rings), 0]

    explore_once(program, world)
    return results


CALLS = (
    Ring(length=37, heads=2),
    Ring(length=24, balance="striped", causal=False, dtype=BF16),
    Ring(length=37, heads=2, seed=1),
    Ring(length=41, balance="contiguous", window=7, dropout_p=DROPOUT, size=40),
    Ring(length=30, documents=(0, 9, 26), heads=4, dtype=F16, batch=1),
)


@pytest.mark.parametrize(
    ("world", "way", "calls"),
    [
        (2, False, (0, 3)),
        (3, True, (1,)),
        *exhaustive((1, True, (0,)), (2, False, (2, 1, 4)), (3, True, (0, 2)), (4, False, (1, 0))),
    ],
)
def test_blocks_that_are_exchanged(world: int, way: bool, calls: Sequence[int]) -> None:
    """out, lse and dq have the bits of blocks that are here; dk and dv are added in another order."""
    rings = [replace(CALLS[call], world=world) for call in calls]
    for ring, ranks in zip(rings, exchanged(rings, way), strict=True):
        for results, of_here in zip(ranks, here(ring), strict=True):
            for actual, expected in zip(results[:3], of_here[:3], strict=True):
                assert torch.equal(actual, expected.to(actual.dtype))
            for gradient in results[2:]:
                assert gradient.dtype == ring.dtype and gradient.transpose(1, 2).is_contiguous()
        ring.check(ranks)


@pytest.mark.parametrize("way", exhaustive(False, True))
def test_the_same_bits_in_every_run_and_either_way(way: bool) -> None:
    """The first run is around the ring."""
    rings = [Ring(world=3, length=37, dtype=BF16)]
    for expected, actual in zip(exchanged(rings, True), exchanged(rings, way), strict=True):
        for ours, theirs in zip(expected, actual, strict=True):
            assert all(map(torch.equal, ours, theirs))


def test_parts_of_sources_add_up() -> None:
    ring = Ring(world=3, length=50)
    blocks = torch.stack([torch.stack([ring.shards[name][rank] for name in "kv"]) for rank in range(3)])
    visible_keys, runs = ring.visible_ranges(1)[0], ring.layout.runs
    of = partial(ring_attention_dq, *queries_of(ring, 1), runs=runs, rank=1, visible_keys=visible_keys)
    parts = sum(of(blocks=blocks[source : source + 1], sources=(source,)) for source in range(3))
    torch.testing.assert_close(parts, of(blocks=blocks, sources=(0, 1, 2)))


@pytest.mark.parametrize("batch", [0, 1])
def test_empty(batch: int) -> None:
    """Results are 0 and the epoch still advances without a batch, or with queries that see nothing."""
    ring = Ring(length=20, batch=batch, documents=(0, 0) if batch else None)
    for ranks in exchanged([ring, ring], True):
        for out, lse, *gradients in ranks:
            assert out.shape == (batch, 1, 10, 16) and not any(x.any() for x in (out, *gradients))
            assert lse.shape == (batch, 1, 10) and (lse == -torch.inf).all()


EXCHANGE = BlockExchange(unconnected(slot_bytes=1 << 14, flag_count=24), torch.zeros(6, dtype=torch.int32), ring=True)
SEEN = torch.zeros(4, dtype=torch.int32)


def on_a_channel(**changes: int) -> BlockExchange:
    return replace(EXCHANGE, endpoint=replace(EXCHANGE.endpoint, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": torch.zeros(2, 1, 4, 16)}, r"blocks has shape \(2, 1, 4, 16\): expected \[2, B, Hk, n, D\]"),
        ({"blocks": torch.zeros(2, 1, 1, 5, 16)}, "blocks has 5 tokens: expected 4, as runs"),
        ({"blocks": torch.zeros(2, 1, 1, 4, 32)[..., :16]}, ".*expected contiguous, at a multiple of 16 bytes"),
        ({"blocks": torch.zeros(2, 1, 1, 4, 16).half()}, ".*one dtype"),
        ({"q": torch.zeros(1, 2, 5, 16)}, "q has 5 tokens: expected 4, as runs"),
        ({"q": torch.zeros(1, 2, 4, 12)}, "k has shape"),
        ({"visible_keys": (SEEN, SEEN.float())}, r"visible_range\[1\] is torch.float32: expected int32"),
        ({"rank": 0}, "rank 0 of 3: the channel's is 1 of 3"),
        ({"rank": 3}, "rank 3 of 3: expected 0 <= rank < world"),
        ({"sources": (1,)}, r"sources \(1,\): expected None with exchange"),
        ({"exchange": None}, "sources None: expected ranks from 0 to 2, or exchange"),
        ({"exchange": None, "sources": (0, 3)}, ".*expected ranks from 0 to 2"),
        ({"exchange": None, "sources": (0, 1, 1)}, ".*equally far from each other"),
        (
            {"exchange": None, "sources": (0, 1), "blocks": torch.empty(2, 2, 1, 1024, 8192, 128, device="meta")},
            "blocks has 2147483648 elements for each source: expected fewer than 2\\^31",
        ),
        ({"scale": -1.0}, "scale -1.0: expected a positive number"),
        ({"dropout_p": 1.0}, "dropout_p 1.0: expected 0 <= dropout_p < 1"),
        ({"dropout_p": 0.1}, "counters is None: dropout needs it"),
        ({"out_dtype": torch.float16}, "out_dtype torch.float16: expected torch.float32, as q, or torch.float32"),
        ({"exchange": on_a_channel(programs=1)}, "a channel of 1 program: expected at least 2"),
        ({"exchange": on_a_channel(flag_count=5)}, "too few flags: one program needs 6, the channel has 5"),
        ({"exchange": on_a_channel(slot_bytes=1024)}, "1536 bytes to stage, a slot holds 1024"),
    ],
)  # fmt: skip
def test_bad_input_of_forward_is_named(changes: dict[str, Any], message: str) -> None:
    ring = Ring(world=3, length=12, heads=2)
    good = {"blocks": ring.block(1), "exchange": EXCHANGE, **ring.forward_arguments(1)}
    with pytest.raises(ValueError, match=f"ring_attention_forward: {message}"):
        ring_attention_forward(**good | changes)
    ring_attention_forward(**good)


def test_bad_input_of_backward_is_named() -> None:
    good = Ring(world=3, length=12).backward_arguments(1) | {"exchange": EXCHANGE}
    first, last = good["visible_keys"]
    for changes, message in (
        ({"v": good["v"][:, :, 1:]}, "v has shape"),
        ({"k": good["k"].half()}, "k is torch.float16, q is torch.float32"),
        ({"out": good["out"][..., :8]}, "grad_out has shape"),
        ({"grad_out": good["grad_out"].half()}, "grad_out is torch.float16"),
        ({"lse": good["lse"].double()}, "lse is torch.float64: expected float32"),
        ({"lse": good["lse"][..., 1:]}, "lse has shape"),
        ({"rank": 3}, "rank 3 of 3"),
        ({"visible_keys": (first.long(), last)}, r"visible_range\[0\] is torch.int64"),
        ({"visible_queries": (first, last[1:])}, r"visible_range\[1\] has shape"),
        ({"dropout_p": 0.5}, "counters is None"),
        ({"dropout_p": 0.5, "counters_of_all": torch.zeros(2, 1, 1, 4, dtype=torch.int64)}, "counters_of_all has"),
        ({"exchange": on_a_channel(slot_bytes=256)}, ".*a slot holds 256"),
        ({"exchange": on_a_channel(programs=1)}, "a channel of 1 program"),
    ):
        with naming(message), pytest.raises(ValueError, match=f"ring_attention_backward: {message}"):
            ring_attention_backward(**good | changes)
    ring = Ring(length=12)
    q, grad_out, *sums = queries_of(ring, 1)
    with pytest.raises(ValueError, match=r"ring_attention_dkdv: grad_out is torch.float16"):
        ring_attention_dkdv(ring.block(1), q, grad_out.half(), *sums, ring.layout.runs, 1, 0, ring.visible_ranges(0)[1])


def test_rows_that_ranks_may_take_agree_on_who_copies_what() -> None:
    rows = [row for row in read_table(TABLE) if row.operator == "ring_attention_forward"]
    for family in {row.family for row in rows}:
        copies = {(row.blocks["COPIERS"], row.blocks["BLOCK_COPY"]) for row in rows if row.family == family}
        assert len(copies) == 1, family
