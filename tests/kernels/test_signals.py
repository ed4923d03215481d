"""Signals by themselves, in kernels that are as small as possible, explored and with every line of them deleted."""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl

from tests.support.tiers import exhaustive
from tpfuse.comm.errors import PeerTimeout
from tpfuse.explore import ExploreError, Sequential, SimulatedMemory, explore
from tpfuse.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.kernels import signals
from tpfuse.kernels.signals import advance, barrier, begin, peer_pointer, signal, wait_signal

Program = Callable[[SimulatedMemory], None]


@triton.jit
def neighbours_kernel(x_ptr, out_ptr, slots_ptr, flags_ptr, state_ptr, abort_ptr, left, right, rank):
    """Add the values of the two neighbours: one signal to each and one wait for each."""
    offs = tl.arange(0, 4)
    epoch, running = begin(state_ptr, abort_ptr)
    half = (epoch & 1) * 4
    if running:
        tl.store(peer_pointer(slots_ptr, rank, tl.float32) + half + offs, tl.load(x_ptr + offs))
        signal(peer_pointer(flags_ptr, left, tl.int32) + 1, epoch)
        signal(peer_pointer(flags_ptr, right, tl.int32), epoch)
        own_flags = peer_pointer(flags_ptr, rank, tl.int32)
        if wait_signal(own_flags, epoch, abort_ptr) & wait_signal(own_flags + 1, epoch, abort_ptr):
            total = tl.load(peer_pointer(slots_ptr, left, tl.float32) + half + offs)
            total += tl.load(peer_pointer(slots_ptr, right, tl.float32) + half + offs)
            tl.store(out_ptr + offs, total)
            advance(state_ptr, epoch)


def neighbours(memory: SimulatedMemory, first_epoch: int = 0, flags_before: int = 0) -> None:
    """Run four epochs after `first_epoch`."""
    slots = memory.buffer("slots", (2, 4), torch.float32)
    flags, state = memory.signals("flags", 2), memory.signals("state", 2)
    state.local[0] = first_epoch
    flags.local.fill_(flags_before)
    memory.barrier()
    rank, world = memory.rank, memory.world
    left, right = (rank - 1) % world, (rank + 1) % world
    for epoch in range(4):
        x, out = torch.full((4,), 10.0 * epoch + rank), torch.empty(4)
        tensors = x, out, slots.addresses, flags.addresses, state.local, memory.abort
        neighbours_kernel[(1,)](*tensors, left, right, rank)
        assert out.tolist() == [20.0 * epoch + left + right] * 4


@triton.jit
def counting_kernel(out_ptr, state_ptr, abort_ptr):
    """Ask for the epoch and wait for nothing."""
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        tl.store(out_ptr + tl.program_id(0), epoch)
        advance(state_ptr, epoch)


def counting(memory: SimulatedMemory) -> None:
    state, out = memory.signals("state", 2), torch.empty(3, dtype=torch.int32)
    for epoch in range(1, 4):
        counting_kernel[(3,)](out, state.local, memory.abort)
        assert out.tolist() == [epoch] * 3


@triton.jit
def meeting_kernel(out_ptr, slots_ptr, flags_ptr, state_ptr, abort_ptr, value, rank, WORLD: tl.constexpr):
    """Use two barriers in a launch: the next rank writes what each rank reads in between, from what it read itself."""
    pid = tl.program_id(0)
    epoch, running = begin(state_ptr, abort_ptr)
    half = (epoch & 1) * 6
    if running:
        own_slot = peer_pointer(slots_ptr, rank, tl.int32) + half + pid
        after = peer_pointer(slots_ptr, (rank + 1) % WORLD, tl.int32) + half + pid
        tl.store(own_slot, value)
        if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD):
            tl.store(own_slot + 3, tl.load(after) + 100)
            if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, ROUND=1):
                tl.store(out_ptr + pid, tl.load(after + 3))
                advance(state_ptr, epoch)


def meeting(memory: SimulatedMemory) -> None:
    """Run grids of one, two and three programs, in turn."""
    slots = memory.buffer("slots", (2, 6), torch.int32)
    flags, state = memory.signals("flags", 6 * memory.world), memory.signals("state", 2)
    for epoch, programs in enumerate((2, 1, 3, 1, 2), 1):
        out = torch.empty(programs, dtype=torch.int32)
        tensors = out, slots.addresses, flags.addresses, state.local, memory.abort
        meeting_kernel[(programs,)](*tensors, epoch + memory.rank, memory.rank, WORLD=memory.world)
        assert out.tolist() == [100 + epoch + (memory.rank + 2) % memory.world] * programs


PROGRAMS = {"neighbours": 3, "counting": 2, "meeting": 2}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("resident", "seeds"), [(2, 1), *exhaustive((1, 5), (2, 5))])
def test_no_alarm(name: str, resident: int, seeds: int) -> None:
    explore(globals()[name], PROGRAMS[name], resident=resident, seeds=range(seeds))


def survivors(name: str, mutants: list[Mutant]) -> list[Mutant]:
    """Return the mutants that a program of this file does not fail."""
    this = sys.modules[__name__]

    def program_of(signals: ModuleType, this: ModuleType) -> Program:
        program: Program = getattr(this, name)
        return program

    return surviving(program_of, [signals, this], PROGRAMS[name], mutants=mutants, resident=2)


@pytest.mark.exhaustive
def test_every_line_is_needed() -> None:
    """Every line is needed by at least one of the programs: none of them does everything that a kernel may do."""
    left = mutants_of(signals)
    assert left
    for name in ("meeting", "neighbours", "counting"):
        left = survivors(name, left)
    assert not left, "\n".join(map(str, left))


