"""Symmetric memory between CPU ranks, and of one rank alone. test_failures.py tests ranks that fail."""

import gc
import os
import random
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.comm.symmetric_memories import check_buffers, check_names, check_ring, ring
from tests.support.tiers import exhaustive
from tpfuse.comm import rank_state, shared_memory
from tpfuse.comm.channel import slot_size
from tpfuse.comm.errors import Disagreement, Unavailable
from tpfuse.comm.shared_memory import LocalMemory, SharedMemory
from tpfuse.testing.patience import patient
from tpfuse.testing.ranks import on_ranks

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def _memory(timeout: float = 60.0) -> SharedMemory:
    group = dist.group.WORLD
    assert group is not None
    return SharedMemory(group, timeout)


@pytest.mark.parametrize("world", [1, 3])
@on_ranks("world")
def test_every_rank_reads_and_writes_every_ranks_part() -> None:
    check_buffers(_memory(), DTYPES)


@on_ranks(2)
def test_a_name_has_one_shape_and_dtype_until_it_is_freed() -> None:
    memory = _memory()
    check_names(memory)
    floats = memory.buffer("floats", (2,), torch.float32)
    floats.local.fill_(3.0)
    memory.reset()
    assert floats.local.tolist() == [3.0, 3.0]  # A reset sets only signals to 0.


