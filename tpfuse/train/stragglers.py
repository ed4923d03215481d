"""How long each rank works in a step, and which ranks are so slow that the others wait for them.

All ranks take equally long for a step, because they wait for each other. So the time of a step says nothing about one
rank. What tells a slow rank is the time in which it works: the step's time without the rank's waits for other ranks.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from types import TracebackType

import torch

from tpfuse.comm.trace import waited_seconds

STEPS = 30  # the number of successive steps after which a rank that is slow, or no longer slow, counts as such


class StepClock:
    """A context manager around each training step, which measures how long this rank works and waits in it.

    measures: whether it can measure, which is equal on all ranks. last: the seconds of work and of waiting in the last
    complete step; None if there is none. A single rank is not measured. GPUs are not measured yet, because their
    kernels wait for other ranks and the host does not: use `tpfuse profile` there.
    """

    def __init__(self, device: torch.device, world: int) -> None:
        self.measures = device.type == "cpu" and world > 1
        self.last: tuple[float, float] | None = None

    def __enter__(self) -> None:
        self._began, self._waited = time.perf_counter(), waited_seconds()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.measures:
            waited = waited_seconds() - self._waited
            self.last = time.perf_counter() - self._began - waited, waited


@dataclass(frozen=True)
class Straggler:
    """A rank that others wait for. excess: the share by which it has worked longer than the median rank."""

    rank: int
    excess: float


class Stragglers:
    """Finds the ranks that work longer than the median rank by more than `share` in `STEPS` successive steps.

    share: 0 to find none. Of an even number of ranks, the faster of the two in the middle is the median rank: of two
    ranks it is the faster one. present: the stragglers of now. A rank remains one until it has not been slow in `STEPS`
    successive steps. pipeline: the number of pipeline ranks. The ranks with the same stages, which follow each other,
    are compared with each other: other stages have other work.
    """

    def __init__(self, share: float, pipeline: int = 1) -> None:
        self._share, self._pipeline = share, pipeline
        self.present: set[int] = set()
        # In each of the last steps the work of all ranks, and that of the median rank for each of them.
        self._recent: deque[tuple[Sequence[float], Sequence[float]]] = deque(maxlen=STEPS)
        self._successive: dict[int, int] = {}  # for each rank the number of successive steps that speak for a change

    def add(self, worked: Sequence[float]) -> list[Straggler]:
        """Returns the ranks that have become stragglers by this step. worked: each rank's seconds of work in it."""
        if not self._share:
            return []
        size = len(worked) // self._pipeline
        medians = [median_low(worked[rank // size * size :][:size]) for rank in range(len(worked))]
        self._recent.append((worked, medians))
        found = []
        for rank, seconds in enumerate(worked):
            slow = seconds > (1.0 + self._share) * medians[rank]
            count = self._successive.get(rank, 0) + 1 if slow != (rank in self.present) else 0
            if count == STEPS:
                count = 0
                self.present ^= {rank}
                if slow:
                    found.append(Straggler(rank, self._excess(rank)))
            self._successive[rank] = count
        return found

    def _excess(self, rank: int) -> float:
        """Returns the share by which the rank has worked longer than the median rank in the recent steps."""
        work = sum(worked[rank] for worked, _ in self._recent)
        return work / sum(medians[rank] for _, medians in self._recent) - 1.0
