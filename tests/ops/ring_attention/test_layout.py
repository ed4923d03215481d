"""Every token of a sequence is on one rank, at the position that the layout says, and returns from there."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.tiers import exhaustive
from tpfuse.kernels.sequence_runs import run_start
from tpfuse.ops.ring_attention.layout import BALANCES, Balance, SequenceLayout
from tpfuse.testing.inputs import integers

LENGTHS = (8, 9, 15, 16, 17, 48, 63, 100)
WORLDS = ((1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (3, 3), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8), (6, 2))


def _layouts() -> Iterator[SequenceLayout]:
    for length, (world, ulysses), balance in itertools.product(LENGTHS, WORLDS, BALANCES):
        yield SequenceLayout(length, world, balance, ulysses)


def _all_positions(layout: SequenceLayout) -> list[list[int]]:
    return [layout.positions(rank).tolist() for rank in range(layout.world)]


def test_every_position_is_on_one_rank() -> None:
    for layout in _layouts():
        found = _all_positions(layout)
        assert sorted(itertools.chain(*found)) == list(range(layout.padded_length)), layout
        assert all(len(one) == layout.local_length for one in found), layout
        assert all(one == sorted(one) for one in found), layout
        smallest = 2 * layout.world if layout.balance == "zigzag" else layout.world
        assert layout.length <= layout.padded_length < layout.length + smallest, layout


def test_the_positions_on_every_rank() -> None:
    """The table is written out, with padding, for 15 tokens on 4 ranks."""
    zigzag = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    contiguous = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    striped = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    for balance, expected in (("zigzag", zigzag), ("contiguous", contiguous), ("striped", striped)):
        assert _all_positions(SequenceLayout(15, 4, balance)) == expected
        if balance != "striped":
            assert all(_all_positions(SequenceLayout(15, 4, balance, ulysses)) == expected for ulysses in (2, 4))
    in_pairs = [striped[0], striped[2], striped[1], striped[3]]
    assert _all_positions(SequenceLayout(15, 4, "striped", 2)) == in_pairs
    assert _all_positions(SequenceLayout(15, 4, "striped", 4)) == striped


def test_ranks_that_exchange_heads_hold_the_tokens_of_a_rank_of_their_ring() -> None:
    for layout in _layouts():
        runs, u = layout.runs, layout.ulysses
        assert runs.world == layout.world // u and runs.local_length == layout.local_length * u
        for ring in range(runs.world):
            together = torch.cat([layout.positions(ring * u + i) for i in range(u)]).sort().values
            assert torch.equal(together, runs.positions(ring)), layout


def test_runs_have_the_positions_of_a_rank() -> None:
    for layout in _layouts():
        runs = layout.runs
        assert runs.count * runs.size == runs.local_length
        for rank in range(runs.world):
            written = [runs.start(rank, j) + i * runs.step for j in range(runs.count) for i in range(runs.size)]
            assert runs.positions(rank).tolist() == written == sorted(written), layout


@triton.jit
def _starts_kernel(
    starts,  # [WORLD, 2] int64, written
    unit,
    WORLD: tl.constexpr,
):
    rank = tl.program_id(0)
    for run in range(2):
        tl.store(starts + rank * 2 + run, run_start(rank, run, unit, WORLD))


@pytest.mark.parametrize("world", [1, 3, *exhaustive(8)])
def test_kernels_compute_the_same_positions(world: int) -> None:
    for balance in BALANCES:
        runs = SequenceLayout(100, world, balance).runs
        found = torch.empty(world, 2, dtype=torch.int64)
        _starts_kernel[(world,)](found, runs.unit, WORLD=world)
        expected = [[runs.start(rank, run) for run in range(runs.count)] for rank in range(world)]
        assert found[:, : runs.count].tolist() == expected


def _parts(layout: SequenceLayout, x: Tensor, dim: int, value: float) -> Tensor:
    return torch.stack([layout.shard(x, rank, dim, value) for rank in range(layout.world)])


@pytest.mark.parametrize("dim", [0, -2])
def test_whole_is_the_inverse_of_shard(dim: int) -> None:
    for layout in _layouts():
        shape = [2, 3, 2]
        shape[dim] = layout.length
        x = integers(1, *shape)
        parts = _parts(layout, x, dim, -9)
        shape[dim] = layout.local_length
        assert parts.shape == (layout.world, *shape)
        assert torch.equal(layout.whole(parts, dim), x), layout
        for rank, part in enumerate(parts):
            positions = layout.positions(rank)
            kept = positions < layout.length
            assert torch.equal(part.movedim(dim, 0)[kept], x.movedim(dim, 0)[positions[kept]]), layout
            assert bool((part.movedim(dim, 0)[~kept] == -9).all()), layout


def test_shards_of_another_layout_are_no_whole() -> None:
    for shards in ((3, 4), (4, 5), (4, 3)):
        expected = f"{shards[0]} shards of {shards[1]} tokens in dimension 0: expected 4 of 4"
        with pytest.raises(ValueError, match=expected):
            SequenceLayout(13, 4).whole(torch.zeros(shards), -1)


def test_shards_keep_integers_and_gradients() -> None:
    """Integers stay integers; a token's gradient returns to it, and that of padding is dropped."""
    layout = SequenceLayout(13, 4)
    labels = _parts(layout, torch.arange(13), 0, -100)
    assert labels.dtype == torch.int64 and int((labels == -100).sum()) == 3
    assert torch.equal(layout.whole(labels, 0), torch.arange(13))
    x = integers(1, 13, 2).requires_grad_()
    weights = integers(2, 4, 4, 2)
    (_parts(layout, x, 0, 5.0) * weights).sum().backward()
    assert torch.equal(x.grad, layout.whole(weights, 0))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((3, 4), "a sequence of 3 tokens cannot be sharded over 4 ranks"),
        ((0, 1), "a sequence of 0 tokens cannot be sharded over 1 ranks"),
        ((8, 4, "zigzag", 8), "4 ranks, 8 of them exchange heads: expected a divisor of 4"),
        ((8, 0), "0 ranks, 1 of them exchange heads: expected at least one rank"),
        ((8, 4, "zigzag", 3), "4 ranks, 3 of them exchange heads: expected a divisor of 4"),
        ((8, 4, "zigzag", 0), "4 ranks, 0 of them exchange heads: expected a divisor of 4"),
        ((8, 4, "zig-zag"), "balance 'zig-zag': expected one of zigzag, contiguous, striped"),
    ],
)
def test_impossible_layouts_are_refused(arguments: tuple[int, int, Balance, int], complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        SequenceLayout(*arguments)
    assert str(caught.value) == complaint


@pytest.mark.parametrize("balance", BALANCES)
def test_ranks_outside_of_the_world_are_refused(balance: Balance) -> None:
    layout = SequenceLayout(8, 4, balance, 2)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"rank {rank} of 4: expected 0 to 3"):
            layout.positions(rank)
        with pytest.raises(ValueError, match=f"rank {rank} of 4: expected 0 to 3"):
            layout.shard(torch.zeros(8), rank, 0)


def test_a_tensor_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="x has 7 tokens in dimension 1: expected 8"):
        SequenceLayout(8, 2).shard(torch.zeros(2, 7), 0, 1)
