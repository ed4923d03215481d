"""Ranges of flat elements as rectangles, tested exhaustively on small shapes."""

import itertools
import math
from typing import get_args

import pytest
import torch

from tests.support.tiers import exhaustive
from tpfuse.comm.layout import Slices
from tpfuse.zero.shard_slices import StateKind, rectangles, state_rectangles

SHAPES = [
    (),
    (1,),
    (5,),
    (0,),
    (1, 1),
    (3, 4),
    (4, 1),
    (1, 6),
    (2, 0),
    (0, 3),
    (3, 1, 2),
    (2, 3, 2),
    *exhaustive(((2, 3, 4),), ((1, 2, 1, 3),), ((2,) * 4,)),
]


def every_rectangle(shape: tuple[int, ...]) -> dict[tuple[int, int], Slices]:
    """Return all rectangles whose elements are contiguous, by flat range."""
    flat = torch.arange(math.prod(shape)).view(shape)
    found: dict[tuple[int, int], Slices] = {}
    for slices in itertools.product(*(itertools.combinations(range(size + 1), 2) for size in shape)):
        inside = flat[tuple(slice(*each) for each in slices)].flatten()
        if len(inside) == inside[-1] - inside[0] + 1:
            found[int(inside[0]), int(inside[-1]) + 1] = slices
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_of_small_shapes(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    flat, contiguous = torch.arange(size), every_rectangle(shape)
    whole = flat.view(shape)
    for start in range(size + 1):
        fewest = {start: 0}  # the number of rectangles from start to each stop
        for stop in range(start, size + 1):
            cuts = [fewest[cut] for cut in range(start, stop) if (cut, stop) in contiguous]
            fewest[stop] = 1 + min(cuts) if cuts else fewest[stop]
            found = rectangles(shape, range(start, stop))
            assert len(found) == fewest[stop], (start, stop)
            at = start
            for slices, part in found:
                assert part.start == at and len(part) and len(slices) == len(shape)
                at = part.stop
                rectangle = flat[part.start : part.stop].view([b - a for a, b in slices])
                assert torch.equal(rectangle, whole[tuple(slice(*each) for each in slices)])
            assert at == stop


def test_ranges_outside_of_the_tensor_are_refused() -> None:
    for owned in (range(-1, 2), range(3, 13), range(3, 2), range(0, 4, 2)):
        with pytest.raises(ValueError, match=r"is not a range of the 12 elements of a tensor \(3, 4\)"):
            rectangles((3, 4), owned)


def test_state_rectangles_are_views_at_their_slices_of_the_global_tensor() -> None:
    whole = torch.arange(6 * 10).view(6, 10)
    local_slices = (2, 5), (1, 9)
    flat = whole[2:5, 1:9].flatten()
    owned = range(3, 21)
    tensors = {kind: flat[3:21].clone() for kind in get_args(StateKind)}
    owned_rectangles = list(state_rectangles("w", (6, 10), local_slices, owned, tensors, True))
    assert [(p.kind, p.slices) for p in owned_rectangles if p.kind == "model"] == [
        ("model", ((2, 3), (4, 9))),
        ("model", ((3, 4), (1, 9))),
        ("model", ((4, 5), (1, 6))),
    ]
    for rectangle in owned_rectangles:
        assert rectangle.name == "w" and rectangle.shape == (6, 10) and rectangle.is_owner
        assert torch.equal(rectangle.tensor, whole[tuple(slice(*each) for each in rectangle.slices)])
        rectangle.tensor.zero_()
    assert not any(tensor.any() for tensor in tensors.values()) and len(owned_rectangles) == 9
    with pytest.raises(ValueError, match=r"exp_avg of w has shape \(17,\): expected \(18,\)"):
        list(state_rectangles("w", (6, 10), local_slices, owned, {"exp_avg": flat[:17]}, True))
