"""One run of a protocol under one schedule: ranks as threads that take turns, and what they do to memory."""

import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tpfuse.testing.explore.clocks import Atomic, Clocks, Line, Word
from tpfuse.testing.explore.errors import ProtocolError, RaceError
from tpfuse.testing.explore.explanation import explain
from tpfuse.testing.explore.scheduler import Scheduler, Task
from tpfuse.testing.explore.schedules import Schedule
from tpfuse.testing.explore.shadow import Indices, Region
from tpfuse.testing.explore.sites import Site, actor, lines_here, text_of

Addresses = NDArray[np.uint64]


@dataclass(frozen=True)
class Options:
    """How a run is made; see `explore`."""

    resident: int = 1
    timeouts: bool = False
    patience: int = 20
    barrier_rule: bool = True
    max_steps: int = 200_000


@dataclass(frozen=True)
class Semantics:
    """What an atomic operation orders. scope: 0 within a block, 1 within a GPU, 2 between GPUs."""

    acquires: bool
    releases: bool
    scope: int
    modifies: bool = True  # a read-modify-write
    writes: bool = True  # not a mere load
    host: bool = False


_MEANT = (ValueError, RuntimeError)  # what the memory raises when it is misused, and time-outs
_SCOPES = ("cta", "gpu", "sys")
HOST_PUT = Semantics(acquires=False, releases=True, scope=2, modifies=False, host=True)
HOST_WAIT = Semantics(acquires=True, releases=False, scope=2, modifies=False, writes=False, host=True)


