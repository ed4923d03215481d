"""`CudaMemory` on CPU ranks, with a replacement of CUDA. test_cuda_ranks.py tests it on a GPU."""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.comm.symmetric_memories import check_buffers, check_names, check_ring, ring
from tests.support.cuda_stand_in import StandIn
from tpfuse.comm import stream_watchdog
from tpfuse.comm.collectives.fused import open_channel
from tpfuse.comm.cuda_memory import CudaMemory
from tpfuse.comm.dispatch import connected, symmetric_memory
from tpfuse.comm.errors import Disagreement, PeerTimeout, Unavailable
from tpfuse.comm.settings import FIRST_WAIT, set_settings
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.comm.symmetric_memory import SymmetricBuffer
from tpfuse.testing.patience import patient, wait_until
from tpfuse.testing.ranks import on_ranks

PLENTY = 60.0  # seconds, in which every operation ends that has no reason to wait


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _memory() -> tuple[CudaMemory, StandIn]:
    calls = StandIn(_group())
    return CudaMemory(_group(), torch.device("cpu"), PLENTY, calls), calls


def _set_timeout(memory: CudaMemory, seconds: float = PLENTY) -> None:
    memory.timeout = memory.control.timeout = seconds


@on_ranks(3)
def test_buffers_begin_at_their_offset() -> None:
    with torch.inference_mode():  # as where the first operator of a group samples a text
        memory, _ = _memory()
    memory.abort.zero_()
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.uint8, torch.bool, torch.complex128)
    check_buffers(memory, dtypes)
    check_names(memory)
    with pytest.raises(Disagreement, match=r"rank \d runs buffer 'y' .*, rank \d runs buffer 'y' "):
        memory.buffer("y", (1 + memory.rank,), torch.int32)


@pytest.mark.parametrize(("world", "rounds", "first"), [(2, 200, 0), (3, 50, 2**31 - 20)])
@on_ranks("world")
def test_signals_order_copies_on_streams(rounds: int, first: int) -> None:
    """The stream does the copies and signals of all rounds; the host reads the results afterwards."""
    memory, calls = _memory()
    out = ring(memory, rounds, first, calls.do)
    calls.synchronize()
    check_ring(memory, out)


def _never(memory: CudaMemory, flags: SymmetricBuffer, peer: int | None = None) -> None:
    with memory.guard("operation", peer=peer):
        memory.wait_signal(flags, memory.rank, 0, 1, op="its wait")


def _signal_each_other(memory: CudaMemory, flags: SymmetricBuffer, epoch: int) -> None:
    with memory.guard("operation"):
        memory.signal(flags, 1 - memory.rank, 0, epoch)
        memory.wait_signal(flags, memory.rank, 0, epoch, op="operation")


@pytest.mark.parametrize(
    ("op", "peer"),
    [("operation", None), ("operation", 1), ("its wait", None)],
    ids=["in an operation of all ranks", "in an operation of two ranks", "outside of operations"],
)
@on_ranks(2)
def test_a_wait_on_a_stream_ends_and_is_raised_later(op: str, peer: int | None, tmp_path: Path) -> None:
    """The host goes on; the kernel returns at the deadline, and the next check raises. No rank begins anything then."""
    set_settings(flight_folder=tmp_path)
    memory, calls = _memory()
    memory.step = 3
    flags = memory.signals("flags", 1)
    _set_timeout(memory, patient(0.2))
    limit, started = FIRST_WAIT * memory.timeout, time.monotonic()
    if memory.rank == 0:
        if op == "operation":
            _never(memory, flags, peer)
        else:
            memory.wait_signal(flags, memory.rank, 0, 1, peer=1, op=op)
        assert time.monotonic() - started < limit, "the host goes on, and does not wait"
        memory.check()
        calls.synchronize()  # The kernel returns.
        assert time.monotonic() - started > 0.8 * limit and calls.rung == 1 and int(memory.abort) == 1
        with pytest.raises(PeerTimeout, match=rf"^{op}, step 3: rank 0 waited \d+\.\d s for rank 1; ") as caught:
            memory.check()
        assert (caught.value.op, caught.value.peer) == (op, 1)
        record = json.loads((tmp_path / "flight_record_rank0.json").read_text())
        assert (record["op"], record["missing"]) == (op, 1)
    else:
        wait_until(lambda: memory.control.aborted, "rank 0 tells this rank to stop waiting")
    for _ in range(2):
        with pytest.raises(PeerTimeout), memory.guard("the next one"):
            raise AssertionError("must not begin")
    with pytest.raises(PeerTimeout):
        memory.wait_signal(flags, memory.rank, 0, 1, op="another one")
    set_settings(flight_folder=None)
    _set_timeout(memory)
    memory.reset()
    assert int(memory.abort) == 0 and flags.local.tolist() == [0], "a reset lets all ranks begin again"
    memory.barrier()
    memory.check()
    _signal_each_other(memory, flags, 1)
    calls.synchronize()
    memory.check()
    memory.barrier()


