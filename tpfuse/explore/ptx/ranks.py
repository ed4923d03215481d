"""Compiled kernels of several ranks in one explored run: schedules, vector clocks and symmetric memory as elsewhere.

Each access to symmetric memory is an operation before which the schedule may switch ranks. A plain load or store must
be ordered after those of other ranks and programs by releases and acquires, with a barrier of the program's threads
before a release (`tpfuse.explore.clocks`); here the barriers are those that the compiler has written.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tpfuse.explore.clocks import Atomic
from tpfuse.explore.memory import Semantics
from tpfuse.explore.ptx.global_memory import Array, Buffer, Change, GlobalMemory
from tpfuse.explore.ptx.kernel import Kernel
from tpfuse.explore.ptx.warps import LANES
from tpfuse.explore.run import ExploredRun
from tpfuse.explore.spins import Place

_SCOPES = {"cta": 0, "gpu": 1, "sys": 2}


def launch(
    run: ExploredRun, kernel: Kernel, grid: Sequence[int], arguments: Sequence[Any], seed: int | None = None
) -> None:
    """Run a launch of the current rank. arguments, seed: as for `Kernel.run`."""
    given, sizes = kernel.bind(arguments), (*grid, 1, 1)[:3]
    tensors = [Buffer.of(name, x) for name, x in kernel.tensors(arguments)]
    tensors += [Buffer.of("a table of addresses", x) for x in run.tables]
    named = [(number, x.base, x.base + x.size) for number, x in enumerate(tensors)]
    regions = [Buffer(f"{x.key} of rank {x.rank}", x.base, x.end - x.base) for x in run.memory.regions]

    def execute() -> None:
        program, run.scheduler.current.tensors = run.scheduler.current.program, named
        assert program is not None
        memory = ExploredGlobalMemory(run, [*tensors, *regions], kernel)
        kernel.run_program(program, sizes, given, memory, seed=seed)

    run.launch(sizes, lambda index: None, execute)


class ExploredGlobalMemory(GlobalMemory):
    """The memory that one program of a rank accesses: its arguments, and the symmetric memory of all ranks.

    Each warp of a kernel with specialized warps is a chain of its own (`tpfuse.explore.clocks`); otherwise all are the
    program's chain, whose barriers are those of all its warps. Bulk copies know what a proxy fence has let them see:
    loads are a second chain. A store is on a third one, which nobody knows before its warp has waited for it.
    """

    def __init__(self, run: ExploredRun, buffers: Sequence[Buffer], kernel: Kernel | None = None) -> None:
        super().__init__(buffers)
        self._run, self._checked, self._clocks, self._task = run, run.memory, run.memory.clocks, run.scheduler.current
        self._program, self._begun = self._task.chain, 0
        self._apart = kernel is not None and kernel.specialized
        warps = range(kernel.parsed.threads // LANES if kernel is not None else 0)

        def chains(part: int) -> list[int]:
            return [run.chain_of(self._program, 3 * warp * self._apart + part) for warp in warps]

        self._warps = chains(0) if self._apart else [self._program for _ in warps]
        self._loads, self._stores = (chains(1), chains(2)) if kernel is not None and kernel.copies else ([], [])
        self._own = sorted({*self._warps, *self._loads, *self._stores} - {self._program})
        for chain in self._own:
            self._clocks.fork(self._program, chain)

    def load(self, addresses: Array, warps: Array, dtype: Any, count: int) -> Array:
        poll, touched, size = None, self._checked.touched(addresses), np.dtype(dtype).itemsize * count
        values = np.empty((len(addresses), count), dtype) if touched else self.read(addresses, dtype, count)
        for chain, some in self._split(warps) if touched else ():
            parts = self._checked.touched(addresses[some])
            with self._at_source(chain):
                poll = self._checked.access(parts, size, "ld", write=False)
                with self._checked.reading((parts, size)):
                    values[some] = self.read(addresses[some], dtype, count)
        self._checked.loaded(values)
        if poll is not None and values.size == 1:
            self._checked.polled(poll)
        return values

    def store(self, addresses: Array, warps: Array, values: Array) -> None:
        parts = self._checked.touched(addresses)
        if not parts:
            self._run.scheduler.acted(self._task)
        for chain, some in self._split(warps) if parts else ():
            with self._at_source(chain):
                size = values.dtype.itemsize * values.shape[1]
                self._checked.access(self._checked.touched(addresses[some]), size, "st", write=True)
        self.write(addresses, values)
        self._checked.written(parts)

    def ordered(
        self,
        addresses: Array,
        warps: Array,
        dtype: Any,
        order: frozenset[str],
        name: str,
        change: Change | None = None,
    ) -> Array:
        """Do what the base class says, on words all of which are symmetric memory or none of which is."""
        if not self._checked.touched(addresses):
            if change is not None:
                self._run.scheduler.acted(self._task)
            values = self._replace(addresses, dtype, change)[0]
            self._checked.loaded(values)
            return values
        old = np.empty(len(addresses), dtype)
        for chain, some in self._split(warps):
            numbers = np.arange(len(addresses))[some]
            with self._at_source(chain):
                old[some] = self._atomic(addresses[some], dtype, order, name, change and _of_some(change, numbers))
        return old

    def _atomic(self, addresses: Array, dtype: Any, order: frozenset[str], name: str, change: Change | None) -> Array:
        parts = self._checked.touched(addresses)
        # The words of `parts` are in the order of the regions.
        order_of_parts = np.concatenate([np.flatnonzero(np.isin(addresses, part)) for _, part in parts])

        def watched() -> tuple[Array, Array, Array, Array]:
            old, *words = self._replace(addresses, dtype, change)
            before, after, stored = (x[order_of_parts] for x in (old, *words))
            return old, before, after, stored

        semantics = self._semantics(order, modifies=name.startswith("atom"), writes=change is not None)
        result: Array = self._checked.atomic(name, parts, semantics, watched)
        return result

    def barrier(self, warps: list[int]) -> None:
        if self._apart:
            self._clocks.barrier([self._warps[warp] for warp in warps])
            self._clocks.barrier([self._loads[warp] for warp in warps if self._loads])
        else:
            self._clocks.debug_barrier(self._program)

    def arrive(self, mbarrier: int, warp: int) -> None:
        for token, chains in ((mbarrier, self._warps), (~mbarrier, self._loads)):
            if self._apart and chains:
                self._pass(chains[warp], token, releases=True)

    def wait(self, mbarrier: int, warp: int) -> None:
        for token, chains in ((mbarrier, self._warps), (~mbarrier, self._loads)):
            if self._loads or (self._apart and chains):
                self._pass(chains[warp], token, releases=False)

    def proxy_fence(self, warps: list[int]) -> None:
        for warp in warps if self._loads else ():
            self._clocks.fork(self._warps[warp], self._loads[warp])

    def begin_copy(self, addresses: Array, warp: int, size: int, mbarrier: int | None = None) -> int:
        chain = self._loads[warp]
        if mbarrier is None:
            chain = self._stores[warp]
            self._clocks.fork(self._loads[warp], chain)
        if parts := self._checked.touched(addresses):
            name = (
                f"TMA {'store' if mbarrier is None else 'load'}, which sees what precedes a fence.proxy.async.global,"
            )
            with self._at_source(chain):
                self._checked.access(parts, size, name, write=mbarrier is None)
        self._begun += 1
        self._pass(chain, -self._begun if mbarrier is None else mbarrier, releases=True)
        return self._begun

    def end_store(self, number: int, addresses: Array, warp: int) -> None:
        for chain in (self._warps[warp], self._loads[warp]):
            self._pass(chain, -number, releases=False)
        self._checked.written(self._checked.touched(addresses))

    def begin(self, source: Callable[[], tuple[str, int]], state: Callable[[Place], Hashable]) -> None:
        super().begin(source, state)
        self._task.emulated = state

    def end(self) -> None:
        self._task.emulated = lambda place: ()
        if self._own:
            self._clocks.join(self._program, self._own)

    def _split(self, warps: Array) -> Iterator[tuple[int, Any]]:
        """Yield chains with the positions of their accesses among those of some warps."""
        if not self._apart:
            yield self._program, slice(None)
            return
        for warp in np.unique(warps).tolist():
            yield self._warps[warp], np.flatnonzero(warps == warp)

    def _pass(self, chain: int, token: int, *, releases: bool) -> None:
        """Let a chain release what it knows to a token of this program, or acquire what is there."""
        word = -1 - self._program, token
        self._clocks.atomic(
            Atomic(chain, word, self.source(), releases=releases, acquires=not releases, stores=releases, host=True)
        )

    def _semantics(self, order: frozenset[str], **more: bool) -> Semantics:
        return Semantics(
            acquires=bool(order & {"acquire", "acq_rel"}),
            releases=bool(order & {"release", "acq_rel"}),
            scope=min((_SCOPES[x] for x in order & _SCOPES.keys()), default=_SCOPES["gpu"]),
            host=self._apart,  # a warp that is a chain of its own needs no barrier to release what it knows
            **more,
        )

    @contextmanager
    def _at_source(self, chain: int | None = None) -> Iterator[None]:
        """Let the checks within the block name the source line of the instruction, for a chain."""
        self._task.lines, self._task.chain = (self.source(),), self._program if chain is None else chain
        try:
            yield
        finally:
            self._task.lines, self._task.chain = (), self._program


def _of_some(change: Change, numbers: Array) -> Change:
    """Return the change of the numbers at some positions, by their own positions."""
    return lambda i, old: change(int(numbers[i]), old)
