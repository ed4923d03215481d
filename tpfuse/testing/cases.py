"""Test cases in a loop: the message of a failure names the case in which it occurred."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def naming(case: object) -> Iterator[None]:
    """Add `case` to the message of any exception that the block raises, also on a rank of a pool."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {case}")
        raise
