"""Which events of an execution come before which in all equivalent ones."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

from tpfuse.explore.executions import Name, RoundEnd, Values, Word, WordEvent

Clock = Mapping[Name, int]  # how many events of each thread come before, in all equivalent executions
_MOST_CUTS = 64  # sets of later changes that are compared


class EventOrder:
    """Which events of an execution come before which in all equivalent ones.

    An event that only reads comes before the next change of its words, unless all values that it could read before its
    thread goes on have the same effect (`soft`), as far as that is known if `hopeful`. after: for each event the clock
    with it.
    """

    def __init__(self, events: Sequence[WordEvent], merging: bool, hopeful: bool = False) -> None:
        self._events, self._hopeful = events, hopeful
        reads = [i for i, x in enumerate(events) if not x.changes and x.effect(x.values) is not None]
        self.soft = set(reads if merging else ())
        while True:
            self._find()
            hard = {i for i in self.soft if not self._is_soft(i)}
            if not hard:
                break
            self.soft -= hard

    def _find(self) -> None:
        """Find the clocks."""
        self.after: list[Clock] = []
        for index, event in enumerate(self._events):
            clock = dict(self.before(event, index))
            clock[event.thread] = event.number
            self.after.append(clock)

    def _linked(self, event: WordEvent, index: int) -> set[int]:
        """Return the last events before an event of this number on its words whose order with it matters."""
        linked = set[int]()
        for word in event.reads:
            for i in range(index - 1, -1, -1):
                x = self._events[i]
                if word in x.changes:
                    linked.add(i)
                    break
                if word in event.changes and word in x.reads and i not in self.soft:
                    linked.add(i)
        return linked

    def knowledge(self, cut: RoundEnd) -> Hashable:
        """Return, for the last change of each word and the reads after it, which ranks know them after a round."""
        clocks, found, changed = [self.clock(past) for past in cut.pasts], set[Hashable](), set[Word]()
        for i in reversed(range(cut.events)):
            event = self._events[i]
            known = tuple(self.precedes(i, clock) for clock in clocks)
            for word in event.reads.keys() - changed & cut.state.words.keys():
                if not all(known):
                    found.add((word, word in event.changes, event.thread[0], known))
            changed |= event.changes.keys()
        return frozenset(found)

    def rivals(self, event: WordEvent, index: int) -> set[int]:
        """Return the events before an event of this number whose order with it no other order gives."""
        past = self.clock(event.past)
        linked = {i for i in self._linked(event, index) if not self.precedes(i, past)}
        return {i for i in linked if not any(self.precedes(i, self.after[k]) for k in linked - {i})}

    def before(self, event: WordEvent, index: int) -> Clock:
        """Return the clock of what comes before an event of this number."""
        return self.clock({*event.past, *self._linked(event, index)})

    def between(self, earlier: int, later: int) -> list[int]:
        """Return the events between two that do not come after the earlier one."""
        return [i for i in range(earlier + 1, later) if not self.precedes(earlier, self.after[i])]

    def clock(self, past: Collection[int]) -> Clock:
        """Return the clock after some events."""
        clock: dict[Name, int] = {}
        for index in past:
            for name, count in self.after[index].items():
                clock[name] = max(clock.get(name, 0), count)
        return clock

    def precedes(self, index: int, clock: Clock) -> bool:
        """Return whether what has this clock comes after an event."""
        event = self._events[index]
        return clock.get(event.thread, 0) >= event.number

    def without(self, earlier: int, last: WordEvent, later: int) -> Values:
        """Return what an event of number `later` would read without an earlier one and what follows from that."""
        gone = [i for i in range(earlier, later) if i == earlier or self.precedes(earlier, self.after[i])]
        changed = ((word, i) for i in reversed(gone) for word in self._events[i].changes)
        old = {word: self._events[i].reads[word] for word, i in changed}
        return tuple(old.get(word, value) for word, value in last.reads.items())

    def _is_soft(self, index: int) -> bool:
        """Return whether all values that an event could read before its thread goes on have the same effect."""
        same = {self._events[index].effect(self._events[index].values), *((None,) if self._hopeful else ())}
        sets = self._sets_of_changes(index)
        return len(sets) <= _MOST_CUTS and all(self._effect(index, changes) in same for changes in sets)

    def unknown(self, index: int) -> Iterator[tuple[int, ...]]:
        """Yield sets of later changes with which it is not known what an event would read."""
        yield from (changes for changes in self._sets_of_changes(index) if self._effect(index, changes) is None)

    def _effect(self, index: int, changes: tuple[int, ...]) -> Hashable:
        """Return the effect of what an event would read after later changes."""
        event = self._events[index]
        later = {word: value for i in changes for word, value in self._events[i].changes.items()}
        return event.effect(tuple(later.get(word, value) for word, value in event.reads.items()))

    def _sets_of_changes(self, index: int) -> list[tuple[int, ...]]:
        """Return the sets of later changes after which an event could read, or more than `_MOST_CUTS` of them."""
        event = self._events[index]
        changes = [
            i
            for i in range(index + 1, len(self._events))
            if not event.reads.keys().isdisjoint(self._events[i].changes) and not self.precedes(index, self.after[i])
        ]
        cuts: list[tuple[int, ...]] = [()]
        for i in changes:
            needed = {k for k in changes if k < i and self.precedes(k, self.after[i])}
            cuts += [(*cut, i) for cut in cuts if needed.issubset(cut)]
            if len(cuts) > _MOST_CUTS:
                break
        return cuts
