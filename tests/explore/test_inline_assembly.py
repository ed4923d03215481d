"""Kernels that signal by inline assembly, as other projects write them, and torch's handle of symmetric memory."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tpfuse.explore import (
    DeadlockError,
    ProtocolError,
    RaceError,
    RoundRobin,
    Sequential,
    TorchHandle,
    explore,
    explore_all,
)
from tpfuse.explore.ptx import Kernel, compiled, ranks
from tpfuse.explore.ptx.global_memory import GlobalMemory
from tpfuse.explore.ptx.parser import Register

# Signals by compare-and-swap, from 0 to 1 and back, in the style of torch's `symm_mem` kernels


@triton.jit
def thread_number():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def swap(words, order: tl.constexpr, expected: tl.constexpr, new: tl.constexpr):
    return tl.inline_asm_elementwise(
        f"""
        {{
            .reg .u32 %seen<1>;
            .reg .pred %done<1>;
            again:  // until the word was as expected
                atom.global.sys.{order}.cas.b32 %seen0, [$1], {expected}, {new};
                setp.eq.u32 %done0, %seen0, {expected};
                @!%done0 bra again;
        }}
        """,
        "=r, l",
        [words],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def meet(
    pads, rank, WORLD: tl.constexpr, SEND: tl.constexpr, WAIT: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr
):
    pads = pads.to(tl.pointer_type(tl.uint64))
    peers = tl.arange(0, WORLD)
    sent = tl.load(pads + peers).to(tl.pointer_type(tl.uint32)) + rank
    received = tl.load(pads + rank).to(tl.pointer_type(tl.uint32)) + peers
    if BEFORE == "assembly":
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    elif BEFORE:
        tl.debug_barrier()
    if thread_number() < WORLD:
        swap(sent, SEND, 0, 1)
        if WAIT is not None:
            swap(received, WAIT, 1, 0)
    if AFTER:
        tl.debug_barrier()


@triton.jit
def sum_kernel(
    slots,
    pads,
    out_ptr,
    rank,
    value,
    WORLD: tl.constexpr,
    N: tl.constexpr,
    SEND: tl.constexpr = "release",
    WAIT: tl.constexpr = "acquire",
    BEFORE: tl.constexpr = True,
    AFTER: tl.constexpr = True,
    LAST: tl.constexpr = "release",
):
    offs = tl.arange(0, N)
    slots = slots.to(tl.pointer_type(tl.uint64))
    tl.store(tl.load(slots + rank).to(tl.pointer_type(tl.float32)) + offs, tl.zeros((N,), tl.float32) + value)
    meet(pads, rank, WORLD, SEND, WAIT, BEFORE, AFTER)
    total = tl.zeros((N,), tl.float32)
    for peer in range(WORLD):
        total += tl.load(tl.load(slots + peer).to(tl.pointer_type(tl.float32)) + offs)
    tl.store(out_ptr + offs, total)
    meet(pads, rank, WORLD, LAST, "relaxed", True, False)  # the next launch may write again: its border orders it


def summing(**change):
    def program(memory):
        handle, out = TorchHandle(memory, "slots", (8,), torch.float32), torch.zeros(8)
        for value in (1.0, 2.0):
            arguments = handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, memory.rank, value + memory.rank
            sum_kernel[(1,)](*arguments, memory.world, 8, **change)
            assert out.eq(sum(value + rank for rank in range(memory.world))).all()
        assert not handle.get_signal_pad(memory.rank).any()

    return program


def test_signals_by_inline_assembly_are_right_under_all_schedules() -> None:
    explore(summing(), 2)
    explore(summing(BEFORE="assembly"), 4, schedules=[RoundRobin()])


@pytest.mark.exhaustive
def test_signals_by_inline_assembly_are_right_under_many_schedules() -> None:
    explore(summing(), 4, resident=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SEND": "relaxed"}, r"release semantics at .*inline_asm_elementwise\( would order them"),
        ({"WAIT": "relaxed"}, r"acquire semantics at .*inline_asm_elementwise\( would order them"),
        ({"BEFORE": False}, r"tl.debug_barrier\(\) before the release at .* would order them"),
        ({"AFTER": False}, r"tl.debug_barrier\(\) after the wait at .* would order them"),
        ({"SEND": "relaxed", "BEFORE": False}, r"release semantics at .* and a tl.debug_barrier\(\) before it would"),
        ({"LAST": "relaxed"}, r"release semantics at .* would order them"),
    ],
    ids=str,
)
def test_each_part_of_a_signal_is_needed(change, message) -> None:
    for barrier_rule in (True, False):  # the compiler writes no barrier beside assembly under any version of Triton
        with pytest.raises(RaceError, match=message):
            explore(summing(**change), 2, barrier_rule=barrier_rule, seeds=())


def test_a_wait_that_is_dropped_is_found() -> None:
    with pytest.raises(RaceError, match=r"race on slots\[0\]"):
        explore(summing(WAIT=None), 2)


@triton.jit
def entry_kernel(slots, pads, out_ptr, rank, SEND: tl.constexpr):
    meet(pads, rank, 2, SEND, "acquire", False, True)
    slot = tl.load(slots.to(tl.pointer_type(tl.uint64)) + 1 - rank).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr, tl.load(slot))


def test_a_relaxed_signal_passes_on_what_preceded_its_launch() -> None:
    def program(memory):
        handle, out = TorchHandle(memory, "slots", (1,), torch.float32), torch.zeros(1)
        handle.get_buffer(memory.rank, (1,), torch.float32).fill_(memory.rank + 1)
        entry_kernel[(1,)](handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, memory.rank, "relaxed")
        assert out.item() == 2 - memory.rank

    report = explore_all(program, 2)
    assert report.exhausted and len(report.schedules) == 3  # the lanes of a rank see their words together, or of both


@triton.jit
def failing_kernel(slots, pads, out_ptr, rank, EXPECTED: tl.constexpr):
    slot = tl.load(slots.to(tl.pointer_type(tl.uint64)) + 1).to(tl.pointer_type(tl.int32))
    pads = pads.to(tl.pointer_type(tl.uint64))
    lanes = tl.arange(0, 2)
    words = tl.load(pads + 1 - lanes)  # not in the order of the ranks
    if rank == 0:
        tl.store(slot, 7)
    tl.debug_barrier()
    if thread_number() < 2:
        if rank == 0:
            expected = tl.where(lanes == 0, EXPECTED, 0)
            text: tl.constexpr = "atom.global.release.sys.cas.b32 $0, [$1], $2, 1;"
            tl.inline_asm_elementwise(text, "=r,l,r", [words, expected], dtype=tl.int32, is_pure=False, pack=1)
            if EXPECTED:
                swap(tl.load(pads + 1), "relaxed", 0, 1)
        else:
            swap(tl.load(pads + 1), "acquire", 1, 0)
    tl.debug_barrier()
    if rank == 1:
        tl.store(out_ptr, tl.load(slot))


@pytest.mark.parametrize("expected", [0, 5])
def test_a_swap_that_fails_releases_nothing(expected) -> None:
    def program(memory):
        handle, out = TorchHandle(memory, "slots", (1,), torch.int32), torch.full((1,), 7, dtype=torch.int32)
        failing_kernel[(1,)](handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, memory.rank, expected)
        assert out.item() == 7

    if expected == 0:
        explore(program, 2, schedules=[RoundRobin()])
    else:
        with pytest.raises(RaceError, match="nothing orders these accesses"):
            explore(program, 2, schedules=[RoundRobin()])


# Signals by stores and loads


@triton.jit
def ring_kernel(slots, pads, out_ptr, rank, WORLD: tl.constexpr, SIGNAL: tl.constexpr, WAIT: tl.constexpr):
    slots, pads = slots.to(tl.pointer_type(tl.uint64)), pads.to(tl.pointer_type(tl.uint64))
    right = (rank + 1) % WORLD
    tl.store(tl.load(slots + right).to(tl.pointer_type(tl.int32)), rank)
    tl.debug_barrier()
    if thread_number() == 0:
        tl.inline_asm_elementwise(
            SIGNAL, "=r,l,r", [tl.load(pads + right), tl.cast(5, tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        f"{{ .reg .pred enough; wait: {WAIT} $0, [$1 + 0]; setp.ge.s32 enough, $0, $2; @!enough bra wait; }}",
        "=&r,l,r",
        [tl.load(pads + rank), tl.cast(5, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr, tl.load(tl.load(slots + rank).to(tl.pointer_type(tl.int32))))


STORE, ADD, LOAD = (
    "st.release.sys.global.u32 [$1], $2",
    "red.release.sys.add.u32 [$1], $2;",
    "ld.acquire.sys.global.b32",
)


@pytest.mark.parametrize(
    ("signal", "wait", "fault"),
    [
        (STORE, LOAD, None),
        (ADD, LOAD, None),
        (STORE.replace("release", "relaxed"), LOAD, "release semantics"),
        (ADD.replace("release", "relaxed"), LOAD, "release semantics"),
        (STORE, "ld.volatile.global.b32", "acquire semantics"),
        (STORE.replace("sys", "gpu"), LOAD, '"sys" is needed'),
        ("st.global.u32 [$1], $2", LOAD, "nothing orders these accesses"),
    ],
)
def test_loops_that_load_until_a_store_comes(signal, wait, fault) -> None:
    def program(memory):
        handle, out = TorchHandle(memory, "slots", (1,), torch.int32), torch.zeros(1, dtype=torch.int32)
        ring_kernel[(1,)](
            handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, memory.rank, memory.world, signal, wait
        )
        assert out.item() == (memory.rank - 1) % memory.world

    if fault is None:
        assert str(explore_all(program, 3)) == "3 ranks, 1 execution, all of them: no fault"
    else:
        with pytest.raises(RaceError, match=fault):
            explore_all(program, 3)


def test_a_loop_whose_signal_does_not_come_is_a_deadlock() -> None:
    def program(memory):
        handle, out = TorchHandle(memory, "slots", (1,), torch.int32), torch.zeros(1, dtype=torch.int32)
        nothing = "mov.u32 $0, 0;"
        ring_kernel[(1,)](handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, memory.rank, 2, nothing, LOAD)

    with pytest.raises(DeadlockError, match=r"waits at .*inline_asm_elementwise\(\n +slots's signal pad\[0\] .* is 0"):
        explore_all(program, 2)


# Every execution


@triton.jit
def lock_kernel(lock_ptr, count_ptr, ASSEMBLY: tl.constexpr, WAIT: tl.constexpr, GIVE: tl.constexpr):
    """Take a lock, add 1 to a number, and give the lock back."""
    if ASSEMBLY:
        if thread_number() == 0:
            if WAIT:
                swap(lock_ptr, "acquire", 0, 1)
            else:
                tl.inline_asm_elementwise(
                    "atom.global.sys.acquire.cas.b32 $0, [$1], 0, 1;", "=r,l", [lock_ptr], tl.int32, False, 1
                )
    else:
        while tl.atomic_cas(lock_ptr, 0, 1, sem="acquire", scope="sys") != 0:
            pass
    tl.debug_barrier()
    tl.store(count_ptr, tl.load(count_ptr) + 1)
    tl.debug_barrier()
    if ASSEMBLY:
        if thread_number() == 0:
            tl.inline_asm_elementwise(GIVE, "=r,l", [lock_ptr], tl.int32, False, 1)
    else:
        tl.atomic_xchg(lock_ptr, 0, sem="release", scope="sys")


def locking(ASSEMBLY=True, WAIT=True, GIVE="st.release.sys.global.u32 [$1], 0;"):
    def program(memory):
        lock, count = memory.signals("lock", 1), memory.buffer("count", (1,), torch.int32)
        lock_kernel[(1,)](lock.peers[0], count.peers[0], ASSEMBLY, WAIT, GIVE)
        memory.barrier()
        assert count.peers[0].item() == memory.world

    return program


@pytest.mark.parametrize("assembly", [True, False])
def test_a_lock_is_taken_in_every_order(assembly) -> None:
    for world, orders in (2, 2), (3, 6):
        report = explore_all(locking(assembly), world)
        assert str(report) == f"{world} ranks, {orders} executions, all of them: no fault"


@pytest.mark.parametrize(
    ("change", "fault", "message"),
    [
        ({"GIVE": "st.relaxed.sys.global.u32 [$1], 0;"}, RaceError, "release semantics at .* would order them"),
        ({"WAIT": False}, RaceError, "race on count"),
        ({"GIVE": "mov.u32 $0, 0;"}, DeadlockError, r"waits at .*return tl.inline_asm_elementwise\(\n +lock\[0\] .* 1"),
    ],
    ids=["relaxed", "no wait", "not given back"],
)
def test_faults_of_a_lock_are_found(change, fault, message) -> None:
    with pytest.raises(fault, match=message):
        explore_all(locking(**change), 2)


@triton.jit
def waiting_kernel(flag_ptr, out_ptr, TEXT: tl.constexpr, USED: tl.constexpr):
    out = tl.inline_asm_elementwise(TEXT, "=&r,l", [flag_ptr], tl.int32, False, 1)
    if USED:
        tl.store(out_ptr, out)
    else:
        tl.store(out_ptr, 7)


# A wait for an odd value, one that gives up after three polls, and one that counts its polls
ODD = """{ .reg .pred p; .reg .b32 bit; again: ld.acquire.sys.b32 $0, [$1]; and.b32 bit, $0, 1;
    setp.eq.u32 p, bit, 0; @p bra again; }"""
BOUNDED = """{ .reg .pred p, q; .reg .b32 x; mov.u32 $0, 0; again: ld.acquire.sys.b32 x, [$1]; setp.ne.u32 p, x, 0;
    @p bra done; setp.eq.u32 q, $0, 2; @q bra done; add.u32 $0, $0, 1; bra again; done: }"""
COUNTING = """{ .reg .pred p; .reg .b32 x, n; mov.u32 n, 0; again: ld.acquire.sys.b32 x, [$1]; add.u32 n, n, 1;
    setp.eq.u32 p, x, 0; @p bra again; mov.u32 $0, n; }"""


@triton.jit
def ticket_kernel(words_ptr, mine_ptr):
    tl.store(mine_ptr, tl.atomic_add(words_ptr, 1, sem="relaxed", scope="sys"))


@pytest.mark.parametrize(
    ("text", "used", "values", "outcomes", "executions"),
    [
        (ODD, True, (1, 2, 3), {1, 3}, 4),
        (ODD, True, (1, 3), {1, 3}, 4),
        (ODD, False, (1, 3), {7}, 3),  # what it reads makes no difference once that is known
        (BOUNDED, True, (1,), {0, 1, 2}, 7),
    ],
    ids=["odd", "odd, no other", "odd, unused", "bounded"],
)
def test_a_wait_in_a_text_has_every_outcome_whatever_else_happens(text, used, values, outcomes, executions) -> None:
    found, seen, kept = set(), {}, []

    def program(memory):
        flag, tickets = memory.signals("flag", 1), memory.signals("tickets", 1)
        kept.append(flag)  # every execution has memory of its own
        out = torch.zeros(1, dtype=torch.int32)
        if memory.rank == 0:
            for value in values:
                memory.signal(flag, 1, 0, value)
        elif memory.rank == 1:
            waiting_kernel[(1,)](flag.local, out, text, used)
        else:
            ticket_kernel[(1,)](tickets.peers[0], out)
        seen[memory.rank] = out.item()
        memory.barrier()
        found.add((seen[1], seen[2]))

    report = explore_all(program, 4)
    assert found == {(value, ticket) for value in outcomes for ticket in (0, 1)}
    assert report.exhausted and len(report.schedules) == executions


class ScriptedMemory(GlobalMemory):
    """Memory from which the warps of a kernel load given values; it keeps the kernel's states at its loads."""

    def __init__(self, values):
        super().__init__([])
        self._values, self.states = iter(values), []

    def begin(self, source, state):
        super().begin(source, state)
        self._state = state

    def ordered(self, addresses, warps, dtype, order, name, change=None):
        self.states.append(self._state(lambda address: None))
        return np.array(next(self._values), dtype)[warps]


