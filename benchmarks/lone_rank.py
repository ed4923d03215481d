"""Rank 0 of a group without the other ranks, which appear to record and do at once the same as rank 0.

It serves to measure the host's time of one rank for operations of the group. Everything is the library's own but the
parts that CUDA would do (`cuda_calls`), and the first meeting, to which other processes would have to come.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import control_block
from tpfuse.comm.control_block import RECORDS, RankState
from tpfuse.comm.cuda_calls import CudaCalls, Event, Handle
from tpfuse.comm.cuda_memory import CudaMemory
from tpfuse.testing.cuda_stand_in import StandIn

RANK = 0


class _Passed:
    """An event of a stream that does nothing: the event has been passed."""

    def query(self) -> bool:
        return True


class _Parts:
    """The allocations of every rank."""

    offset = 0

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = parts

    @property
    def buffer_ptrs(self) -> list[int]:
        return [part.data_ptr() for part in self._parts]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        return self._parts[rank]


class _Calls(StandIn):
    """CUDA's stand-in, with memory of every rank in this process, and without threads for streams."""

    def allocate(self, size: int, group_name: str) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def rendezvous(self, tensor: Tensor, group_name: str) -> Handle:
        others = [torch.zeros_like(tensor) for _ in range(self.group.size() - 1)]
        return _Parts([tensor, *others])

    def copy_word(self, words: Tensor, index: int, value: Tensor) -> None:
        CudaCalls.copy_word(self, words, index, value)

    def record(self) -> Event:
        return _PASSED

    def wait_for(self, event: Event) -> None:
        pass


_PASSED = _Passed()


class LoneRank:
    """Rank 0 of `world`. A process may have one LoneRank, for its whole life."""

    def __init__(self, world: int) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        control_block.exchange = _said_by_all  # type: ignore[assignment]
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=world)
        group = dist.group.WORLD
        assert group is not None
        self._parts: list[RankState] = []
        self._meeting = True
        threading.Thread(target=self._follow, daemon=True).start()
        calls = _Calls(group)
        # The parts exist before the memory, which meets the other ranks while it is constructed.
        self._board_made(calls)
        self.memory = CudaMemory(group, torch.device("cpu"), 60.0, calls)

    def _board_made(self, calls: StandIn) -> None:
        made = control_block.ControlBlock.__init__

        def make(this: control_block.ControlBlock, *arguments: Any) -> None:
            made(this, *arguments)
            self._parts = this.states

        control_block.ControlBlock.__init__ = make  # type: ignore[method-assign]

    def _follow(self) -> None:
        """Make the other ranks come wherever this rank waits for them, until `alone` is called."""
        while self._meeting:
            if self._parts:
                mine, *others = self._parts
                numbers = mine.numbers.copy()
                for part in others:
                    part.records[:] = mine.records
                    for text, own in zip(part.texts, mine.texts, strict=True):
                        text[:] = own
                    part.numbers[:] = numbers
            time.sleep(1e-4)

    def alone(self) -> None:
        """Make the other ranks come only where `follow` is called, from now on."""
        self._meeting = False

    def follow(self) -> None:
        """Record that the other ranks have done this rank's last operation."""
        mine, *others = self._parts
        for part in others:
            part.records[mine.begun % RECORDS] = mine.records[mine.begun % RECORDS]
            part.numbers[:] = mine.numbers


def _said_by_all(group: dist.ProcessGroup, value: object, op: str, timeout: float) -> list[object]:
    return [value] * group.size()
