"""A suite of tests for one communicating program: subclass `ProtocolSuite` in a test module, and pytest runs it.

    class TestShardSum(ProtocolSuite):
        modules = (signals, shard_sum)       # the modules that mutants change, and those that import them
        needed = (shard_sum,)                # the modules or functions whose synchronising lines this suite deletes
        worlds = ((2, 2), (2, 1), (3, 2))    # (ranks, resident programs); the first pair serves all other tests
        faults = (Fault("an old epoch", replace(shard_sum.shard_sum_kernel, "epoch", by="epoch - 1", call="barrier")),)

        def program(self, memory):           # runs on every rank, with a check of its results
            current(shard_sum).shard_sum(...)

        def late_program(self, memory):      # one rank is missing; afterwards everything works again
            ...

`current` returns the copy of a module that is being explored. In the first tier the suite explores the program once in
one world, and lets waits end. In the second tier it explores other worlds, runs every execution of a shorter program,
deletes or weakens each synchronising line once, and plants the faults that are not deletions. Each mutant runs until an
execution fails: nearly always the first, since vector clocks find a race in any order of the accesses.
"""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.symmetric_memory import SymmetricBuffer
from tpfuse.explore import PCT, Report, RoundRobin, Schedule, Sequential, SimulatedMemory, explore, explore_all
from tpfuse.explore.fresh_modules import fresh
from tpfuse.explore.mutants import Mutant, mutants_of, span_of, surviving
from tpfuse.explore.planting import Fault, replace

__all__ = ["Fault", "ProtocolSuite", "StreamMemory", "current", "replace", "without_rank_0", "without_wait"]

SCHEDULES = (Sequential(), RoundRobin(), PCT(0))
_unchanged: dict[type, Report] = {}


def _second_tier(values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters that `pytest -m "not exhaustive"` leaves out."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
        for value in values
    ]


def current(module: ModuleType) -> Any:
    """Return the copy of the module that is explored now, mutated or not; outside an exploration the module itself."""
    return sys.modules[module.__name__]


class StreamMemory:
    """A group's memory as one stream of a rank uses it: each rank of the explored memory stands for one stream.

    The first `world` ranks of the explored memory are the streams that run products; the ranks after them are the
    streams that run copies.
    """

    def __init__(self, memory: SimulatedMemory, world: int) -> None:
        self._memory, self.rank, self.world = memory, memory.rank % world, world
        self.device, self.signal, self.resident_programs = memory.device, memory.signal, memory.resident_programs

    @property
    def abort(self) -> Tensor:
        return self._memory.abort

    def buffer(self, key: str, shape: Any, dtype: torch.dtype) -> SymmetricBuffer:
        buffer = self._memory.buffer(key, shape, dtype)
        return SymmetricBuffer(key, buffer.peers[: self.world], self.rank, buffer.addresses[: self.world])

    def signals(self, key: str, count: int) -> SymmetricBuffer:
        flags = self._memory.signals(key, count)
        return SymmetricBuffer(key, flags.peers[: self.world], self.rank, flags.addresses[: self.world])


def without_wait(program: Callable[[SimulatedMemory], None], left_out: str) -> Callable[[SimulatedMemory], None]:
    """Return `program` without the waits of the host whose `op` is `left_out`."""

    def changed(memory: SimulatedMemory) -> None:
        def wait(*arguments: Any, op: str, **options: Any) -> None:
            if op != left_out:
                real_wait(*arguments, op=op, **options)

        real_wait = memory.wait_signal
        memory.wait_signal = wait  # type: ignore[method-assign]
        program(memory)

    return changed


def without_rank_0(memory: SimulatedMemory, op: str, state: Tensor, run: Callable[[], object]) -> None:
    """Call `run` twice on each rank while rank 0 stays away, then reset the memory, in a program for late ranks.

    Both calls must end without ending the epoch, which is in `state`, and the guard of `op` must raise PeerTimeout.
    """
    epoch = int(state[0])
    with pytest.raises(PeerTimeout), memory.guard(op):
        if memory.rank == 0:
            memory.barrier("elsewhere")
        for _ in range(2):
            run()
            assert state[0] == epoch, "the epoch is not over"
    memory.reset()
    memory.barrier()
    assert state.tolist() == [0, 0]


