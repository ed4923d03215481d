"""A suite of tests for one communicating program: subclass `ProtocolSuite` in a test module, and pytest runs it.

    class TestShardSum(ProtocolSuite):
        modules = (signals, shard_sum)       # the modules that mutants change, and those that import them
        needed = (shard_sum,)                # whose synchronisation lines this suite deletes
        worlds = ((2, 2), (2, 1), (3, 2))    # (ranks, resident programs); the first pair serves all other tests
        faults = (Fault("an old epoch", replace(shard_sum.shard_sum_kernel, "epoch", by="epoch - 1", call="barrier")),)

        def program(self, memory):           # what every rank runs, with a check of its results
            current(shard_sum).shard_sum(...)

        def late_program(self, memory):      # one rank does not come; afterwards everything works again
            ...

`current` gives the copy of a module that is being explored. In the first tier the suite explores the program once in
one world, deletes or weakens each synchronisation line once, and lets waits end; in the second tier it explores other
worlds and many seeds, and plants the faults that are no deletion. A line is tried under the sequential schedule first,
which finds nearly all of them, since vector clocks find a race whatever the order of accesses; further schedules follow
only for what that leaves.
"""

import ast
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tpfuse.comm.symmetric_memory import SymmetricBuffer
from tpfuse.testing.explore import PCT, Report, RoundRobin, Schedule, Sequential, SimulatedMemory, explore
from tpfuse.testing.explore.fresh_modules import fresh
from tpfuse.testing.explore.mutants import Mutant, mutants_of, span_of, surviving
from tpfuse.testing.explore.planting import Fault, replace
from tpfuse.testing.tiers import exhaustive

__all__ = ["Fault", "ProtocolSuite", "StreamMemory", "current", "replace"]

SCHEDULES = (Sequential(), RoundRobin(), PCT(0))
_unchanged: dict[type, Report] = {}


def current(module: ModuleType) -> Any:
    """The copy of the module that is explored now, mutated or not; outside an exploration the module itself."""
    return sys.modules[module.__name__]


class StreamMemory:
    """A group's memory as one stream of a rank sees it: each rank of the explored memory is a stream of its own.

    The first `world` are the streams of products, those behind them the streams of copies.
    """

    def __init__(self, memory: SimulatedMemory, world: int) -> None:
        self._memory, self.rank, self.world = memory, memory.rank % world, world
        self.device, self.put, self.resident_programs = memory.device, memory.put, memory.resident_programs

    @property
    def abort(self) -> Tensor:
        return self._memory.abort

    def buffer(self, key: str, shape: Any, dtype: torch.dtype) -> SymmetricBuffer:
        found = self._memory.buffer(key, shape, dtype)
        return SymmetricBuffer(key, found.peers[: self.world], self.rank, found.addresses[: self.world])

    def signals(self, key: str, count: int) -> SymmetricBuffer:
        found = self._memory.signals(key, count)
        return SymmetricBuffer(key, found.peers[: self.world], self.rank, found.addresses[: self.world])


