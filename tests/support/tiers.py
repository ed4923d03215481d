"""Which tests run: `make test` runs the tests that no marker defers, `make test-all` runs all tests.

    @pytest.mark.parametrize("world", [2, *exhaustive(1, 3, 4)])
    @pytest.mark.parametrize(*pairwise(dtype=[F32, BF16, F16], rows=[63, 1, 100]))

A parameter stays unmarked if the test needs it to find a fault that no other test of the first tier finds.
pyproject.toml lists the markers that defer a test. A test that needs more than the oldest torch of pyproject.toml says
so by `needs_torch`. This module imports pytest.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

_Cells = tuple[tuple[int, int], ...]  # pairs of an axis and the index of a value


def exhaustive(*rows: Any) -> list[Any]:
    """Return the rows as parameters of the second tier. A row that is a tuple has one value per parameter name."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.exhaustive) for row in rows]


def needs_torch(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if torch is older. reason: what an older torch cannot do."""
    older = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (major, minor)
    return pytest.mark.skipif(older, reason=f"needs torch {major}.{minor}: {reason}")


STAGE_3_ABANDONS = needs_torch(2, 13, "in older ones stage 3 cannot abandon a step")
UNEVEN_SEQUENCES = needs_torch(2, 13, "older styles of torch refuse sequences that the ranks do not divide")


def pairwise(first: int = 1, **axes: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Return names and rows for `parametrize`, so that every pair of values of two axes is in at least one row.

    There are fewer rows than in the full product. The first row holds the first value of each axis. The first `first`
    rows belong to the first tier, the others to the second. The rows are a greedy covering array; they depend on the
    order of the values alone.
    """
    names, sizes = list(axes), [len(values) for values in axes.values()]
    missing: set[_Cells] = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(names)), 2)
        for a, b in itertools.product(range(sizes[i]), range(sizes[j]))
    }
    if len(names) == 1:
        missing = {((0, a),) for a in range(sizes[0])}
    rows: list[tuple[int, ...]] = []
    while missing or not rows:
        chosen = dict(min(missing)) if rows else dict.fromkeys(range(len(names)), 0)
        for axis in range(len(names)):
            if axis not in chosen:
                counts = [len(_pairs(chosen | {axis: value}) & missing) for value in range(sizes[axis])]
                chosen[axis] = counts.index(max(counts))
        missing -= _pairs(chosen)
        rows.append(tuple(chosen[axis] for axis in range(len(names))))
    values = [tuple(axes[name][index] for name, index in zip(names, row, strict=True)) for row in rows]
    return names, [*(pytest.param(*row) for row in values[:first]), *exhaustive(*values[first:])]


def _pairs(chosen: dict[int, int]) -> set[_Cells]:
    """Return the pairs of (axis, value) that a row, or a part of one, covers, and each (axis, value) by itself."""

    items = sorted(chosen.items())
    return set(itertools.combinations(items, 2)) | {(item,) for item in items}
