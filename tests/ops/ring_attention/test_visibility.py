"""The visible ranges say the same as a mask that is written out, for any positions of the tokens."""

import itertools
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tpfuse.ops.ring_attention.visibility import VisibleRange, visible_ranges

LENGTH = 23
DOCUMENTS: tuple[list[int] | None, ...] = (
    None,
    [0, LENGTH],
    [0, 5, 6, 14, LENGTH],
    [0, 0, 5, 5, 5, LENGTH],  # some are empty
    [0, 7, 16],  # the tokens after them are of no document
    [0, 9, 9, 9],
    [0, 0],
    [0],
)
WINDOWS = (None, 1, 2, 6, LENGTH, 1000, 2**31, sys.maxsize)


def _visible(causal: bool, window: int | None, documents: list[int] | None, padded: int) -> Tensor:
    """Return [padded, padded] bool: whether the query (row) sees the key (column), by the definition."""
    bounds = [0, LENGTH] if documents is None else documents
    visible = torch.zeros(padded, padded, dtype=torch.bool)
    for begin, end in itertools.pairwise(bounds):
        for q, k in itertools.product(range(begin, end), repeat=2):
            visible[q, k] = (not causal or k <= q) and (window is None or abs(q - k) < window)
    return visible


def _mask(visible: VisibleRange, positions: Tensor) -> Tensor:
    """Return [T, len(positions)] bool: which of the positions are in each token's range."""
    return (visible.first.unsqueeze(1) <= positions) & (positions <= visible.last.unsqueeze(1))


def _cases() -> Iterator[tuple[bool, int | None, list[int] | None]]:
    yield from itertools.product((True, False), WINDOWS, DOCUMENTS)


@pytest.mark.parametrize("padded", [LENGTH, LENGTH + 9])
def test_ranges_of_queries_and_of_keys_match_the_mask(padded: int) -> None:
    positions = torch.arange(padded)
    for causal, window, documents in _cases():
        cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
        visible_keys, visible_queries = visible_ranges(positions, LENGTH, causal, window, cu_seqlens)
        expected = _visible(causal, window, documents, padded)
        assert torch.equal(_mask(visible_keys, positions), expected), (causal, window, documents)
        assert torch.equal(_mask(visible_queries, positions), expected.t()), (causal, window, documents)
        for visible in (visible_keys, visible_queries):
            _check_form(visible, expected.any(1 if visible is visible_keys else 0))


def _check_form(visible: VisibleRange, sees: Tensor) -> None:
    """Check that ends are int32, that neither decreases, and that first > last exactly where nothing is visible."""
    assert visible.first.dtype == visible.last.dtype == torch.int32
    assert torch.equal(visible.first <= visible.last, sees)
    assert bool((visible.first.diff() >= 0).all()) and bool((visible.last.diff() >= 0).all())
    assert bool((visible.first >= 0).all()) and bool((visible.last < LENGTH).all())
