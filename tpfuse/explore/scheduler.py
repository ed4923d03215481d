"""Threads of which exactly one runs at a time; another one continues only when `switch` is called.

A run is therefore a list of choices, and the same choices give the same run. A thread that reads a word twice and finds
the same value waits until another thread changes a word that it has read. When all threads wait, they may look
`patience` times more (so that a bounded wait can give up by itself). After that it is a deadlock, which is found
without measuring time.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.errors import DeadlockError, ExploreError, Stopped
from tpfuse.explore.executions import Name, Word
from tpfuse.explore.rounds import RoundState
from tpfuse.explore.sites import actor
from tpfuse.explore.spins import Place

Pick = Callable[[Sequence[int], int, int], int]  # (ready threads, the current one, the step) -> the next one
GRID, PLACE = "the end of its grid", "its turn to begin"  # reasons for which a task is held


@dataclass(frozen=True)
class WordOperation:
    """An operation on words, before it is performed.

    addresses: of the words. words: what identifies them in every run; none for a plain load of one, which may be a
    poll; None for words that nothing has to order. read: returns their values. where: returns the line and the values,
    for messages. ends: whether values end a wait, to which they make no other difference; None if that is not known.
    """

    addresses: tuple[int, ...]
    words: tuple[Word, ...] | None
    read: Callable[[], tuple[bytes, ...]]
    where: Callable[[], str]
    ends: Callable[[tuple[bytes, ...]], bool] | None = None


class Task:
    """A thread of the scheduler: a rank, or a program of its grid.

    name: identifies it in every run. held: the reason why it cannot continue by itself; empty if it can. watched: the
    words whose change it waits for; None if it does not wait for any. where: the description of the line at which it
    waits. lines: the source lines of a compiled kernel's operation; empty for an operation whose lines are on Python's
    stack. side: the number of its stream. threads: how many threads its program has. some_threads: whether only some of
    them act, up to the next barrier (`inline_assembly`). emulated: returns the state of the PTX that it executes.
    tensors: its program's arguments, with the addresses at which each begins and ends.
    """

    def __init__(self, number: int, rank: int, stream: int, name: Name) -> None:
        self.number, self.rank, self.stream, self.chain, self.name = number, rank, stream, stream, name
        self.program: tuple[int, ...] | None = None
        self.gate, self.done = threading.Semaphore(0), False
        self.held, self.where = "", ""
        self.lines: tuple[tuple[str, int], ...] = ()
        self.side, self.threads, self.some_threads = 0, 1, False
        self.emulated: Callable[[Place], Hashable] = lambda place: ()
        self.tensors: Sequence[tuple[Hashable, int, int]] = ()
        self.watched: frozenset[int] | None = None
        self.polled: dict[tuple[int, ...], object] = {}
        self.woken = False  # whether it looks again because all threads waited, and not because of a change
        self.thread: threading.Thread | None = None


class Scheduler:
    """A run of several threads, one at a time.

    on_stall: called when no thread can continue; returns whether it has ended waits. describe: returns more text for
    the message of a deadlock. save, restore: keep and put back state that belongs to the running thread. wrap: turns a
    thread's exception into the run's error. error: the error with which the run ended, or None.
    """

    def __init__(self, pick: Pick, *, patience: int, max_steps: int) -> None:
        self._pick = pick
        self._patience, self._max_steps, self._stalls = patience, max_steps, 0
        self.tasks: list[Task] = []
        self.current: Task
        self.error: BaseException | None = None
        self.steps = 0
        self.log: list[tuple[int, int]] = []  # (task, site) of each step, in the order in which they were performed
        self._finished = threading.Event()
        self._stopping = False
        self.on_stall: Callable[[], bool] = lambda: False
        self.describe: Callable[[], str] = lambda: ""
        self.save: Callable[[], Any] = lambda: None
        self.restore: Callable[[Any], None] = lambda saved: None
        self.snapshot: Callable[[int], Callable[[], None]]
        self.state: Callable[[], tuple[Any, ...] | None] = lambda: None
        self.wrap: Callable[[Task, BaseException], BaseException] = lambda task, error: error

    def spawn(
        self, rank: int, stream: int, body: Callable[[Task], None], name: Name, parent: Task | None = None
    ) -> Task:
        """Start a new thread, which waits for its first turn. parent: the thread that launches it; None for a rank."""
        task = Task(len(self.tasks), rank, stream, name)
        self.tasks.append(task)
        task.thread = threading.Thread(target=self._live, args=(task, body), daemon=True)
        task.thread.start()
        return task

    def run(self) -> None:
        """Let the threads run until all have ended or one fails; `error` is the failure."""
        ready = self._ready()
        self.current = self.tasks[self._next(ready, -1)]
        self.current.gate.release()
        try:
            self._finished.wait()
        finally:
            self._halt()
            for task in self.tasks:
                assert task.thread is not None
                task.thread.join()

    def _live(self, task: Task, body: Callable[[Task], None]) -> None:
        task.gate.acquire()
        try:
            if self._stopping:
                return
            body(task)
            task.done = True
            if all(other.done for other in self.tasks):
                self._finished.set()
            else:
                self.dispatch(task)
        except Stopped:
            pass
        except BaseException as error:
            if not self._stopping:
                self._fail(self.wrap(task, error))

    def _halt(self) -> None:
        self._stopping = True
        for task in self.tasks:
            task.gate.release()

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._halt()
        self._finished.set()

    def stop(self, error: ExploreError) -> None:
        """End the run with this error. It raises Stopped."""
        if not self._stopping:
            self._fail(error)
        raise Stopped

    def switch(self, task: Task, site: int, operation: WordOperation | None = None) -> None:
        """Let the schedule choose the next thread, before each operation on symmetric memory.

        operation: one that may be a poll.
        """
        self._count()
        if task.watched is not None and not (operation and task.watched.issuperset(operation.addresses)):
            task.watched = None
        self.dispatch(task)
        self.log.append((task.number, site))

    def _count(self) -> None:
        if self._stopping:
            raise Stopped
        self.steps += 1
        if self.steps > self._max_steps:
            self.stop(DeadlockError(f"still running after {self._max_steps} steps: {self._places()}"))

    def _ready(self) -> list[int]:
        return [t.number for t in self.tasks if not t.done and not t.held and t.watched is None]

    def dispatch(self, task: Task) -> None:
        """Let the schedule choose the next thread; return at the next turn of this thread."""
        if self._stopping:
            raise Stopped
        ready = self._ready()
        while not ready:
            if not self._look_again():
                self.stop(DeadlockError(f"deadlock: {self._places()}{self.describe()}"))
            ready = self._ready()
        number = self._next(ready, task.number)
        if number == task.number:
            return
        saved = self.save()
        self.current = self.tasks[number]
        self.current.gate.release()
        if not task.done:
            task.gate.acquire()
            if self._stopping:
                raise Stopped
            self.restore(saved)

    def _next(self, ready: list[int], current: int) -> int:
        return ready[0] if len(ready) == 1 else self._pick(ready, current, self.steps)

    def _look_again(self) -> bool:
        waiting = [task for task in self.tasks if task.watched is not None]
        if waiting and self._stalls < self._patience:
            self._stalls += 1
        elif self.on_stall():
            self._stalls = 0
        else:
            return False
        for task in waiting:
            task.watched, task.woken = None, True
        return True

    def polled(self, task: Task, operation: WordOperation, values: tuple[bytes, ...]) -> None:
        """Record that words were read and not changed: reading the same values again counts as waiting for a change."""
        words = operation.addresses
        if task.polled.get(words) == values:
            task.watched = frozenset(address for group in task.polled for address in group)
            task.where = operation.where()
        task.polled[words] = values

    def changed(self, low: int, high: int) -> None:
        """Record that memory from `low` to `high` was written: threads that wait for a word there look again."""
        self.progress()
        for task in self.tasks:
            if task.watched is not None and any(low <= address <= high for address in task.watched):
                task.watched, task.woken = None, False
                task.polled.clear()

    def performed(
        self,
        task: Task,
        operation: WordOperation,
        values: tuple[bytes, ...],
        changed: NDArray[np.bool_],
        acted: NDArray[np.bool_],
    ) -> None:
        """Record an operation on words, with their values before it. changed: which of them have other values now.

        acted: which of them it has written or released, and not only read.
        """
        if changed.any():
            task.polled.clear()
            self.changed(min(operation.addresses), max(operation.addresses))
        else:
            self.polled(task, operation, values)

    def acted(self, task: Task, writes: bool = True) -> None:
        """Record that the thread has done something that is no poll. writes: whether it may have changed memory."""
        task.polled.clear()

    @contextmanager
    def program(self, task: Task, index: tuple[int, ...]) -> Iterator[None]:
        """Run a program of a grid within the block."""
        yield

    def observe(self, task: Task, read: Callable[[], Hashable]) -> None:
        """Record what the thread has read from memory, other than words."""

    def went_round(self, task: Task) -> None:
        """Record that the thread goes on waiting after its last operation."""

    def mark(self, task: Task, word: Word) -> None:
        """Let the schedule choose the next thread before one changes what is no memory of the program."""

    def joined(self, tasks: Sequence[Task], others: Sequence[Task] = ()) -> None:
        """Record that what some tasks do next comes after all that they and others have done."""

    def end_round(self, task: Task, given: Any, world: int, state: Callable[[Sequence[Any]], RoundState]) -> None:
        """Record that a rank has come to the end of a round. state: returns the run's, for what the ranks gave."""

    def progress(self) -> None:
        """Record an event for which other threads may have waited: none of them counts as stalled any more."""
        self._stalls = 0

    def _places(self) -> str:
        places = []
        for task in self.tasks:
            if task.done and task.program is None:
                places.append(f"{actor(task.rank, None)} has ended")
            elif not task.done and task.held not in (GRID, PLACE):
                places.append(f"{actor(task.rank, task.program)} waits at {task.held or self._where(task)}")
        return "".join(f"\n  {place}" for place in places)

    def _where(self, task: Task) -> str:
        return task.where
