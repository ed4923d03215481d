"""`explore` runs a program on several ranks under several schedules, until one of them shows a fault."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import triton

from tpfuse.explore.clocks import Line
from tpfuse.explore.errors import ExploreError
from tpfuse.explore.interpreter_hooks import hooked
from tpfuse.explore.run import ExploredRun, RunOptions
from tpfuse.explore.schedules import PCT, Choices, RoundRobin, Schedule, Sequential
from tpfuse.explore.simulated_memory import SimulatedMemory
from tpfuse.explore.torch_operations import LeavingTorch, TorchOperations

Program = Callable[[SimulatedMemory], object]
# Within the block, launches of kernels go to the run that was given last to the function that the block gets.
Launches = Callable[[], AbstractContextManager[Callable[[ExploredRun], None]]]
_running = threading.Lock()


@contextmanager
def interpreted() -> Iterator[Callable[[ExploredRun], None]]:
    """Let Triton's interpreter run kernels. Raise ValueError unless it interprets them in this process."""
    if not triton.knobs.runtime.interpret:
        raise ValueError("explore runs interpreted kernels: set TRITON_INTERPRET=1 before they are imported")
    with hooked() as enter:
        yield enter


@dataclass
class Report:
    """The runs of an exploration that found no fault.

    steps, logs: the number of steps and the log of each schedule's run. shared_lines: (file, line) of the atomic
    operations on words that two ranks accessed. exhausted: whether every schedule within the bound was run.
    """

    schedules: list[Schedule] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    logs: list[list[tuple[int, int]]] = field(default_factory=list)
    shared_lines: set[Line] = field(default_factory=set)
    exhausted: bool = False

    def add(self, schedule: Schedule, run: ExploredRun) -> None:
        """Add a run without a fault."""
        self.schedules.append(schedule)
        self.steps.append(run.scheduler.steps)
        self.logs.append(run.scheduler.log)
        self.shared_lines |= run.memory.shared_lines()

    def __str__(self) -> str:
        return f"{len(self.schedules)} schedules, {sum(self.steps)} steps: no fault"


def explore(
    program: Program,
    world: int,
    *,
    schedules: Iterable[Schedule] | None = None,
    seeds: Iterable[int] = range(3),
    resident: int = 1,
    timeouts: bool = False,
    patience: int = 20,
    barrier_rule: bool = True,
    max_steps: int = 200_000,
    launches: Launches = interpreted,
) -> Report:
    """Run `program(memory)` on ranks 0 to world - 1 of a simulated symmetric memory under each schedule.

    schedules: by default sequential, round-robin and PCT with each of `seeds`. resident: how many programs of a grid
    interleave (1: one after another, so that a program that waits for a later one of its own grid never ends).
    timeouts: if no rank can continue, end the waits (PeerTimeout) instead of reporting a deadlock. patience: how often
    ranks that all wait may look again before that. barrier_rule: a release covers only what precedes the program's last
    tl.debug_barrier(), as up to Triton 3.8. max_steps: the largest number of operations on symmetric memory in one run.
    launches: how kernels are run: by default by Triton's interpreter.

    Raise RaceError, DeadlockError or ProtocolError, whose messages end with the expression that replays the run;
    ValueError without TRITON_INTERPRET=1, without a rank and without a schedule; RuntimeError inside another
    exploration.
    """
    if world < 1:
        raise ValueError(f"world={world}: expected at least one rank")
    options = RunOptions(resident, timeouts, patience, barrier_rule, max_steps)
    report = Report()
    with _exploring(launches) as enter:
        for schedule in _standard(seeds, report) if schedules is None else schedules:
            run = _execute(program, world, schedule, options, enter)
            report.add(schedule, run)
    if not report.schedules:
        raise ValueError("explore got no schedule: expected at least one (an iterator can be used once)")
    return report


def _standard(seeds: Iterable[int], report: Report) -> Iterator[Schedule]:
    yield Sequential()
    yield RoundRobin()
    for seed in seeds:
        yield PCT(seed, length=report.steps[0])


def explore_bounded(
    program: Program, world: int, *, preemptions: int = 1, limit: int = 10_000, **options: Any
) -> Report:
    """Run `explore` under every schedule with at most `preemptions` switches away from a rank that could continue.

    There are at most `limit` runs; `exhausted` of the report says whether these were all. This is feasible for two
    ranks and one iteration. options: those of `explore`, but for schedules and seeds.
    """
    if limit < 1 or preemptions < 0:
        raise ValueError(f"limit={limit}, preemptions={preemptions}: expected at least 1 run and 0 preemptions")
    stack = [Choices()]

    def schedules() -> Iterator[Schedule]:
        for _ in range(limit):
            if stack:
                yield (schedule := stack.pop())
                stack.extend(map(Choices, schedule.tracing.alternatives(preemptions)))

    report = explore(program, world, schedules=schedules(), **options)
    report.exhausted = not stack
    return report


def _execute(
    program: Program, world: int, schedule: Schedule, options: RunOptions, enter: Callable[[ExploredRun], None]
) -> ExploredRun:
    """Run the program under one schedule. Raise the fault that it shows."""
    gradients = torch.is_grad_enabled()

    def body(run: ExploredRun, rank: int) -> None:
        with torch.set_grad_enabled(gradients), TorchOperations(run.memory), LeavingTorch(run.memory):
            program(SimulatedMemory(run, rank))

    run = ExploredRun(body, world, schedule, options)
    enter(run)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        error = run.execute()
    if isinstance(error, ExploreError):
        steps = [run.memory.sites[site] for _, site in run.scheduler.log]
        raise error.of_run(_replay(program, world, schedule, options), steps) from error.__cause__
    if error is not None:
        raise error
    return run


def _replay(program: Program, world: int, schedule: Schedule, options: RunOptions) -> str:
    changed = [
        f", {option.name}={value!r}"
        for option in fields(options)
        if (value := getattr(options, option.name)) != option.default
    ]
    name = getattr(program, "__name__", "program")
    return f"explore({name}, {world}, schedules=[{schedule!r}]{''.join(changed)})"


@contextmanager
def _exploring(launches: Launches) -> Iterator[Callable[[ExploredRun], None]]:
    if not _running.acquire(blocking=False):
        raise RuntimeError("explore is already running in this process: one exploration at a time")
    try:
        with launches() as enter:
            yield enter
    finally:
        _running.release()