class Run:
    """`world` ranks under one schedule. body(run, rank) is what a rank does."""

    def __init__(self, body: Callable[["Run", int], None], world: int, schedule: Schedule, options: Options) -> None:
        self.world, self.options = world, options
        self.scheduler = Scheduler(schedule, patience=options.patience, max_steps=options.max_steps)
        self.clocks = Clocks(options.barrier_rule)
        self.regions: list[Region] = []
        self.aborts = [Region("abort", rank, torch.Size([1]), torch.int32, checked=False) for rank in range(world)]
        self.regions += self.aborts
        self._body = body
        self._sites: dict[Site, int] = {}
        self._site_list: list[Site] = []
        self._chains: dict[tuple[int, int], int] = {}  # (stream, program) -> chain
        self._arrived: dict[str, list[Task]] = {}
        self._word_lines: dict[Word, tuple[set[int], set[Line]]] = {}  # who used a word by atomics, and where
        self._missing: dict[int, int] = {}  # rank -> for whom it waited in vain
        self._word_users: dict[Word, dict[int, tuple[int, int]]] = {}  # word -> chain -> (scope, site)
        self._programs_left: dict[int, int] = {}  # rank -> programs of its grid that have not begun
        self._roots = frozenset({Run._live.__code__, Run._program.__code__})
        self.scheduler.on_stall, self.scheduler.describe = self._time_out, self._unbegun
        self.scheduler.wrap = self._failure

    @property
    def task(self) -> Task:
        """Who holds the baton."""
        return self.scheduler.current

    def execute(self) -> BaseException | None:
        """Runs all ranks to their end, or to the first failure, which is returned."""
        for rank in range(self.world):
            self.scheduler.spawn(rank, self.clocks.new_chain(), self._live)
        self.scheduler.run()
        return self.scheduler.error

    def _live(self, task: Task) -> None:
        self._body(self, task.rank)

    def _failure(self, task: Task, error: BaseException) -> BaseException:
        while error.__cause__ is not None and type(error).__name__ == "InterpreterError":
            error = error.__cause__
        frames = traceback.extract_tb(error.__traceback__)
        if frames and Path(frames[-1].filename).parent == Path(__file__).parent and not isinstance(error, _MEANT):
            return error  # a fault of the explorer, not of what it explores
        place = f" at {text_of((frames[-1].filename, frames[-1].lineno or 0))}" if frames else ""
        wrapped = ProtocolError(f"{actor(task.rank, task.program)} raised {type(error).__name__}: {error}\n {place}")
        wrapped.__cause__ = error
        return wrapped

    # Launches: programs are forked from the rank's stream and joined at the end.

    def launch(
        self, grid: Sequence[int], begin: Callable[[tuple[int, ...]], None], kernel: Callable[[], object]
    ) -> None:
        """One launch by the current rank. begin(index) makes a program the current one for the interpreter."""
        task = self.task
        indices = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
        chains = [self._chain_of(task.stream, number) for number in range(len(indices))]
        self._programs_left[task.rank] = len(indices)
        if self.options.resident == 1 or len(indices) == 1:
            for chain, index in zip(chains, indices, strict=True):
                self._program(task, chain, index, begin, kernel)
            task.chain, task.program = task.stream, None
        else:
            self._interleave(task, chains, indices, begin, kernel)
        task.polled.clear()
        self.clocks.join(task.stream, chains)

    def _chain_of(self, stream: int, number: int) -> int:
        if (stream, number) not in self._chains:
            self._chains[stream, number] = self.clocks.new_chain()
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
        task.polled.clear()
        self._programs_left[task.rank] -= 1
        self.clocks.fork(task.stream, chain)
        begin(index)
        kernel()

    def _interleave(
        self,
        parent: Task,
        chains: list[int],
        indices: list[tuple[int, int, int]],
        begin: Callable[[tuple[int, ...]], None],
        kernel: Callable[[], object],
    ) -> None:
        """Up to `resident` programs take turns; they begin in the order of the grid."""
        children: list[Task] = []

        def live(task: Task, chain: int, index: tuple[int, ...]) -> None:
            self._program(task, chain, index, begin, kernel)
            for waiting in [child for child in children if child.held][:1]:
                waiting.held = ""
            if all(child.done or child is task for child in children):
                parent.held = ""

        for chain, index in zip(chains, indices, strict=True):
            body = lambda task, chain=chain, index=index: live(task, chain, index)  # noqa: E731
            children.append(self.scheduler.spawn(parent.rank, parent.stream, body))
            children[-1].held = "" if len(children) <= self.options.resident else "for a place"
        parent.held = "for its grid"
        self.scheduler.dispatch(parent)

    def _unbegun(self) -> str:
        waiting = [f"{left} of rank {rank}" for rank, left in self._programs_left.items() if left]
        if not waiting:
            return ""
        return (
            f"\n  programs that have not begun: {', '.join(waiting)} (resident={self.options.resident}): "
            "does a program wait for a later one of its own grid?"
        )

    # Memory.

    def site(self, operation: str) -> int:
        """The number of the place where the current thread is."""
        task = self.task
        site = Site(operation, task.rank, task.program, lines_here(self._roots))
        if site not in self._sites:
            self._sites[site] = len(self._site_list)
            self._site_list.append(site)
        return self._sites[site]

    def touched(self, addresses: Addresses) -> list[tuple[Region, Addresses]]:
        """The symmetric parts among these addresses, red zones included."""
        if not addresses.size:
            return []
        low, high = int(addresses.min()), int(addresses.max())
        regions = [region for region in self.regions if region.low <= high and low < region.high]
        return [
            (region, part)
            for region in regions
            if (part := addresses[(addresses >= region.low) & (addresses < region.high)]).size
        ]

    def _inside(self, region: Region, part: Addresses, size: int, site: int) -> Indices:
        index = region.elements(part, size)
        if region.freed:
            self._refuse(f"symmetric buffer {region.key!r} of rank {region.rank} was freed", site)
        if len(outside := index[(index < 0) | (index >= region.count)]):
            element = f"element {int(outside[0])} of symmetric buffer {region.key!r} of rank {region.rank}"
            self._refuse(f"{element}, which has {region.count}", site)
        return index

    def _refuse(self, what: str, site: int) -> None:
        self.scheduler.stop(ProtocolError(f"{what}:\n  {self._site_list[site]}"))

    def access(self, parts: Iterable[tuple[Region, Addresses]], size: int, operation: str, *, write: bool) -> int:
        """Before a plain load or store: others may go first, then it is checked. Returns the number of its site."""
        parts, task = list(parts), self.task
        site = self.site(operation)
        scalar = len(parts) == 1 and parts[0][1].size == 1
        self.scheduler.switch(task, site, _words(parts) if scalar and not write else ())
        if write or not scalar:
            task.polled.clear()
        for region, part in parts:
            index = self._inside(region, part, size, site)
            if region.checked:
                self._check(region, index, site, write=write, atomic=False)
                if write:
                    number = self.regions.index(region)
                    self.clocks.overwrite((number, int(element)) for element in index)
        return site

    def written(self, parts: Iterable[tuple[Region, Addresses]]) -> None:
        """After a store: who polls what it changed looks again."""
        for _, part in parts:
            self.scheduler.changed(int(part.min()), int(part.max()))

    def polled(self, parts: list[tuple[Region, Addresses]], values: NDArray[Any], site: int) -> None:
        """After words were read and not changed."""
        found = tuple(values.tolist())

        def where() -> str:
            names = [region.name(int(i)) for region, part in parts for i in region.elements(part, 1)]
            words = ", ".join(f"{name} is {value}" for name, value in zip(names, found, strict=True))
            return f"{text_of(self._site_list[site].lines[0])}\n    {words}"

        self.scheduler.poll(self.task, _words(parts), found, where)

    def _check(self, region: Region, index: Indices, site: int, *, write: bool, atomic: bool) -> None:
        task = self.task
        conflict = region.access(self.clocks, index, task.chain, site, write=write, atomic=atomic)
        if conflict is not None:
            why = explain(self.clocks, conflict.component, conflict.time, task.chain)
            self._race(region, conflict.element, conflict.site, site, why)

    def _race(self, region: Region, element: int, earlier: int, later: int, why: str) -> None:
        sites = f"\n  {self._site_list[earlier]}\n  {self._site_list[later]}"
        self.scheduler.stop(RaceError(f"race on {region.name(element)}: nothing orders{sites}\n  {why}"))

    def atomic(
        self,
        operation: str,
        parts: list[tuple[Region, Addresses]],
        semantics: Semantics,
        perform: Callable[[], tuple[Any, NDArray[Any], NDArray[Any], NDArray[np.bool_]]],
    ) -> Any:
        """An atomic operation on the words `parts`.

        perform() does it and returns its result, the old and the new values of the words, and whether it stored them.
        """
        task, site = self.task, self.site(operation)
        self.scheduler.switch(task, site, _words(parts))
        words: list[tuple[Region, int]] = []
        for region, part in parts:
            index = self._inside(region, part, region.step, site)
            words += [(region, int(element)) for element in index]
            if region.checked:
                self._check(region, index, site, write=semantics.writes, atomic=True)
        for region, element in words:
            if region.checked:
                self._scope(region, element, semantics.scope, site)
        result, old, new, stored = perform()
        for (region, element), done in zip(words, stored.tolist(), strict=True):
            if region.checked:
                self._order(region, element, semantics, bool(done), site)
        if (stored & (old != new)).any():
            task.polled.clear()
            for _, part in parts:
                self.scheduler.changed(int(part.min()), int(part.max()))
        else:
            self.polled(parts, old, site)
        return result

    def _order(self, region: Region, element: int, semantics: Semantics, stored: bool, site: int) -> None:
        word = self.regions.index(region), element
        line = self._site_list[site].lines[0]
        self.clocks.atomic(
            Atomic(
                self.task.chain,
                word,
                line,
                releases=semantics.releases,
                acquires=semantics.acquires,
                stores=stored and semantics.writes,
                modifies=semantics.modifies,
                host=semantics.host,
            )
        )

    def _scope(self, region: Region, element: int, scope: int, site: int) -> None:
        """Atomics of two programs on one word are atomic, and order anything, only if the scope of both spans both."""
        task = self.task
        word = self.regions.index(region), element
        users = self._word_users.setdefault(word, {})
        ranks, lines = self._word_lines.setdefault(word, (set(), set()))
        ranks.add(task.rank)
        lines.add(self._site_list[site].lines[0])
        for chain, (other, other_site) in users.items():
            there = self._site_list[other_site]
            needed = 2 if there.rank != task.rank else 1
            if chain != task.chain and min(scope, other) < needed:
                where = "two ranks" if needed == 2 else "two programs"
                narrow = site if scope < needed else other_site
                line = text_of(self._site_list[narrow].lines[0])
                why = f'scope="{_SCOPES[min(scope, other)]}" spans no {where}: "{_SCOPES[needed]}" is needed at {line}'
                self._race(region, element, other_site, site, why)
        if task.chain not in users or scope < users[task.chain][0]:
            users[task.chain] = scope, site

    def shared_lines(self) -> set[Line]:
        """Where atomic operations on words are that two ranks have touched."""
        return {line for ranks, lines in self._word_lines.values() if len(ranks) > 1 for line in lines}

    # What the host does.

    def host_word(self, operation: str, region: Region, index: int, value: int | None) -> int:
        """Sets a word (release) or, without a value, reads it (acquire)."""
        address = region.base + index * region.step
        semantics = HOST_WAIT if value is None else HOST_PUT

        def perform() -> tuple[int, NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
            assert region.words is not None
            old = region.words[index : index + 1].copy()
            if value is not None:
                region.words[index] = np.int64(value).astype(np.int32)
            return int(old[0]), old, region.words[index : index + 1].copy(), np.array([value is not None])

        return int(self.atomic(operation, [(region, np.array([address], np.uint64))], semantics, perform))

    def aborted(self, rank: int) -> bool:
        """Whether the rank has been told to stop waiting."""
        words = self.aborts[rank].words
        assert words is not None
        return bool(words[0])

    def end_abort(self, rank: int) -> None:
        """The rank may wait again."""
        words = self.aborts[rank].words
        assert words is not None
        words[0] = 0

    def forget(self, region: Region) -> None:
        """What was released at the words of a region is released no more."""
        number = self.regions.index(region)
        self.clocks.overwrite((number, element) for element in range(region.count))

    def meet(self, what: str, *, joins: bool) -> int | None:
        """Until every rank has come here; joins: and orders them. Returns who was missing where waits were ended."""
        task, arrived = self.task, self._arrived.setdefault(what, [])
        self.scheduler.switch(task, self.site(what))
        arrived.append(task)
        if len(arrived) == self.world:
            if joins:
                self.clocks.barrier([other.chain for other in arrived])
            for other in arrived:
                other.held = ""
            arrived.clear()
            self.scheduler.progress()
        else:
            task.held = f"at {text_of(lines_here(self._roots)[0])}\n    {what}"
        self.scheduler.dispatch(task)
        return self._missing.pop(task.rank, None)

    def _time_out(self) -> bool:
        """When everybody waits: ends all waits, if the options say so and there are some that have not been ended."""
        meeting = any(self._arrived.values())
        if not self.options.timeouts or (not meeting and all(self.aborted(rank) for rank in range(self.world))):
            return False
        for region in self.aborts:
            assert region.words is not None
            region.words[0] = 1
        for arrived in self._arrived.values():
            present = {task.rank for task in arrived}
            for task in arrived:
                task.held, self._missing[task.rank] = "", min(set(range(self.world)) - present)
            arrived.clear()
        return True


def _words(parts: list[tuple[Region, Addresses]]) -> tuple[int, ...]:
    return tuple(int(address) for _, part in parts for address in part)


def bind(function: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> dict[str, Any]:
    """Arguments by name; keywords that the function does not take (num_warps and the like) are dropped."""
    spec = inspect.getfullargspec(function)
    known = {key: value for key, value in kwargs.items() if key in spec.args or key in spec.kwonlyargs}
    return inspect.getcallargs(function, *args, **known)
