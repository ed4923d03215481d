"""Values of ring_attention_forward, with blocks that are here or are exchanged, beside attention by its definition."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.kernels.block_exchange import BlockExchange
from tpfuse.kernels.configurations import TABLE, read_table
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.ring_attention_forward import ring_attention_forward
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.visibility import visible_ranges
from tpfuse.testing.compare import Expected
from tpfuse.testing.explore import RoundRobin, SimulatedMemory, explore
from tpfuse.testing.inputs import normal
from tpfuse.testing.tiers import exhaustive

Connect = Callable[..., Endpoint]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Mask:
    """The visibility in a whole sequence. documents: where they begin, and where the last one ends."""

    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.documents is None else torch.tensor(self.documents, dtype=torch.int32)

    def hidden(self, length: int) -> Tensor:
        """Returns the mask [length, length], pair by pair."""
        query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
        hidden = torch.zeros(length, length, dtype=torch.bool)
        if self.causal:
            hidden |= key > query
        if self.window is not None:
            hidden |= (query - key).abs() >= self.window
        if self.documents is not None:
            bounds = torch.tensor(self.documents)
            query_document, key_document = (torch.searchsorted(bounds, x, right=True) for x in (query, key))
            hidden |= (query_document != key_document) | (query >= bounds[-1])
        return hidden


MASKS = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "window": Mask(window=9),
    "window on both sides": Mask(causal=False, window=7),
    "documents": Mask(documents=(0, 11, 12, 30)),  # tokens after the last document see nothing
    "documents, full": Mask(causal=False, documents=(0, 20, 37)),
}


def defined(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, dropout_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of the whole sequence; dropout_mask: dropout's mask, scaled."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(mask.hidden(q.shape[2]), -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    return (p if dropout_mask is None else p * dropout_mask.to(p.dtype)).to(v.dtype) @ v, lse


@dataclass
class Whole:
    """A sequence, how it is spread, and the arguments of each rank."""

    layout: SequenceLayout
    mask: Mask
    q: Tensor
    k: Tensor
    v: Tensor

    def block(self, rank: int) -> Tensor:
        """Returns a rank's block [2, B, Hk, n, D]; padding may be any finite values."""
        return torch.stack([self.layout.shard(x, rank, 2, 7.0) for x in (self.k, self.v)])

    def arguments(self, rank: int) -> dict[str, Any]:
        """Returns the arguments of a rank's launch, except blocks."""
        layout, mask = self.layout, self.mask
        seen, _ = visible_ranges(layout.positions(rank), layout.length, mask.causal, mask.window, mask.cu_seqlens)
        return {"q": layout.shard(self.q, rank, 2), "runs": layout.runs, "rank": rank, "seen": seen}

    def check(self, results: list[tuple[Tensor, Tensor]], dropout_mask: Tensor | None = None) -> None:
        """Compares every rank's (out, lse) with the whole, allowing the error that plain torch makes."""
        out, lse = (self.layout.whole(torch.stack(parts), 2) for parts in zip(*results, strict=True))
        inputs = {"q": self.q, "k": self.k, "v": self.v}

        def plain(**x: Tensor) -> Tensor:
            return defined(**x, mask=self.mask, dropout_mask=dropout_mask)[0]

        Expected(plain, inputs, torch.zeros_like(self.q)).check("out", out)
        truth = defined(*(x.double() for x in inputs.values()), mask=self.mask)[1]
        torch.testing.assert_close(lse.double(), truth, rtol=1e-5, atol=1e-5)
        for rank, (rank_out, sums) in enumerate(results):
            hidden = self.layout.positions(rank) >= self.layout.length
            assert not rank_out[:, :, hidden].any() and (sums[:, :, hidden] == -torch.inf).all(), "padding"


