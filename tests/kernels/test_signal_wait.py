"""signal_wait between two ranks, and its end by the abort word."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.explore import explore
from tpfuse.kernels.signal_wait import signal_wait


def passing(skip: int | None = None) -> Callable[[SymmetricMemory], None]:
    """Return a program in which rank 0 writes, signals and waits until rank 1 has read.

    skip: leave one of the two waits out.
    """

    def program(memory: SymmetricMemory) -> None:
        x, flags = memory.buffer("x", (3,), torch.int64), memory.signals("flags", 1)
        for epoch in (1, 2, 3):
            if memory.rank == 0:
                x.local.fill_(epoch)
                memory.signal(flags, 1, 0, epoch)
            if memory.rank != skip:
                signal_wait(flags.local, epoch, memory.abort)
            if memory.rank == 1:
                assert x.peers[0].tolist() == [epoch] * 3
                memory.signal(flags, 0, 0, epoch)

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


def test_tensors_that_are_no_word_are_refused() -> None:
    word = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="flag"):
        signal_wait(word.long(), 1, word)
    with pytest.raises(ValueError, match="abort"):
        signal_wait(word, 1, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="abort is on meta, flag on cpu"):
        signal_wait(word, 1, word.to("meta"))