LOOP = "again: ld.global.acquire.sys.b32 x, [a]; setp.eq.u32 p, x, 0; @p bra again;"
WAYS = """again: ld.global.acquire.sys.b32 x, [a]; setp.eq.u32 p, x, 1; @p bra one; setp.eq.u32 p, x, 2; @p bra two;
    bra again; one: mov.u32 n, 10; bra done; two: mov.u32 n, 20; done:"""
# One warp waits at one of two barriers, and the other one, whose loop comes later in the order, for its word.
TWO_BARRIERS = f"""ld.global.acquire.sys.b32 y, [a]; setp.eq.u32 p, y, 1; @p bra one; setp.eq.u32 p, y, 2; @p bra two;
    {LOOP} mov.u32 n, 30; bar.sync 0; bra done;
    one: mov.u32 n, 10; bar.sync 0; bra b; b: bra c; c: bra d; d: bra e; e: bra done;
    two: mov.u32 n, 20; bar.sync 0; bra f; f: bra g; g: bra h; h: bra i; i: bra done; done:"""


def states_of(text, *values):
    head = ".visible .entry wait() .reqntid 64 { .reg .pred p, q; .reg .b32 x, y, n; .reg .b16 h<2>; .reg .b64 a, z;"
    kernel = Kernel(f"{head} mov.u64 z, 4096; {text} ret; }}", results=[Register("n", 32)])
    memory = ScriptedMemory(values)
    kernel.run_program((0, 0, 0), (1, 1, 1), {"a": np.full(64, 4096, np.uint64)}, memory)
    return memory.states


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        ("", "", False),
        ("", "mov.u32 n, y;", True),
        ("", "@q mov.u32 n, 1;", True),
        ("", "@q bra done; mov.u32 n, 1; done:", True),
        ("mov.u32 n, y;", "@p mov.u32 n, 1;", True),
        ("mov.u32 n, y;", "mov.u32 n, 1;", False),
        ("@q add.u64 z, z, 4;", "ld.global.acquire.sys.b32 n, [z];", True),
        ("@q add.u64 z, z, 4;", "st.global.release.sys.b32 [z + 4], x;", True),
        ("", "ways: .branchtargets done, one, two; brx.idx y, ways; one: mov.u32 n, 1; two: done:", True),
        ("mov.b32 {h0, h1}, y;", "mov.b32 n, {h0, h1};", True),
        ("bra again; back: mov.u32 n, y;", "setp.eq.u32 p, x, 7; @p bra back;", True),
    ],
)
def test_what_a_text_has_read_is_in_its_state_if_it_may_still_use_it(before, after, counts) -> None:
    text = f"mov.u32 n, 0; ld.global.acquire.sys.b32 y, [a]; setp.eq.u32 q, y, 1; {before} {LOOP} {after}"
    one, two = (states_of(text, (value, value), (1, 1), (0, 0))[1] for value in (1, 2))
    assert (one != two) is counts


