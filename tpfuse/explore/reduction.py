"""Dynamic partial-order reduction: one execution for each order of the operations on words that matters.

Two executions are equivalent if they order all dependent events alike: events of one thread, and events on a word that
one of them changes. `Reduction` visits each class of equivalent executions once, by source sets and sleep sets
(Abdulla, Aronis, Jonsson and Sagonas, "Source Sets: A Foundation for Optimal Dynamic Partial Order Reduction", Journal
of the ACM, 2017). The program starts again for each of them. Plain loads and stores are no events: the clocks of
`tpfuse.explore.clocks` find those that are unordered in every execution of a class.

A poll after which the thread goes on waiting is no event either: such a thread cannot continue, and the execution is
the same without it (cf. Kokologiannakis, Ren and Vafeiadis, "Dynamic Partial Order Reductions for Spinloops", FMCAD
2021). And where a later value of a word has the same effect on a thread as an earlier one, as in a wait for an epoch or
any later one, the execution in which it reads the earlier value stands for both: all else is the same, and what the
later value orders beside that can only hide a race. Which values do so is known once a thread has read them; `effects`
keeps it for later executions.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tpfuse.explore.rounds import Overlap, RoundState

Name = tuple[int, ...]  # of a thread: its rank, or its parent's name, the number of the launch and of the program
Word = Hashable
Values = tuple[bytes, ...]
Past = frozenset[int]  # the numbers of the last events of threads after which one goes on
Clock = Mapping[Name, int]  # how many events of each thread come before, in all equivalent executions
Effects = dict[tuple[Name, Hashable, Values], Hashable]
Decisions = dict[int, Name]  # the number of an event -> the thread that performs it


WAITS, ENDS = "goes on waiting", "ends its wait"  # effects of values on a thread
_MOST_CUTS = 64  # sets of later changes that are compared


class Redundant(Exception):
    """The execution is equivalent to one that was visited before."""


@dataclass(frozen=True)
class RoundEnd:
    """The end of a round on all ranks. events: how many came before. pasts: of the ranks. state: of the run."""

    events: int
    pasts: tuple[Past, ...]
    state: RoundState


@dataclass(frozen=True)
class WordEvent:
    """An operation of a thread on words.

    number: counts the thread's events from 1. past: the events after which the thread comes to it. reads: the values of
    all words of the operation before it; changes: the values of those that it changes after it. effect: returns the
    effect of values that it could have read: WAITS, ENDS, what identifies another effect, or None if it is not known.
    """

    thread: Name
    number: int
    past: Past
    reads: Mapping[Word, bytes]
    changes: Mapping[Word, bytes]
    effect: Callable[[Values], Hashable]

    @property
    def values(self) -> Values:
        """The values that it has read."""
        return tuple(self.reads.values())

    def depends_on(self, other: "WordEvent") -> bool:
        """Return whether the order of the two events matters."""
        return (
            self.thread == other.thread
            or any(word in other.reads for word in self.changes)
            or any(word in self.reads for word in other.changes)
        )


class Execution:
    """The events of one execution, in which a thread runs on until it cannot unless `decisions` name another one."""

    in_rounds = False  # whether no rank begins a round before all have come to the end of the one before

    def __init__(self, decisions: Mapping[int, Name] | None = None) -> None:
        self.effects: Effects = {}  # of values on a thread in a state
        self._given = dict(decisions or {})
        self.start()

    def start(self) -> None:
        """Begin an execution."""
        self.events: list[WordEvent] = []
        self.decisions: Decisions = {}
        self.order: list[Name] = []  # the threads that performed the events, and the one that may perform the next
        self.cuts: list[RoundEnd] = []
        self._counts: dict[Name, int] = {}
        self._waiting: list[tuple[int, WordEvent]] = []  # polls that never end a wait, and how many events came before

    def choose(self, able: Mapping[Name, bool], current: Name) -> Name:
        """Return the thread that performs the next event.

        able: those that can continue, in order, and whether they are at the end of a wait. current: the one that ran
        last.
        """
        standard = current if current in able else next(iter(able))
        chosen = self._choose(able, standard)
        if chosen != standard:
            self.decisions[len(self.events)] = chosen
        self.order[len(self.events) :] = [chosen]
        return chosen

    def _choose(self, able: Mapping[Name, bool], standard: Name) -> Name:
        chosen = self._given.get(len(self.events), standard)
        if chosen not in able:
            raise ValueError(f"event {len(self.events)}: thread {chosen} cannot continue: decisions of another program")
        return chosen

    def end_round(self, pasts: tuple[Past, ...], state: RoundState) -> None:
        """Take note that all ranks have come to the end of a round."""
        self.cuts.append(RoundEnd(len(self.events), pasts, state))

    def event(
        self,
        thread: Name,
        past: Past,
        reads: Mapping[Word, bytes],
        changes: Mapping[Word, bytes],
        state: Hashable,
        ends: Callable[[Values], bool] | None,
    ) -> WordEvent:
        """Return the next event of a thread. state, ends: as for `effect`."""
        number = self._counts.get(thread, 0) + 1
        return WordEvent(thread, number, past, reads, changes, partial(self.effect, thread, state, ends))

    def perform(self, event: WordEvent) -> int:
        """Add an event of the thread that was chosen; return its number."""
        self._counts[event.thread] = event.number
        self.events.append(event)
        return len(self.events) - 1

    def retract(self) -> WordEvent:
        """Remove the last event, a poll with which its thread goes on waiting."""
        event = self.events.pop()
        assert not event.changes
        self._counts[event.thread] -= 1
        self.decisions.pop(len(self.events), None)
        return event

    def wait(self, event: WordEvent) -> None:
        """Take note of a poll of a thread that waits here for ever, or until waits are ended."""
        self._waiting.append((len(self.events), event))

    def effect(self, thread: Name, state: Hashable, ends: Callable[[Values], bool] | None, values: Values) -> Hashable:
        """Return the effect of values that a thread reads in a state; see `WordEvent`.

        ends: whether values end a wait to which they make no other difference; None if that is not known.
        """
        if ends is not None:
            return ENDS if ends(values) else WAITS
        return self.effects.get((thread, state, values))


class Ordered(Execution):
    """An execution whose events are performed by these threads, in this order. ends: whether it ends after them."""

    def __init__(self, order: Sequence[Name], effects: Effects, ends: bool) -> None:
        super().__init__()
        self.effects, self._order, self._ends = effects, order, ends

    def _choose(self, able: Mapping[Name, bool], standard: Name) -> Name:
        if len(self.events) == len(self._order):
            if self._ends:
                raise Redundant
            return standard
        if (chosen := self._order[len(self.events)]) not in able:
            raise Redundant
        return chosen


@dataclass
class _Node:
    """A state in which a thread has to be chosen.

    sleeping: events whose executions from here are equivalent to ones visited before. wanted: threads that have to run
    from here. done: the events of those that have. unable: threads that go on waiting here.
    """

    sleeping: dict[Name, WordEvent]
    chosen: Name
    wanted: set[Name]
    done: dict[Name, WordEvent] = field(default_factory=dict)
    unable: set[Name] = field(default_factory=set)

    def next(self) -> Name | None:
        """Return a thread that has to run from here and has not, or None."""
        return min(self.wanted - self.done.keys() - self.unable - self.sleeping.keys(), default=None)


class Reduction(Execution):
    """The executions of a program, one of each class; after each of them `finish` says whether one is left.

    merging: whether an execution also stands for those in which threads read later values with the same effect.
    in_rounds: whether ranks go from round to round together, and an execution is not followed beyond the end of a round
    whose state was there before. grows: after all executions, what keeps them from standing for any number of rounds:
    None if there are no rounds, "" if nothing does.
    """

    def __init__(self, merging: bool = True, in_rounds: bool = False) -> None:
        super().__init__()
        self._merging, self.in_rounds = merging, in_rounds
        self._nodes: list[_Node] = []
        self._new = 0  # the first event that earlier executions did not have
        self._states: list[tuple[RoundState, Hashable]] = []
        self._tried = set[tuple[Name, ...]]()
        self.grows: str | None = None

    def _choose(self, able: Mapping[Name, bool], standard: Name) -> Name:
        depth = len(self.events)
        if depth == len(self._nodes):
            sleeping = self._sleeping()
            chosen = self._preferred(able, standard, sleeping)
            if chosen is None:
                raise Redundant
            self._nodes.append(_Node(sleeping, chosen, {chosen}))
        node = self._nodes[depth]
        if node.chosen not in able:
            assert depth >= self._new, f"event {depth}: thread {node.chosen} could continue before: not deterministic"
            node.unable.add(node.chosen)
        if node.chosen in node.unable:
            following = node.next()
            if following is None and not node.done:  # the first choice here, which did not come about
                following = self._preferred(able, standard, node.sleeping)
            if following is None:
                raise Redundant
            node.chosen = following
            node.wanted.add(following)
        return node.chosen

    def _preferred(self, able: Mapping[Name, bool], standard: Name, sleeping: Collection[Name]) -> Name | None:
        """Return a thread that is not asleep: one at the end of a wait, which then reads the earliest value."""
        awake = [name for name in able if name not in sleeping]
        return min(awake, key=lambda name: (not able[name], name != standard), default=None)

    def _sleeping(self) -> dict[Name, WordEvent]:
        if not self.events:
            return {}
        node, event = self._nodes[len(self.events) - 1], self.events[-1]
        return {name: x for name, x in (node.sleeping | node.done).items() if not x.depends_on(event)}

    def retract(self) -> WordEvent:
        event = super().retract()
        self._nodes[len(self.events)].unable.add(event.thread)
        return event

    def finish(self) -> bool:
        """End the execution; return whether another one is left, which the next `start` begins."""
        order = _Order(self.events, self._merging)
        end = self._end(order)
        last = [(later, self.events[later]) for later in range(self._new, end)]
        for later, event in last + [(later, event) for later, event in self._waiting if later <= end]:
            for earlier in order.rivals(event, later):
                self._reverse(order, earlier, event, later)
        for depth in reversed(range(len(self._nodes))):
            node = self._nodes[depth]
            if depth < len(self.events):
                node.done[node.chosen] = self.events[depth]
            if (following := node.next()) is not None:
                node.chosen, self._new = following, depth
                return True
            self._nodes.pop()
        return False

    def _end(self, order: "_Order") -> int:
        """Return the number of events that count: all up to the first new state that was there before."""
        for cut in self.cuts:
            if cut.events > self._new:
                knowledge = order.knowledge(cut)
                differences = [self._difference(cut, *state, knowledge) for state in self._states]
                if "" in differences:
                    self.grows = self.grows or ""
                    return cut.events
                self._states.append((cut.state, knowledge))
                if cut is self.cuts[-1]:
                    self.grows = differences[-1] if differences else "a single round"
        return len(self.events)

    def _difference(self, cut: RoundEnd, earlier: RoundState, earlier_knowledge: Hashable, knowledge: Hashable) -> str:
        since = next((x.events for x in self.cuts if x.state.epochs == earlier.epochs), 0)
        between = self.events[since : cut.events]
        read = {word for event in between for word in event.reads}
        changed = {word for event in between for word in event.changes}
        other = "" if knowledge == earlier_knowledge else "the order of operations on words"
        return cut.state.difference(earlier, read, changed) or other

    def untried(self) -> "Ordered | None":
        """Return an execution in which a thread reads a word before or after a change of another round, or None.

        Afterwards the effect of that is known: whether the thread goes on waiting, or goes on as it has here.
        """
        for numbers in self._unknown() if self.cuts else ():
            names = tuple(self.events[i].thread for i in numbers)
            if names not in self._tried:
                self._tried.add(names)
                return Ordered(names, self.effects, ends=True)
        return None

    def _unknown(self) -> Iterator[list[int]]:
        """Yield the events of executions that end with such a read, in their order."""
        order = _Order(self.events, self._merging, hopeful=True)
        for read in sorted(order.soft):
            for changes in order.unknown(read):
                before = (order.after[i] for i in changes)
                needed = {i for clock in before for i in range(read + 1, changes[-1] + 1) if order.precedes(i, clock)}
                yield [*range(read), *sorted(needed), read]
        for cut in self.cuts:
            for later in range(max(cut.events, self._new), len(self.events)):
                for earlier in order.rivals(self.events[later], later):
                    if earlier < cut.events and not self.events[later].changes:
                        between = [i for i in range(earlier + 1, later) if not order.precedes(earlier, order.after[i])]
                        yield [*range(earlier), *between, later]

    def _reverse(self, order: "_Order", earlier: int, last: WordEvent, later: int) -> None:
        """Let an execution have the last event, of number `later`, before the earlier one, unless one already has.

        If the last event is a poll with which its thread would go on waiting there, it goes before an even earlier one.
        """
        before = order.clock(last.past)
        while last.effect(order.without(earlier, last, later)) == WAITS:
            changing = (i for i in reversed(range(earlier)) if not last.reads.keys().isdisjoint(self.events[i].changes))
            earlier = next(changing, -1)
            if earlier < 0 or order.precedes(earlier, before):
                return
        if any(earlier < cut.events <= later for cut in self.cuts):
            raise Overlap
        sequence = [i for i in range(earlier + 1, later) if not order.precedes(earlier, order.after[i])]
        initials: dict[Name, None] = {}
        following = [(self.events[i], order.after[i]) for i in sequence] + [(last, order.before(last, later))]
        for position, (event, clock) in enumerate(following):
            if event.thread not in initials and not any(order.precedes(i, clock) for i in sequence[:position]):
                initials[event.thread] = None
        node = self._nodes[earlier]
        if node.wanted.isdisjoint(initials):
            node.wanted.add(next(iter(initials)))


class _Order:
    """Which events of an execution come before which in all equivalent ones.

    An event that only reads comes before the next change of its words, unless all values that it could read before its
    thread goes on have the same effect (`soft`), as far as that is known if `hopeful`. after: for each event
    the clock with it.
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
            clock = dict(self.clock({*event.past, *self._linked(event, index)}))
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
