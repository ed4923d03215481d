"""Which variables count at an instruction: those that may be read before they are assigned again."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

_T = TypeVar("_T", bound=Hashable)


def live_before(following: Sequence[Sequence[int]], uses: Sequence[Sequence[tuple[bool, _T]]]) -> list[set[_T]]:
    """Return the variables that count before each instruction.

    following: for each instruction those that may come next. uses: its variables in order, and whether it reads them.
    """
    before: list[set[_T]] = [set() for _ in uses]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(uses))):
            needed = set[_T]().union(*(before[x] for x in following[number]))
            for reads, name in reversed(uses[number]):
                needed = needed | {name} if reads else needed - {name}
            changed |= needed != before[number]
            before[number] = needed
    return before
