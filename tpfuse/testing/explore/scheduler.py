"""Threads that take turns: a baton lets exactly one run at a time, and changes hands only where `switch` is called.

So a run is a list of choices, and whoever makes the same choices sees the same run. A thread that reads the same word
twice in vain waits until somebody changes a word that it read; when everybody waits, they may look `patience` times
more (a bounded wait gives up by itself), and then that is a deadlock, found without a clock.
"""

import threading
from collections.abc import Callable
from typing import Any

from tpfuse.testing.explore.errors import DeadlockError, ExploreError, Stopped
from tpfuse.testing.explore.schedules import Schedule
from tpfuse.testing.explore.sites import actor

GRID, PLACE = "the end of its grid", "its turn to begin"  # why a task is held


class Task:
    """A thread that can hold the baton: a rank, or a program of its grid.

    held: why it cannot go on by itself; watched: the words that it polls, once it did so in vain.
    """

    def __init__(self, number: int, rank: int, stream: int) -> None:
        self.number, self.rank, self.stream, self.chain = number, rank, stream, stream
        self.program: tuple[int, ...] | None = None
        self.gate, self.done = threading.Semaphore(0), False
        self.held, self.where = "", ""
        self.watched: frozenset[int] | None = None
        self.polled: dict[tuple[int, ...], object] = {}
        self.woken = False  # by a stall and not by a change
        self.thread: threading.Thread | None = None


class Scheduler:
    """One run of some threads.

    on_stall: what may help when nobody can go on (True: it did); describe: more about a deadlock; save, restore: what
    belongs to a thread and changes with the baton; wrap: what becomes of a thread's exception. error: how it ended.
    """

    def __init__(self, schedule: Schedule, *, patience: int, max_steps: int) -> None:
        self._pick = schedule.start()
        self._patience, self._max_steps, self._stalls = patience, max_steps, 0
        self.tasks: list[Task] = []
        self.current: Task
        self.error: BaseException | None = None
        self.steps = 0
        self.log: list[tuple[int, int]] = []  # (task, site) of each step
        self._finished = threading.Event()
        self._stopping = False
        self.on_stall: Callable[[], bool] = lambda: False
        self.describe: Callable[[], str] = lambda: ""
        self.save: Callable[[], Any] = lambda: None
        self.restore: Callable[[Any], None] = lambda saved: None
        self.wrap: Callable[[Task, BaseException], BaseException] = lambda task, error: error

    def spawn(self, rank: int, stream: int, body: Callable[[Task], None]) -> Task:
        """A new thread, which waits for the baton."""
        task = Task(len(self.tasks), rank, stream)
        self.tasks.append(task)
        task.thread = threading.Thread(target=self._live, args=(task, body), daemon=True)
        task.thread.start()
        return task

    def run(self) -> None:
        """Hands the baton to a thread and returns when all have ended; `error` tells how."""
        ready = self._ready()
        self.current = self.tasks[self._pick(ready, -1, 0) if len(ready) > 1 else 0]
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
        """Ends the run with this error; does not return."""
        if not self._stopping:
            self._fail(error)
        raise Stopped

    def switch(self, task: Task, site: int, words: tuple[int, ...] = ()) -> None:
        """Before each operation on symmetric memory: others may go first. words: addresses that it may be polling."""
        if self._stopping:
            raise Stopped
        self.steps += 1
        self.log.append((task.number, site))
        if self.steps > self._max_steps:
            self.stop(DeadlockError(f"still running after {self._max_steps} steps: {self._places()}"))
        if task.watched is not None and not (words and task.watched.issuperset(words)):
            task.watched = None
        self.dispatch(task)

    def _ready(self) -> list[int]:
        return [t.number for t in self.tasks if not t.done and not t.held and t.watched is None]

    def dispatch(self, task: Task) -> None:
        """Lets the schedule choose; returns when this thread holds the baton again."""
        if self._stopping:
            raise Stopped
        ready = self._ready()
        while not ready:
            if not self._look_again():
                self.stop(DeadlockError(f"deadlock: {self._places()}{self.describe()}"))
            ready = self._ready()
        number = ready[0] if len(ready) == 1 else self._pick(ready, task.number, self.steps)
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

    def poll(self, task: Task, words: tuple[int, ...], values: object, where: Callable[[], str]) -> None:
        """After words were read and not changed: reading the same again is waiting for somebody else."""
        if task.polled.get(words) == values:
            task.watched, task.where = frozenset(address for group in task.polled for address in group), where()
        task.polled[words] = values

    def changed(self, low: int, high: int) -> None:
        """Memory from `low` to `high` was written: who waits for a word there looks again."""
        self.progress()
        for task in self.tasks:
            if task.watched is not None and any(low <= address <= high for address in task.watched):
                task.watched, task.woken = None, False
                task.polled.clear()

    def progress(self) -> None:
        """Something happened that others may have waited for."""
        self._stalls = 0

    def _places(self) -> str:
        places = []
        for task in self.tasks:
            if task.done and task.program is None:
                places.append(f"{actor(task.rank, None)} has ended")
            elif not task.done and task.held not in (GRID, PLACE):
                places.append(f"{actor(task.rank, task.program)} waits at {task.held or task.where}")
        return "".join(f"\n  {place}" for place in places)
