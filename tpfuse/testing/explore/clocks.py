"""Vector clocks: what each chain of operations knows of every other one.

A chain is one thread of control: a rank's stream (what its host calls, in order), or program p of its launches (launch
n is ordered before launch n + 1, so one chain serves all of them). `knows[d, c]` is the time of chain c up to which
chain d is ordered after it; an access of c at time t is ordered before what d does now if t <= knows[d, c].

A launch forks its programs from the stream and joins them at its end; a barrier joins streams; an atomic that releases
leaves what its chain knows at a word, and one that acquires takes what is there. The programs of one grid are
concurrent, even where a schedule runs them one after another.

The rule of debug_barrier: up to Triton 3.8 an atomic with release semantics is performed by one thread, and nothing
makes it wait for the loads and stores of the program's other warps, but `tl.debug_barrier()` before it does. So a
program's release covers of the program itself what precedes its last debug_barrier (triton PR 10816), and of its
atomics, which that thread performs too, all. Therefore a chain has two components: c for what it loads and stores,
c + 1 for its atomics.

Everything that moves a clock is logged, so that a log can be run again under a supposition: "were this line a release".
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Clock = NDArray[np.int64]
Word = tuple[int, int]  # (number of the region, element)
Line = tuple[str, int]  # (file, line)


@dataclass(frozen=True)
class Atomic:
    """One atomic operation on a word. host: by the host, which needs no debug_barrier."""

    chain: int
    word: Word
    line: Line
    releases: bool = False
    acquires: bool = False
    stores: bool = True  # a failed compare-and-swap and a load store nothing
    modifies: bool = True  # read-modify-write: continues what was released before; a store does not
    host: bool = False


class Supposition(NamedTuple):
    """A change of one source line."""

    line: Line
    change: str  # "release", "acquire" or "debug_barrier"


class Clocks:
    """See the module. barrier_rule: whether a release needs a debug_barrier."""

    def __init__(self, barrier_rule: bool = True, suppose: Supposition | None = None) -> None:
        self.barrier_rule, self._suppose = barrier_rule, suppose
        self._count = 0
        self.knows: NDArray[np.int64] = np.zeros((16, 16), np.int64)
        self._covered: Clock = np.zeros(16, np.int64)  # of each chain: the time of its last debug_barrier
        self._published: dict[Word, Clock] = {}
        self.log: list[tuple[str, tuple[object, ...]]] = []

    def time(self, component: int) -> int:
        """The own time of a chain, or of its atomics."""
        return int(self.knows[component & ~1, component])

    def new_chain(self) -> int:
        """A chain that knows nobody. Chains have even numbers."""
        self.log.append(("new_chain", ()))
        chain, self._count = self._count, self._count + 2
        size = len(self.knows)
        if chain == size:
            self.knows = np.pad(self.knows, (0, size))
            self._covered = np.pad(self._covered, (0, size))
            self._published = {word: np.pad(clock, (0, size)) for word, clock in self._published.items()}
        self._tick(chain)
        return chain

    def _tick(self, chain: int) -> None:
        self.knows[chain, chain : chain + 2] += 1

    def fork(self, stream: int, program: int) -> None:
        """A program begins: it knows what its stream knows."""
        self.log.append(("fork", (stream, program)))
        self._covered[program] = self.time(program)
        self.knows[program] = np.maximum(self.knows[program], self.knows[stream])
        self._tick(program)

    def join(self, stream: int, programs: Iterable[int]) -> None:
        """A launch has ended: the stream knows what its programs knew."""
        programs = tuple(programs)
        self.log.append(("join", (stream, programs)))
        for program in programs:
            np.maximum(self.knows[stream], self.knows[program], out=self.knows[stream])
        self._tick(stream)

    def barrier(self, streams: Iterable[int]) -> None:
        """All know what any of them knew."""
        rows = list(streams)
        self.log.append(("barrier", (tuple(rows),)))
        self.knows[rows] = self.knows[rows].max(axis=0)
        for row in rows:
            self._tick(row)

    def debug_barrier(self, program: int) -> None:
        """All threads of the program have come here."""
        self.log.append(("debug_barrier", (program,)))
        self._covered[program] = self.time(program)
        self._tick(program)

    def atomic(self, operation: Atomic) -> None:
        """An atomic operation that has just been done."""
        self.log.append(("atomic", (operation,)))
        chain, covered = operation.chain, self._covered[operation.chain]
        if self._suppose and self._suppose.line == operation.line:
            if self._suppose.change == "debug_barrier":
                covered = self.time(chain)
            else:
                releases = operation.releases or self._suppose.change == "release"
                acquires = operation.acquires or self._suppose.change == "acquire"
                operation = replace(operation, releases=releases, acquires=acquires)
        if operation.acquires and operation.word in self._published:
            np.maximum(self.knows[chain], self._published[operation.word], out=self.knows[chain])
        if operation.stores and not operation.modifies:
            self._published.pop(operation.word, None)
        if operation.stores and operation.releases:
            clock = self.knows[chain].copy()
            if self.barrier_rule and not operation.host:
                clock[chain] = covered
            if operation.word in self._published:
                np.maximum(clock, self._published[operation.word], out=clock)
            self._published[operation.word] = clock
        self._tick(chain)  # whatever its semantics, so that times are the same under every supposition

    def suppose(self, supposition: Supposition) -> "Clocks":
        """The clocks as they would be now with this line changed."""
        other = Clocks(self.barrier_rule, supposition)
        for method, arguments in self.log:
            getattr(other, method)(*arguments)
        return other