@pytest.mark.parametrize(
    ("text", "first", "second", "same"),
    [
        (LOOP, (1, 0), (2, 0), True),
        (LOOP, (1, 0), (0, 1), False),
        (f"{LOOP} mov.u32 n, x;", (1, 0), (2, 0), False),
        (WAYS, (1, 0), (2, 0), False),
        (TWO_BARRIERS, (1, 0), (2, 0), False),
    ],
    ids=["ended", "which ended", "value", "place", "barrier"],
)
def test_the_state_of_a_warp_has_what_the_others_do(text, first, second, same) -> None:
    one, two = (states_of(text, values, (1, 1))[1] for values in (first, second))
    assert (one == two) is same


def test_a_poll_comes_back_to_its_state_unless_it_counts() -> None:
    for count in ("", "add.u32 n, n, 1;"):
        first, second, _ = states_of(f"mov.u32 n, 0; {LOOP.replace('setp', f'{count} setp')}", (0, 0), (0, 0), (1, 1))
        assert (first == second) == (not count)


def test_a_text_that_counts_its_polls_for_ever_is_refused_by_name() -> None:
    def program(memory):
        flag, out = memory.signals("flag", 1), torch.zeros(1, dtype=torch.int32)
        waiting_kernel[(1,)](flag.local, out, COUNTING, True)

    with pytest.raises(ProtocolError, match="read the same 101 times, in states that differ"):
        explore_all(program, 1)


