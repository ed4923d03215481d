"""signal_wait and set_signal between two ranks, and the end of a wait by the abort word."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch._C._distributed_c10d import _SymmetricMemory

from tpfuse.comm.cuda_calls import CudaCalls
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.explore import explore
from tpfuse.kernels.signal_wait import set_signal, signal_wait


def passing(skip: int | None = None) -> Callable[[SymmetricMemory], None]:
    """Return a program in which rank 0 writes, signals to rank 1 and waits until that has read.

    skip: leave one of the two waits out.
    """

    def program(memory: SymmetricMemory) -> None:
        x, flags = memory.buffer("x", (3,), torch.int64), memory.signals("flags", 1)
        for epoch in (1, 2, 3):
            if memory.rank == 0:
                x.local.fill_(epoch)
                set_signal(flags.addresses, 1, 0, epoch)
            if memory.rank != skip:
                signal_wait(flags.local, epoch, memory.abort)
            if memory.rank == 1:
                assert x.peers[0].tolist() == [epoch] * 3
                set_signal(flags.addresses, 0, 0, epoch)

    return program


def test_writes_before_the_signal_are_seen_after_the_wait() -> None:
    explore(passing(), 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_both_waits_are_needed(rank: int) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        explore(passing(skip=rank), 2)


def test_a_wait_ends_with_the_signal_or_the_abort_word() -> None:
    for ends in ("flag", "abort"):
        words = {name: torch.zeros(1, dtype=torch.int32) for name in ("flag", "abort")}
        timer = threading.Timer(0.2, lambda word: word.fill_(7), [words[ends]])
        started = time.monotonic()
        timer.start()
        signal_wait(words["flag"], 7, words["abort"])
        assert time.monotonic() - started > 0.15
        timer.join()
    flag, abort = torch.tensor([-(2**31)], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    signal_wait(flag, 2**31 - 1, abort)  # the epoch before: words wrap around
    signal_wait(flag, 2**31, abort)


def test_the_driver_is_not_asked_to_set_the_words_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA 13.1 and newer refuse cuStreamWriteValue32 there."""

    def refuse(words: torch.Tensor, index: int, value: int) -> None:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(_SymmetricMemory, "stream_write_value32", refuse)
    calls, words = CudaCalls(torch.device("cpu")), torch.zeros(3, 2, dtype=torch.int32)
    addresses = torch.tensor([row.data_ptr() for row in words])
    for owner, value in enumerate((7, 2**31 - 1, 2**31)):
        calls.set_word(addresses, owner, 1, value)
    assert words.tolist() == [[0, 7], [0, 2**31 - 1], [0, -(2**31)]]


def test_tensors_that_are_no_word_are_refused() -> None:
    word = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="flag"):
        signal_wait(word.long(), 1, word)
    with pytest.raises(ValueError, match="abort"):
        signal_wait(word, 1, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="abort is on meta, flag on cpu"):
        signal_wait(word, 1, word.to("meta"))
    with pytest.raises(ValueError, match=r"set_signal: flags is torch\.int32: expected int64"):
        set_signal(word, 0, 0, 1)
