"""Attention between the tokens of two ranks, cut into pieces that torch's kernels can compute without a mask.

What a query sees of another rank's keys is an interval of their indices (`tpfuse.ops.ring_attention.visibility`). Rows
that all see the same keys are one rectangle; rows that each see one key more than the row above are a rectangle and a
causal square. Only what is left, at the borders of windows and documents, is computed with a mask, in small tiles. With
zigzag a causal sequence comes to one square with oneself and one rectangle with every other rank.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpfuse.kernels.sequence_runs import SequenceRuns
from tpfuse.ops.ring_attention.visibility import visible_ranges

_TILE = 256  # rows of a masked tile
_LEAST = 64  # rows or keys worth a piece of their own

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Queries [first_row, stop_row) against keys [first_key, stop_key), all indices of a rank's tokens.

    causal: a square, of which row i sees the keys up to i. seen: where neither all nor that is seen, [rows, 2] int64:
    each row's first key and the one behind its last.
    """

    first_row: int
    stop_row: int
    first_key: int
    stop_key: int
    causal: bool = False
    seen: Tensor | None = None

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.stop_row)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.stop_key)

    def mask(self) -> Tensor | None:
        """[rows, keys] bool, true where a key is seen; None for all."""
        if self.seen is not None:
            keys = torch.arange(self.first_key, self.stop_key)
            return (keys >= self.seen[:, :1]) & (keys < self.seen[:, 1:])
        if self.causal:
            return torch.ones(self.stop_row - self.first_row, self.stop_key - self.first_key, dtype=torch.bool).tril()
        return None


@functools.lru_cache(maxsize=1024)
def pieces(
    runs: SequenceRuns, q_rank: int, k_rank: int, causal: bool, window: int | None, documents: tuple[int, ...] | None
) -> tuple[Piece, ...]:
    """What the queries of `q_rank` see of the keys of `k_rank`; documents: cumulative lengths."""
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    visible, _ = visible_ranges(runs.positions(q_rank), runs.length, causal, window, cu_seqlens)
    keys = runs.positions(k_rank).numpy()
    first: Ints = np.searchsorted(keys, visible.first.numpy(), "left")
    stop: Ints = np.searchsorted(keys, visible.last.numpy(), "right")
    return tuple(_cut(first, np.maximum(first, stop)))


def _cut(first: Ints, stop: Ints) -> list[Piece]:
    """Pieces of rows that see the keys [first, stop) each; both ends never go back."""
    found: list[Piece] = []
    index = np.arange(len(first))
    least = min(_LEAST, -(-len(first) // 4))
    row = 0
    while row < len(first):
        if stop[row] == first[row]:
            row = _end_of(stop == first, row)
            continue
        same = _end_of((first == first[row]) & (stop == stop[row]), row)
        steps = _end_of((first == first[row]) & (stop - index == stop[row] - row), row)
        if max(same, steps) - row < least:
            end = min(row + _TILE, len(first))
            found += _tile(row, first[row:end], stop[row:end])
        elif same >= steps:
            end = same
            found.append(Piece(row, end, int(first[row]), int(stop[row])))
        else:
            end, square = steps, int(stop[row]) - 1
            if square > first[row]:
                found.append(Piece(row, end, int(first[row]), square))
            found.append(Piece(row, end, square, square + end - row, causal=True))
        row = end
    return found


def _end_of(holds: NDArray[np.bool_], row: int) -> int:
    """The end of the rows from `row` on where something holds, which it does there."""
    fails = np.flatnonzero(~holds[row:])
    return row + int(fails[0]) if len(fails) else len(holds)


def _tile(row: int, first: Ints, stop: Ints) -> list[Piece]:
    """Rows that see different keys: those that all see as a rectangle, where it is worth it, the rest with masks."""
    sees = stop > first
    begin, end = int(first[sees].min()), int(stop[sees].max())
    all_begin, all_end = int(first.max()), int(stop.min())
    if not sees.all() or all_end - all_begin < _LEAST:
        all_begin = all_end = end
    seen = torch.from_numpy(np.stack([first, stop], 1))
    parts = [(begin, all_begin, seen), (all_begin, all_end, None), (all_end, end, seen)]
    return [Piece(row, row + len(first), a, b, seen=of) for a, b, of in parts if a < b]
