"""Parameters of tests and the tiers to which they belong."""

import itertools

from tests.support.tiers import pairwise


def test_every_pair_of_values_is_in_a_row() -> None:
    axes = {"world": [2, 1, 3, 4], "dtype": ["f32", "bf16", "f16"], "bias": [False, True], "rows": [63, 1]}
    names, rows = pairwise(2, **axes)
    values = [row.values for row in rows]
    assert names == list(axes) and values[0] == (2, "f32", False, 63)
    deferred = [any(mark.name == "exhaustive" for mark in row.marks) for row in rows]
    assert deferred == [False, False] + [True] * (len(rows) - 2)
    for i, j in itertools.combinations(range(4), 2):
        assert {(row[i], row[j]) for row in values} == set(itertools.product(axes[names[i]], axes[names[j]]))
    assert len(rows) <= 14 < 48, "the largest two axes alone need 12"
    assert [row.values for row in pairwise(world=[2, 1, 3])[1]] == [(2,), (1,), (3,)]
