"""Schedules, which choose which thread of control runs next.

A schedule is a value whose repr is the expression that makes it. Most choose before every operation on symmetric
memory: `start` returns the function that chooses in one run, pick(ready, current, step) -> one of `ready`, where
threads are numbered in the order in which they were created. `Decided` chooses before operations on words alone.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tpfuse.explore.event_scheduler import EventScheduler
from tpfuse.explore.executions import Decisions, Execution
from tpfuse.explore.scheduler import Pick, Scheduler


class Schedule(ABC):
    """Chooses the thread that runs next, with the same choices in each run."""

    @abstractmethod
    def scheduler(self, patience: int, max_steps: int) -> Scheduler:
        """Return the scheduler of one run."""


class Picking(Schedule):
    """A schedule that chooses before every operation on symmetric memory."""

    @abstractmethod
    def start(self) -> Pick:
        """Return the function that makes the choices of one run."""

    def scheduler(self, patience: int, max_steps: int) -> Scheduler:
        return Scheduler(self.start(), patience=patience, max_steps=max_steps)


@dataclass(frozen=True)
class Sequential(Picking):
    """Lets a rank run until it has to wait, which gives the fewest switches."""

    def start(self) -> Pick:
        return lambda ready, current, step: current if current in ready else ready[0]


@dataclass(frozen=True)
class RoundRobin(Picking):
    """Chooses the next rank at every operation, which gives the most switches."""

    def start(self) -> Pick:
        return lambda ready, current, step: next((number for number in ready if number > current), ready[0])


@dataclass(frozen=True)
class PCT(Picking):
    """Probabilistic concurrency testing (Burckhardt et al., ASPLOS 2010): the thread with the highest priority runs.

    Priorities are random. At depth - 1 random steps among the first `length`, the priority of the running thread drops
    below all others. A bug that needs `depth` ordering constraints is found with a probability of at least
    1 / (threads * length ** (depth - 1)).
    """

    seed: int
    length: int = 200
    depth: int = 3

    def start(self) -> Pick:
        draw = random.Random(self.seed)
        drops = sorted(draw.randrange(1, max(self.length, 2)) for _ in range(1, self.depth))
        priority: dict[int, float] = {}

        def pick(ready: Sequence[int], current: int, step: int) -> int:
            while drops and drops[0] <= step:
                drops.pop(0)
                priority[current] = min(priority.values(), default=0.0) - 1.0
            for number in ready:
                priority.setdefault(number, draw.random())
            return max(ready, key=lambda number: priority[number])

        return pick


@dataclass(frozen=True)
class Decided(Schedule):
    """Lets a thread run until it has to wait, but for some decisions, and switches before operations on words alone.

    decisions: the number of an event (an operation on words, without the polls of a wait that goes on) -> the thread
    that performs it: (rank,), or (rank, launch, program) of programs that interleave.
    """

    decisions: Decisions

    def scheduler(self, patience: int, max_steps: int) -> Scheduler:
        return EventScheduler(Execution(self.decisions), max_steps)