class ProtocolSuite:
    """The tests of one program; the module's docstring says what a subclass defines.

    unneeded: maps (function, its line, or the name of the function that the line calls) to the reason why the program
    does not need that line; the second tier tests that it does not. late_faults: the faults that `late_program` finds.
    all_worlds: (ranks, resident programs) with which the second tier runs every execution of `short_program`. fixtures:
    the names of pytest fixtures that become attributes of the suite.
    """

    modules: ClassVar[Sequence[ModuleType]]
    needed: ClassVar[Sequence[Any]]
    unneeded: ClassVar[Mapping[tuple[Any, str], str]] = {}
    worlds: ClassVar[Sequence[tuple[int, int]]]
    faults: ClassVar[Sequence[Fault]] = ()
    late_faults: ClassVar[Sequence[Fault]] = ()
    all_worlds: ClassVar[Sequence[tuple[int, int]]] = ((2, 1),)
    fixtures: ClassVar[Sequence[str]] = ()

    def program(self, memory: SimulatedMemory) -> None:
        """Run one rank's part of the protocol: several rounds, with a check of every result."""
        raise NotImplementedError

    def short_program(self, memory: SimulatedMemory) -> Iterator[object] | None:
        """Run a shorter program than `program`, all of whose executions are run, or yield after each of its rounds."""
        self.program(memory)
        return None

    def late_program(self, memory: SimulatedMemory) -> None:
        """Run the protocol with one rank missing: the others' waits end, and after a reset it works as before."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _take_fixtures(self, request: pytest.FixtureRequest) -> None:
        for name in self.fixtures:
            setattr(self, name, request.getfixturevalue(name))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize by `worlds`, the first of which belongs to the first tier, and by `all_worlds`."""
        if "resident" in metafunc.fixturenames:
            metafunc.parametrize(("world", "resident"), [self.worlds[0], *_second_tier(self.worlds[1:])])
        if "all_resident" in metafunc.fixturenames:
            metafunc.parametrize(("all_world", "all_resident"), _second_tier(self.all_worlds))

    def test_no_alarm(self, world: int, resident: int) -> None:
        """The unchanged program has no race, no deadlock and no wrong result under `SCHEDULES`."""
        if (world, resident) == self.worlds[0]:
            self._explored()
        else:
            self._explore(self.program, SCHEDULES, world=world, resident=resident)

    def test_no_alarm_in_any_execution(self, all_world: int, all_resident: int) -> None:
        """The unchanged short program has no fault in any execution, of any number of rounds if it has rounds."""
        with fresh(self.modules):
            report = explore_all(self.short_program, all_world, resident=all_resident, seconds=600)
        print(f"{type(self).__name__}, {all_resident} resident: {report}")
        assert report.exhausted and not report.grows

    @pytest.mark.exhaustive
    def test_every_line_is_needed(self) -> None:
        """The program fails if any line that orders something is deleted or weakened."""
        mutants, unneeded = self._mutants()
        survivors = self._survivors(self.program, [m for m in mutants if m not in unneeded], unchanged=self._explored())
        assert not survivors, "\n".join(["the program does not need these lines:", *map(str, survivors)])

    @pytest.mark.exhaustive
    def test_unneeded_lines_are_not_needed(self) -> None:
        """No execution of the short program fails if a line of `unneeded` is deleted or weakened."""
        unneeded = self._mutants()[1]
        survivors = self._survivors(self.short_program, unneeded, unchanged=self._explored())
        needed = [mutant for mutant in unneeded if mutant not in survivors]
        assert not needed, "\n".join(["the program needs these lines, which `unneeded` names:", *map(str, needed)])

    def test_faults_can_be_planted(self) -> None:
        """The expressions and statements that the faults change are in the source."""
        for fault in (*self.faults, *self.late_faults):
            fault.mutant()

    @pytest.mark.exhaustive
    def test_planted_faults_are_found(self) -> None:
        """The program fails with each fault of `faults`, and `late_program` with each of `late_faults`."""
        faults, late = ([fault.mutant() for fault in faults] for faults in (self.faults, self.late_faults))
        survivors = self._survivors(self.program, faults, unchanged=self._explored())
        if late:
            survivors += self._survivors(self.late_program, late, schedules=[RoundRobin()], resident=4, timeouts=True)
        assert not survivors, "\n".join(map(str, survivors))

    @pytest.mark.parametrize("schedules", [SCHEDULES[:2], *_second_tier([[PCT(seed) for seed in range(3)]])], ids=len)
    def test_waits_end(self, schedules: Sequence[Schedule]) -> None:
        """No wait lasts for ever if a rank is missing, and after a reset the protocol works as at the beginning."""
        self._explore(self.late_program, schedules, timeouts=True)

    def _mutants(self) -> tuple[list[Mutant], list[Mutant]]:
        """Return the mutants of `needed`, and those among them that `unneeded` names."""
        mutants: list[Mutant] = []
        for target in self.needed:
            mutants += mutants_of(target, among=self.modules)
        unneeded: list[Mutant] = []
        for function, line in self.unneeded:
            named = [mutant for mutant in mutants if _is_in(mutant, function, line)]
            assert named, f"{function} has no line {line!r} that synchronises, which `unneeded` names"
            unneeded += named
        return mutants, unneeded

    def _explore(
        self, program: Callable[[SimulatedMemory], object], schedules: Iterable[Schedule], **options: Any
    ) -> Report:
        """Explore the program in copies of the modules, as mutants are, so that its changes to them do not last."""
        world, resident = self.worlds[0]
        with fresh(self.modules):
            return explore(program, **({"world": world, "resident": resident} | options), schedules=schedules)

    def _explored(self) -> Report:
        """Return the report of the unchanged program under `SCHEDULES`, explored once for all tests of the suite."""
        if type(self) not in _unchanged:
            _unchanged[type(self)] = self._explore(self.program, SCHEDULES)
        return _unchanged[type(self)]

    def _survivors(
        self, program: Callable[[SimulatedMemory], object], mutants: list[Mutant], **options: Any
    ) -> list[Mutant]:
        """Return the mutants with which the program does not fail."""
        world, resident = self.worlds[0]
        options = {"resident": resident} | options
        return surviving(lambda *copies: program, self.modules, world, mutants=mutants, **options)


def _is_in(mutant: Mutant, function: Any, line: str) -> bool:
    """Return whether the mutant changes this line of the function, or a call of this name; formatting is ignored."""
    first, last = span_of(function)
    return first <= mutant.lines[0] <= last and ast.unparse(ast.parse(line)) in (mutant.code, mutant.code.split("(")[0])