@triton.jit
def counting_in_memory_kernel(flag_ptr, tries_ptr, COUNT: tl.constexpr):
    """Poll at most three times, and count the polls in other memory."""
    if COUNT:
        text: tl.constexpr = f"""{{ .reg .pred p, q; .reg .b32 x, n; again: ld.acquire.sys.b32 x, [$1];
            {COUNT} setp.ne.u32 p, x, 0; @p bra done; setp.lt.u32 q, n, 2; @q bra again; done: mov.u32 $0, 0; }}"""
        if thread_number() == 0:
            tl.inline_asm_elementwise(text, "=r,l,l", [flag_ptr, tries_ptr], tl.int32, False, 1)
    else:
        while (tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0) & (tl.atomic_add(tries_ptr, 1) < 2):
            pass


@pytest.mark.parametrize(
    "count",
    ["", "atom.relaxed.gpu.add.u32 n, [$2], 1;", "ld.b32 n, [$2]; add.u32 n, n, 1; st.b32 [$2], n; sub.u32 n, n, 1;"],
)
def test_what_a_loop_writes_to_other_memory_ends_it(count) -> None:
    found = set()

    def program(memory):
        flag, tries = memory.signals("flag", 1), torch.zeros(1, dtype=torch.int32)
        if memory.rank == 0:
            memory.signal(flag, 1, 0, 1)
        else:
            counting_in_memory_kernel[(1,)](flag.local, tries, count)
            found.add(tries.item())

    assert explore_all(program, 2).exhausted
    assert found == {1, 2, 3}


