"""Executions of a program as events on words, and who performs each of them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tpfuse.explore.rounds import RoundState

Name = tuple[int, ...]  # of a thread: its rank, or its parent's name, the number of the launch and of the program
Word = Hashable
Values = tuple[bytes, ...]
Past = frozenset[int]  # the numbers of the last events of threads after which one goes on
Effects = dict[tuple[Name, Hashable, Values], Hashable]
Decisions = dict[int, Name]  # the number of an event -> the thread that performs it


WAITS, ENDS = "goes on waiting", "ends its wait"  # effects of values on a thread


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
