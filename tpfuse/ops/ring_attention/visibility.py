"""Visible ranges of positions: one form for causal masks, windows, documents and padding.

In all of them a query sees an interval of keys, and a key is seen by an interval of queries; neither end decreases from
a token to the next. So two numbers per token describe the mask completely, on any rank that holds the token, and the
numbers of the first and the last token of a tile tell which keys the whole tile sees.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class VisibleRange(NamedTuple):
    """The positions of the first and the last visible token, [T] int32 each, first > last where none is visible."""

    first: Tensor
    last: Tensor


def visible_ranges(
    positions: Tensor, length: int, causal: bool, window: int | None, cu_seqlens: Tensor | None
) -> tuple[VisibleRange, VisibleRange]:
    """Return (the keys that queries at these positions see, the queries that see keys at these positions).

    positions: [T] int64, increasing. Tokens from `length` on, and after the last document, see no token and no token
    sees them. cu_seqlens: [S + 1] int32, the documents' first positions and the end of the last one; window: as in
    `attention`.
    """
    if cu_seqlens is None:
        begin, end = torch.zeros_like(positions), torch.full_like(positions, length)
        stop = positions.new_full((), length)
    else:
        # Values are not read on the host: it would wait for the GPU.
        bounds = cu_seqlens.to(torch.int64).clamp(0, length)
        stop = bounds[-1]
        document = torch.searchsorted(bounds, positions, right=True)
        begin = bounds[(document - 1).clamp(max=len(bounds) - 1)]
        end = bounds[document.clamp(max=len(bounds) - 1)]
    far = length if window is None else min(window - 1, length)  # ends are int32
    ahead = 0 if causal else far
    hidden = positions >= stop

    def interval(before: int, after: int) -> VisibleRange:
        first = torch.maximum(positions - before, begin).masked_fill(hidden, stop)
        last = torch.minimum(positions + after, end - 1).masked_fill(hidden, stop - 1)
        return VisibleRange(first.to(torch.int32), last.to(torch.int32))

    return interval(far, ahead), interval(ahead, far)
