"""The execution of one program (thread block): all of its threads at once, group by group where they diverge.

A group is a set of threads at one block of instructions. The group at the first block in the order of `control_flow`
runs; groups that meet at the beginning of a block are one group again. A barrier stops a group until all threads have
come. A step is a function that executes one instruction for the threads of the present group (`compilation`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.ptx.faults import Divergence, GlobalRace, MbarrierFault, PtxError, SharedRace, Stuck, WgmmaHazard
from tpfuse.explore.ptx.global_memory import GlobalMemory
from tpfuse.explore.ptx.global_order import GlobalOrder
from tpfuse.explore.ptx.mbarriers import Mbarriers
from tpfuse.explore.ptx.parser import PtxInstruction
from tpfuse.explore.ptx.shared_memory import CheckedSharedMemory
from tpfuse.explore.ptx.wgmma import WARPGROUP, Products

Array = NDArray[Any]
Step = Callable[["Program"], None]
LANES = 32


class StepBlock(NamedTuple):
    """Instructions that are executed together. end: what follows them: "next", "branch", "barrier" or "exit".

    steps: with the index of the instruction. last: the index of the instruction that ends the block. target: the block
    to which a branch goes. position: in the order of `control_flow`. guard: the slot of the predicate of a branch or an
    exit, and whether it is negated; None without one. barrier: its number.
    """

    steps: tuple[tuple[int, Step], ...]
    end: str
    last: int
    target: int
    position: int
    guard: tuple[int, bool] | None
    barrier: int | None


@dataclass
class ThreadGroup:
    """Threads at one block."""

    block: int
    mask: NDArray[np.bool_]


class Copy(NamedTuple):
    """An asynchronous copy of some threads that has begun. group: for each thread the number of its commit group."""

    threads: Array
    group: Array
    source: Array
    kept: Array  # how many bytes are copied; the others become 0
    target: Array
    early: Array  # the bytes that it found when it began
    size: int
    at: int  # the index of the instruction

    def some(self, chosen: Array) -> "Copy":
        """Return the part of the copy that the chosen threads make."""
        threads, group, source, kept, target, early = (x[chosen] for x in self[:6])
        return Copy(threads, group, source, kept, target, early, self.size, self.at)


@dataclass
class Program:
    """One program of a grid. registers: by slot (`slots`). mask: the active threads, or None for all of them.

    touched: for each instruction the slots that it accesses, of a kernel with wgmma. maps: for the address of each
    tensor map its words when a proxy fence made it visible, and the clocks of that fence.
    """

    blocks: Sequence[StepBlock]
    instructions: Sequence[PtxInstruction]
    touched: Sequence[frozenset[int]]
    registers: list[Any]
    memory: GlobalMemory
    shared: CheckedSharedMemory
    threads: int
    most_blocks: int
    index: tuple[int, ...]
    mask: NDArray[np.bool_] | None = None
    at: int = 0  # the index of the instruction that is executed
    copies: list[Copy] = field(default_factory=list)
    mbarriers: Mbarriers = field(default_factory=Mbarriers)
    maps: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.thread_numbers = np.arange(self.threads)
        self.memory.source = lambda: self.instructions[self.at].source
        self.warp_of = self.thread_numbers // LANES
        self.committed = np.zeros(self.threads, np.int64)  # commit groups of each thread
        self.global_order = GlobalOrder(self.shared)
        self._alive = np.ones(self.threads, bool)
        self._everyone = self._alive.copy()
        self._groups = [ThreadGroup(0, self._everyone)]
        self._waiting: dict[int, list[ThreadGroup]] = {}
        self.products = Products(self.threads)
        # Threads that wait at mbarriers until one changes, and those that the present block has let wait
        self._parked: list[ThreadGroup] = []
        self._failed: tuple[NDArray[np.bool_], tuple[int, str]] | None = None
        self._stuck = 0, ""  # the instruction that they execute, and why they wait

    def run(self) -> None:
        """Execute the program. Raise a PtxError that names the instruction."""
        for _ in range(self.most_blocks):
            group = self._next()
            if group is None:
                return self._check_end()
            block = self.blocks[group.block]
            self.mask = None if group.mask is self._everyone or group.mask.all() else group.mask
            try:
                for self.at, step in block.steps:
                    self.shared.site = self.at
                    if self.products.slots:
                        self._check_products()
                    step(self)
                self.at = block.last
                self._end(group, block)
            except PtxError as error:
                raise self._located(error) from None
        raise self._located(Stuck(f"the program still runs after {self.most_blocks} blocks of instructions"))

    def active(self) -> NDArray[np.bool_]:
        """Return which threads execute the present instruction."""
        return self._everyone if self.mask is None else self.mask

    def guarded(self, guard: tuple[int, bool] | None) -> NDArray[np.bool_] | None:
        """Return which threads execute an instruction with this guard; None for all threads of the program."""
        if guard is None:
            return self.mask
        holds: Any = self.registers[guard[0]]
        if guard[1]:
            holds = np.logical_not(holds)
        if self.mask is not None:
            both: NDArray[np.bool_] = holds & self.mask
            return both
        if np.ndim(holds) == 0:
            return None if holds else np.zeros(self.threads, bool)
        return None if holds.all() else holds

    def whole_warps(self, mask: NDArray[np.bool_] | None, members: int = 0xFFFFFFFF) -> None:
        """Raise Divergence unless each warp of the active threads is active with all the lanes of `members`."""
        if mask is None:
            return
        lanes = mask.reshape(-1, LANES)
        needed = np.array([bool(members >> lane & 1) for lane in range(LANES)])
        if (lanes.any(1) & (lanes != needed).any(1)).any():
            warp = int(np.flatnonzero(lanes.any(1) & (lanes != needed).any(1))[0])
            raise Divergence(f"warp {warp} is active with {int(lanes[warp].sum())} lanes: expected {int(needed.sum())}")

    def write(self, slot: int, value: Any, mask: NDArray[np.bool_] | None) -> None:
        """Set a register of some threads. Registers are never changed in place."""
        self.registers[slot] = value if mask is None else np.where(mask, value, self.registers[slot])

    def write_some(self, slot: int, values: Any, threads: Array) -> None:
        """Set a register of some threads, which have one value each."""
        if len(threads) < self.threads:
            whole = np.array(np.broadcast_to(self.registers[slot], self.threads))
            whole[threads] = values
            values = whole
        self.registers[slot] = values

    def warps_of(self, mask: NDArray[np.bool_] | None) -> list[int]:
        """Return the numbers of the warps with a thread in a mask."""
        active = self._everyone if mask is None else mask
        warps: list[int] = np.flatnonzero(active.reshape(-1, LANES).any(1)).tolist()
        return warps

    def wait_again(self, threads: Array, why: str) -> None:
        """Let threads for whom an mbarrier's phase has not ended wait, after this block, until an mbarrier changes."""
        if len(threads):
            mask = np.zeros(self.threads, bool)
            mask[threads] = True
            self._failed = mask, (self.at, why)

    def moved(self) -> None:
        """Wake the threads that wait at mbarriers, one of which has changed."""
        self._groups += self._parked
        self._parked = []

    def threads_of(self, mask: NDArray[np.bool_] | None) -> Array:
        """Return the numbers of the threads in a mask."""
        return self.thread_numbers if mask is None else np.flatnonzero(mask)

    def values_of(self, register: Any, threads: Array) -> Array:
        """Return one value of a register for each of the threads."""
        if np.ndim(register) == 0:
            return np.full(len(threads), register)
        values: Array = register if len(threads) == self.threads else register[threads]
        return values

    def array(self, slot: int) -> Array:
        """Return a register as an array of all threads."""
        if np.ndim(self.registers[slot]) == 0:
            self.registers[slot] = np.full(self.threads, self.registers[slot])
        register: Array = self.registers[slot]
        return register

    def begin_copy(self, threads: Array, source: Array, kept: Array, target: Array, size: int) -> None:
        """Begin an asynchronous copy of these threads, for each of which `kept` says how many bytes it reads.

        A copy may read its source and write its target at any time up to its wait. Therefore the source must be there
        now, and nobody may use the target before the wait.
        """
        self.shared.begin_copy(target, self.warp_of[threads], size)
        early = self._copied(threads, source, kept, size)
        self.copies.append(Copy(threads, self.committed[threads], source, kept, target, early, size, self.at))

    def commit_copies(self) -> None:
        """Let the copies that the active threads have begun since their last group be their next group."""
        self.committed = self.committed + self.active()

    def finish_copies(self, left: int | None = None) -> None:
        """Complete the asynchronous copies of the active threads but for their last `left` groups; None: all copies.

        A copy reads its source again and writes its target now: as late as its wait allows.
        """
        active, remaining = self.active(), []
        for copy in self.copies:
            due = active[copy.threads]
            if left is not None:
                due = due & (copy.group < self.committed[copy.threads] - left)
            if due.any():
                self._perform(copy if due.all() else copy.some(due))
            if not due.all():
                remaining.append(copy.some(~due))
        self.copies = remaining

    def _perform(self, copy: Copy) -> None:
        waiting, self.at = self.at, copy.at  # a wrong address is the copy's fault
        values = self._copied(copy.threads, copy.source, copy.kept, copy.size)
        if (values != copy.early).any():
            raise GlobalRace("the source of an asynchronous copy has changed since it began, and it was not waited for")
        self.at = waiting
        self.shared.end_copy(copy.target, self.warp_of[copy.threads], values)

    def _copied(self, threads: Array, source: Array, kept: Array, size: int) -> Array:
        """Return the bytes that a copy finds now; those that are not read are 0."""
        values = np.zeros((len(threads), size), np.uint8)
        for length in {*kept.tolist()} - {0}:
            these = np.flatnonzero(kept == length)
            unit = {2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}.get(length, np.uint8)
            loaded = self.memory.load(source[these], unit, length // np.dtype(unit).itemsize)
            values[these, :length] = loaded.view(np.uint8)
            self.global_order.add(source[these], self.warp_of[threads[these]], length, self.at, writes=False)
        return values

    def _next(self) -> ThreadGroup | None:
        """Return the group that runs next; None if all threads have ended."""
        if not self._groups:
            if not self._waiting and not self._parked:
                return None
            waiting = [f"{int(sum(g.mask.sum() for g in x))} threads at barrier {n}" for n, x in self._waiting.items()]
            if self._parked:
                self.at, why = self._stuck
                waiting.append(f"{int(sum(group.mask.sum() for group in self._parked))} threads {why}")
            raise self._located(Stuck(f"no thread can continue: {', '.join(waiting)} of {int(self._alive.sum())}"))
        if len(self._groups) == 1:
            return self._groups.pop()
        block = min((group.block for group in self._groups), key=lambda block: self.blocks[block].position)
        together = [group for group in self._groups if group.block == block]
        self._groups = [group for group in self._groups if group.block != block]
        return ThreadGroup(block, np.logical_or.reduce([group.mask for group in together]))

    def _end(self, group: ThreadGroup, block: StepBlock) -> None:
        """Move the threads of a group to where they go after a block."""
        after, before = group.block + 1, len(self._groups)
        self._follow(group, block, after)
        if self._failed is not None:
            mask, self._stuck = self._failed
            moving = self._groups[before:]
            self._groups[before:] = [x for x in moving if not (x.mask & mask).any()]
            self._parked += [x for x in moving if (x.mask & mask).any()]
            self._failed = None

    def _follow(self, group: ThreadGroup, block: StepBlock, after: int) -> None:
        if block.end == "next":
            self._groups.append(ThreadGroup(after, group.mask))
        elif block.end == "branch":
            mask = self.guarded(block.guard)
            taken = group.mask if mask is None else mask & group.mask
            for place, threads in ((block.target, taken), (after, group.mask & ~taken)):
                if threads.any():
                    self._groups.append(ThreadGroup(place, threads))
        elif block.end == "exit":
            mask = self.guarded(block.guard)
            ended = group.mask if mask is None else mask & group.mask
            self._alive &= ~ended
            if not self._alive.any():
                self.global_order.barrier()
            if (left := group.mask & ~ended).any():
                self._groups.append(ThreadGroup(after, left))
            for number in list(self._waiting):
                self._release(number)
        else:
            assert block.barrier is not None
            self._arrive(group, block.barrier, after)

    def _arrive(self, group: ThreadGroup, number: int, after: int) -> None:
        lanes, alive = group.mask.reshape(-1, LANES), self._alive.reshape(-1, LANES)
        if (lanes.any(1) & (lanes != alive).any(1)).any():
            raise Divergence("some lanes of a warp wait at a barrier, and others do not")
        self._waiting.setdefault(number, []).append(ThreadGroup(after, group.mask))
        self._release(number)

    def _release(self, number: int) -> None:
        """Let the threads at a barrier continue if all have come that have not ended."""
        arrived = np.logical_or.reduce([group.mask for group in self._waiting[number]])
        if (arrived == self._alive).all():
            self.shared.barrier(self.warps_of(arrived))
            self.global_order.barrier()
            self.memory.barrier()
            self._groups += self._waiting.pop(number)

    def _check_products(self) -> None:
        lanes = self.active()[: self.threads // WARPGROUP * WARPGROUP].reshape(-1, WARPGROUP)
        self.products.check(self.touched[self.at], np.flatnonzero(lanes.any(1)))

    def _check_end(self) -> None:
        """Raise an error if something asynchronous still runs when the program has ended."""
        if self.products.running:
            self.at = self.products.running[0].at
            raise self._located(WgmmaHazard("the program ends before it has waited for this wgmma"))
        if self.mbarriers.copying():
            raise self._located(MbarrierFault("the program ends before a bulk copy has ended"))

    def _located(self, error: PtxError) -> PtxError:
        """Return the error with the program and the instruction."""
        at = error.at if isinstance(error, GlobalRace) and error.at is not None else self.at
        places = [f"program {self.index}, {self.instructions[at]}"]
        if isinstance(error, SharedRace) and error.site is not None:
            places.append(f"written by {self.instructions[error.site]}")
        if isinstance(error, GlobalRace) and error.site is not None:
            places.append(f"after {self.instructions[error.site]}")
        if isinstance(error, WgmmaHazard) and error.site is not None:
            places.append(f"begun by {self.instructions[error.site]}")
        return type(error)("\n  ".join([str(error), *places]))