def whole(
    seed: int,
    length: int,
    world: int,
    balance: Any = "zigzag",
    mask: Mask = MASKS["causal"],
    *,
    heads: tuple[int, int] = (2, 1),
    size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Whole:
    q, k, v = (normal(10 * seed + i, 1, heads[i > 0], length, size, dtype=dtype) for i in range(3))
    return Whole(SequenceLayout(length, world, balance), mask, q, k, v)


def here(x: Whole, rank: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Runs with all blocks, in a ring's order."""
    world = x.layout.world
    order = [(rank - step) % world for step in range(world)]
    blocks = torch.stack([x.block(source) for source in order])
    return ring_attention_forward(blocks=blocks, sources=order, **x.arguments(rank), **options)


@pytest.mark.parametrize(
    ("balance", "name", "world"),
    [
        ("zigzag", "causal", 2),
        ("contiguous", "window", 3),
        ("striped", "documents, full", 3),
        ("striped", "window on both sides", 3),
        *exhaustive(
            ("contiguous", "causal", 1),
            ("zigzag", "causal", 1),
            ("striped", "causal", 2),
            ("zigzag", "causal", 3),
            ("contiguous", "causal", 4),
            ("zigzag", "causal", 4),
            ("contiguous", "full", 3),
            ("zigzag", "full", 3),
            ("striped", "window", 3),
            ("zigzag", "window on both sides", 3),
            ("zigzag", "documents", 3),
            ("contiguous", "documents", 3),
            ("contiguous", "documents, full", 3),
        ),
    ],
)
def test_masks(balance: str, name: str, world: int) -> None:
    """There are 37 tokens, which no number of ranks divides."""
    x = whole(world, 37, world, balance, MASKS[name])
    x.check([here(x, rank) for rank in range(world)])


@pytest.mark.parametrize(
    ("size", "heads", "dtype"),
    [
        (64, (2, 1), BF16),
        *exhaustive((16, (4, 1), BF16), (16, (4, 1), F16), (40, (4, 4), F32), (40, (4, 4), F16), (64, (2, 1), F32)),
    ],
)
def test_heads_and_dtypes(size: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    x = whole(3, 75, 2, "zigzag", heads=heads, size=size, dtype=dtype)
    x.check([here(x, rank) for rank in range(2)])
    one = here(x, 1, out_dtype=torch.float32)[0]
    assert one.dtype == torch.float32 and torch.equal(one.to(dtype), here(x, 1)[0])


def test_blocks_of_whole_tiles_give_the_bits_of_one_rank() -> None:
    """The launch rounds nothing between blocks: in the order of positions it computes exactly what attention does."""
    x = whole(4, 128, 2, "contiguous", Mask(causal=False), dtype=torch.bfloat16)
    blocks = torch.stack([x.block(0), x.block(1)])
    out, lse = ring_attention_forward(blocks=blocks, sources=(0, 1), **x.arguments(1))
    expected = attention_forward(x.q[:, :, 64:], x.k, x.v, causal=False)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert out.transpose(1, 2).is_contiguous()


def test_strides_of_q() -> None:
    x = whole(5, 40, 2)
    expected = here(x, 0)
    arguments = x.arguments(0)
    wide = torch.full((1, 20, 2, 24), torch.nan)[..., 8:].transpose(1, 2)
    odd = torch.full((1, 2, 20, 17), torch.nan)[..., 1:]
    blocks = torch.stack([x.block(0), x.block(1)])
    for view in (wide, odd):
        view.copy_(arguments["q"])
        got = ring_attention_forward(blocks=blocks, sources=(0, 1), **arguments | {"q": view})
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_ranks_whose_keys_no_query_sees() -> None:
    x = whole(6, 32, 2, "contiguous")
    out, lse = ring_attention_forward(blocks=x.block(1).unsqueeze(0), sources=(1,), **x.arguments(0))
    assert not out.any() and (lse == -torch.inf).all()


class Channel:
    """A rank's end of a channel, with space for blocks."""

    def __init__(self, memory: SimulatedMemory, connect: Connect, ring: bool, **options: int) -> None:
        options = {"slot_bytes": 1 << 16, "flag_count": 2 * memory.world**2, "programs": 5} | options
        self.end = connect(memory, **options)
        self.exchange = BlockExchange(self.end, memory.signals("ready", 2 * memory.world).local, ring)

    def attend(self, x: Whole, **options: Any) -> tuple[Tensor, Tensor]:
        rank = self.end.rank
        return ring_attention_forward(blocks=x.block(rank), exchange=self.exchange, **x.arguments(rank) | options)


@pytest.mark.parametrize(
    ("world", "ring", "count"), [(2, False, 4), (3, True, 2), *exhaustive((1, True, 4), (4, True, 4), (4, False, 3))]
)
def test_blocks_that_are_exchanged(connect: Connect, world: int, ring: bool, count: int) -> None:
    """Launches of different data and sizes, one after another, give the bits of blocks that are here."""
    sequences = [
        whole(10, 37, world, "contiguous", MASKS["documents"], heads=(1, 1)),
        whole(11, 37, world, "contiguous", MASKS["documents"], heads=(1, 1)),
        whole(12, 9, world, "striped", MASKS["window"], dtype=torch.bfloat16),
        whole(13, 11, world, "zigzag", heads=(1, 1), dtype=torch.float16),
    ][:count]
    expected = [[here(x, rank) for rank in range(world)] for x in sequences]
    sequences[0].check(expected[0])

    def program(memory: SimulatedMemory) -> None:
        channel = Channel(memory, connect, ring)
        for x, results in zip(sequences, expected, strict=True):
            for got, should in zip(channel.attend(x), results[memory.rank], strict=True):
                assert torch.equal(got, should)
        assert channel.end.state.tolist() == [len(sequences), 0]

    explore(program, world, schedules=[RoundRobin()])


def test_nothing_to_attend_to(connect: Connect) -> None:
    """There are no heads: every launch is an epoch all the same."""

    def program(memory: SimulatedMemory) -> None:
        channel = Channel(memory, connect, ring=True)
        x = whole(1, 5, 2, heads=(0, 0))
        out, lse = channel.attend(x)
        assert out.shape == (1, 0, 4, 16) and lse.shape == (1, 0, 4)
        assert channel.end.state.tolist() == [1, 0]

    explore(program, 2, schedules=[RoundRobin()])


@pytest.mark.parametrize(("balance", "documents"), [("striped", (0, 11, 33)), *exhaustive(("zigzag", None))])
def test_dropout_is_that_of_the_whole_sequence(balance: str, documents: tuple[int, ...] | None) -> None:
    p, length, width = 0.4, 33, 50
    key, head_rows = torch.tensor(123456789012), torch.tensor([[7, 3]] if documents is None else [[7, 3], [1, 4]])
    dropped: dict[str, Any] = {"dropout_p": p, "dropout_key": key}
    x = whole(7, length, 3, balance, Mask(documents=documents))
    starts = torch.tensor(documents or (0, length))
    plain: dict[str, Any] = {}
    if documents is not None:
        bounds = starts.to(torch.int32)
        plain = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 22}
    expected, _ = attention_forward(x.q, x.k, x.v, head_rows=head_rows, dropout_width=width, **dropped, **plain)
    results = []
    for rank in range(3):
        positions = x.layout.positions(rank).clamp(max=length - 1)
        document = torch.searchsorted(starts, positions, right=True) - 1
        rows = head_rows[document].mT * width + positions - starts[document]
        counters = (rows * width - starts[document]).unsqueeze(0)
        results.append(here(x, rank, counters=counters, **dropped))
    out = x.layout.whole(torch.stack([out for out, _ in results]), 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][1], here(x, 0)[1])


@pytest.fixture
def alone() -> dict[str, Any]:
    """Returns arguments of one rank of three on an unconnected channel, aborted so that launches do nothing."""
    table, words = torch.zeros(3, dtype=torch.int64), torch.ones(2, dtype=torch.int32)
    end = Endpoint(1, 3, table, 4096, table, 12, words, words[:1], programs=2)
    x = whole(1, 12, 3)
    exchange = BlockExchange(end, torch.zeros(3, dtype=torch.int32), ring=True)
    return {"blocks": x.block(1), "exchange": exchange, **x.arguments(1)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": torch.zeros(2, 1, 4, 16)}, r"blocks has shape \(2, 1, 4, 16\): expected \[2, B, Hk, n, D\]"),
        ({"blocks": torch.zeros(2, 1, 1, 5, 16)}, "blocks has 5 tokens: expected 4, as runs"),
        ({"blocks": torch.zeros(2, 1, 1, 4, 32)[..., :16]}, "expected contiguous, at a multiple of 16 bytes"),
        ({"blocks": torch.zeros(2, 1, 1, 4, 16).half()}, "one dtype"),
        ({"q": torch.zeros(1, 2, 5, 16)}, "q has 5 tokens: expected 4, as runs"),
        ({"q": torch.zeros(1, 2, 4, 12)}, "k has shape"),
        ({"seen": (torch.zeros(4, dtype=torch.int32), torch.zeros(4))}, r"seen\[1\] is torch.float32: expected int32"),
        ({"rank": 0}, "rank 0 of 3: the channel's is 1 of 3"),
        ({"rank": 3}, "rank 3 of 3: expected 0 <= rank < world"),
        ({"sources": (1,)}, r"sources \(1,\): expected None with exchange"),
        ({"exchange": None}, "sources None: expected ranks from 0 to 2, or exchange"),
        ({"exchange": None, "sources": (0, 3)}, "expected ranks from 0 to 2"),
        ({"exchange": None, "sources": (0, 1, 1)}, "equally far from each other"),
        ({"scale": -1.0}, "scale -1.0: expected a positive number"),
        ({"dropout_p": 1.0}, "dropout_p 1.0: expected 0 <= dropout_p < 1"),
        ({"dropout_p": 0.1}, "counters is None: dropout needs it"),
        ({"out_dtype": torch.float16}, "out_dtype torch.float16: expected torch.float32, as q, or torch.float32"),
    ],
)  # fmt: skip
def test_bad_input_is_named(alone: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ring_attention_forward(**alone | changes)
    ring_attention_forward(**alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"programs": 1}, "a channel of 1 program: expected at least 2"),
        ({"flag_count": 5}, "too few flags: one program needs 6, the channel has 5"),
        ({"slot_bytes": 1024}, "1536 bytes to stage, a slot holds 1024"),
    ],
)
def test_channels_that_are_too_small(alone: dict[str, Any], changes: dict[str, int], message: str) -> None:
    exchange = replace(alone["exchange"], endpoint=replace(alone["exchange"].endpoint, **changes))
    with pytest.raises(ValueError, match=f"ring_attention_forward: {message}"):
        ring_attention_forward(**alone | {"exchange": exchange})


def test_rows_that_ranks_may_take_agree_on_who_copies_what() -> None:
    rows = [row for row in read_table(TABLE) if row.operator == "ring_attention_forward"]
    for family in {row.family for row in rows}:
        copies = {(row.blocks["COPIERS"], row.blocks["BLOCK_COPY"]) for row in rows if row.family == family}
        assert len(copies) == 1, family
