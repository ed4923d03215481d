"""Parameters of tests and the tiers to which they belong."""

import itertools

from tests.support.tiers import exhaustive, pairwise


def _values(rows):
    return [row.values for row in rows]


def _deferred(rows):
    return [any(mark.name == "exhaustive" for mark in row.marks) for row in rows]


def test_exhaustive_rows_are_marked() -> None:
    rows = exhaustive(1, (2, "b"))
    assert _values(rows) == [(1,), (2, "b")]
    assert _deferred(rows) == [True, True]


def test_every_pair_of_values_is_in_a_row() -> None:
    axes = {"world": [2, 1, 3, 4], "dtype": ["f32", "bf16", "f16"], "bias": [False, True], "rows": [63, 1]}
    names, rows = pairwise(2, **axes)
    assert names == list(axes)
    assert _values(rows)[0] == (2, "f32", False, 63)
    assert _deferred(rows) == [False, False] + [True] * (len(rows) - 2)
    for i, j in itertools.combinations(range(4), 2):
        covered = {(row[i], row[j]) for row in _values(rows)}
        assert covered == set(itertools.product(axes[names[i]], axes[names[j]]))
    assert len(rows) <= 14 < 48, "the largest two axes alone need 12"


def test_one_axis_has_a_row_for_each_value() -> None:
    assert _values(pairwise(world=[2, 1, 3])[1]) == [(2,), (1,), (3,)]
