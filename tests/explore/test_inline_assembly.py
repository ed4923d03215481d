"""Kernels that signal by inline assembly, as other projects write them, and torch's handle of symmetric memory."""

from contextlib import contextmanager

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
)
from tpfuse.explore.ptx import Kernel, compiled, ranks

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

    explore(program, 2)


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
        explore(program, 3)
    else:
        with pytest.raises(RaceError, match=fault):
            explore(program, 3)


def test_a_loop_whose_signal_does_not_come_is_a_deadlock() -> None:
    def program(memory):
        handle, out = TorchHandle(memory, "slots", (1,), torch.int32), torch.zeros(1, dtype=torch.int32)
        nothing = "mov.u32 $0, 0;"
        ring_kernel[(1,)](handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, memory.rank, 2, nothing, LOAD)

    with pytest.raises(DeadlockError, match=r"waits at .*inline_asm_elementwise\(\n +slots's signal pad\[0\] .* is 0"):
        explore(program, 2, seeds=())


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
