"""A channel: what one family of operations owns in symmetric memory, and the rounds that pass through it.

A rank writes into its own slot, signals, waits for the others' signals and reads their slots: "stage, signal, wait,
combine". Rounds are counted by epochs. Each slot has two halves, used in turn: the half of epoch e is written again in
epoch e + 2, after this rank has waited for everybody's signal of e + 1; and that a rank gives only when it has read all
that it wanted of epoch e. So one round of signals per epoch is enough, and no barrier.
"""

import math

import torch
from torch import Tensor

from tpfuse.comm.symmetric_memory import SymmetricMemory

_LEAST_SLOT = 2**16  # bytes
_VIEWS = 256  # views that are kept, since operations of a training step come again


def slot_size(nbytes: int) -> int:
    """Of a slot for this many bytes: a power of two, so that few sizes serve all shapes."""
    return max(_LEAST_SLOT, 1 << (nbytes - 1).bit_length())


class Channel:
    """Two halves of `nbytes` per rank. Rounds must be the same, in one order, on every rank.

    slots: uint8 [2, nbytes], written by its rank alone; flags: int32 signals, of which word 0 of each rank is its
    epoch, written by its rank alone.
    """

    def __init__(self, memory: SymmetricMemory, name: str, nbytes: int) -> None:
        self.memory, self.nbytes = memory, nbytes
        self.slots = memory.buffer(f"{name}: slots", (2, nbytes), torch.uint8)
        self.flags = memory.signals(f"{name}: flags", 1)
        self._epoch = self.flags.local.numpy()
        self._views: dict[tuple[torch.dtype, tuple[int, ...], int], list[Tensor]] = {}
        self.others = [(memory.rank + i) % memory.world for i in range(1, memory.world)]

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that `signal` begins."""
        return int(self._epoch[0]) + 1

    @torch.inference_mode(False)  # views are kept, and serve calls that need gradients too
    def next_slots(self, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        """The beginning of every rank's slot of the next epoch, in rank order, as a tensor of this dtype and shape.

        This rank's own may be written now; the others' may be read once `wait_for` has returned.
        """
        key = dtype, shape, self.next_epoch % 2
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            size = math.prod(shape) * dtype.itemsize
            views = self._views[key] = [slot[key[2]][:size].view(dtype).view(shape) for slot in self.slots.peers]
        return views

    def signal(self) -> int:
        """Begins the next epoch, whose number is returned: this rank's slot is written."""
        epoch = self.next_epoch
        self.memory.signal(self.flags, self.memory.rank, 0, epoch)
        return epoch

    def wait_for(self, rank: int, epoch: int, op: str) -> None:
        """Until `rank` has begun `epoch`; then its slot may be read until this rank signals again."""
        self.memory.wait_signal(self.flags, rank, 0, epoch, op=op)
