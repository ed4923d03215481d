"""Vector clocks, which say for each chain of operations up to which time it is ordered after every other chain.

A chain is one thread of control: a rank's stream (the calls of its host, in order), or program p of its launches
(launch n is ordered before launch n + 1, so one chain serves all launches). `knows[d, c]` is the time of chain c up to
which chain d is ordered after it: an access of c at time t is ordered before the next operation of d if
t <= knows[d, c]. We say then that chain d knows the access.

A launch forks its programs from the stream and joins them at its end. A barrier joins streams. An atomic operation that
releases stores the clock of its chain at its word, and one that acquires takes over the clock that is stored there. The
programs of one grid are concurrent, even if a schedule runs them one after another.

The rule of debug_barrier: up to Triton 3.8 one thread performs an atomic operation with release semantics, and only a
`tl.debug_barrier()` before it makes it wait for the loads and stores of the program's other warps. Among the program's
own operations a release therefore covers the loads and stores that precede the program's last debug_barrier (triton
PR 10816), and all earlier atomic operations, which the same thread performs. For this reason a chain has two
components: c for its loads and stores, c + 1 for its atomic operations.

The compiler writes no barriers beside inline assembly. There the rule holds under every version of Triton, and for
acquires too: if one thread of several waits, the others know what it has acquired after the next debug_barrier. The end
of a kernel flushes its writes to the whole system. Kernels of other projects rely on that (torch's `symm_mem` among
them), and signal by relaxed assembly: such a signal passes on what preceded its launch, and such a wait counts at the
end of its launch.

Every call that moves a clock is logged, so that a log can be run again under a supposition: "if this line were a
release".
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Clock = NDArray[np.int64]
Word = tuple[int, int]  # (number of the region, element)
Line = tuple[str, int]  # (file, line)


@dataclass(frozen=True)
class Atomic:
    """An atomic operation on a word. host: whether the host performed it, which needs no debug_barrier."""

    chain: int
    word: Word
    line: Line
    releases: bool = False
    acquires: bool = False
    stores: bool = True  # False for a load and for a failed compare-and-swap
    modifies: bool = True  # True for a read-modify-write, which continues earlier releases; False for a store
    host: bool = False
    assembly: bool = False  # inline assembly, beside which the compiler writes no barrier
    alone: bool = False  # one thread of several performed it, and the others have not waited for that


class Supposition(NamedTuple):
    """A supposed change of one source line.

    changes: of "release", "acquire", "debug_barrier" (before the line) and "wait" (a debug_barrier after the line).
    """

    line: Line
    changes: tuple[str, ...]


class Clocks:
    """The clocks of all chains of one run; see the module. barrier_rule: whether a release needs a debug_barrier."""

    def __init__(self, barrier_rule: bool = True, suppose: Supposition | None = None) -> None:
        self.barrier_rule, self._suppose = barrier_rule, suppose
        self._count = 0
        self.knows: NDArray[np.int64] = np.zeros((16, 16), np.int64)
        self._covered: Clock = np.zeros(16, np.int64)  # for each chain the time of its last debug_barrier
        self._begun = np.zeros_like(self.knows)  # what the stream knew when the chain's launch began
        self._acquired = np.zeros_like(self.knows)  # what the chain will know after its next debug_barrier
        self._observed = np.zeros_like(self.knows)  # what the chain's stream will know after the launch
        self.published: dict[Word, Clock] = {}  # at words
        self.log: list[tuple[str, tuple[object, ...]]] = []

    def time(self, component: int) -> int:
        """Return the current time of a component of a chain: of its loads and stores, or of its atomic operations."""
        return int(self.knows[component & ~1, component])

    def new_chain(self) -> int:
        """Return the number of a new chain, which is ordered after no other. Chains have even numbers."""
        self.log.append(("new_chain", ()))
        chain, self._count = self._count, self._count + 2
        size = len(self.knows)
        if chain == size:
            self.knows, self._begun, self._acquired, self._observed = (
                np.pad(rows, (0, size)) for rows in (self.knows, self._begun, self._acquired, self._observed)
            )
            self._covered = np.pad(self._covered, (0, size))
            self.published = {word: np.pad(clock, (0, size)) for word, clock in self.published.items()}
        self._tick(chain)
        return chain

    def _tick(self, chain: int) -> None:
        self.knows[chain, chain : chain + 2] += 1

    def fork(self, stream: int, program: int) -> None:
        """Begin a program: it knows what its stream knows."""
        self.log.append(("fork", (stream, program)))
        self._covered[program] = self.time(program)
        self.knows[program] = np.maximum(self.knows[program], self.knows[stream])
        self._begun[program] = self.knows[stream]
        self._acquired[program] = self._observed[program] = 0
        self._tick(program)

    def join(self, stream: int, programs: Iterable[int]) -> None:
        """End a launch: the stream knows what the launch's programs knew."""
        programs = tuple(programs)
        self.log.append(("join", (stream, programs)))
        for program in programs:
            for rows in (self.knows, self._acquired, self._observed):
                np.maximum(self.knows[stream], rows[program], out=self.knows[stream])
        self._tick(stream)

    def barrier(self, streams: Iterable[int]) -> None:
        """Join streams: each knows what any of them knew."""
        rows = list(streams)
        self.log.append(("barrier", (tuple(rows),)))
        self.knows[rows] = self.knows[rows].max(axis=0)
        for row in rows:
            self._tick(row)

    def debug_barrier(self, program: int) -> None:
        """Record that all threads of the program have reached a `tl.debug_barrier()`."""
        self.log.append(("debug_barrier", (program,)))
        self._covered[program] = self.time(program)
        np.maximum(self.knows[program], self._acquired[program], out=self.knows[program])
        self._tick(program)

    def atomic(self, operation: Atomic) -> None:
        """Record an atomic operation that has just been performed."""
        self.log.append(("atomic", (operation,)))
        chain, covered = operation.chain, self._covered[operation.chain]
        if self._suppose and self._suppose.line == operation.line:
            changes = self._suppose.changes
            covered = self.time(chain) if "debug_barrier" in changes else covered
            operation = replace(
                operation,
                releases=operation.releases or "release" in changes,
                acquires=operation.acquires or "acquire" in changes,
                alone=operation.alone and "wait" not in changes,
            )
        if (operation.acquires or operation.assembly) and operation.word in self.published:
            rows = self.knows if operation.acquires else self._observed
            rows = self._acquired if operation.acquires and operation.alone else rows
            np.maximum(rows[chain], self.published[operation.word], out=rows[chain])
        if operation.stores and not operation.modifies:
            self.published.pop(operation.word, None)
        if operation.stores and (operation.releases or operation.assembly):
            clock = (self.knows if operation.releases else self._begun)[chain].copy()
            if operation.releases and (self.barrier_rule or operation.assembly) and not operation.host:
                clock[chain] = covered
            if operation.word in self.published:
                np.maximum(clock, self.published[operation.word], out=clock)
            self.published[operation.word] = clock
        self._tick(chain)  # for all semantics, so that times are the same under every supposition

    def snapshot(self, chain: int) -> Callable[[], None]:
        """Return a function that forgets what a chain has done and acquired since; no other chain has gone on."""
        rows = [(x, x[chain].copy()) for x in (self.knows, self._acquired, self._observed)]
        covered, published, length = self._covered[chain], dict(self.published), len(self.log)

        def undo() -> None:
            for array, row in rows:
                array[chain] = row
            self._covered[chain], self.published = covered, published
            del self.log[length:]

        return undo

    def suppose(self, supposition: Supposition) -> "Clocks":
        """Return the clocks as they would be now if this line were changed."""
        other = Clocks(self.barrier_rule, supposition)
        for method, arguments in self.log:
            getattr(other, method)(*arguments)
        return other
