"""Test cases in a loop, whose failures name the case in which they occurred, and tables of refused arguments."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest


@contextlib.contextmanager
def naming(case: object) -> Iterator[None]:
    """Add `case` to the message of any exception that the block raises, also on a rank of a pool."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {case}")
        raise


def refusals(
    function: Callable[..., object], good: Mapping[str, Any], prefix: str, *cases: tuple[dict[str, Any], str]
) -> Callable[..., None]:
    """Return a test: `function(**good)` works, and with the changes of each case it raises ValueError.

    cases: (changes, message). prefix, message: regular expressions that match the error's message, one after the other.
    """

    def test(changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=prefix + message):
            function(**{**good, **changes})
        function(**good)

    parametrized: Callable[..., None] = pytest.mark.parametrize(("changes", "message"), cases)(test)
    return parametrized
