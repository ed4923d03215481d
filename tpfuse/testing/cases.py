"""Cases in a loop: a failure says in which case it came up."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def naming(case: object) -> Iterator[None]:
    """Adds `case` to the message of whatever is raised within the block, also on a rank of a pool."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {case}")
        raise
