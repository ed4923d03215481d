"""A channel: the slots and signals of one family of operations in symmetric memory, and its rounds.

In each round a rank writes into its own slot, signals, waits for the others' signals and reads their slots: "stage,
signal, wait, combine". Epochs count the rounds. Each slot has two halves, which are used in turn: a rank writes the
half of epoch e again in epoch e + 2, after it has waited for the signal of e + 1 of every rank; and a rank gives its
signal of e + 1 only after it has read all that it needs of epoch e. So one round of signals per epoch is enough, and no
barrier is needed.
"""

import functools
import math

import torch
from torch import Tensor

from tpfuse.comm.symmetric_memory import SymmetricBuffer, SymmetricMemory

_LEAST_SLOT = 2**16  # bytes
_VIEWS = 256  # the number of views that are kept, since the operations of a training step repeat


def slot_size(nbytes: int) -> int:
    """Return the slot size for `nbytes` bytes: 1, 1.25, 1.5 or 1.75 times a power of two, at least 64 KiB.

    So few sizes serve all shapes, at most a fifth of a large slot is unused, and halves begin at multiples of 8 KiB.
    """
    nbytes = max(nbytes, _LEAST_SLOT)
    step = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // step) * step


class Channel:
    """A channel whose slots have two halves of `nbytes` bytes. Every rank must run the same rounds in one order.

    slots: uint8 [2, nbytes] on each rank, which only that rank writes; flags: int32 signals, of which word 0 of each
    rank is its epoch, which only that rank writes.
    """

    def __init__(self, memory: SymmetricMemory, name: str, nbytes: int) -> None:
        self.memory, self.nbytes = memory, nbytes
        self.slots = memory.buffer(f"{name}: slots", (2, nbytes), torch.uint8)
        self.flags = memory.signals(f"{name}: flags", 1)
        self._epoch = self.flags.local.numpy()
        self._views = functools.lru_cache(_VIEWS)(functools.partial(_make_views, self.slots))
        self.others = [(memory.rank + i) % memory.world for i in range(1, memory.world)]

    @property
    def next_epoch(self) -> int:
        """Return the number of the epoch that the next `signal` begins."""
        return int(self._epoch[0]) + 1

    def next_slots(self, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        """Return the beginning of each rank's half for the next epoch, as tensors of one shape, in rank order.

        This rank may write its own tensor now, and may read another rank's after `wait_for` has returned for that rank.
        """
        return self._views(dtype, shape, self.next_epoch % 2)

    def signal(self) -> int:
        """Tell all ranks that this rank's slot is written. Begin the next epoch and return its number."""
        epoch = self.next_epoch
        self.memory.signal(self.flags, self.memory.rank, 0, epoch)
        return epoch

    def wait_for(self, rank: int, epoch: int, op: str) -> None:
        """Wait until `rank` has begun `epoch`. Its slot may then be read until this rank signals again."""
        self.memory.wait_signal(self.flags, rank, 0, epoch, op=op)


@torch.inference_mode(False)  # The views are kept, also for calls that need gradients.
def _make_views(slots: SymmetricBuffer, dtype: torch.dtype, shape: tuple[int, ...], half: int) -> list[Tensor]:
    """Return the beginning of a half of each rank's slot, as tensors of one shape."""
    size = math.prod(shape) * dtype.itemsize
    return [slot[half][:size].view(dtype).view(shape) for slot in slots.peers]