def test_slots_grow_in_quarters_of_a_power_of_two() -> None:
    small = 2**16
    assert [slot_size(nbytes) for nbytes in (0, 1, small, small + 1)] == [small, small, small, 5 * small // 4]
    sizes = sorted({slot_size(nbytes) for nbytes in range(2**20, 2**21 + 1, 63)})
    assert sizes == [2**18 * quarters for quarters in range(4, 9)]
    for nbytes in (small + 2**13 + 1, 3 * 2**20, 2**30 - 1, 2**30):  # the largest is the limit of endpoints
        size = slot_size(nbytes)
        assert nbytes <= size < 1.25 * nbytes and size % 2**13 == 0 and slot_size(size) == size <= 2**30


def _open() -> tuple[int, int]:
    gc.collect()
    own = Path("/proc/self/maps").read_text().count("memfd:tpfuse buffer")  # buffers of earlier tests may be freed
    return len(list(Path("/proc/self/fd").iterdir())), own


@on_ranks(2)
def test_buffers_leave_nothing_open() -> None:
    memory = _memory()
    before = _open()
    for number in range(20):
        memory.buffer(f"buffer{number}", (number, 100), torch.float32)
        if number % 10 == 0:
            memory.signals(f"buffer flags{number}", 5)
            memory.signal(memory.signals(f"buffer flags{number}", 5), 0, 1, 1)
    descriptors, mappings = _open()
    assert (descriptors, mappings) == (before[0], 22 * memory.world), (descriptors, mappings, before)
    for number in range(20):
        memory.free(f"buffer{number}")
        if number % 10 == 0:
            memory.free(f"buffer flags{number}")
    assert _open() == before


@pytest.mark.parametrize("world", [1, 3])
@on_ranks("world")
def test_signals_set_and_order_words() -> None:
    memory = _memory()
    flags = memory.signals("flags", 3)
    assert flags.local.tolist() == [0, 0, 0] and flags.dtype == torch.int32
    memory.barrier()
    right = (memory.rank + 1) % memory.world
    memory.signal(flags, right, 2, 5)
    memory.wait_signal(flags, memory.rank, 2, 5, peer=memory.rank - 1, op="test")
    memory.wait_signal(flags, memory.rank, 2, 3, op="an earlier value is enough")
    assert flags.local.tolist() == [0, 0, 5]
    memory.barrier()
    memory.reset()
    assert flags.local.tolist() == [0, 0, 0] and memory.generation == 1


@pytest.mark.parametrize(("world", "rounds"), [(3, 500), *exhaustive((2, 2000), (4, 2000))])
@on_ranks("world")
def test_data_is_there_when_its_signal_is(rounds: int) -> None:
    """Ranks are late at random."""
    memory, late = _memory(), random.Random(dist.get_rank())
    check_ring(memory, ring(memory, rounds, 0, pause=lambda: time.sleep(max(0.0, late.random() - 0.98) / 10)))


@pytest.mark.parametrize("first", [2**31 - 100, 2**32 - 100])
@on_ranks(2)
def test_signals_may_wrap_around(first: int) -> None:
    memory = _memory()
    check_ring(memory, ring(memory, 200, first))


@on_ranks(2)
def test_an_allocation_within_an_operation_raises_the_disagreement_that_the_watchdog_has_found() -> None:
    memory = _memory()
    memory.barrier()
    begun = memory.control.local.begun + 1
    others = f"rank {1 - memory.rank} runs operation {1 - memory.rank}, rank {memory.rank} runs operation {memory.rank}"
    with pytest.raises(Disagreement, match=others), memory.guard(f"operation {memory.rank}"):
        while any(state.begun < begun for state in memory.control.states):
            time.sleep(0.001)
        memory.control.stop_if_others_differ()
        memory.buffer("within", (3,), torch.float32)
    memory.buffer("after", (3,), torch.float32)


@on_ranks(3)
def test_all_ranks_get_both_sides_of_a_disagreement() -> None:
    memory = _memory()
    last = memory.rank == memory.world - 1
    sides = [
        (("x", (3, 2), torch.float32), ("x", (2, 3), torch.float32)),
        (("x", (2, 3), torch.float32), ("x", (2, 3), torch.int32)),
        (("x", (2, 3), torch.float32), ("y", (2, 3), torch.float32)),
    ]
    for both in sides:
        with pytest.raises(Disagreement) as caught:
            memory.buffer(*both[last])
        first, other = (f"buffer {key!r} {dtype} {shape}" for key, shape, dtype in both)
        # Rank 2 names the one of the others that it compared with first.
        others = tuple(f"rank {rank} runs {first}, rank 2 runs {other}" for rank in (0, 1))
        told = others if last else (f"rank 2 runs {other}, rank {memory.rank} runs {first}",)
        assert str(caught.value).endswith(told)
    with pytest.raises(Disagreement, match="runs a, rank . runs b" if not last else "runs b, rank 2 runs a"):
        memory.barrier("a" if last else "b")
    memory.buffer("x", (2, 3), torch.float32)


@on_ranks(2)
def test_two_threads_in_one_group_are_refused() -> None:
    memory = _memory()
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with memory.guard("first"):
            inside.set()
            leave.wait(patient(60.0))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(patient(60.0))
    with pytest.raises(RuntimeError, match="second: another operation of this group is under way in another thread"):
        memory.guard("second").__enter__()
    leave.set()
    thread.join()
    with memory.guard("third"):
        pass
    with pytest.raises(KeyError), memory.guard("fourth"):
        raise KeyError
    with memory.guard("fifth"):
        pass


@on_ranks(2)
def test_nothing_is_in_dev_shm() -> None:
    memory = _memory()
    buffer = memory.buffer("x", (1000,), torch.float32)
    check_ring(memory, ring(memory, 50, 0))
    links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    assert buffer.local.shape == (1000,)
    places = [*links, *Path("/proc/self/maps").read_text().split()]
    # Python's locks between processes, which an earlier test of the same ranks may have made, are sem.* there.
    assert not [place for place in places if "/dev/shm" in place and "/dev/shm/sem." not in place]


@pytest.mark.parametrize(
    ("function", "ranks"),
    [("posix_fallocate", (2,)), ("_map", (0,)), *exhaustive(("memfd_create", (0,)), ("_map", (2,)))],
)
@on_ranks(3)
def test_no_memory_on_one_rank_is_reported_on_all(function: str, ranks: tuple[int, ...]) -> None:
    memory = _memory()
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    for rank in ranks:
        before, message = (
            _open(),
            f"^rank {rank}: 400 bytes of shared memory for x cannot be .*No space left on device$",
        )
        with pytest.MonkeyPatch.context() as patch:
            if memory.rank == rank:
                patch.setattr(rank_state if function == "_map" else os, function, full)
            with pytest.raises(Unavailable, match=message) as caught:
                memory.buffer("x", (100,), torch.float32)
        del caught  # Its traceback keeps what was open.
        assert _open() == before
        assert memory.buffer("x", (100,), torch.float32).local.shape == (100,)  # The next attempt may succeed.
        memory.free("x")


@on_ranks(2)
def test_a_request_for_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(Unavailable, match=f"'weights' takes {2**53} bytes on each of 2 ranks; this machine has "):
        _memory().buffer("weights", (2**50,), torch.float64)


def test_a_memory_of_one_rank_needs_no_peer() -> None:
    memory = LocalMemory(torch.device("cpu"))
    assert (memory.rank, memory.world, memory.backend) == (0, 1, "local")
    check_buffers(memory, DTYPES)
    check_names(memory)
    flags = memory.signals("more flags", 2)
    with memory.guard("test"):
        memory.signal(flags, 0, 1, 2**31 + 5)
        memory.wait_signal(flags, 0, 1, 2**31 + 5, op="test")
        memory.signal(flags, 0, 0, torch.tensor([7], dtype=torch.int32))
        memory.wait_signal(flags, 0, 0, 7, op="test")
    memory.barrier()
    memory.check()
    memory.reset()
    assert not flags.local.any() and int(memory.abort) == 0


def test_the_available_memory_is_not_checked_for_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 2**30)
    shared_memory._check_available("x", 2**29, 2)
    with pytest.raises(Unavailable, match=r"on each of 2 ranks; this machine has 1073741824 left"):
        shared_memory._check_available("x", 2**29 + 1, 2)
    monkeypatch.setattr(shared_memory, "available_memory", lambda: None)
    shared_memory._check_available("x", 2**60, 2)
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 1 // 0)
    shared_memory._check_available("x", 2**20, 8)
