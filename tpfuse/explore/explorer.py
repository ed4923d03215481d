"""`explore` runs a program on several ranks under several schedules, until one of them shows a fault."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import partial

import torch
import triton

from tpfuse.explore.clocks import Line
from tpfuse.explore.errors import ExploreError, RaceError
from tpfuse.explore.event_scheduler import EventScheduler
from tpfuse.explore.executions import Execution, Ordered, Redundant
from tpfuse.explore.interpreter_hooks import hooked
from tpfuse.explore.older_values import OlderValues
from tpfuse.explore.reduction import Reduction
from tpfuse.explore.rounds import Overlap
from tpfuse.explore.run import ExploredRun, RunOptions
from tpfuse.explore.scheduler import Scheduler
from tpfuse.explore.schedules import PCT, Decided, RoundRobin, Schedule, Sequential
from tpfuse.explore.simulated_memory import SimulatedMemory
from tpfuse.explore.torch_operations import LeavingTorch, TorchOperations

Program = Callable[[SimulatedMemory], object]
# Within the block, launches of kernels go to the run that was given last to the function that the block gets.
Launches = Callable[[], AbstractContextManager[Callable[[ExploredRun], None]]]
_Execute = Callable[..., ExploredRun]  # takes a schedule, and older values that reads find
_running = threading.Lock()
brief: ContextVar[bool] = ContextVar("brief", default=False)  # whether no run is spent on the message of an error


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
    operations on words that two ranks accessed. exhausted: whether these are all executions (`explore_all`). grows: the
    name of what is another after each round, "" if the executions stand for any number of rounds, None without rounds.
    """

    world: int
    schedules: list[Schedule] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    logs: list[list[tuple[int, int]]] = field(default_factory=list)
    shared_lines: set[Line] = field(default_factory=set)
    exhausted: bool = False
    grows: str | None = None

    def add(self, schedule: Schedule, run: ExploredRun) -> None:
        """Add a run without a fault."""
        self.schedules.append(schedule)
        self.steps.append(run.scheduler.steps)
        self.logs.append(run.scheduler.log)
        self.shared_lines |= run.memory.shared_lines()

    def __str__(self) -> str:
        if all(isinstance(schedule, Decided) for schedule in self.schedules):
            which = "all of them" if self.exhausted else "not all"
            if self.exhausted and self.grows is not None:
                which += f", and {self.grows} grows" if self.grows else ", for any number of rounds"
            executions = "1 execution" if len(self.schedules) == 1 else f"{len(self.schedules)} executions"
            return f"{self.world} ranks, {executions}, {which}: no fault"
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
    _check_world(world)
    options = RunOptions(resident, timeouts, patience, barrier_rule, max_steps)
    report = Report(world)
    with _exploring(launches) as enter:
        execute = partial(_execute, program, world, options=options, enter=enter)
        for schedule in _standard(seeds, report) if schedules is None else schedules:
            try:
                report.add(schedule, execute(schedule))
            except RaceError as error:
                raise _with_damage(error, schedule, execute) from None
    if not report.schedules:
        raise ValueError("explore got no schedule: expected at least one (an iterator can be used once)")
    return report


def _check_world(world: int) -> None:
    if world < 1:
        raise ValueError(f"world={world}: expected at least one rank")


def _standard(seeds: Iterable[int], report: Report) -> Iterator[Schedule]:
    yield Sequential()
    yield RoundRobin()
    for seed in seeds:
        yield PCT(seed, length=report.steps[0])