@on_ranks(2)
def test_first_waits_may_take_longer() -> None:
    """Each operation, the messages of each peer and each buffer have one, since other ranks may compile kernels."""
    memory, calls = _memory()
    flags = memory.signals("flags", 1)
    every: tuple[tuple[str, int | None], ...]
    every = ("a", None), ("a", None), ("b", None), ("message 0", 1), ("message 1", 1), ("a", 0), ("b", None)
    with mock.patch.object(memory._on_streams, "add") as added:
        for op, peer in every:
            with memory.guard(op, peer=peer):
                pass
        for _ in range(2):
            memory.wait_signal(flags, memory.rank, 0, 0, op="wait")
    assert [call.args[0].patience for call in added.mock_calls] == [3.0, 1.0, 3.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0]
    calls.synchronize()
    limits = [patient(0.6)]  # which differs from rank to rank on a machine that slows down
    dist.broadcast_object_list(limits, src=0)
    _set_timeout(memory, limits[0])
    if memory.rank == 1:
        time.sleep(1.5 * memory.timeout)
    memory.buffer("late", (1,), torch.int32)
    assert memory.control.timeout == memory.timeout
    _set_timeout(memory)
    memory.barrier()


@on_ranks(2)
def test_a_kernel_that_heeds_no_alarm_ends_the_process() -> None:
    """Its operation had one deadline to end by itself and has another one after the alarm."""
    memory, calls = _memory()
    _set_timeout(memory, limit := patient(0.3))
    ended, ends, started = threading.Event(), list[str](), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_watchdog, "end_process", ends.append)
        patch.setattr(stream_watchdog, "LEAST_PATIENCE", 0.0)
        with memory.guard("torch's operator"):
            calls.do(ended.wait)
        wait_until(lambda: bool(ends), "the watchdog ends the process")
        assert time.monotonic() - started > 1.6 * limit and calls.rung == 1
        ended.set()
        calls.synchronize()
    assert ends[0] == f"rank {memory.rank}: torch's operator does not heed the alarm"
    _set_timeout(memory)
    memory.reset()


@on_ranks(2)
def test_one_rank_that_gives_up_ends_the_waits_of_all() -> None:
    """Rank 0 gives up. Rank 1's kernel, which has begun before and would wait for long, ends as well."""
    memory, calls = _memory()
    flags = memory.signals("flags", 1)
    with memory.guard("operation"):
        pass  # so that the next one is not the first
    if memory.rank == 1:
        _never(memory, flags)
    dist.barrier()
    if memory.rank == 0:
        _set_timeout(memory, 0.4)
        _never(memory, flags)
    calls.synchronize()
    with pytest.raises(PeerTimeout) as caught:
        memory.check()
    assert caught.value.rank == memory.rank and caught.value.op == "operation"
    _set_timeout(memory)
    memory.reset()
    memory.barrier()


