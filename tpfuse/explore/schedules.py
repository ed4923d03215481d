"""Schedules, which choose before every operation on symmetric memory which thread of control runs next.

A schedule is a value whose repr is the expression that makes it. `start` returns the function that chooses in one run:
pick(ready, current, step) -> one of `ready`, where threads are numbered in the order in which they were created.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Pick = Callable[[Sequence[int], int, int], int]


class Schedule(ABC):
    """Chooses the thread that runs next, with the same choices each time it is started."""

    @abstractmethod
    def start(self) -> Pick:
        """Return the function that makes the choices of one run."""


@dataclass(frozen=True)
class Sequential(Schedule):
    """Lets a rank run until it has to wait, which gives the fewest switches."""

    def start(self) -> Pick:
        return lambda ready, current, step: current if current in ready else ready[0]


@dataclass(frozen=True)
class RoundRobin(Schedule):
    """Chooses the next rank at every operation, which gives the most switches."""

    def start(self) -> Pick:
        return lambda ready, current, step: next((number for number in ready if number > current), ready[0])


@dataclass(frozen=True)
class PCT(Schedule):
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


@dataclass(unsafe_hash=True)  # equal by its choices, which do not change
class Choices(Schedule):
    """Makes the given choices first (0: the running thread continues; n: the n-th of the others); then never switches
    away from a thread that can continue.

    tracing: of the last run, from which further choices follow.
    """

    choices: tuple[int, ...] = ()
    tracing: "Tracing" = field(init=False, repr=False, compare=False)

    def start(self) -> Pick:
        self.tracing = Tracing(self.choices)
        return self.tracing


class Tracing:
    """Follows `choices`, and records at each step how many threads could have been chosen."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = list(choices)
        # For each step: the choice, the number of threads to choose from, whether a switch interrupts a thread.
        self.trace: list[tuple[int, int, bool]] = []

    def __call__(self, ready: Sequence[int], current: int, step: int) -> int:
        order = sorted(ready, key=lambda number: (number != current, number))
        chosen = self.choices[len(self.trace)] if len(self.trace) < len(self.choices) else 0
        if chosen >= len(order):
            raise ValueError(
                f"choice {chosen} at step {step}: expected at most {len(order) - 1}; the choices are of another program"
            )
        self.trace.append((chosen, len(order), order[0] == current))
        return order[chosen]

    def alternatives(self, preemptions: int) -> Iterator[tuple[int, ...]]:
        """Yield choices that leave this run after its given choices, with at most `preemptions` interruptions.

        Bounding the number of interruptions is the method of CHESS (Musuvathi et al., OSDI 2008).
        """
        spent = 0
        for step, (chosen, width, interrupts) in enumerate(self.trace):
            if step >= len(self.choices) and spent + interrupts <= preemptions:
                for other in range(1, width):
                    yield (*(choice for choice, _, _ in self.trace[:step]), other)
            spent += bool(interrupts and chosen)
