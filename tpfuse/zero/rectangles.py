"""What a rank owns of each parameter and of its moments, as rectangles: the terms in which checkpoints are kept.

A rank that owns a range of a flat bucket owns, of a parameter that the range cuts, a range of its flat elements. In
the parameter's own dimensions that is the end of a first row, whole rows, and the beginning of a last row, where a
row's own parts are again ranges of something flat with one dimension fewer. Each such rectangle is contiguous, so
that it is a view of the flat buffer: nothing is copied, neither to save nor to load.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from tpfuse.comm.layout import Slices

StateKind = Literal["model", "exp_avg", "exp_avg_sq"]
STATE_KINDS: tuple[StateKind, ...] = get_args(StateKind)


@dataclass(frozen=True)
class StateRectangle:
    """A rectangle of a parameter (kind "model": its master, where it has one) or of one of its moments.

    shape: of the global tensor. slices: [start, stop) of the piece in every dimension of it. tensor: the piece itself,
    a view of what training uses, so that writing into it changes that. writer: whether this rank saves it; of the
    ranks with the same piece exactly one does.
    """

    name: str
    kind: StateKind
    shape: tuple[int, ...]
    slices: Slices
    tensor: Tensor
    is_owner: bool


def rectangles(shape: tuple[int, ...], owned: range) -> list[tuple[Slices, range]]:
    """The range `owned` of the flat elements of a row-major tensor as rectangles, each with its own part of the range.

    In order, without those that are empty; no smaller number of contiguous rectangles is possible. Raises ValueError
    for a range that is not inside the tensor.
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
    """The pieces of a rank that owns a range of the flat elements of a parameter's local part.

    shape: of the global parameter. place: where its local part lies in it (`tpfuse.comm.layout.local_slices`). owned:
    of the local part's flat elements. tensors: by kind, [len(owned)] contiguous, those elements. Raises ValueError for
    a range that is not inside the local part, or tensors of another size.
    """
    local = tuple(stop - start for start, stop in local_slices)
    for inside, part in rectangles(local, owned):
        slices = tuple((low + start, low + stop) for (low, _), (start, stop) in zip(local_slices, inside, strict=True))
        extent = [stop - start for start, stop in inside]
        for kind, flat in tensors.items():
            if flat.shape != (len(owned),):
                raise ValueError(f"{kind} of {name}: a tensor {tuple(flat.shape)}, expected ({len(owned)},)")
            tensor = flat[part.start - owned.start : part.stop - owned.start].view(extent)
            yield StateRectangle(name, kind, tuple(shape), slices, tensor, is_owner)
