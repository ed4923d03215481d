"""Ranks in one process on a CPU: their signals and barriers, and that every wait ends."""

import threading
import time

import pytest
import torch

from tpfuse.comm.collectives.fused import FusedCollectives
from tpfuse.comm.errors import PeerTimeout
from tpfuse.explore import SimulatedMemory, explore
from tpfuse.testing.one_process import OneProcess, OneProcessMemory, set_epochs
from tpfuse.testing.patience import patient

CPU = torch.device("cpu")


def test_ranks_at_once_exchange_by_signals_and_barriers() -> None:
    def program(memory: OneProcessMemory) -> list[float]:
        x, flags = memory.buffer("x", (3,), torch.float32), memory.signals("flags", 1)
        x.local.fill_(memory.rank)
        left, right = (memory.rank - 1) % memory.world, (memory.rank + 1) % memory.world
        with memory.guard("operation"):
            memory.signal(flags, right, 0, 2**31)
            memory.wait_signal(flags, memory.rank, 0, 2**31, peer=left, op="operation")
        found = [float(x.peers[left][0])]
        memory.barrier()
        memory.free("x")
        assert not memory.buffer("x", (7,), torch.int32).local.any(), "a new buffer of the same name"
        memory.reset()
        assert int(flags.local) == 0
        return found

    assert OneProcess(3, CPU).at_once(program) == [[2.0], [0.0], [1.0]]


def test_every_thread_has_multiplied_before_a_program_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may wait for kernels to end before it makes a thread's handle of cuBLAS."""
    threads = set()

    def multiply(x: torch.Tensor, y: torch.Tensor) -> None:
        time.sleep(0.05 * len(threads))
        threads.add(threading.get_ident())

    monkeypatch.setattr(torch, "mm", multiply)
    found = OneProcess(3, CPU).at_once(lambda memory: (len(threads), threading.get_ident() in threads))
    assert found == [(3, True)] * 3


def test_a_rank_that_raises_ends_the_waits_of_the_others() -> None:
    def program(memory: OneProcessMemory) -> None:
        flags = memory.signals("flags", 1)
        if memory.rank == 1:
            raise KeyError("a message of its own")
        if memory.rank == 0:
            memory.barrier()
        memory.wait_signal(flags, memory.rank, 0, 1, op="operation")

    ranks, started = OneProcess(3, CPU), time.monotonic()
    with pytest.raises(KeyError, match="a message of its own") as caught:
        ranks.at_once(program)
    assert caught.value.__notes__ == ["rank 1 of 3"] and time.monotonic() - started < patient(20.0)
    ranks.reset()
    assert ranks.at_once(lambda memory: memory.barrier()) == [None] * 3


def test_a_missing_rank_causes_a_time_out() -> None:
    def program(memory: OneProcessMemory) -> None:
        if memory.rank == 0:
            memory.wait_signal(memory.signals("flags", 1), 0, 0, 1, peer=1, op="operation")

    ranks = OneProcess(2, CPU)
    ranks.timeout = 0.2
    with pytest.raises(PeerTimeout, match=r"operation: rank 0 waited 0\.2 s"):
        ranks.at_once(program)
    with pytest.raises(PeerTimeout, match=r"after: rank 0 waited 0\.2 s"), ranks.memories[0].guard("after"):
        pass


def test_signal_ahead_satisfies_every_wait_and_other_waits_time_out() -> None:
    def program(memory: OneProcessMemory) -> torch.Tensor:
        out = torch.empty(3, 4, dtype=torch.int64)
        collectives.all_gather(torch.arange(4), out)
        return out

    ranks = OneProcess(3, CPU)
    with ranks.aborted():
        collectives = ranks.alone(1, FusedCollectives)
    for epoch in (0, 2**31 - 2):
        ranks.reset()
        set_epochs(ranks.memories[1], epoch)
        ranks.signal_ahead(1)
        for _ in range(3):
            assert ranks.alone(1, program)[1].tolist() == [0, 1, 2, 3]
    ranks.reset()
    ranks.timeout = 0.5
    with pytest.raises(PeerTimeout, match="rank 1 waited"):
        ranks.alone(1, program)


def test_epochs_of_every_channel_can_be_set() -> None:
    """The other ranks wait for ever if the epochs of one rank are not set."""

    def program(memory: SimulatedMemory, late: int = -1) -> None:
        collectives = FusedCollectives(memory)
        memory.barrier()
        if memory.rank != late:
            set_epochs(memory, 2**31 - 2)
        memory.barrier()
        out = torch.empty(2, 4, dtype=torch.int64)
        for _ in range(3):
            collectives.all_gather(torch.full((4,), memory.rank), out)
            assert out.tolist() == [[0] * 4, [1] * 4]

    explore(program, 2, seeds=())
    with pytest.raises(Exception, match="deadlock"):
        explore(lambda memory: program(memory, 1), 2, seeds=())
