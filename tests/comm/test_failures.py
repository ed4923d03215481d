"""Ranks that are killed, stopped, late, interrupted or in another operation get a named error or the right result.

The ranks are forked, so that a test can end any of them within a second or two.
"""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests.support.forked_ranks import LIMIT, Rank, ranks
from tests.support.tiers import exhaustive
from tpfuse.comm.errors import Disagreement, PeerTimeout
from tpfuse.comm.settings import set_settings
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.comm.stacks import offered_stack
from tpfuse.kernels import signals
from tpfuse.testing.patience import patient


def connect(rank: Rank) -> SharedMemory:
    """Return a memory with a deadline that ranks on a slow machine can also meet."""
    return SharedMemory(rank.join(), patient(LIMIT))


def set_timeout(memory: SharedMemory, timeout: float) -> None:
    """Set the deadline that a test is about, for the operations that all ranks begin now. Collective."""
    memory.barrier()
    memory.timeout = memory.control.timeout = timeout


def be_patient(memory: SharedMemory) -> None:
    memory.timeout = memory.control.timeout = patient(LIMIT)


class Sum:
    """An operation in which every rank writes its number into its slot, signals, and sums over all ranks."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.slots = memory.buffer("slots", (2, 1000), torch.int64)
        self.flags = memory.signals("flags", 1)

    def __call__(self, value: int, pause: Callable[[], None] = lambda: None) -> int:
        memory, flags = self.memory, self.flags
        with memory.guard("sum"):
            epoch = int(flags.local[0]) + 1
            self.slots.local[epoch % 2].fill_(value)
            pause()
            memory.signal(flags, memory.rank, 0, epoch)
            for rank in range(memory.world):
                memory.wait_signal(flags, rank, 0, epoch, op="sum")
            total = torch.stack([peer[epoch % 2] for peer in self.slots.peers]).sum(0)
        assert bool((total == total[0]).all())
        return int(total[0])


@triton.jit
def _wait_kernel(flags_ptr, abort_ptr, out_ptr):
    heard = signals.wait_signal(flags_ptr, 1, abort_ptr)
    tl.store(out_ptr, heard.to(tl.int32))


def _spin(memory: SharedMemory) -> None:
    """Run a kernel that waits for a signal that never comes."""
    out = torch.full((1,), 7, dtype=torch.int32)
    try:
        with memory.guard("kernel", kernel=True):
            _wait_kernel[(1,)](memory.signals("never", 1).local, memory.abort, out)
    finally:
        assert int(out) == 0, "the kernel came back and said that it was told to"


def _until_somebody_dies(rank: Rank, operation: str) -> None:
    memory = connect(rank)
    memory.step = 7
    never = memory.signals("never", 1)
    rank.tell("here")
    try:
        while True:
            if operation == "barrier":
                memory.barrier()
            elif operation == "wait":
                with memory.guard("wait"):
                    memory.wait_signal(never, 1, 0, 1, op="wait")
            elif memory.rank == 1:
                time.sleep(LIMIT)
            else:
                _spin(memory)
    except PeerTimeout:
        with pytest.raises(PeerTimeout, match=r"reset, step 7: rank . waited \d+\.\d s for rank 1; .* has ended"):
            memory.reset()
        raise


@pytest.mark.parametrize("operation", ["barrier", "wait", "kernel"])
def test_a_rank_that_is_killed_is_named_at_once(operation: str, tmp_path: Path) -> None:
    with ranks(3, tmp_path, _until_somebody_dies, operation) as running:
        running.wait_for_all()
        time.sleep(0.1)  # Most ranks are in the operation by then. The test expects the same of those that are not.
        killed = running.send(1, signal.SIGKILL)
        for survivor in (0, 2):
            when, error = running.result(survivor)
            assert isinstance(error, PeerTimeout), error
            assert (error.peer, error.rank) == (1, survivor)
            assert f"its process ({running.processes[1].pid}) has ended" in str(error)
            assert (error.step, error.op) == (7, operation)
            assert str(error).startswith(f"{error.op}, step 7: rank {survivor} waited ")
            assert when - killed < LIMIT / 2, "nobody waits until the deadline"


def _sums(rank: Rank, stopped: int) -> list[int]:
    """Compute sums; one rank is stopped in the middle of the second one."""
    total = Sum(connect(rank))

    found = [total(1)]
    found.append(total(10 + rank.rank, rank.pause if rank.rank == stopped else lambda: None))
    found.append(total(100))
    return found


def test_a_rank_that_stops_for_a_while_causes_no_error(tmp_path: Path) -> None:
    with ranks(3, tmp_path, _sums, 2) as running:
        assert running.hear(2) == "here"
        running.send(2, signal.SIGSTOP)
        running.connections[2].send("go")
        assert not running.connections[0].poll(0.5), "rank 0 waits"
        continued = running.send(2, signal.SIGCONT)
        for rank in range(3):
            when, result = running.result(rank)
            assert result == [3, 33, 300]
            assert when > continued


def _stopped_too_long(rank: Rank, stopped: int, timeout: float) -> tuple[PeerTimeout, float, list[int]]:
    memory = connect(rank)
    total = Sum(memory)
    assert total(1) == 3
    set_timeout(memory, timeout)

    try:
        total(5, rank.pause if rank.rank == stopped else lambda: None)
    except PeerTimeout as error:
        caught = error
    else:
        raise AssertionError("the others have given up")
    when = time.monotonic()
    with pytest.raises(PeerTimeout):  # Until the reset no wait blocks any more.
        total(5)
    with pytest.raises(PeerTimeout):
        memory.barrier()
    rank.pause()
    be_patient(memory)
    memory.reset()
    sums = [total(10**turn * (memory.rank + 1)) for turn in range(5)]
    memory.barrier()
    return caught, when, sums


@pytest.mark.parametrize("stopped", [2, *exhaustive(0)])
def test_a_rank_that_stops_for_too_long_is_named_and_all_can_go_on(stopped: int, tmp_path: Path) -> None:
    survivors, timeout = [rank for rank in range(3) if rank != stopped], patient(1.0)
    with ranks(3, tmp_path, _stopped_too_long, stopped, timeout) as running:
        assert running.hear(stopped) == "here"
        began = running.send(stopped, signal.SIGSTOP)
        running.connections[stopped].send("go")
        for rank in survivors:
            assert running.hear(rank) == "here"
        running.send(stopped, signal.SIGCONT)
        assert running.hear(stopped) == "here"
        running.go()
        for rank in range(3):
            _, (error, when, sums) = running.result(rank)
            assert (error.op, error.peer, error.rank) == ("sum", stopped, rank)
            assert sums == [6 * 10**turn for turn in range(5)]
            if rank != stopped:
                assert 0.9 * timeout < error.waited < timeout + patient(3.0) and when - began > 0.9 * timeout
                assert f"waited {error.waited:.1f} s for rank {stopped}; process" in str(error)
                assert str(error).endswith("last seen in sum")


def _stopped_together(rank: Rank, operation: str, timeout: float) -> int:
    memory = connect(rank)
    total, flags, out = Sum(memory), memory.signals("told", 1), torch.zeros(1, dtype=torch.int32)
    set_timeout(memory, timeout)

    if operation == "sum":
        return total(memory.rank + 1, rank.pause if memory.rank == 1 else lambda: None)
    if memory.rank == 1:
        rank.pause()
        memory.signal(flags, 0, 0, 1)
        return 3
    with memory.guard("kernel", kernel=True):
        _wait_kernel[(1,)](flags.local, memory.abort, out)
    return 3 * int(out)


@pytest.mark.exhaustive
@pytest.mark.parametrize("operation", ["sum", "kernel"])
def test_a_run_whose_ranks_all_stop_goes_on(operation: str, tmp_path: Path) -> None:
    """No rank is late after Ctrl-Z and fg."""
    timeout = patient(1.5)  # more than the second that a stopwatch counts of a stop
    with ranks(2, tmp_path, _stopped_together, operation, timeout) as running:
        assert running.hear(1) == "here"
        time.sleep(0.1)  # Rank 0 waits by then, or begins to wait afterwards.
        for rank in range(2):
            running.send(rank, signal.SIGSTOP)
        time.sleep(1.5 * timeout)
        for rank in range(2):
            running.send(rank, signal.SIGCONT)
        running.connections[1].send("go")
        assert [running.result(rank)[1] for rank in range(2)] == [3, 3]


def _one_stays_away(rank: Rank, operation: str, timeout: float) -> int:
    set_settings(flight_folder=Path("/nowhere"))  # a disk that fails does not hide the error
    memory = connect(rank)
    memory.step = 7
    total = Sum(memory)
    memory.signals("never", 1)
    set_timeout(memory, timeout)
    if rank.rank == 1:
        rank.hear()
    with pytest.raises(PeerTimeout) as caught:
        if operation == "sum" or rank.rank == 1:
            total(1)
        elif operation == "kernel":
            _spin(memory)
        else:
            memory.barrier("end of the epoch")
    (note,) = caught.value.__notes__
    assert note.startswith("the flight record could not be written: ") and "nowhere" in note
    rank.tell(caught.value)
    rank.hear()
    be_patient(memory)
    memory.reset()
    memory.barrier()  # Not every rank had come to the operation before it.
    return total(memory.rank)


@pytest.mark.parametrize("operation", ["sum", "end of the epoch", *exhaustive("kernel")])
def test_a_rank_that_never_comes_is_named(operation: str, tmp_path: Path) -> None:
    timeout = patient(0.5)
    with ranks(3, tmp_path, _one_stays_away, operation, timeout) as running:
        for rank in (0, 2):
            error = running.hear(rank)
            assert isinstance(error, PeerTimeout), error
            assert (error.op, error.peer, error.rank, error.step) == (operation, 1, rank, 7)
            assert "last seen in" in str(error) and 0.9 * timeout < error.waited < timeout + patient(3.0)
        running.connections[1].send("go")
        assert running.hear(1).op == "sum"  # It comes late, and does not wait itself.
        running.go()
        assert [running.result(rank)[1] for rank in range(3)] == [3, 3, 3]


def _recorded(rank: Rank, folder: Path) -> PeerTimeout:
    set_settings(flight_folder=folder)
    memory = connect(rank)
    total = Sum(memory)
    memory.step = 3
    for _ in range(80):  # These are more than the record holds.
        total(1)
    memory.step = 4
    memory.timeout = memory.control.timeout = 0.5
    if rank.rank == 0:
        with memory.guard("sum"), offered_stack(folder):
            rank.hear()
        assert not [*folder.glob(".stack-*")]
    with pytest.raises(PeerTimeout) as caught:
        total(1)
    return caught.value


def test_the_flight_record_has_the_last_operations_of_every_rank(tmp_path: Path) -> None:
    with ranks(2, tmp_path, _recorded, tmp_path) as running:
        _, error = running.result(1)
        record = json.loads((tmp_path / "flight_record_rank1.json").read_text())
        assert record["error"] == str(error)
        assert (record["op"], record["step"], record["rank"], record["missing"]) == ("sum", 4, 1, 0)
        assert record["waited_s"] == round(error.waited, 3)
        assert [entry["rank"] for entry in record["ranks"]] == [0, 1]
        assert [entry["pid"] for entry in record["ranks"]] == [process.pid for process in running.processes]
        assert not any(entry["ended"] for entry in record["ranks"])
        assert "in hear" in record["ranks"][0]["stack"] and "in _recorded" in record["ranks"][0]["stack"]
        assert record["ranks"][0]["state"].startswith("S") and record["ranks"][1]["stack"] == "", "it offers none"
        other, mine = (entry["operations"] for entry in record["ranks"])
        assert other[-1]["operation"] == mine[-1]["operation"] == "sum"
        assert [entry["number"] for entry in mine] == list(range(20, 84))
        assert all(entry["ended_ns"] > entry["begun_ns"] > 0 for entry in mine[:-1])
        assert other[-1]["ended_ns"] == mine[-1]["ended_ns"] == 0
        assert str(error).endswith("last seen in sum")
        running.connections[0].send("go")
        assert isinstance(running.result(0)[1], PeerTimeout)


def _fingerprints(rank: Rank) -> list[str]:
    set_settings(fingerprint=True)
    memory = connect(rank)
    with memory.guard("all_gather float32 (4,)"):
        pass
    with pytest.raises(Disagreement) as caught, memory.guard(f"all_gather float32 ({4 + rank.rank // 2},)"):
        raise AssertionError("the operation must not begin")
    with memory.guard("all_gather float32 (8,)"):
        pass
    return [str(caught.value)]


def test_fingerprints_name_both_operations_of_a_disagreement(tmp_path: Path) -> None:
    with ranks(3, tmp_path, _fingerprints) as running:
        for rank in range(3):
            others, size, own = ((0, 1), 4, 5) if rank == 2 else ((2,), 5, 4)  # rank 2 may see either of them first
            ours = f"rank {rank} runs all_gather float32 ({own},)"
            expected = [f"operation 2: rank {other} runs all_gather float32 ({size},), {ours}" for other in others]
            (found,) = running.result(rank)[1]
            assert found in expected


def _interrupted(rank: Rank, operation: str) -> str:
    memory = connect(rank)
    never = memory.signals("never", 1)
    out = torch.zeros(1, dtype=torch.int32)
    if operation == "kernel":  # Triton's first launch imports: an interrupted import may end in RuntimeError
        _wait_kernel[(1,)](torch.ones(1, dtype=torch.int32), memory.abort, out)
    try:
        rank.tell("here")
        if operation == "kernel":
            with memory.guard("kernel", kernel=True):
                _wait_kernel[(1,)](never.local, memory.abort, out)
        elif operation == "wait":
            with memory.guard("wait"):
                memory.wait_signal(never, memory.rank, 0, 1, op="wait")
        elif rank.rank == 1:
            with memory.guard("barrier"):  # The rank never comes to it.
                time.sleep(LIMIT)
        else:
            memory.barrier()
    except KeyboardInterrupt:
        rank.tell(("interrupted", time.monotonic()))
        rank.hear()  # A rank that ends would end the others' waits.
        with memory.guard("the next operation"):
            return "free again"
    return "not interrupted"


@pytest.mark.parametrize("operation", ["wait", "barrier", "kernel"])
def test_control_c_ends_a_wait(operation: str, tmp_path: Path) -> None:
    with ranks(2, tmp_path, _interrupted, operation) as running:
        running.wait_for_all()
        time.sleep(0.1)  # Most ranks wait by then. The others begin to wait, and are interrupted too.
        sent = [running.send(rank, signal.SIGINT) for rank in range(2)]
        for rank in range(2):
            kind, when, *rest = running.hear(rank)
            assert kind == "interrupted" and when - sent[rank] < LIMIT / 2, rest
        running.go()
        assert [running.result(rank)[1] for rank in range(2)] == ["free again", "free again"]
