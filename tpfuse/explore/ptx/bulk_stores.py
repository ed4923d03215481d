"""Bulk stores: copies of tiles from shared to global memory (cp.async.bulk.tensor), which groups of their thread end.

A store may read its source and write its target at any time up to a wait for its group: `wait_group.read` ends the
reads, and `wait_group` alone the writes, which nobody else sees before (PTX ISA 8.7, "cp.async.bulk.wait_group").
Therefore both happen at these waits, as late as they may; and writes that nobody waits for at the program's end.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tpfuse.explore.ptx.faults import SharedRace
from tpfuse.explore.ptx.global_memory import GlobalMemory
from tpfuse.explore.ptx.global_order import Access, GlobalOrder
from tpfuse.explore.ptx.mbarriers import Array
from tpfuse.explore.ptx.shared_memory import CheckedSharedMemory
from tpfuse.explore.ptx.tensor_maps import Tile


class StoringProgram(Protocol):
    """The parts of a program that its stores need. at: the number of the present instruction."""

    at: int
    warp_of: Array
    shared: CheckedSharedMemory
    memory: GlobalMemory
    global_order: GlobalOrder


@dataclass(eq=False)
class BulkStore:
    """A store of a thread of a warp. group: the number of its commit group. source: addresses of its chunks.

    number: as `GlobalMemory.begin_copy` gives it. access: as `global_order` has it. values: once its source was read.
    """

    number: int
    thread: int
    warp: int
    group: int
    source: Array
    target: Tile
    access: Access
    values: Any = None


class BulkStores:
    """The bulk stores of a program that have not ended."""

    def __init__(self, threads: int) -> None:
        self.running: list[BulkStore] = []
        self._committed = np.zeros(threads, np.int64)  # groups of each thread

    def begin(self, p: StoringProgram, thread: int, source: Array, target: Tile) -> None:
        """Begin a store of chunks of shared memory."""
        warp = int(p.warp_of[thread])
        p.shared.begin_read(source, [warp])
        number = p.memory.begin_copy(target.addresses, warp, target.element)
        access = p.global_order.begin_copy(target.addresses, warp, target.element, p.at, writes=True)
        self.running.append(BulkStore(number, thread, warp, int(self._committed[thread]), source, target, access))

    def commit(self, threads: Array) -> None:
        """Let the stores that threads have begun since their last group be their next group."""
        self._committed[threads] += 1

    def wait(self, p: StoringProgram, threads: Array, left: int, *, reads: bool) -> None:
        """End the stores of threads but for their last `left` groups. reads: end their reads alone."""
        due = [x for x in self.running if x.thread in threads and x.group < self._committed[x.thread] - left]
        for x in due:
            if x.values is None:
                x.values = p.shared.end_read(x.source, [x.warp])
        if not reads:
            self._write(p, due)

    def end(self, p: StoringProgram) -> None:
        """End all stores with the program. Raise SharedRace if the source of one was not read before."""
        for x in self.running:
            if x.values is None:
                raise SharedRace("the program ends before this store has read shared memory", at=x.access.at)
        self._write(p, [*self.running])

    def _write(self, p: StoringProgram, stores: list[BulkStore]) -> None:
        waiting = p.at
        for x in stores:
            p.at = x.access.at  # a wrong address is the store's fault
            x.target.store(p.memory, x.values)
            p.memory.end_store(x.number, x.target.addresses, x.warp)
            p.global_order.end_store(x.access)
            self.running.remove(x)
        p.at = waiting