@on_ranks(2)
def test_a_deadline_begins_when_its_operation_begins() -> None:
    """The stream's work before an operation does not count. Both ranks' streams begin the operation together."""
    memory, calls = _memory()
    flags, ready = memory.signals("flags", 1), memory.buffer("ready", (1,), torch.int32)
    with memory.guard("operation"):
        pass  # so that the next one is not the first
    _set_timeout(memory, limit := patient(0.3))

    def work() -> None:
        time.sleep(1.5 * limit)
        ready.local.fill_(1)
        wait_until(lambda: all(int(peer) for peer in ready.peers), "the other rank's stream is here")

    calls.do(work)
    _signal_each_other(memory, flags, 1)
    calls.synchronize()
    memory.check()
    _set_timeout(memory)
    memory.barrier()


@on_ranks(2)
def test_a_rank_that_has_left_ends_waits_on_streams_at_once() -> None:
    memory, calls = _memory()
    flags = memory.signals("flags", 1)
    dist.barrier()  # Otherwise rank 1 may leave while rank 0 is still in `signals`.
    if memory.rank == 0:
        wait_until(lambda: memory.control.has_left(1), "rank 1 is in its reset")
        with pytest.raises(PeerTimeout) as caught:
            _never(memory, flags)  # raises it if the watchdog has looked before the guard ends
            calls.synchronize()
            memory.check()
        assert caught.value.peer == 1 and caught.value.waited < memory.timeout / 2
    memory.reset()


@on_ranks(2)
def test_an_operation_that_raises_is_still_watched() -> None:
    """Another error in an operation is not hidden, and the operation's work on the stream is still watched."""
    memory, calls = _memory()
    flags = memory.signals("flags", 1)
    with memory.guard("operation"):
        pass  # so that the next one is not the first
    if memory.rank == 0:
        _set_timeout(memory, 0.4)
        with pytest.raises(KeyError), memory.guard("operation"):
            memory.wait_signal(flags, memory.rank, 0, 1, op="its wait")
            raise KeyError
        calls.synchronize()
        with pytest.raises(PeerTimeout):
            memory.check()
        _set_timeout(memory)
    else:
        wait_until(lambda: memory.control.aborted, "rank 0 tells this rank to stop waiting")
    memory.reset()


@on_ranks(2)
def test_the_second_of_two_streams_waits_for_the_first() -> None:
    memory, calls = _memory()
    done: list[str] = []

    def operation(stream: str, seconds: float, name: str) -> None:
        calls.use(stream)
        with memory.guard(name):
            calls.do(lambda: time.sleep(seconds))
            calls.do(lambda: done.append(name))

    operation("a", 0.2, "first")
    operation("a", 0.0, "second")
    assert calls.waits == 0
    operation("b", 0.0, "third")
    operation("a", 0.0, "fourth")
    assert calls.waits == 2
    calls.synchronize()
    assert done == ["first", "second", "third", "fourth"]
    memory.barrier()


@on_ranks(2)
def test_work_beside_a_stream_waits_for_it_and_is_joined() -> None:
    """It does not run on the stream, which goes on without it, and where ranks share a GPU it does not run at all."""
    memory, calls = _memory()
    done, go_on = list[str](), threading.Event()

    def work() -> None:
        with memory.guard("beside"):
            calls.do(lambda: done.append("begun"))
            calls.do(go_on.wait)
            calls.do(lambda: done.append("work"))

    calls.do(lambda: time.sleep(0.1))
    calls.do(lambda: done.append("before"))
    end = memory.beside(work)
    calls.do(lambda: done.append("meanwhile"))
    calls.do(go_on.set)
    memory.join(end)
    calls.do(lambda: done.append("joined"))
    calls.synchronize()
    memory.check()
    assert end is not None and done[0] == "before"
    done.remove("begun")  # before, during or after what runs meanwhile
    assert done == ["before", "meanwhile", "work", "joined"]
    calls.capture = True
    assert memory.beside(work) is None
    calls.capture = False
    shared = CudaMemory(_group(), torch.device("cpu"), 60.0, StandIn(_group(), gpu="the only one"))
    assert shared.beside(work) is None
    memory.barrier()


