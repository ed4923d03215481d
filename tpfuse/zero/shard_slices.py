"""The rectangles of each parameter and its moments that a rank owns; checkpoints are stored as such rectangles.

If a rank owns a range of a flat bucket and the range cuts a parameter, the rank owns a range of the parameter's flat
elements. In the parameter's own dimensions this range is the end of a first row, then whole rows, then the beginning of
a last row; the part of a row is again a range of flat elements, with one dimension fewer. Each of these rectangles is
contiguous, so it is a view of the flat buffer, and neither saving nor loading copies data.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tpfuse.comm.layout import Slices

StateKind = Literal["model", "exp_avg", "exp_avg_sq"]


@dataclass(frozen=True)
class StateRectangle:
    """A rectangle of a parameter (kind "model": of its master, if it has one) or of one of its moments.

    tensor: the rectangle's elements, a view of the memory that training uses, so writing to it changes the training
    state.
    """

    name: str
    kind: StateKind
    shape: tuple[int, ...]  # of the global tensor
    slices: Slices  # [start, stop) of the rectangle in each dimension of that tensor
    tensor: Tensor
    is_owner: bool  # whether this rank saves it; of the ranks with the same rectangle exactly one does


def rectangles(shape: tuple[int, ...], owned: range) -> list[tuple[Slices, range]]:
    """Return the range `owned` of a row-major tensor's flat elements as rectangles, each with its part of the range.

    The rectangles are in order and not empty, and there are as few contiguous ones as possible. Raise ValueError for a
    range that is not inside the tensor.
    """
    size = math.prod(shape)
    if owned.step != 1 or not 0 <= owned.start <= owned.stop <= size:
        raise ValueError(f"{owned} is not a range of the {size} elements of a tensor {tuple(shape)}")
    return list(_rectangles(tuple(shape), owned.start, owned.stop))


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Slices, range]]:
    if start == stop:
        return
    if not shape:
        yield (), range(start, stop)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _inside_row(shape, last, start, stop)
        return
    yield from _inside_row(shape, first - 1, start, first * row)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:])), range(first * row, last * row)
    yield from _inside_row(shape, last, last * row, stop)


def _inside_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[tuple[Slices, range]]:
    before = index * math.prod(shape[1:])
    for slices, part in _rectangles(shape[1:], start - before, stop - before):
        yield ((index, index + 1), *slices), range(part.start + before, part.stop + before)


def state_rectangles(
    name: str,
    shape: tuple[int, ...],
    local_slices: Slices,
    owned: range,
    tensors: Mapping[StateKind, Tensor],
    is_owner: bool,
) -> Iterator[StateRectangle]:
    """Yield the rectangles of a rank that owns a range of the flat elements of a parameter's local shard.

    shape: the shape of the global parameter. local_slices: the local shard's slices of it
    (`tpfuse.comm.layout.local_slices`). owned: a range of the local shard's flat elements. tensors: these elements by
    kind, [len(owned)] contiguous. Raise ValueError for a range that is not inside the local shard.
    """
    local = tuple(stop - start for start, stop in local_slices)
    for inside, part in rectangles(local, owned):
        slices = tuple((low + start, low + stop) for (low, _), (start, stop) in zip(local_slices, inside, strict=True))
        extent = [stop - start for start, stop in inside]
        for kind, flat in tensors.items():
            tensor = flat[part.start - owned.start : part.stop - owned.start].view(extent)
            yield StateRectangle(name, kind, tuple(shape), slices, tensor, is_owner)
