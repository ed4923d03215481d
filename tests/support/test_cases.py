"""A failure in a loop over cases names the case in which it occurred."""

import traceback

import pytest

from tests.support.cases import naming


def test_the_traceback_names_the_case_that_failed() -> None:
    """A rank of a pool sends the test its traceback, so the case must be in it."""
    with pytest.raises(AssertionError) as caught:
        for case in (("bfloat16", 1), ("float32", 2), ("float64", 3)):
            with naming(case):
                assert case[1] < 2
    assert traceback.format_exception(caught.value)[-1] == "case: ('float32', 2)\n"