class ProtocolSuite:
    """The tests of one program; see the module for what a subclass defines.

    unneeded: (function, its line, or the name of what the line calls) -> why the program does not need that line, which
    the second tier tests. late_faults: faults that `late_program` finds. seeds: how many schedules of `short_program`
    the second tier draws. fixtures: the names of pytest's fixtures that become attributes of the suite.
    """

    modules: ClassVar[Sequence[ModuleType]]
    needed: ClassVar[Sequence[Any]]
    unneeded: ClassVar[Mapping[tuple[Any, str], str]] = {}
    worlds: ClassVar[Sequence[tuple[int, int]]]
    faults: ClassVar[Sequence[Fault]] = ()
    late_faults: ClassVar[Sequence[Fault]] = ()
    seeds: ClassVar[int] = 20
    fixtures: ClassVar[Sequence[str]] = ()

    def program(self, memory: SimulatedMemory) -> None:
        """Each rank's part of the protocol: several rounds, with a check of every result."""
        raise NotImplementedError

    def short_program(self, memory: SimulatedMemory) -> None:
        """Like `program`, but as short as many seeds allow."""
        self.program(memory)

    def late_program(self, memory: SimulatedMemory) -> None:
        """One rank does not come; the waits of the others end, and after a reset the protocol works as before."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _take_fixtures(self, request: pytest.FixtureRequest) -> None:
        for name in self.fixtures:
            setattr(self, name, request.getfixturevalue(name))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Worlds of `test_no_alarm`: the first belongs to the first tier."""
        if "resident" in metafunc.fixturenames:
            metafunc.parametrize(("world", "resident"), [self.worlds[0], *exhaustive(*self.worlds[1:])])

    def test_no_alarm(self, world: int, resident: int) -> None:
        """The unchanged program has no race, no deadlock and no wrong result."""
        if (world, resident) == self.worlds[0]:
            self._explored()
        else:
            self._explore(self.program, SCHEDULES, world=world, resident=resident)

    @pytest.mark.exhaustive
    def test_no_alarm_in_many_seeds(self) -> None:
        """Nor under random priorities of its threads."""
        self._explore(self.short_program, map(PCT, range(self.seeds)))

    def test_every_line_is_needed(self) -> None:
        """Each line that orders something, deleted or weakened, makes the program fail."""
        mutants, unneeded = self._mutants()
        left = self._left(self.program, [m for m in mutants if m not in unneeded], unchanged=self._explored())
        assert not left, "\n".join(["the program does not need these lines:", *map(str, left)])

    @pytest.mark.exhaustive
    def test_unneeded_lines_are_not_needed(self) -> None:
        """What `unneeded` says is still so."""
        unneeded = self._mutants()[1]
        left = self._left(self.program, unneeded, unchanged=self._explored())
        needed = [mutant for mutant in unneeded if mutant not in left]
        assert not needed, "\n".join(["the program needs these lines of `unneeded` after all:", *map(str, needed)])

    def test_faults_can_be_planted(self) -> None:
        """What the faults change is in the source."""
        for fault in (*self.faults, *self.late_faults):
            fault.mutant()

    @pytest.mark.exhaustive
    def test_planted_faults_are_found(self) -> None:
        """The program fails with each fault that is no deletion, and `late_program` with those of the way out."""
        faults, late = ([fault.mutant() for fault in faults] for faults in (self.faults, self.late_faults))
        left = self._left(self.program, faults, unchanged=self._explored())
        if late:
            left += self._left(self.late_program, late, schedules=[RoundRobin()], resident=4, timeouts=True)
        assert not left, "\n".join(map(str, left))

    @pytest.mark.parametrize("schedules", [SCHEDULES[:2], *exhaustive([PCT(seed) for seed in range(3)])], ids=len)
    def test_waits_end(self, schedules: Sequence[Schedule]) -> None:
        """No wait lasts for ever where a rank does not come, and after a reset everything is as new."""
        self._explore(self.late_program, schedules, timeouts=True)

    def _mutants(self) -> tuple[list[Mutant], list[Mutant]]:
        """The mutants of `needed`, and those of them that `unneeded` names."""
        mutants: list[Mutant] = []
        for target in self.needed:
            found = mutants_of(target, among=self.modules)
            assert found, f"{target} has no line that synchronises"
            mutants += found
        unneeded: list[Mutant] = []
        for function, line in self.unneeded:
            named = [mutant for mutant in mutants if _is_in(mutant, function, line)]
            assert named, f"{function} has no line {line!r} that synchronises, which `unneeded` names"
            unneeded += named
        return mutants, unneeded

    def _explore(
        self, program: Callable[[SimulatedMemory], None], schedules: Iterable[Schedule], **options: Any
    ) -> Report:
        """In copies of the modules, as mutants are, so that what a program changes in them ends with it."""
        world, resident = self.worlds[0]
        with fresh(self.modules):
            return explore(program, **({"world": world, "resident": resident} | options), schedules=schedules)

    def _explored(self) -> Report:
        """What the unchanged program does under `SCHEDULES`, explored once for all tests of the suite."""
        if type(self) not in _unchanged:
            _unchanged[type(self)] = self._explore(self.program, SCHEDULES)
        return _unchanged[type(self)]

    def _left(self, program: Callable[[SimulatedMemory], None], mutants: list[Mutant], **options: Any) -> list[Mutant]:
        """Those that the program does not fail."""
        world, resident = self.worlds[0]
        options = {"resident": resident} | options
        return surviving(lambda *copies: program, self.modules, world, mutants=mutants, **options)


def _is_in(mutant: Mutant, function: Any, line: str) -> bool:
    """Whether the mutant changes this line of the function, or this name's call; formatting does not matter."""
    first, last = span_of(function)
    return first <= mutant.lines[0] <= last and ast.unparse(ast.parse(line)) in (mutant.code, mutant.code.split("(")[0])