def explore_all(
    program: Program,
    world: int,
    *,
    seconds: float = 60.0,
    resident: int = 1,
    timeouts: bool = False,
    barrier_rule: bool = True,
    max_steps: int = 200_000,
    launches: Launches = interpreted,
) -> Report:
    """Run every execution of `program(memory)` on ranks 0 to world - 1, one for each order of operations that matters.

    Executions that differ only in the order of independent operations, in how often a wait polls, or in later values of
    a word with which a wait ends as well, count as one (`tpfuse.explore.reduction`). The program may be a generator
    that yields at the end of each round its epoch, which words count, or (its epochs, what else the next round depends
    on beside symmetric memory). If all executions then come back to states between rounds that were there before, they
    stand for any number of rounds (`tpfuse.explore.rounds`); `grows` of the report says whether they do.

    seconds: after which no further execution begins; `exhausted` of the report says whether there was none. The other
    options are those of `explore`. The replay of an error has as few decisions as were found to show it.

    Raise what `explore` raises; and ProtocolError for a loop that reads the same values again and again, in states that
    differ: whether it waits is then not known.
    """
    if seconds <= 0:
        raise ValueError(f"seconds={seconds}: expected a positive number")
    _check_world(world)
    options = RunOptions(resident, timeouts, barrier_rule=barrier_rule, max_steps=max_steps)
    end = time.monotonic() + seconds
    with _exploring(launches) as enter:
        execute = partial(_execute, program, world, options=options, enter=enter)
        try:
            return _all_executions(Reduction(in_rounds=True), world, execute, end)
        except Overlap:
            return _all_executions(Reduction(), world, execute, end)


def _all_executions(reduction: Reduction, world: int, execute: _Execute, end: float) -> Report:
    """Run the executions that a reduction wants, up to a time."""
    report = Report(world)
    while True:
        try:
            run = execute(_Following(reduction))
            report.add(Decided(reduction.decisions), run)
        except Redundant:
            pass
        except ExploreError as error:
            raise _with_fewer_decisions(error, reduction, execute) from None
        while (execution := reduction.untried()) is not None:
            with contextlib.suppress(Redundant):
                execute(_Following(execution))
        report.exhausted, report.grows = not reduction.finish(), reduction.grows
        if report.exhausted or time.monotonic() > end:
            return report


class _Following(Schedule):
    """An execution, shown afterwards by the decisions that it has made."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def scheduler(self, patience: int, max_steps: int) -> Scheduler:
        self._execution.start()
        return EventScheduler(self._execution, max_steps)

    def __repr__(self) -> str:
        return repr(Decided(self._execution.decisions))


def _with_fewer_decisions(error: ExploreError, reduction: Reduction, execute: _Execute) -> ExploreError:
    """Return an error of the same type that fewer of the decisions show: none can be left out alone."""
    if brief.get():
        return error
    decisions = reduction.decisions
    if reduction.cuts:  # a replay has no rounds, and there the same order is the result of other decisions
        same = Ordered(reduction.order, reduction.effects, ends=False)
        try:
            execute(_Following(same))
        except ExploreError as found:
            error, decisions = found, same.decisions
    for left_out in reversed(decisions):
        fewer = {event: thread for event, thread in decisions.items() if event != left_out}
        try:
            execute(Decided(fewer))
        except ExploreError as found:
            if type(found) is type(error):
                decisions, error = fewer, found
        except ValueError:  # a decision that is not possible without the one that was left out
            continue
    return _with_damage(error, Decided(decisions), execute)


def _with_damage(error: ExploreError, schedule: Schedule, execute: _Execute) -> ExploreError:
    """Return the error; if it is the race of a read, with what the older value does in one more run."""
    if brief.get() or not isinstance(error, RaceError) or error.steps[-1].operation not in ("load", "read", "ld"):
        return error
    older, end = OlderValues(), None
    try:
        execute(schedule, older=older)
    except ExploreError as found:
        end = found
    except ValueError:  # a decision that is not possible after the race
        return error
    return RaceError(error.message + older.damage(end), error.replay, error.steps)


def _execute(
    program: Program,
    world: int,
    schedule: Schedule,
    options: RunOptions,
    enter: Callable[[ExploredRun], None],
    older: OlderValues | None = None,
) -> ExploredRun:
    """Run the program under one schedule. Raise the fault that it shows."""
    gradients = torch.is_grad_enabled()

    def body(run: ExploredRun, rank: int) -> None:
        with torch.set_grad_enabled(gradients), TorchOperations(run.memory), LeavingTorch(run.memory):
            memory = SimulatedMemory(run, rank)
            rounds = program(memory)
            if isinstance(rounds, Iterator):
                for yielded in rounds:
                    memory.end_round(yielded)

    run = ExploredRun(body, world, schedule, options)
    run.memory.older = older
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