@triton.jit
def after_ticket_kernel(words_ptr, mine_ptr, out_ptr, LOAD: tl.constexpr):
    if LOAD:
        text: tl.constexpr = f"""{{ .reg .pred p; .reg .b32 mine, x, y; {LOAD} mine, [$2];
            ld.relaxed.sys.b32 x, [$1 + 4]; setp.eq.u32 p, mine, 0; add.u32 y, x, 5; sub.u32 x, 6, x;
            selp.b32 $0, y, x, p; }}"""
        out = tl.inline_asm_elementwise(text, "=r,l,l", [words_ptr, mine_ptr], tl.int32, False, 1)
    else:
        mine = tl.atomic_add(mine_ptr, 0)
        x = tl.atomic_add(words_ptr + 1, 0, sem="relaxed", scope="sys")
        out = tl.where(mine == 0, x + 5, 6 - x)
    tl.store(out_ptr, out)


@pytest.mark.parametrize("load", ["ld.global.b32", "ld.relaxed.gpu.b32", ""])
def test_what_a_kernel_reads_in_other_memory_counts(load) -> None:
    found = set()

    def program(memory):
        words, mine, out = (
            memory.signals("words", 2),
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
        )
        if memory.rank == 2:
            ticket_kernel[(1,)](words.peers[0], mine)
            after_ticket_kernel[(1,)](words.peers[0], mine, out, load)
            found.add((mine[0].item(), out.item()))
        else:
            memory.signal(words, 0, 1 - memory.rank, 1)

    assert explore_all(program, 3).exhausted
    assert found == {(0, 5), (0, 6), (1, 5), (1, 6)}