@on_ranks(2)
def test_nothing_is_recorded_while_a_graph_is_captured() -> None:
    memory, calls = _memory()
    flags = memory.signals("flags", 1)
    _signal_each_other(memory, flags, 1)
    calls.synchronize()
    events = calls.events
    calls.capture = True
    calls.use("capturing")
    for _ in range(2):
        _signal_each_other(memory, flags, 2)
    memory.wait_signal(flags, memory.rank, 0, 1, op="test")
    memory.check()
    with pytest.raises(
        RuntimeError, match="symmetric buffer 'new' is requested while a graph is captured: request it before"
    ):
        memory.buffer("new", (1,), torch.int32)
    with pytest.raises(RuntimeError, match="barrier: the host cannot wait in a barrier while a graph is captured"):
        memory.barrier()
    calls.use("another one")
    with pytest.raises(RuntimeError, match="operation: the graph captures a second stream of the group"):
        _signal_each_other(memory, flags, 2)
    calls.capture = False
    assert calls.events == events
    memory.check()
    calls.capture = True
    _signal_each_other(memory, flags, 2)
    calls.capture = False
    assert calls.waits == 0
    _signal_each_other(memory, flags, 2)
    assert calls.waits == 1  # It waits for the last operation that ran.
    calls.synchronize()
    memory.barrier()


ONE = {"gpu": "the only one", "overlapping_allowed": False}
MPS = {"gpu": "the only one", "shared_by_mps": True}


@pytest.mark.parametrize(
    ("answers", "numbers", "message"),
    [
        pytest.param({1: {"why_not": "torch 2.1 has no symmetric memory"}}, (0, 1, 2),
                     "rank 1: torch 2.1 has no symmetric memory", id="missing"),
        pytest.param({2: {"blind": "gpu 0"}}, (0, 1, 2),
                     "there is no peer access between the GPUs of rank 2 (cuda:2) and rank 0 (cuda:0)", id="blind"),
        pytest.param(dict.fromkeys(range(3), ONE), (0, 0, 0),
                     "rank 0 (cuda:0) and rank 1 (cuda:0) are on one GPU: torch refuses that without ", id="one GPU"),
        pytest.param(dict.fromkeys(range(3), MPS), (0, 0, 0),
                     "rank 0 (cuda:0) and rank 1 (cuda:0) are on one GPU under MPS: waiting kernels of one would ",
                     id="MPS"),
        pytest.param(dict.fromkeys(range(3), ONE), (0, 1, 2),
                     "rank 0 (cuda:0) and rank 1 (cuda:1) are on one GPU: torch refuses that without ",
                     id="one GPU of several numbers"),
        pytest.param({1: {"model": "H200"}}, (0, 1, 2),
                     "rank 0 (cuda:0) and rank 1 (cuda:1) have GPUs of two models, the one model and H200: ",
                     id="two models"),
        pytest.param({1: {"socket_folder": "/scratch"}}, (0, 1, 2),
                     "rank 0 (cuda:0) and rank 1 (cuda:1) have torch's sockets in /tmp and /scratch: set TMPDIR to one",
                     id="two folders"),
    ],
)  # fmt: skip
@on_ranks(3)
def test_every_rank_gets_the_reason_why_gpus_cannot_share_memory(
    answers: dict[int, dict[str, Any]], numbers: tuple[int, ...], message: str
) -> None:
    """answers: what differs on a rank from a healthy machine; numbers: of the GPUs, as each rank sees its own."""
    rank = dist.get_rank()
    calls = StandIn(_group(), **answers.get(rank, {}))
    calls.device = torch.device("cuda", numbers[rank])
    with pytest.raises(Unavailable, match=f"^{re.escape(message)}"):
        CudaMemory(_group(), calls.device, 10.0, calls)


@on_ranks(2)
def test_ranks_that_share_a_gpu_start_fewer_programs() -> None:
    for answers, programs in (({"gpu": "the only one"}, 32), ({}, 132)):
        memory = CudaMemory(_group(), torch.device("cpu"), 60.0, StandIn(_group(), **answers))
        assert open_channel(memory, "channel", 16, 132)[1].programs == programs
        assert open_channel(memory, "small", 16, 8)[1].programs == 8


