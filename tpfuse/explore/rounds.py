"""Rounds of a protocol, and the states between them, which may have been there before.

If every execution of some rounds comes back to states that were there before, and no operation of a round has to come
after one of a later round, then the rounds that follow have the executions that were run already, however many they
are.

A state is what the next rounds can depend on: words, the contents of buffers, what the ranks yield, and which of the
accesses and operations so far each rank knows, because those come before what it does next. Words count from the epoch:
between two equal states each one has moved as the epoch has, in 32 bits, or it is what it was.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

Element = tuple[tuple[str, int, int], int]  # the identity of a region, and the number of an element


class Overlap(Exception):
    """An operation of a round has to come after one of a later round."""


@dataclass(frozen=True)
class RoundState:
    """The state of a run after a round.

    epochs: of each rank, all that it counts. words: the values of all words. rest: whatever else belongs to the state,
    by its name.
    """

    epochs: tuple[tuple[int, ...], ...]
    words: Mapping[Element, float]
    rest: Mapping[str, Hashable]

    def difference(self, earlier: "RoundState", read: Collection[Hashable], changed: Collection[Hashable]) -> str:
        """Return the name of what makes the next rounds differ from those after an earlier state, or "".

        read, changed: the words that were, in between. One that was read but not changed may be compared with an epoch
        that goes on; one that was changed and is what it was counts something else.
        """
        moved = {
            tuple((x - y) % 2**32 for x, y in zip(now, before, strict=True))
            for now, before in zip(self.epochs, earlier.epochs, strict=True)
        }
        if len(moved) > 1:
            return "the distance between the ranks' epochs"
        moves = set().union(*moved)
        for word, value in self.words.items():
            move = (value - earlier.words.get(word, value)) % 2**32
            if move not in moves and (move or (word in read and word not in changed)):
                return f"{word[0][0]}[{word[1]}] of rank {word[0][2]}"
        names = self.rest.keys() | earlier.rest.keys()
        return next((x for x in sorted(names) if self.rest.get(x) != earlier.rest.get(x)), "")
