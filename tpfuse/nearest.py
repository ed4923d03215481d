"""The known word that a user may have meant. Messages about unknown names end with it."""

import difflib
from collections.abc import Sequence


def nearest(word: str, known: Sequence[str]) -> str:
    """Return "; did you mean …?" with the known word that is most similar to `word`, or "" if none is similar."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else ""
