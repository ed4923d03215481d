"""Schedules: which thread of control moves next, asked before every operation on symmetric memory.

A schedule is a value that prints as the expression that makes it; `start` gives the function that chooses in one run:
pick(ready, current, step) -> one of `ready`, where threads are numbered in the order in which they came to be.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Pick = Callable[[Sequence[int], int, int], int]


class Schedule(ABC):
    """Chooses who moves next; the same choices each time it is started."""

    @abstractmethod
    def start(self) -> Pick:
        """The choices of one run, from its beginning."""


@dataclass(frozen=True)
class Sequential(Schedule):
    """A rank runs until it has to wait: the fewest switches."""

    def start(self) -> Pick:
        return lambda ready, current, step: current if current in ready else ready[0]


@dataclass(frozen=True)
class RoundRobin(Schedule):
    """The next rank at every operation: the most switches."""

    def start(self) -> Pick:
        return lambda ready, current, step: next((number for number in ready if number > current), ready[0])


@dataclass(frozen=True)
class RandomWalk(Schedule):
    """Anybody at every operation."""

    seed: int

    def start(self) -> Pick:
        choose = random.Random(self.seed).choice
        return lambda ready, current, step: choose(ready)


@dataclass(frozen=True)
class PCT(Schedule):
    """Probabilistic concurrency testing (Burckhardt et al., ASPLOS 2010): random priorities, the highest runs.

    At depth - 1 random steps among the first `length` the one that runs falls below all others: a bug that needs
    `depth` ordering constraints is found with a probability of at least 1 / (threads * length ** (depth - 1)).
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
class Choices(Schedule):
    """These choices first (0: whoever runs goes on; n: the n-th of the others), then nobody is interrupted."""

    choices: tuple[int, ...] = ()

    def start(self) -> Pick:
        return Tracing(self.choices)


class Tracing:
    """Follows `choices` and notes at each step how many others could have been chosen."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = list(choices)
        self.trace: list[tuple[int, int, bool]] = []  # chosen, how many there were, would a switch have interrupted

    def __call__(self, ready: Sequence[int], current: int, step: int) -> int:
        order = sorted(ready, key=lambda number: (number != current, number))
        chosen = self.choices[len(self.trace)] if len(self.trace) < len(self.choices) else 0
        if chosen >= len(order):
            raise ValueError(f"choice {chosen} of {len(order)} at step {step}: these choices belong to another program")
        self.trace.append((chosen, len(order), order[0] == current))
        return order[chosen]

    def alternatives(self, preemptions: int) -> Iterator[tuple[int, ...]]:
        """Choices that leave this run after its own prefix, with at most so many interruptions (CHESS, OSDI 2008)."""
        spent = 0
        for step, (chosen, width, interrupts) in enumerate(self.trace):
            if step >= len(self.choices) and spent + interrupts <= preemptions:
                for other in range(1, width):
                    yield (*(choice for choice, _, _ in self.trace[:step]), other)
            spent += bool(interrupts and chosen)