@triton.jit
def careless_kernel(words_ptr, box_ptr, READS: tl.constexpr):
    """Order the box by a barrier or for all threads, unless another word has changed already."""
    if not READS:
        tl.store(box_ptr, 1.0)
    early = tl.atomic_add(words_ptr + 1, 0, sem="relaxed", scope="sys")
    if READS:
        if early == 1:
            thread_number() == 0  # noqa: B015 (from here on only some threads count)
        text: tl.constexpr = """{ .reg .pred p; again: ld.acquire.sys.b32 $0, [$1]; setp.eq.u32 p, $0, 0;
            @p bra again; }"""
        if tl.inline_asm_elementwise(text, "=&r,l", [words_ptr + 2], tl.int32, False, 1) == 2:
            tl.load(box_ptr)
    else:
        if early == 0:
            tl.debug_barrier()
        tl.atomic_xchg(words_ptr + 3, 1, sem="release", scope="sys")


@pytest.mark.parametrize("reads", [True, False])
def test_what_only_some_threads_know_or_no_barrier_orders_is_found_wherever_it_comes_about(reads) -> None:
    def program(memory):
        words, box, mine = memory.signals("words", 4), memory.buffer("box", (1,), torch.float32), torch.zeros(1).int()
        if memory.rank > 1:
            ticket_kernel[(1,)](words.peers[0], mine)
        if memory.rank == 3:
            second = mine.item() == 1  # found later than both values of the other word
            if second and reads:
                box.peers[0].fill_(1.0)
            memory.signal(words, 0, 2, 1 + second)
            if second and not reads:
                memory.wait_signal(words, 0, 3, 1, op="read")
                box.peers[0].item()
        elif memory.rank == 0:
            memory.wait_signal(words, 0, 2, 1, op="go on")
            memory.signal(words, 0, 1, 1)
        elif memory.rank == 1:
            careless_kernel[(1,)](words.peers[0], box.peers[0], reads)

    with pytest.raises(RaceError, match="race on box"):
        explore_all(program, 4)


