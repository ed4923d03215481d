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

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from tpfuse.explore.event_order import EventOrder
from tpfuse.explore.executions import WAITS, Execution, Name, Ordered, Redundant, RoundEnd, WordEvent
from tpfuse.explore.rounds import Overlap, RoundState


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
        order = EventOrder(self.events, self._merging)
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

    def _end(self, order: EventOrder) -> int:
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

    def untried(self) -> Ordered | None:
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
        order = EventOrder(self.events, self._merging, hopeful=True)
        for read in sorted(order.soft):
            for changes in order.unknown(read):
                before = (order.after[i] for i in changes)
                needed = {i for clock in before for i in range(read + 1, changes[-1] + 1) if order.precedes(i, clock)}
                yield [*range(read), *sorted(needed), read]
        for cut in self.cuts:
            for later in range(max(cut.events, self._new), len(self.events)):
                for earlier in order.rivals(self.events[later], later):
                    if earlier < cut.events and not self.events[later].changes:
                        yield [*range(earlier), *order.between(earlier, later), later]

    def _reverse(self, order: EventOrder, earlier: int, last: WordEvent, later: int) -> None:
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
        sequence = order.between(earlier, later)
        initials: dict[Name, None] = {}
        following = [(self.events[i], order.after[i]) for i in sequence] + [(last, order.before(last, later))]
        for position, (event, clock) in enumerate(following):
            if event.thread not in initials and not any(order.precedes(i, clock) for i in sequence[:position]):
                initials[event.thread] = None
        node = self._nodes[earlier]
        if node.wanted.isdisjoint(initials):
            node.wanted.add(next(iter(initials)))
