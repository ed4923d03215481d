"""Ranges of flat elements as rectangles, tested exhaustively on small shapes."""

import itertools
import math

import pytest
import torch

from tests.support.tiers import exhaustive
from tpfuse.comm.layout import Slices
from tpfuse.zero.shard_slices import rectangles

SHAPES = [(), (0,), (5,), (3, 4), (1, 6), (2, 0), (2, 3, 2), *exhaustive(((3, 1, 2),), ((1, 2, 1, 3),), ((2,) * 4,))]


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
