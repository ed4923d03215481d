"""Rank 0 of a group without the other ranks, which appear to record and do at once the same as rank 0.

It serves to measure the host's time of one rank for operations of the group. The library's own code runs, except for
the work of CUDA (`cuda_calls`) and the first rendezvous, to which other processes would have to come.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.cuda_stand_in import StandIn
from tpfuse.comm import control_block
from tpfuse.comm.cuda_calls import CudaCalls, DriverHandle, Event
from tpfuse.comm.cuda_memory import CudaMemory
from tpfuse.comm.rank_state import RECORDS, RankState

RANK = 0


class _Passed:
    """An event of a stream that does nothing: the event has been passed."""

    def query(self) -> bool:
        return True


class _Allocations:
    """The allocations of every rank."""

    offset = 0

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    @property
    def buffer_ptrs(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        return self._tensors[rank]


class _Calls(StandIn):
    """CUDA's stand-in, with memory of every rank in this process, and without threads for streams."""

    def allocate(self, size: int, group_name: str) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def rendezvous(self, tensor: Tensor, group_name: str) -> DriverHandle:
        others = [torch.zeros_like(tensor) for _ in range(self.group.size() - 1)]
        return _Allocations([tensor, *others])

    def set_word(self, addresses: Tensor, owner: int, index: int, value: int) -> None:
        CudaCalls.set_word(self, addresses, owner, index, value)

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

        control_block.exchange = _exchange_with_equals  # type: ignore[assignment]
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=world)
        group = dist.group.WORLD
        assert group is not None
        self._states: list[RankState] = []  # of all ranks, this one first
        self._following = True
        threading.Thread(target=self._follow_always, daemon=True).start()
        # The states must be known before the memory meets the other ranks, which it does while it is constructed.
        self._learn_states()
        self.memory = CudaMemory(group, torch.device("cpu"), 60.0, _Calls(group))

    def _learn_states(self) -> None:
        """Let this object take the states from each control block that is constructed from now on."""
        construct = control_block.ControlBlock.__init__

        def construct_and_tell(block: control_block.ControlBlock, *arguments: Any) -> None:
            construct(block, *arguments)
            self._states = block.states

        control_block.ControlBlock.__init__ = construct_and_tell  # type: ignore[method-assign]

    def _follow_always(self) -> None:
        """Copy this rank's whole state to the other ranks again and again, until `stop_following` is called."""
        while self._following:
            if self._states:
                this_rank, *other_ranks = self._states
                numbers = this_rank.numbers.copy()
                for other in other_ranks:
                    other.records[:] = this_rank.records
                    for to, source in zip(other.texts, this_rank.texts, strict=True):
                        to[:] = source
                    other.numbers[:] = numbers
            time.sleep(1e-4)

    def stop_following(self) -> None:
        """Let the other ranks follow only when `follow` is called, from now on."""
        self._following = False

    def follow(self) -> None:
        """Record that the other ranks have done this rank's last operation."""
        this_rank, *other_ranks = self._states
        for other in other_ranks:
            other.records[this_rank.begun % RECORDS] = this_rank.records[this_rank.begun % RECORDS]
            other.numbers[:] = this_rank.numbers


def _exchange_with_equals(group: dist.ProcessGroup, value: object, op: str, timeout: float) -> list[object]:
    """Return the values of all ranks, which are those of this rank."""
    return [value] * group.size()
