"""Compiled kernels of several ranks in one explored run: schedules, vector clocks and symmetric memory as elsewhere.

Each access to symmetric memory is an operation before which the schedule may switch ranks. A plain load or store must
be ordered after those of other ranks and programs by releases and acquires, with a barrier of the program's threads
before a release (`tpfuse.explore.clocks`); here the barriers are those that the compiler has written.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tpfuse.explore.memory import Semantics
from tpfuse.explore.ptx.global_memory import Array, Buffer, Change, GlobalMemory
from tpfuse.explore.ptx.kernel import Kernel
from tpfuse.explore.run import ExploredRun

_SCOPES = {"cta": 0, "gpu": 1, "sys": 2}


def launch(
    run: ExploredRun, kernel: Kernel, grid: Sequence[int], arguments: Sequence[Any], seed: int | None = None
) -> None:
    """Run a launch of the current rank. arguments, seed: as for `Kernel.run`."""
    given, sizes = kernel.bind(arguments), (*grid, 1, 1)[:3]
    tensors = [Buffer.of(name, x) for name, x in kernel.tensors(arguments)]
    tensors += [Buffer.of("a table of addresses", x) for x in run.tables]
    regions = [Buffer(f"{x.key} of rank {x.rank}", x.base, x.end - x.base) for x in run.memory.regions]

    def execute() -> None:
        program = run.scheduler.current.program
        assert program is not None
        kernel.run_program(program, sizes, given, ExploredGlobalMemory(run, [*tensors, *regions]), seed=seed)

    run.launch(sizes, lambda index: None, execute)


class ExploredGlobalMemory(GlobalMemory):
    """The memory that one program of a rank accesses: its arguments, and the symmetric memory of all ranks."""

    def __init__(self, run: ExploredRun, buffers: Sequence[Buffer]) -> None:
        super().__init__(buffers)
        self._run, self._checked = run, run.memory
        self._task = run.scheduler.current

    def load(self, addresses: Array, dtype: Any, count: int) -> Array:
        parts = self._checked.touched(addresses)
        if not parts:
            return self._read(addresses, dtype, count)
        with self._at_source():
            site = self._checked.access(parts, np.dtype(dtype).itemsize * count, "ld", write=False)
            values = self._read(addresses, dtype, count)
            if values.size == 1:
                self._checked.polled(parts, values.ravel(), site)
        return values

    def store(self, addresses: Array, values: Array) -> None:
        parts = self._checked.touched(addresses)
        if parts:
            with self._at_source():
                self._checked.access(parts, values.dtype.itemsize * values.shape[1], "st", write=True)
        self._write(addresses, values)
        self._checked.written(parts)

    def ordered(
        self, addresses: Array, dtype: Any, order: frozenset[str], name: str, change: Change | None = None
    ) -> Array:
        """Do what the base class says, on words all of which are symmetric memory or none of which is."""
        parts, writes = self._checked.touched(addresses), change is not None
        if not parts:
            return self._replace(addresses, dtype, change)[0]
        # The words of `parts` are in the order of the regions.
        order_of_parts = np.concatenate([np.flatnonzero(np.isin(addresses, part)) for _, part in parts])

        def watched() -> tuple[Array, Array, Array, Array]:
            old, *words = self._replace(addresses, dtype, change)
            before, after, stored = (x[order_of_parts] for x in (old, *words))
            return old, before, after, stored

        with self._at_source():
            semantics = self._semantics(order, modifies=name.startswith("atom"), writes=writes)
            result: Array = self._checked.atomic(name, parts, semantics, watched)
        return result

    def barrier(self) -> None:
        self._checked.clocks.debug_barrier(self._task.chain)

    def _semantics(self, order: frozenset[str], **more: bool) -> Semantics:
        return Semantics(
            acquires=bool(order & {"acquire", "acq_rel"}),
            releases=bool(order & {"release", "acq_rel"}),
            scope=min((_SCOPES[x] for x in order & _SCOPES.keys()), default=_SCOPES["gpu"]),
            **more,
        )

    @contextmanager
    def _at_source(self) -> Iterator[None]:
        """Let the checks within the block name the source line of the instruction."""
        self._task.lines = (self.source(),)
        try:
            yield
        finally:
            self._task.lines = ()