# Compiled kernels

TABLE = """
.visible .entry read(.param .u64 table) .reqntid 32 {
    .reg .b64 %d<2>;
    .reg .b32 %r<1>;
    ld.param.u64 %d0, [table];
    ld.global.b64 %d1, [%d0 + 8];
    ld.global.b32 %r0, [%d1];
    ret;
}"""


def test_a_compiled_kernel_reads_the_buffers_of_a_handle_by_the_address_of_their_table() -> None:
    runs = []

    @contextmanager
    def launches():
        yield runs.append

    def program(memory):
        handle = TorchHandle(memory, "slots", (1,), torch.int32)
        if memory.rank == 1:
            handle.get_buffer(1, (1,), torch.int32).fill_(5)
        else:
            ranks.launch(runs[0], Kernel(TABLE), (1,), [handle.buffer_ptrs_dev])

    with pytest.raises(RaceError, match=r"write by rank 1 .*\n  ld by rank 0|ld by rank 0, .*\n  write by rank 1"):
        explore(program, 2, seeds=(), launches=launches)


def test_launches_run_compiled_only_for_known_gpus_and_if_kernels_are_not_interpreted() -> None:
    with pytest.raises(ValueError, match="unset TRITON_INTERPRET"), compiled():
        pass
    with pytest.raises(ValueError, match=r"'sm_100'.*: expected sm_80 or sm_90"), compiled("sm_100"):
        pass


# Each of these kernels is refused.


@triton.jit
def any_kernel(words, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr):
    tl.inline_asm_elementwise(TEXT, CONSTRAINTS, [words], dtype=tl.int32, is_pure=False, pack=PACK)


@triton.jit
def value_kernel(words, USE: tl.constexpr):
    number = thread_number() * 2
    if USE == "address":
        tl.store(words + number, 1, mask=number < 8)
    elif USE == "value":
        tl.store(words, number)
    elif USE == "block":
        tl.store(words + tl.arange(0, 2), number + tl.arange(0, 2))
    elif USE == "operand":
        tl.inline_asm_elementwise("st.b32 [$1], 1;", "=r,l", [words + number], dtype=tl.int32, is_pure=False, pack=1)
    elif number == 2:
        tl.store(words, 1)


@pytest.mark.parametrize(
    ("text", "constraints", "pack", "message"),
    [
        (
            "multimem.red.release.sys.global.add.u32 [$1], 1;",
            "=r,l",
            1,
            r"multimem\.red\.release\.sys\.global\.add\.u32",
        ),
        ("fence.acq_rel.sys;", "=r,l", 1, r"fence\.acq_rel\.sys"),
        ("shfl.sync.bfly.b32 $0, $0, 1, 31, -1;", "=r,l", 1, r"shfl\.sync\.bfly\.b32"),
        ("redux.sync.max.s32 $0, $0, -1;", "=r,l", 1, r"redux\.sync\.max\.s32"),
        ("{.reg .pred %p; elect.sync _|%p, -1;}", "=r,l", 1, r"elect\.sync"),
        ("bar.warp.sync -1;", "=r,l", 1, r"bar\.warp\.sync"),
        ("fence.proxy.async;", "=r,l", 1, r"fence\.proxy\.async"),
        ("bar.sync 1, 64;", "=r,l", 1, r"bar\.sync is not supported"),
        ("mov.u32 $0, %smid;", "=r,l", 1, "%smid"),
        ("mov.u32 $0, 1;", "=r,l", 4, "pack=4: the explorer supports pack=1"),
        ("mov.u32 $0, 1;", "=r,n", 1, "constraint 'n'"),
        ("mov.u32 $0, $1;", "=r,r", 1, "an operand of 64 bits in a register of 32"),
        ("mov.u32 $0, 1;", "=r,=r", 1, "'=r,=r'"),
        ("atom.add.release.sys.global.u32 $0, [$1], 1;", "=r,l", 1, "atom.add"),
        ("atom.global.release.sys.add.u32 $0, [$1], 1;", "=r,l", 1, r"each of the program's 128 threads .*: compare"),
        ("ld.acquire.sys.global.u64 %x, [$1];", "=r,l", 1, "%x is not declared"),
        ("{.reg .b64 %x; ld.acquire.sys.b64 %x, [$1];}", "=r,l", 1, "8 bytes .* whose elements have 4"),
    ],
)
def test_assembly_that_is_not_known_is_refused_by_name(text, constraints, pack, message) -> None:
    with pytest.raises(ProtocolError, match=rf"ValueError: inline assembly.*{message}.*\n  at .*any_kernel|{message}"):
        explore(lambda m: any_kernel[(1,)](m.signals("words", 8).local, text, constraints, pack), 1, seeds=())


