"""Attention between the tokens of two ranks, cut into rectangles that torch's kernels can compute without a mask.

A query sees an interval of another rank's keys, by their indices (`tpfuse.ops.ring_attention.visibility`). Rows that
all see the same keys form one rectangle. Rows that each see one key more than the row above form a rectangle and a
causal square. The rest, at the ends of windows and documents, is computed with a mask, in small rectangles, or for
operators that take windows of keys in bands. With zigzag a causal sequence comes to one square for a rank's own keys
and one rectangle for the keys of every other rank.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpfuse.kernels.sequence_runs import SequenceRuns
from tpfuse.ops.ring_attention.visibility import visible_ranges

_MASKED_ROWS = 256  # rows of a rectangle with a mask
LEAST = 64  # the fewest rows or keys that a rectangle without a mask is made for

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rectangle:
    """Queries [first_row, stop_row) against keys [first_key, stop_key), all indices of a rank's tokens.

    causal: the rectangle is a square whose row i sees the keys up to i. visible: None if every row sees every key, or
    if causal; otherwise [rows, 2] int64, each row's first key and the one after its last. The rectangle is a band if
    the first key stays the rectangle's first and then moves by one from row to row, and the last one moves by one and
    then stays the rectangle's last.
    """

    first_row: int
    stop_row: int
    first_key: int
    stop_key: int
    causal: bool = False
    visible: Tensor | None = None

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.stop_row)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.stop_key)

    @property
    def window(self) -> tuple[int, int] | tuple[None, None]:
        """Return (left, right) of a band, the window of flash attention; (None, None) for another rectangle.

        With R rows and K keys, row i sees the keys from i + K - R - left to i + K - R + right, both inclusive. Neither
        left nor right is negative, which would mean no bound.
        """
        if self.visible is None:
            return None, None
        (top_first, top_stop), (first, stop) = self.visible[[0, -1]].tolist()
        surplus = self.stop_key - self.first_key - (self.stop_row - self.first_row)
        return stop - first - 1, top_stop - top_first - 1 - surplus

    def mask(self) -> Tensor | None:
        """Return [rows, keys] bool, true where a row sees a key, or None if every row sees every key."""
        if self.visible is not None:
            keys = torch.arange(self.first_key, self.stop_key)
            return (keys >= self.visible[:, :1]) & (keys < self.visible[:, 1:])
        if self.causal:
            return torch.ones(self.stop_row - self.first_row, self.stop_key - self.first_key, dtype=torch.bool).tril()
        return None


@functools.lru_cache(maxsize=1024)
def visible_rectangles(
    runs: SequenceRuns,
    q_rank: int,
    k_rank: int,
    causal: bool,
    window: int | None,
    documents: tuple[int, ...] | None,
    bands: bool = False,
) -> tuple[Rectangle, ...]:
    """Return the rectangles of `k_rank`'s keys that `q_rank`'s queries see; documents: their cumulative lengths.

    bands: whether all rectangles with a mask are bands, as long as possible.
    """
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    visible, _ = visible_ranges(runs.positions(q_rank), runs.length, causal, window, cu_seqlens)
    keys = runs.positions(k_rank).numpy()
    first: Ints = np.searchsorted(keys, visible.first.numpy(), "left")
    stop: Ints = np.searchsorted(keys, visible.last.numpy(), "right")
    return tuple(_cut(first, np.maximum(first, stop), bands))


def _cut(first: Ints, stop: Ints, bands: bool) -> list[Rectangle]:
    """Return the rectangles of rows that see the keys [first, stop) each; neither end decreases from row to row."""
    rectangles: list[Rectangle] = []
    index = np.arange(len(first))
    least = min(LEAST, -(-len(first) // 4))
    row = 0
    while row < len(first):
        if stop[row] == first[row]:
            row = _end_of(stop == first, row)
            continue
        same = _end_of((first == first[row]) & (stop == stop[row]), row)
        steps = _end_of((first == first[row]) & (stop - index == stop[row] - row), row)
        if max(same, steps) - row < least and bands:
            end = _end_of_band(first, stop, row)
            visible = torch.from_numpy(np.stack([first[row:end], stop[row:end]], 1))
            rectangles.append(Rectangle(row, end, int(first[row]), int(stop[end - 1]), visible=visible))
        elif max(same, steps) - row < least:
            end = min(row + _MASKED_ROWS, len(first))
            rectangles += _masked(row, first[row:end], stop[row:end])
        elif same >= steps:
            end = same
            rectangles.append(Rectangle(row, end, int(first[row]), int(stop[row])))
        else:
            end, square = steps, int(stop[row]) - 1
            if square > first[row]:
                rectangles.append(Rectangle(row, end, int(first[row]), square))
            rectangles.append(Rectangle(row, end, square, square + end - row, causal=True))
        row = end
    return rectangles


def _end_of(holds: NDArray[np.bool_], row: int) -> int:
    """Return the first row after `row` for which `holds` is false; it is true for `row`."""
    fails = np.flatnonzero(~holds[row:])
    return row + int(fails[0]) if len(fails) else len(holds)


def _end_of_band(first: Ints, stop: Ints, row: int) -> int:
    """Return the end of the longest band of rows from `row` on."""
    enter, leave = np.diff(stop[row:]), np.diff(first[row:])  # the keys that come into view, and go out of it
    holds = (enter >= 0) & (enter <= 1) & (leave >= 0) & (leave <= 1) & (stop > first)[row + 1 :]
    holds[1:] &= (enter[1:] <= enter[:-1]) & (leave[1:] >= leave[:-1])
    return row + _end_of(np.append(True, holds), 0)


def _masked(row: int, first: Ints, stop: Ints) -> list[Rectangle]:
    """Return the rectangles of rows from `row` on that see different keys: [first, stop) each.

    The keys that all rows see form a rectangle of their own if there are enough of them; the others have a mask.
    """
    sees = stop > first
    begin, end = int(first[sees].min()), int(stop[sees].max())
    all_begin, all_end = int(first.max()), int(stop.min())
    if not sees.all() or all_end - all_begin < LEAST:
        all_begin = all_end = end
    visible = torch.from_numpy(np.stack([first, stop], 1))
    spans = [(begin, all_begin, visible), (all_begin, all_end, None), (all_end, end, visible)]
    return [Rectangle(row, row + len(first), a, b, visible=bounds) for a, b, bounds in spans if a < b]
