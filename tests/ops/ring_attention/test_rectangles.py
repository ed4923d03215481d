"""Rectangles cover every visible pair of query and key once, and are few where masks are simple."""

import pytest
import torch

from tpfuse.ops.ring_attention.layout import BALANCES, Balance, SequenceLayout
from tpfuse.ops.ring_attention.rectangles import Rectangle, visible_rectangles


def _covered(found: tuple[Rectangle, ...], queries: int, keys: int, bands: bool) -> torch.Tensor:
    """Return in how many rectangles each (query, key) is. bands: masks are read as flash attention reads windows."""
    count = torch.zeros(queries, keys, dtype=torch.int64)
    for rectangle in found:
        mask, (left, right) = rectangle.mask(), rectangle.window
        part = count[rectangle.rows, rectangle.keys]
        if bands and left is not None and right is not None:
            assert min(left, right) >= 0
            rows, columns = part.shape
            place = torch.arange(columns) - torch.arange(rows).unsqueeze(1) - (columns - rows)
            mask = (place >= -left) & (place <= right)
            assert mask.any(1).all()
        part += 1 if mask is None else mask.to(torch.int64)
    return count


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("window", [None, 1, 37, 300, 301, 599])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("documents", "bands"), [(None, False), (None, True), ((0, 3, 3, 300, 811), False)])
def test_every_visible_pair_is_covered_once(
    balance: Balance, window: int | None, causal: bool, documents: tuple[int, ...] | None, bands: bool
) -> None:
    length, world = 900, 3
    runs = SequenceLayout(length, world, balance).runs
    for rank in range(world):
        for source in range(world):
            i, j = runs.positions(rank).unsqueeze(1), runs.positions(source)
            seen = (i < length) & (j < length)
            if causal:
                seen &= j <= i
            if window is not None:
                seen &= (i - j).abs() < window
            if documents is not None:
                bounds = torch.tensor(documents)
                own, other = (torch.searchsorted(bounds, x, right=True) for x in (i, j))
                seen &= (own == other) & (i < documents[-1]) & (j < documents[-1])
            found = visible_rectangles(runs, rank, source, causal, window, documents, bands)
            assert torch.equal(_covered(found, *seen.shape, bands), seen.to(torch.int64))


def test_causal_zigzag_is_one_square_and_rectangles() -> None:
    runs, half = SequenceLayout(4096, 4).runs, 512
    for rank in range(4):
        for source in range(4):
            (rectangle,) = visible_rectangles(runs, rank, source, True, None, None)
            if source == rank:
                assert rectangle == Rectangle(0, 2 * half, 0, 2 * half, causal=True)
            elif source < rank:
                assert rectangle == Rectangle(0, 2 * half, 0, half)
            else:
                assert rectangle == Rectangle(half, 2 * half, 0, 2 * half)


@pytest.mark.parametrize("balance", ["contiguous", "striped"])
def test_hidden_pairs_are_not_computed(balance: Balance) -> None:
    runs = SequenceLayout(4096, 4, balance).runs
    found = {
        (rank, source): visible_rectangles(runs, rank, source, True, None, None)
        for rank in range(4)
        for source in range(4)
    }
    pairs = sum((r.stop_row - r.first_row) * (r.stop_key - r.first_key) / (1 + r.causal)
                for each in found.values() for r in each)  # fmt: skip
    assert max(map(len, found.values())) == 1
    assert pairs < 1.01 * 4096 * 4097 / 2


def test_masks_are_small_at_the_ends_of_a_window() -> None:
    runs = SequenceLayout(8192, 2, "contiguous").runs
    found = visible_rectangles(runs, 1, 1, True, 1024, None)
    areas = {r: (r.stop_row - r.first_row) * (r.stop_key - r.first_key) for r in found}
    masked = sum(area for rectangle, area in areas.items() if rectangle.visible is not None)
    assert 0 < masked < 0.45 * sum(areas.values())  # 256 rows see 1279 keys: the first 255 and the last 256 are masked


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (4096, [["square"], ["whole"], ["whole"], ["whole"]]),
        (2048, [["square"], ["whole"], ["band"], []]),
        (2047, [["square"], ["whole", "band"], ["band"], []]),  # the last row does not see the first key
        (1000, [["square", "band"], ["band"], [], []]),
    ],
)
def test_bands_are_only_where_the_edge_of_a_window_is(window: int, expected: list[list[str]]) -> None:
    runs = SequenceLayout(4096, 4, "contiguous").runs
    for rank in range(4):
        for source in range(rank + 1):
            found = visible_rectangles(runs, rank, source, True, window, None, True)
            kinds = ["square" if r.causal else "whole" if r.visible is None else "band" for r in found]
            assert kinds == expected[rank - source], (rank, source)