def test_a_text_may_choose_a_thread_by_itself() -> None:
    text = """{
        .reg .pred %other;
        .reg .b32 %tid;
        mov.u32 %tid, %tid.x;
        setp.ne.u32 %other, %tid, 0;
        @%other bra done;
        red.relaxed.gpu.add.u32 [$1], 3; // once
        done: }"""

    def program(memory):
        words = memory.signals("words", 8)
        any_kernel[(1,)](words.local, text, "=r,l,~{memory}", 1)
        assert words.local.tolist() == [3] + [0] * 7

    explore(program, 1, seeds=())


@pytest.mark.parametrize("use", ["address", "value", "block", "operand", "another thread's part"])
def test_the_number_of_a_thread_may_only_be_compared(use) -> None:
    with pytest.raises(ProtocolError, match="the number of a thread is used as a value"):
        explore(lambda memory: value_kernel[(1,)](memory.signals("words", 8).local, use), 1, seeds=())


# torch's handle


@pytest.mark.parametrize("fault", ["", "no wait", "no barrier"])
def test_the_signals_of_a_handle_order_what_precedes_them(fault) -> None:
    def program(memory):
        handle = TorchHandle(memory, "inbox", (2, 4), torch.float32)
        assert handle.buffer_ptrs[memory.rank] == handle.get_buffer(memory.rank, (8,), torch.float32).data_ptr()
        right, left = (memory.rank + 1) % memory.world, (memory.rank - 1) % memory.world
        for turn in range(2):
            handle.get_buffer(right, (4,), torch.int32, 4).fill_(10 * turn + memory.rank)
            handle.put_signal(right, channel=1)
            if fault != "no wait":
                handle.wait_signal(left, channel=1)
            assert handle.get_buffer(memory.rank, (4,), torch.int32, 4).tolist() == [10 * turn + left] * 4 or fault
            if fault != "no barrier":
                handle.barrier(channel=0)

    if fault:
        with pytest.raises(RaceError, match=r"inbox\[1, 0\]"):
            explore(program, 3)
    else:
        explore(program, 3)


def test_a_signal_that_is_not_put_yet_orders_nothing() -> None:
    def program(memory):
        handle = TorchHandle(memory, "inbox", (2,), torch.int32)
        for word in range(2):
            if memory.rank == 0:
                handle.get_buffer(1, (1,), torch.int32, word).fill_(word)
                handle.put_signal(1)  # the second one must wait until the first one is taken
            else:
                handle.wait_signal(0)
                handle.get_buffer(1, (2,), torch.int32).tolist()  # also what the first signal does not order

    with pytest.raises(RaceError, match=r"inbox\[1\]"):
        explore(program, 2, schedules=[Sequential()])


def test_a_handle_refuses_what_it_does_not_have() -> None:
    def program(memory):
        handle = TorchHandle(memory, "inbox", (2, 4), torch.float32)
        assert (handle.buffer_size, handle.signal_pad_size, handle.world_size) == (32, 9216, 1)
        with pytest.raises(ValueError, match="bytes 32 to 48 of symmetric buffer 'inbox': expected a part of its 32"):
            handle.get_buffer(0, (2, 2), torch.float32, 8)
        with pytest.raises(ValueError, match="signal 2304 of rank"):
            handle.put_signal(0, channel=2304)

    explore(program, 1, seeds=())


@triton.jit
def read_at(place):
    text: tl.constexpr = "ld.global.relaxed.sys.b32 $0, [$1];"
    tl.inline_asm_elementwise(text, "=r, l", [place], dtype=tl.int32, is_pure=False, pack=1)


def test_no_word_is_at_address_0() -> None:
    with pytest.raises(ProtocolError, match="4 bytes at address 0"):
        explore(lambda memory: read_at[(1,)](0), world=1)