BARRIER = """
@triton.jit
def barrier(flags_ptr, abort_ptr, epoch, rank, WORLD: tl.constexpr, ROUND: tl.constexpr = 0, trace_ptr=None):
    ranks = tl.arange(0, triton.next_power_of_2(WORLD))
    first = {}
    arrive(flags_ptr, epoch, rank, first, WORLD)
    return wait_signal(peer_pointer(flags_ptr, rank, tl.int32) + first + ranks, epoch, abort_ptr, ranks < WORLD)
"""
ARRIVE = """
@triton.jit
def arrive(flags_ptr, epoch, rank, first, WORLD: tl.constexpr):
    ranks = tl.arange(0, triton.next_power_of_2(WORLD))
    there = tl.load(flags_ptr + ranks, mask=ranks < WORLD, other=0).to(tl.pointer_type(tl.int32))
    signal(there + {}, epoch, ranks < WORLD)
"""
WAIT = """
@triton.jit
def wait_signal(flag_ptrs, epoch, abort_ptr, mask=None, trace_ptr=None, peer=-1):
    late, aborted = 1, 0
    while (late != 0) & (aborted == 0):
        ahead = tl.atomic_add(flag_ptrs, 0, mask=mask, sem="acquire", scope="sys") - {}
        late = tl.{}(((ahead < 0) & mask).to(tl.int32), 0)
        aborted = tl.atomic_add(abort_ptr, 0, sem="relaxed", scope="sys")
    return late == 0
"""
ADVANCE = """
@triton.jit
def advance(state_ptr, epoch):
    tl.debug_barrier()
    ended = tl.atomic_add(state_ptr + 1, 1, sem="acq_rel", scope="sys") + 1
    if ended == {}:
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, epoch)
"""
RIGHT = {
    "barrier": BARRIER.format("(ROUND * tl.num_programs(0) + tl.program_id(0)) * WORLD"),
    "arrive": ARRIVE.format("first + rank"),
    "wait_signal": WAIT.format("epoch", "max"),
    "advance": ADVANCE.format("tl.num_programs(0)"),
}
FAULTS = {
    "one word for all programs": BARRIER.format("ROUND * WORLD"),
    "one word for both rounds": BARRIER.format("tl.program_id(0) * WORLD"),
    "words of a rank are adjacent": ARRIVE.format("rank * tl.num_programs(0) + tl.program_id(0)"),
    "the epoch before will do": WAIT.format("epoch + 1", "max"),
    "any of the ranks will do": WAIT.format("epoch", "min"),
    "the first program publishes": ADVANCE.format("1"),
}


def with_function(name: str, function: str) -> Mutant:
    """Return the signals with one function replaced by `function`, of the same name."""
    source = inspect.getsource(signals) + "\n\n" + function
    return Mutant(signals.__name__, str(signals.__file__), (1, 1), name, "another function", source)


@pytest.mark.exhaustive
def test_faults_other_than_deletions_are_found() -> None:
    """No fault survives; the same functions without a fault do."""
    right = with_function("no fault", "".join(RIGHT.values()))
    assert survivors("meeting", [right, *(with_function(*fault) for fault in FAULTS.items())]) == [right]


@pytest.mark.parametrize("first_epoch", [2**31 - 3, *exhaustive(-3)])
def test_epochs_wrap_around(first_epoch: int) -> None:
    explore(lambda memory: neighbours(memory, first_epoch, first_epoch), 3)


@pytest.mark.parametrize("age", [2**32 - 2**17, *exhaustive(2**31 + 1, 2**31 + 2**30)])
def test_a_word_that_was_not_written_for_many_launches_is_not_ahead(age: int) -> None:
    """A kernel that has used few of its words for many launches uses the others again."""
    word = (7 - age + 2**31) % 2**32 - 2**31
    explore(lambda memory: neighbours(memory, 7, word), 3)


def late(memory: SimulatedMemory) -> None:
    """The waits for rank 0 end by the abort word; after a reset all ranks start again."""
    slots = memory.buffer("slots", (2, 6), torch.int32)
    flags, state = memory.signals("flags", 6 * memory.world), memory.signals("state", 2)
    out, rank = torch.zeros(2, dtype=torch.int32), memory.rank
    tensors = out, slots.addresses, flags.addresses, state.local, memory.abort
    for _ in range(2):
        with pytest.raises(PeerTimeout), memory.guard("meeting"):
            if rank == 0:
                memory.barrier("elsewhere")
            meeting_kernel[(2,)](*tensors, 1 + rank, rank, WORLD=memory.world)
            assert out.tolist() == [0, 0] and state.local.tolist() == [0, 0]
            meeting_kernel[(2,)](*tensors, 50, rank, WORLD=memory.world)  # this launch does not write its slot
        memory.reset()
        assert slots.local.max() == (1 + rank if rank else 0) and not slots.local[0].any()
        assert not flags.local.any()
        memory.barrier()
    for epoch in (1, 2):
        meeting_kernel[(2,)](*tensors, epoch + rank, rank, WORLD=memory.world)
        assert out.tolist() == [100 + epoch + (rank + 2) % memory.world] * 2


@pytest.mark.parametrize(("world", "resident"), [(2, 2), *exhaustive((3, 1))])
def test_waits_end_by_the_abort_word(world: int, resident: int) -> None:
    explore(late, world, timeouts=True, resident=resident)


def test_a_signal_that_comes_too_early_is_found() -> None:
    """The programs of this file would detect a wait that ends too early."""
    with pytest.raises(ExploreError):
        explore(lambda memory: neighbours(memory, 7, 20), 3, schedules=[Sequential()])