@on_ranks(2)
def test_ranks_that_leave_different_numbers_of_multiprocessors_disagree() -> None:
    """One rank has a reducer with NCCL; otherwise its programs would be waited for in vain."""
    memory, _ = _memory()
    programs = 132 - 16 * memory.rank
    with pytest.raises(Disagreement, match=f"rank {memory.rank} would start {programs} programs"):
        open_channel(memory, "channel", 16, programs)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("allocate", "rank 1: {} bytes of GPU memory for {} cannot be allocated: CUDA out of memory."),
        ("rendezvous", "rank 1: GPU memory for {1} cannot be shared: CUDA driver error: invalid device ordinal"),
    ],
)
@on_ranks(2)
def test_memory_that_one_rank_cannot_share_is_refused_on_all(where: str, message: str) -> None:
    """Ranks try it when they connect, and have a reason to communicate in another way."""
    memory, calls = _memory()
    if memory.rank == 1:
        calls.fails.add(where)
    with pytest.raises(Unavailable, match=f"^{message.format(2**17, 'x')}"):
        memory.buffer("x", (2**15,), torch.float32)
    with pytest.raises(Unavailable, match=f"^{message.format(2**20, 'signals')}"):
        CudaMemory(_group(), torch.device("cpu"), 60.0, calls)
    calls.fails.clear()
    memory.buffer("x", (2**15,), torch.float32)


@on_ranks(2)
def test_small_buffers_share_an_allocation() -> None:
    """Each allocation takes a rendezvous. What is freed is used again, zeroed, when all ranks have freed it."""
    memory, calls = _memory()

    def first_bytes() -> dict[str, int]:
        return {key: int(x.addresses[memory.rank]) - calls.live[0][0].data_ptr() for key, x in memory._buffers.items()}

    sizes = {"flags": 2112, "state": 2, "words": 9, "empty": 0}
    for key, count in sizes.items():
        memory.signals(key, count)
    assert len(calls.live) == 1
    assert first_bytes() == {"flags": 0, "state": 8448, "words": 8576, "empty": 8704}, "lines of 128 bytes"
    for peer, x in enumerate(memory._buffers["state"].peers):
        x[memory.rank] = 7 + peer
    memory.barrier()
    assert memory._buffers["state"].local.tolist() == [7 + memory.rank] * 2
    assert not memory._buffers["flags"].local.any() and not memory._buffers["words"].local.any()
    memory.free("state")
    assert not memory.buffer("three words", (33,), torch.int32).local.any()
    assert not memory.signals("two words", 2).local.any(), "zeroed again"
    assert first_bytes() == {"flags": 0, "words": 8576, "empty": 8704, "three words": 8832, "two words": 8448}
    for number in range(20):
        memory.buffer(f"large {number}", (2**14,), torch.int32)
    assert len(calls.live) == 2, "the first allocation is full"
    memory.buffer("larger", (2**14 + 1,), torch.int32)
    assert len(calls.live) == 3 and len(memory._allocations) == 3
    for number in range(15, 20):
        memory.free(f"large {number}")
    memory.free("larger")
    assert len(memory._allocations) == 1, "an allocation is freed with its last buffer"
    with pytest.raises(Disagreement, match=r"buffer 'x' .* at 0, (0,.* at 0, 992128|992128,.* at 0, 0$)"):
        if memory.rank == 1:  # as after an error that only this rank has raised
            memory._allocations[0].places.clear()
        memory.buffer("x", (1,), torch.int32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine without GPUs")
@on_ranks(2)
def test_connect_gives_the_reason_why_there_is_no_memory() -> None:
    no_gpu = "^rank 0: there is no GPU that this torch can use$"
    for device, reason in (("cuda:0", no_gpu), ("cuda:0", no_gpu), ("meta", "^tensors on meta: expected a CPU or a C")):
        with pytest.raises(Unavailable, match=reason):
            symmetric_memory(_group(), torch.device(device))
    memory = symmetric_memory(_group(), torch.device("cpu"))
    assert memory is symmetric_memory(_group(), torch.device("cpu")) and memory in connected()
    assert isinstance(memory, SharedMemory)
