"""A scheduler that switches threads before operations on words alone, for executions that stand for many others.

Loads and stores need no switches (`tpfuse.explore.reduction` says why), and a thread that waits does not poll: it
continues once another thread has changed what it reads. A thread goes on waiting if it comes back to an operation in
the state in which it came to it before, and has changed nothing in between. `state` tells that of interpreted kernels
and of their inline assembly, and the host's waits say so themselves (`went_round`).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.errors import ProtocolError, Stopped
from tpfuse.explore.executions import WAITS, Execution, Name, Past, Redundant, Values, Word, WordEvent
from tpfuse.explore.rounds import Overlap, RoundState
from tpfuse.explore.scheduler import Scheduler, Task, WordOperation
from tpfuse.explore.spins import may_hold

ROUND = "the end of the round on all ranks"  # a reason for which a task is held
_ROUNDS = 100  # polls of unchanged words in states that differ before this is taken for a loop without an end


@dataclass
class _Visit:
    """A thread at an operation. events: how many it had performed. undo: forgets what came after."""

    state: tuple[Any, ...] | None
    events: int
    seen: Hashable
    undo: Callable[[], None]


@dataclass
class _Thread:
    """What the scheduler knows of a task.

    past: of its next event. seen: identifies what it has read so far. pending: the operation before which it stands.
    unknown: what it has read last, as long as the effect of that is not known. arrival: its last visit. visits: where
    it has been, by site and state, since it last changed anything; events: the operations since then, with the values
    that they read. waits: those operations one of which must read other values before it continues.
    """

    past: Past = frozenset()
    seen: Hashable = 0
    pending: WordOperation | None = None
    unknown: tuple[Name, Hashable, Values] | None = None
    arrival: _Visit | None = None
    visits: dict[Hashable, _Visit] = field(default_factory=dict)
    events: list[tuple[WordOperation, tuple[bytes, ...]]] = field(default_factory=list)
    waits: list[tuple[WordOperation, tuple[bytes, ...]]] = field(default_factory=list)

    def act(self) -> None:
        """Take note that the thread has changed something: from here it cannot come back to where it was."""
        self.visits.clear()
        self.events.clear()


class EventScheduler(Scheduler):
    """Runs one execution, which chooses the thread of each event and records it."""

    def __init__(self, execution: Execution, max_steps: int) -> None:
        super().__init__(lambda ready, current, step: ready[0], patience=0, max_steps=max_steps)
        self.execution = execution
        self._threads: dict[Task, _Thread] = {}
        self._stall = 0  # how often waits were ended
        self._at_end: dict[Task, Any] = {}  # the ranks that have come to the end of the round, and what they gave

    def spawn(
        self, rank: int, stream: int, body: Callable[[Task], None], name: Name, parent: Task | None = None
    ) -> Task:
        task = super().spawn(rank, stream, body, name, parent)
        self._threads[task] = thread = _Thread()
        if parent is not None:
            thread.past, thread.seen = self._threads[parent].past, self._threads[parent].seen
        return task

    def switch(self, task: Task, site: int, operation: WordOperation | None = None) -> None:
        self._count()
        self._learn(self._threads[task])
        if operation is not None:
            self._arrive(task, site, operation)
        self.log.append((task.number, site))

    def _learn(self, thread: _Thread) -> None:
        """Take note of the effect of the last event on a thread that has come to its next operation on memory."""
        if (unknown := thread.unknown) is not None:
            thread.unknown = None
            visit, now = thread.arrival, self.state()
            if visit is not None and visit.state is not None and now is not None:
                effect = (now, unknown[2]) if may_hold(visit.state[0], now[0]) else now
                self.execution.effects[unknown] = effect
                thread.seen = hash((unknown[1], effect))

    def _arrive(self, task: Task, site: int, operation: WordOperation) -> None:
        if operation.words is None:
            return
        thread, state = self._threads[task], self.state()
        if state is not None and (visit := thread.visits.get((site, state))) is not None:
            self._go_round(task, visit)
        if operation.words or thread.waits:
            thread.pending = operation
            self.dispatch(task)
            thread.pending, thread.waits = None, []
        thread.arrival = _Visit(state, len(thread.events), thread.seen, self.snapshot(task.chain))
        if state is not None:
            thread.visits[site, state] = thread.arrival
        if not operation.words:
            thread.events.append((operation, operation.read()))

    def went_round(self, task: Task) -> None:
        thread = self._threads[task]
        assert thread.arrival is not None
        self._go_round(task, thread.arrival)

    def _go_round(self, task: Task, visit: _Visit) -> None:
        """Let a thread that has changed nothing since a visit wait until something that it has read since changes."""
        thread = self._threads[task]
        since = thread.events[visit.events :]
        if len(since) == 1 and since[0][0].words:  # the last event: nobody has gone on since
            event = self.execution.retract()
            self.execution.effects[task.name, (visit.seen, self._stall), event.values] = WAITS
            thread.past, thread.seen = event.past, visit.seen
            visit.undo()
        else:
            thread.waits = since
        del thread.events[visit.events :]

    def performed(
        self,
        task: Task,
        operation: WordOperation,
        values: tuple[bytes, ...],
        changed: NDArray[np.bool_],
        acted: NDArray[np.bool_],
    ) -> None:
        thread = self._threads[task]
        if operation.words:
            after = zip(operation.words, operation.read(), acted, strict=True)
            changes = {word: value for word, value, one in after if one}
            event = self._event(task, operation, values, changes)
            thread.past = frozenset({self.execution.perform(event)})
            if changes:
                thread.act()
            else:
                self._poll(task, operation, values)
                if operation.ends is not None:
                    return
                thread.unknown = task.name, (thread.seen, self._stall), event.values
        thread.seen = hash((thread.seen, values))

    def _event(self, task: Task, operation: WordOperation, values: Values, changes: Mapping[Word, bytes]) -> WordEvent:
        """Return the next event of a thread, whose operation has read these values."""
        thread, reads = self._threads[task], dict(zip(operation.words or (), values, strict=True))
        state = thread.seen, self._stall
        return self.execution.event(task.name, thread.past, reads, changes, state, operation.ends)

    def _poll(self, task: Task, operation: WordOperation, values: tuple[bytes, ...]) -> None:
        events = self._threads[task].events
        events.append((operation, values))
        same = sum(x.words == operation.words and y == values for x, y in events)
        if same > _ROUNDS:
            self.stop(ProtocolError(f"read the same {same} times, in states that differ: {operation.where()}"))

    def mark(self, task: Task, word: Word) -> None:
        operation = WordOperation((), (word,), lambda: (b"",), lambda: "")
        self._arrive(task, -1, operation)
        self.performed(task, operation, (b"",), np.array([False]), np.array([True]))

    def polled(self, task: Task, operation: WordOperation, values: tuple[bytes, ...]) -> None:
        pass

    @contextmanager
    def program(self, task: Task, index: tuple[int, ...]) -> Iterator[None]:
        """Within the block the thread runs a program: what that sees does not tell what its rank does later."""
        thread = self._threads[task]
        seen, thread.seen = thread.seen, hash((thread.seen, index))
        yield
        self._learn(thread)
        thread.seen = seen

    def observe(self, task: Task, read: Callable[[], Hashable]) -> None:
        thread = self._threads[task]
        self._learn(thread)
        thread.seen = hash((thread.seen, read()))

    def acted(self, task: Task, writes: bool = True) -> None:
        self._learn(self._threads[task])
        if writes:
            self._threads[task].act()

    def joined(self, tasks: Sequence[Task], others: Sequence[Task] = ()) -> None:
        past = frozenset[int]().union(*(self._threads[task].past for task in (*tasks, *others)))
        for task in tasks:
            self._threads[task].past = past

    def end_round(self, task: Task, given: Any, world: int, state: Callable[[Sequence[Any]], RoundState]) -> None:
        self._learn(self._threads[task])
        if not self.execution.in_rounds:
            return
        self._at_end[task] = given
        task.held = ROUND
        if len(self._at_end) == world:
            ranks = sorted(self._at_end, key=lambda task: task.rank)
            pasts = tuple(self._threads[rank].past for rank in ranks)
            self.execution.end_round(pasts, state([self._at_end.pop(rank) for rank in ranks]))
            for rank in ranks:
                rank.held = ""
        self.dispatch(task)

    def _ready(self) -> list[int]:
        return [task.number for task in self.tasks if not task.done and not task.held and not self._waits(task)]

    def _waits(self, task: Task) -> bool:
        """Return whether the thread would go on waiting with the values that it would read now."""
        thread = self._threads[task]
        if thread.pending is None:
            return False
        if thread.waits:
            return all(operation.read() == values for operation, values in thread.waits)
        return self._effect(task) == WAITS

    def _effect(self, task: Task) -> Hashable:
        """Return the effect of the values that the thread would read now."""
        thread = self._threads[task]
        if thread.pending is None:
            return None
        event = self._event(task, thread.pending, thread.pending.read(), {})
        return event.effect(event.values)

    def _next(self, ready: list[int], current: int) -> int:
        begun = [number for number in ready if self._threads[self.tasks[number]].pending is not None]
        if len(begun) < len(ready):  # what these do before their next events is part of the last ones
            return next(number for number in ready if number not in begun)
        tasks = sorted((self.tasks[number] for number in ready), key=lambda task: task.name)
        able = {task.name: self._effect(task) is not None for task in tasks}
        try:
            name = self.execution.choose(able, self.tasks[current].name)
            return next(task.number for task in tasks if task.name == name)
        except (Redundant, ValueError) as error:
            self._record_waits()
            self._fail(error)
            raise Stopped from None

    def _look_again(self) -> bool:
        self._record_waits()
        if self._at_end:  # a rank waits for one that is a round ahead, or for ever
            self._fail(Overlap())
            raise Stopped
        if not self.on_stall():
            return False
        self._stall += 1
        for thread in self._threads.values():
            thread.waits = []
        self.joined(self.tasks)
        return True

    def _record_waits(self) -> None:
        """Record the polls of all threads that wait."""
        for task, thread in self._threads.items():
            if thread.pending is not None and thread.pending.words and self._waits(task):
                self.execution.wait(self._event(task, thread.pending, thread.pending.read(), {}))

    def _where(self, task: Task) -> str:
        pending = self._threads[task].pending
        return pending.where() if pending is not None else ""
