"""Gathers of large shards by copy engines: each rank's rows are written to the symmetric memory of all its peers.

`tpfuse.kernels.engine_gather` has the protocol. A rank needs `world` chunks at the end in any case. They are in
symmetric memory, which is used again, and so must be read before the next gather of the same size begins.
"""

import functools

import torch
from torch import Tensor

from tpfuse.comm.collectives.fused import open_channel
from tpfuse.comm.symmetric_memory import SymmetricBuffer, SymmetricMemory
from tpfuse.kernels.engine_gather import close_copies, open_copies
from tpfuse.kernels.launch import multiprocessors

_VIEWS = 64  # the most views that are kept: the shapes of a training step occur again


class EngineGather:
    """The gathers of up to `nbytes` of each rank: one rank's end.

    The product that multiplies the chunks takes `endpoint` and `ready`, int32 [world].
    """

    def __init__(self, memory: SymmetricMemory, name: str, nbytes: int) -> None:
        """Open the channel. The call is collective."""
        programs = multiprocessors(memory.device)
        self._memory = memory
        slots, self.endpoint = open_channel(memory, name, nbytes, programs, parts=memory.world)
        self._words = memory.signals(f"{name}: ready, stamp", memory.world + 1)
        self.ready, self._stamp = self._words.local[:-1], self._words.local[-1:]
        self._views = functools.lru_cache(_VIEWS)(functools.partial(_make_views, slots, memory.rank))

    def chunks(self, x: Tensor) -> Tensor:
        """Return this rank's [world, *x.shape], to which all ranks' x of one shape and dtype are gathered."""
        return self._views(x.dtype, x.shape)[0]

    def send(self, x: Tensor, *, multiplied: bool, keep: bool) -> None:
        """Copy x, contiguous, to every peer's chunks, and to this rank's own if `keep`, on the current stream.

        multiplied: a product receives a signal for each chunk, waits for the chunks of all ranks, and ends the
        gather. Otherwise the gather ends here, after all chunks have arrived.
        """
        memory, (_, destinations) = self._memory, self._views(x.dtype, x.shape)
        rank, world = memory.rank, memory.world
        open_copies(self.endpoint, self._stamp)
        for step in range(1, world):
            peer = (rank - step) % world
            destinations[peer].copy_(x)
            if multiplied:
                memory.signal(self._words, peer, rank, self._stamp)
        if keep:
            destinations[rank].copy_(x)
        if not multiplied:
            close_copies(self.endpoint)


@torch.inference_mode(False)  # views are kept, and calls that need gradients use them too
def _make_views(
    slots: SymmetricBuffer, rank: int, dtype: torch.dtype, shape: torch.Size
) -> tuple[Tensor, list[Tensor]]:
    """Return (this rank's chunks [world, *shape]; for each rank the chunk of its memory that x is copied to)."""
    world = len(slots.peers)
    nbytes = world * shape.numel() * dtype.itemsize
    chunks = [slot.view(-1)[:nbytes].view(dtype).view(world, *shape) for slot in slots.peers]
    return chunks[rank], [each[rank] for each in chunks]
