"""The execution of one program (thread block): all of its threads at once, group by group where they diverge.

A group is a set of threads at one block of instructions. The group at the first block in the order of `control_flow`
runs; groups that meet at the beginning of a block are one group again. A barrier stops a group until all threads have
come that meet there, and setmaxnreg until the program has as many free registers. A step is a function that executes
one instruction for the threads of the present group (`kernel`).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.ptx.bulk_stores import BulkStores
from tpfuse.explore.ptx.faults import (
    Divergence,
    GlobalRace,
    MbarrierFault,
    MemoryFault,
    PtxError,
    SharedRace,
    Stuck,
    WgmmaHazard,
)
from tpfuse.explore.ptx.global_memory import GlobalMemory
from tpfuse.explore.ptx.global_order import GlobalOrder
from tpfuse.explore.ptx.mbarriers import Mbarriers
from tpfuse.explore.ptx.numbers import UNSIGNED
from tpfuse.explore.ptx.parser import Parsed
from tpfuse.explore.ptx.shared_memory import CheckedSharedMemory
from tpfuse.explore.ptx.warps import LANES as LANES
from tpfuse.explore.ptx.wgmma import WARPGROUP, Products
from tpfuse.explore.spins import Place, numbers_of

Array = NDArray[Any]
Mask = NDArray[np.bool_]
Step = Callable[["Program"], None]

_SITES: dict[type[PtxError], str] = {SharedRace: "written by", GlobalRace: "after", WgmmaHazard: "begun by"}


class StepBlock(NamedTuple):
    """Instructions that are executed together. end: what follows: "next", "branch", "barrier", "registers" or "exit".

    steps: with the index of the instruction. last: the index of the instruction that ends the block. targets: the
    blocks to which a branch may go. after: the block that follows otherwise. guard: the slot of the predicate of a
    branch or an exit, and whether it is negated; None without one. choice: the slot of the number of a branch's target;
    None for the first one. numbers: of a barrier its number and how many threads meet there (0: all); of setmaxnreg the
    registers.
    """

    steps: tuple[tuple[int, Step], ...]
    end: str
    last: int
    targets: tuple[int, ...]
    after: int
    guard: tuple[int, bool] | None
    choice: int | None
    numbers: tuple[int, ...]


class Copy(NamedTuple):
    """An asynchronous copy of some threads that has begun. group: for each thread the number of its commit group."""

    threads: Array
    group: Array
    source: Array
    kept: Array  # how many bytes are copied; the others become 0
    target: Array
    early: Array  # the bytes that it found when it began
    at: int  # the index of the instruction

    def some(self, chosen: Array) -> "Copy":
        """Return the part of the copy that the chosen threads make."""
        threads, group, source, kept, target, early = (x[chosen] for x in self[:-1])
        return Copy(threads, group, source, kept, target, early, self.at)


class Program:
    """One program of a grid, with its place `index` there.

    touched: for each instruction the slots that it accesses, of a kernel with wgmma. registers: by slot (`slots`).
    mask: the active threads, or None for all of them. at: the index of the instruction that is executed. maps: for the
    address of each tensor map its words when a proxy fence made it visible, and the clocks of that fence.

    Without a seed all threads run that are at the first block. With one some warps run that are chosen at random among
    those that can, but a warpgroup together where it multiplies: results and faults must not depend on the order.
    """

    def __init__(
        self,
        kernel: Parsed,
        blocks: Sequence[StepBlock],
        touched: Sequence[frozenset[int]],
        registers: list[Any],
        memory: GlobalMemory,
        shared: CheckedSharedMemory,
        index: tuple[int, ...],
        seed: int | None = None,
    ) -> None:
        threads = self.threads = kernel.threads
        self.registers, self.memory, self.shared = registers, memory, shared
        self.mask: Mask | None = None
        self.at = 0
        self.thread_numbers = np.arange(threads)
        self.warp_of = self.thread_numbers // LANES
        self.products, self.mbarriers, self.global_order = Products(threads), Mbarriers(), GlobalOrder(shared)
        self.bulk_stores = BulkStores(threads)
        self.maps: dict[int, tuple[Array, Array]] = {}
        self._instructions, self._blocks, self._touched, self._index = kernel.instructions, blocks, touched, index
        self._copies: list[Copy] = []
        self._committed = np.zeros(threads, np.int64)  # commit groups of each thread
        self._everyone = np.ones(threads, bool)
        self._alive = self._everyone.copy()
        self._groups = {0: self._everyone}  # block -> the threads that are there
        self._random = None if seed is None else Random(f"{seed} {index}")
        multiplies = [any(kernel.instructions[i].parts[0] == "wgmma" for i, _ in block.steps) for block in blocks]
        self._together = [WARPGROUP // LANES if x and threads % WARPGROUP == 0 else 1 for x in multiplies]  # warps
        self._waiting: dict[int, dict[int, Mask]] = {}  # number of a barrier -> block after it -> threads
        self._counts: dict[int, int] = {}  # number of a barrier -> how many threads meet there; 0: all
        self._registers_of, self._free_registers = np.full(threads, kernel.registers), 0
        self._number = 0  # of the present block
        # Threads that wait at mbarriers or for registers, and those that the present block has let wait
        self._parked: list[tuple[int, Mask]] = []
        self._failed: Mask | None = None
        self._stuck = 0, ""  # the instruction that they execute, and why they wait

    def run(self, most_blocks: int) -> None:
        """Execute at most so many blocks. Raise a PtxError that names the instruction."""
        for _ in range(most_blocks):
            try:
                if not self._groups:
                    return self._end()
                self._number, mask = self._next()
                block = self._blocks[self._number]
                self.mask = None if mask is self._everyone or mask.all() else mask
                for self.at, step in block.steps:
                    self.shared.site = self.at
                    if self.products.slots:
                        self._check_products()
                    step(self)
                self.at = block.last
                failed, self._failed = self._failed, None
                for place, threads in self._following(block, mask):
                    if failed is not None and (threads & failed).any():
                        self._parked.append((place, threads))
                    else:
                        _join(self._groups, place, threads)
            except PtxError as error:
                raise self._located(error) from None
        raise self._located(Stuck(f"the program still runs after {most_blocks} blocks of instructions"))

    def _next(self) -> tuple[int, Mask]:
        """Take threads that run now from their group. Return their block and them."""
        number, turns = min(self._groups), self._turns() if self._random is not None else {}
        if self._random is None or not turns:
            return number, self._groups.pop(number)
        number = self._random.choice(sorted(turns))
        units = self._random.sample(turns[number], self._random.randint(1, len(turns[number])))
        mask, runs = self._groups.pop(number), np.isin(self.warp_of // self._together[number], units)
        _join(self._groups, number, mask & ~runs)
        return number, mask & runs

    def _turns(self) -> dict[int, list[int]]:
        """Return by block the warps that can run there next, or the warpgroups where they multiply."""
        first = np.full(self.threads // LANES, -1)  # the block of each warp, whose lanes meet by the order of blocks
        for number in sorted(self._groups, reverse=True):
            first[self._groups[number].reshape(-1, LANES).any(1)] = number
        turns = {x: (first == x).reshape(-1, self._together[x]).all(1) for x in self._groups}
        return {x: np.flatnonzero(there).tolist() for x, there in turns.items() if there.any()}

    def source(self) -> tuple[str, int]:
        """Return the source line of the present instruction."""
        return self._instructions[self.at].source

    def state(self, live: Sequence[Sequence[int]], place: Place) -> Hashable:
        """Return what identifies the state before the present instruction; None while something runs asynchronously.

        It says where threads are, which registers that count they have, and what is in shared memory. live: for each
        instruction the slots that count before it.
        """
        if self._copies or self.products.running or self.mbarriers or self.bulk_stores.running or self._parked:
            return None
        there = [(-1, self.at, self.active())]
        for barrier, groups in ((-1, self._groups), *self._waiting.items()):
            for number in sorted(groups):
                block = self._blocks[number]
                there.append((barrier, block.steps[0][0] if block.steps else block.last, groups[number]))

        def values(at: int, threads: Mask) -> list[Hashable]:
            numbers = np.flatnonzero(threads)
            return [numbers_of(self.values_of(self.registers[slot], numbers), place) for slot in live[at]]

        states = ((barrier, at, threads.tobytes(), *values(at, threads)) for barrier, at, threads in there)
        return self.shared.content(), *states

    def active(self) -> Mask:
        """Return which threads execute the present instruction."""
        return self._everyone if self.mask is None else self.mask

    def guarded(self, guard: tuple[int, bool] | None) -> Mask | None:
        """Return which threads execute an instruction with this guard; None for all threads of the program."""
        if guard is None:
            return self.mask
        holds: Any = self.registers[guard[0]]
        if guard[1]:
            holds = np.logical_not(holds)
        if self.mask is not None:
            return np.asarray(holds & self.mask)
        if np.ndim(holds) == 0:
            return None if holds else np.zeros(self.threads, bool)
        return None if holds.all() else holds

    def whole_warps(self, mask: Mask | None, members: int = 0xFFFFFFFF) -> None:
        """Raise Divergence unless each warp of the active threads is active with all the lanes of `members`."""
        if mask is None:
            return
        lanes = mask.reshape(-1, LANES)
        needed = np.array([bool(members >> lane & 1) for lane in range(LANES)])
        for warp in np.flatnonzero(lanes.any(1) & (lanes != needed).any(1)):
            raise Divergence(f"warp {warp} is active with {int(lanes[warp].sum())} lanes: expected {int(needed.sum())}")

    def write(self, slot: int, value: Any, mask: Mask | None) -> None:
        """Set a register of some threads. Registers are never changed in place."""
        self.registers[slot] = value if mask is None else np.where(mask, value, self.registers[slot])

    def write_some(self, slot: int, values: Any, threads: Array) -> None:
        """Set a register of some threads, which have one value each."""
        if len(threads) < self.threads:
            whole = np.array(np.broadcast_to(self.registers[slot], self.threads))
            whole[threads] = values
            values = whole
        self.registers[slot] = values

    def wait_again(self, threads: Array, why: str) -> None:
        """Let threads for whom an mbarrier's phase has not ended wait, after this block, until an mbarrier changes."""
        self._failed = np.zeros(self.threads, bool)
        self._failed[threads] = True
        self._stuck = self.at, why

    def moved(self) -> None:
        """Wake the threads that wait at mbarriers or for registers, of which something has changed."""
        for place, threads in self._parked:
            _join(self._groups, place, threads)
        self._parked = []

    def threads_of(self, mask: Mask | None) -> Array:
        """Return the numbers of the threads in a mask."""
        return self.thread_numbers if mask is None else np.flatnonzero(mask)

    def values_of(self, register: Any, threads: Array) -> Array:
        """Return one value of a register for each of the threads."""
        if np.ndim(register) == 0:
            return np.full(len(threads), register)
        return np.asarray(register if len(threads) == self.threads else register[threads])

    def array(self, slot: int) -> Array:
        """Return a register as an array of all threads."""
        if np.ndim(self.registers[slot]) == 0:
            self.registers[slot] = np.full(self.threads, self.registers[slot])
        return np.asarray(self.registers[slot])

    def begin_copy(self, threads: Array, source: Array, kept: Array, target: Array, size: int) -> None:
        """Begin an asynchronous copy of these threads, for each of which `kept` says how many bytes it reads.

        A copy may read its source and write its target at any time up to its wait. Therefore the source must be there
        now, and nobody may use the target before the wait.
        """
        self.shared.begin_copy(target, self.warp_of[threads], size)
        early = self._copied(threads, source, kept, size)
        self._copies.append(Copy(threads, self._committed[threads], source, kept, target, early, self.at))

    def commit_copies(self) -> None:
        """Let the copies that the active threads have begun since their last group be their next group."""
        self._committed = self._committed + self.active()

    def finish_copies(self, left: int | None = None) -> None:
        """Complete the asynchronous copies of the active threads but for their last `left` groups; None: all copies.

        A copy reads its source again and writes its target now: as late as its wait allows.
        """
        remaining = []
        for copy in self._copies:
            due = self.active()[copy.threads]
            if left is not None:
                due = due & (copy.group < self._committed[copy.threads] - left)
            if due.any():
                self._perform(copy.some(due))
            if not due.all():
                remaining.append(copy.some(~due))
        self._copies = remaining

    def _perform(self, copy: Copy) -> None:
        waiting, self.at = self.at, copy.at  # a wrong address is the copy's fault
        values = self._copied(copy.threads, copy.source, copy.kept, copy.early.shape[1])
        if (values != copy.early).any():
            raise GlobalRace("the source of an asynchronous copy has changed since it began, and it was not waited for")
        self.at = waiting
        self.shared.end_copy(copy.target, self.warp_of[copy.threads], values)

    def _copied(self, threads: Array, source: Array, kept: Array, size: int) -> Array:
        """Return the bytes that a copy finds now; those that are not read are 0."""
        values = np.zeros((len(threads), size), np.uint8)
        for length in {*kept.tolist()} - {0}:
            these, unit = np.flatnonzero(kept == length), length & -length
            units = (source[these, None] + np.arange(0, length, unit, dtype=np.uint64)).ravel()
            readers = self.warp_of[threads[these]].repeat(length // unit)
            loaded = self.memory.load(units, readers, UNSIGNED[8 * min(unit, 8)], max(1, unit // 8))
            values[these, :length] = loaded.view(np.uint8).reshape(-1, length)
            self.global_order.add(units, readers, unit, self.at, writes=False)
        return values

    def _following(self, block: StepBlock, mask: Mask) -> Iterator[tuple[int, Mask]]:
        """Yield the blocks to which threads go after a block, with these threads."""
        if block.end == "next":
            yield block.after, mask
        elif block.end == "barrier":
            self._arrive(mask, block)
        elif block.end == "registers":
            yield from self._set_registers(mask, block)
        else:
            guarded = self.guarded(block.guard)
            chosen = mask if guarded is None else guarded & mask
            if block.choice is not None:
                yield from self._chosen_targets(chosen, self.array(block.choice), block.targets)
            elif block.end == "branch":
                yield block.targets[0], chosen
            else:
                self._alive &= ~chosen
                for number in list(self._waiting):
                    self._release(number)
            yield block.after, mask & ~chosen

    def _chosen_targets(self, mask: Mask, choice: Array, targets: Sequence[int]) -> Iterator[tuple[int, Mask]]:
        """Yield the targets that threads choose by their numbers, with these threads."""
        for number in np.unique(choice[mask]).tolist():
            if number >= len(targets):
                raise MemoryFault(f"a branch to target {number} of {len(targets)}")
            yield targets[number], mask & (choice == number)

    def _arrive(self, mask: Mask, block: StepBlock) -> None:
        """Let threads wait at a barrier."""
        number, count = block.numbers
        lanes, alive = mask.reshape(-1, LANES), self._alive.reshape(-1, LANES)
        if (lanes.any(1) & (lanes != alive).any(1)).any():
            raise Divergence("some lanes of a warp wait at a barrier, and others do not")
        if number in self._waiting and self._counts[number] != count:
            counts = " and ".join(str(x or "all") for x in (self._counts[number], count))
            raise Divergence(f"threads come to barrier {number} with different counts: {counts}")
        self._counts[number] = count
        _join(self._waiting.setdefault(number, {}), block.after, mask)
        self._release(number)

    def _release(self, number: int) -> None:
        """Let the threads at a barrier continue if all have come that meet there and have not ended."""
        arrived = np.logical_or.reduce(list(self._waiting[number].values()))
        present, everyone = int(arrived.sum()), bool((arrived == self._alive).all())
        count = self._counts[number]
        if count and present > count:
            raise Divergence(f"{present} threads come to barrier {number}, at which {count} meet")
        if present == count or (everyone and not count):
            meeting = np.flatnonzero(arrived.reshape(-1, LANES).any(1)).tolist()
            self.shared.barrier(meeting)
            if everyone:
                self.global_order.barrier()
            self.memory.barrier(meeting)
            for place, threads in self._waiting.pop(number).items():
                _join(self._groups, place, threads)

    def _set_registers(self, mask: Mask, block: StepBlock) -> Iterator[tuple[int, Mask]]:
        """Give threads another number of registers. They wait as long as the program does not have so many."""
        self.whole_warps(mask)
        (count,), held = block.numbers, self._registers_of[mask]
        increases = ".inc." in self._instructions[block.last].opcode
        if (held > count if increases else held < count).any():
            raise Divergence(f"a thread has {int(held[0])} registers already")
        needed = int((count - held).sum())
        if needed > self._free_registers:
            self._parked.append((self._number, mask))
            self._stuck = block.last, f"that need {needed} registers, of which {self._free_registers} are free"
            return
        self._free_registers -= needed
        self._registers_of[mask] = count
        if not increases:
            self.moved()
        yield block.after, mask

    def _check_products(self) -> None:
        lanes = self.active()[: self.threads // WARPGROUP * WARPGROUP].reshape(-1, WARPGROUP)
        self.products.check(self._touched[self.at], np.flatnonzero(lanes.any(1)))

    def _end(self) -> None:
        """End the program, none of whose threads can continue. Raise an error if they wait, or something still runs."""
        waiting = [f"{sum(map(np.count_nonzero, x.values()))} threads at barrier {n}" for n, x in self._waiting.items()]
        if self._parked:
            self.at, why = self._stuck
            waiting.append(f"{sum(np.count_nonzero(threads) for _, threads in self._parked)} threads {why}")
        if waiting:
            alive = np.count_nonzero(self._alive)
            raise Stuck(f"no thread can continue: {', '.join(waiting)} of {alive}")
        if self.products.running:
            at = self.products.running[0].at
            raise WgmmaHazard("the program ends before it has waited for this wgmma", at=at)
        if self.mbarriers.copying():
            raise MbarrierFault("the program ends before a bulk copy has ended")
        self.bulk_stores.end(self)
        self.global_order.barrier()
        self.memory.end()

    def _located(self, error: PtxError) -> PtxError:
        """Return the error with the program and the instructions."""
        at, site = (getattr(error, name, None) for name in ("at", "site"))
        places = [f"program {self._index}, {self._instructions[self.at if at is None else at]}"]
        if site is not None:
            places.append(f"{_SITES[type(error)]} {self._instructions[site]}")
        return type(error)("\n  ".join([str(error), *places]))


def _join(groups: dict[int, Mask], block: int, threads: Mask) -> None:
    """Add threads to the group at a block."""
    if threads.any():
        groups[block] = groups[block] | threads if block in groups else threads
