"""The run of a protocol under one schedule: ranks are threads, one of which runs at a time, on checked memory."""

import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tpfuse.explore.errors import ProtocolError
from tpfuse.explore.memory import CheckedMemory
from tpfuse.explore.rounds import RoundState
from tpfuse.explore.scheduler import GRID, PLACE, Task
from tpfuse.explore.schedules import Schedule
from tpfuse.explore.shadow import Region
from tpfuse.explore.sites import actor, is_foreign, text_of
from tpfuse.explore.streams import on_stream, stood_in


@dataclass(frozen=True)
class RunOptions:
    """The options of a run; see `explore`."""

    resident: int = 1
    timeouts: bool = False
    patience: int = 20
    barrier_rule: bool = True
    max_steps: int = 200_000


_MEANT = (ValueError, RuntimeError)  # errors that the memory raises on purpose: misuse and time-outs


class ExploredRun:
    """A run of `world` ranks under one schedule. Each rank runs body(run, rank)."""

    def __init__(
        self, body: Callable[["ExploredRun", int], None], world: int, schedule: Schedule, options: RunOptions
    ) -> None:
        self.world, self.options = world, options
        self.scheduler = schedule.scheduler(patience=options.patience, max_steps=options.max_steps)
        roots = frozenset({ExploredRun._live.__code__, ExploredRun._program.__code__})
        self.memory = CheckedMemory(self.scheduler, options.barrier_rule, roots)
        self.aborts = [Region("abort", rank, torch.Size([1]), torch.int32, checked=False) for rank in range(world)]
        self.memory.regions += self.aborts
        self.parts: dict[tuple[str, int], list[Region]] = {}  # of buffers, by key and how often a buffer was made
        self.tables: list[torch.Tensor] = []  # of the addresses of buffers; kernels may get the address of a table
        self._body = body
        self._chains: dict[tuple[int, int], int] = {}  # (stream, program) -> chain
        self._arrived: dict[str, list[Task]] = {}
        self._fault: tuple[Exception, tuple[int, ...]] | None = None  # the last error of a kernel, and its program
        self._missing: dict[int, int] = {}  # rank -> the rank that was missing when its wait was ended
        self._launches: dict[int, int] = {}  # rank -> the number of its launches
        self._programs_left: dict[int, int] = {}  # rank -> programs of its grid that have not begun
        self.scheduler.on_stall, self.scheduler.describe = self._time_out, self._unbegun
        self.scheduler.wrap = self._failure
        self.scheduler.snapshot, self.scheduler.state = self.memory.clocks.snapshot, self.memory.state

    def execute(self) -> BaseException | None:
        """Run all ranks until they end or one fails; return the first failure."""
        for rank in range(self.world):
            self.scheduler.spawn(rank, self.memory.clocks.new_chain(), self._live, (rank,))
        with stood_in(self.memory):
            self.scheduler.run()
        return self.scheduler.error

    def _live(self, task: Task) -> None:
        self._body(self, task.rank)

    def _failure(self, task: Task, error: BaseException) -> BaseException:
        error_outside = error
        while error.__cause__ is not None and type(error).__name__ == "InterpreterError":
            error = error.__cause__
        frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
        raised_in = Path(frames[-1][0]) if frames else Path()
        if raised_in.parent == Path(__file__).parent and raised_in.name != "suite.py" and not isinstance(error, _MEANT):
            return error  # a fault of the explorer, not of the explored program, parts of which suite.py has
        program = self._fault[1] if self._fault and error_outside is self._fault[0] else None
        places = [text_of(line) for line in frames if not is_foreign(line[0])][-1:]
        message = f"{actor(task.rank, program)} raised {type(error).__name__}" + (f": {error}" if str(error) else "")
        wrapped = ProtocolError("\n  at ".join([message, *places]))
        wrapped.__cause__ = error
        return wrapped

    @on_stream
    def launch(
        self, grid: Sequence[int], begin: Callable[[tuple[int, ...]], None], kernel: Callable[[], object]
    ) -> None:
        """Run a launch of the current rank. begin(index) makes a program the current one of the interpreter."""
        task = self.scheduler.current
        task.lines = ()  # those of a graph are not the kernel's
        indices = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
        chains = [self.chain_of(task.stream, number) for number in range(len(indices))]
        self._programs_left[task.rank] = len(indices)
        if self.options.resident == 1 or len(indices) <= 1:
            try:
                for chain, index in zip(chains, indices, strict=True):
                    self._program(task, chain, index, begin, kernel)
            finally:
                task.chain, task.program = task.stream, None
        else:
            self._interleave(task, chains, indices, begin, kernel)
        self.scheduler.acted(task)
        self.memory.clocks.join(task.stream, chains)

    def chain_of(self, stream: int, number: int) -> int:
        """Return the chain of a program of a stream, or of a part of a program, whose chain then is `stream`."""
        if (stream, number) not in self._chains:
            self._chains[stream, number] = self.memory.clocks.new_chain()
        return self._chains[stream, number]

    def _program(
        self,
        task: Task,
        chain: int,
        index: tuple[int, ...],
        begin: Callable[[tuple[int, ...]], None],
        kernel: Callable[[], object],
    ) -> None:
        task.chain, task.program = chain, index
        self.scheduler.acted(task)
        self._programs_left[task.rank] -= 1
        self.memory.clocks.fork(task.stream, chain)
        begin(index)
        try:
            with self.scheduler.program(task, index):
                kernel()
        except Exception as error:
            self._fault = error, index
            raise

    def _interleave(
        self,
        parent: Task,
        chains: list[int],
        indices: list[tuple[int, int, int]],
        begin: Callable[[tuple[int, ...]], None],
        kernel: Callable[[], object],
    ) -> None:
        """Interleave up to `resident` programs; they begin in the order of the grid."""
        children: list[Task] = []
        launch = self._launches[parent.rank] = self._launches.get(parent.rank, 0) + 1

        def live(task: Task, chain: int, index: tuple[int, ...]) -> None:
            self._program(task, chain, index, begin, kernel)
            if len(indices) > self.options.resident:
                self.scheduler.mark(task, ("places", parent.name, launch))
            for waiting in [child for child in children if child.held][:1]:
                waiting.held = ""
                self.scheduler.joined([waiting], [task])
            if all(child.done or child is task for child in children):
                parent.held = ""

        for number, (chain, index) in enumerate(zip(chains, indices, strict=True)):
            body = lambda task, chain=chain, index=index: live(task, chain, index)  # noqa: E731
            name = (*parent.name, launch, number)
            children.append(self.scheduler.spawn(parent.rank, parent.stream, body, name, parent))
            children[-1].side = parent.side
            children[-1].held = "" if len(children) <= self.options.resident else PLACE
        parent.held = GRID
        self.scheduler.dispatch(parent)
        self.scheduler.joined([parent], children)

    def _unbegun(self) -> str:
        waiting = [f"{left} of rank {rank}" for rank, left in self._programs_left.items() if left]
        if not waiting:
            return ""
        return (
            f"\n  programs that have not begun: {', '.join(waiting)} (resident={self.options.resident}): "
            "does a program wait for a later one of its own grid?"
        )

    def aborted(self, rank: int) -> bool:
        """Return whether the waits of the rank were ended."""
        return bool(self.aborts[rank].words[0])

    def end_abort(self, rank: int) -> None:
        """Allow the rank to wait again."""
        self.aborts[rank].words[0] = 0

    def meet(self, what: str, *, joins: bool) -> int | None:
        """Wait until every rank has called it. joins: whether this orders the ranks.

        Return None, or the number of a missing rank if the wait was ended.
        """
        task, arrived = self.scheduler.current, self._arrived.setdefault(what, [])
        site = self.memory.site(what)
        self.scheduler.switch(task, site)
        self.scheduler.acted(task)
        arrived.append(task)
        if len(arrived) == self.world:
            if joins:
                self.memory.clocks.barrier([other.chain for other in arrived])
            for other in arrived:
                other.held = ""
            self.scheduler.joined(arrived)
            arrived.clear()
            self.scheduler.progress()
        else:
            task.held = f"{self.memory.line_of(site)}\n    {what}"
        self.scheduler.dispatch(task)
        return self._missing.pop(task.rank, None)

    def _time_out(self) -> bool:
        """End all waits when all ranks wait; return whether there were waits to end and the options allow it."""

        meeting = any(self._arrived.values())
        if not self.options.timeouts or (not meeting and all(self.aborted(rank) for rank in range(self.world))):
            return False
        for region in self.aborts:
            region.words[0] = 1
        for arrived in self._arrived.values():
            present = {task.rank for task in arrived}
            for task in arrived:
                task.held, self._missing[task.rank] = "", min(set(range(self.world)) - present)
            arrived.clear()
        return True

    def end_round(self, epochs: tuple[int, ...], rest: Hashable, chains: Sequence[int]) -> None:
        """Let the current rank come to the end of a round.

        epochs, rest: what the next round depends on; see `explore_all`. chains: those on which the rank goes on.
        """
        given = epochs, rest, chains
        self.scheduler.end_round(self.scheduler.current, given, self.world, self._round_state)

    def _round_state(self, given: Sequence[tuple[tuple[int, ...], Hashable, Sequence[int]]]) -> RoundState:
        epochs, yielded, chains = zip(*given, strict=True)
        memory, streams = self.memory, [chain for one in chains for chain in one]
        operated, published = list(memory.words()), memory.published()
        words = {(region.identity, i): region.number(i) for region, i, _ in operated}
        words |= {(region.identity, i): int(x) for region in memory.regions for i, x in enumerate(region.words)}
        rest: dict[str, Hashable] = {"what the ranks yield": yielded, "the words that signal": tuple(published)}
        rest["the scopes of words"] = tuple((region.identity, i, scopes) for region, i, scopes in operated)
        for region in filter(lambda region: region.checked, memory.regions):
            data = region.cells.copy()
            data[[i for identity, i in words if identity == region.identity]] = 0
            name = f"{region.key} of rank {region.rank}"
            rest[f"the contents of {name}"] = region.freed, data.tobytes()
            rest[f"the order of accesses to {name}"] = memory.unknown(region, streams, published)
        return RoundState(epochs, words, rest)
