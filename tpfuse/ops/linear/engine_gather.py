"""Gathers of large shards by copy engines: each rank's rows are written into symmetric memory of all its peers.

`tpfuse.kernels.engine_gather` has the protocol. What a rank needs at the end is `world` chunks in any case; they are in
symmetric memory, which is kept, and so must be read before the next gather of the same size begins.
"""

import torch
from torch import Tensor

from tpfuse.comm.collectives.fused import open_channel
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels.engine_gather import close_copies, open_copies
from tpfuse.kernels.launch import multiprocessors

_VIEWS = 64  # that are kept, since shapes of a training step come again


class EngineGather:
    """One rank's end of the gathers of up to `nbytes` of each rank.

    endpoint, ready: for the product that multiplies the chunks; ready: int32 [world].
    """

    def __init__(self, memory: SymmetricMemory, name: str, nbytes: int) -> None:
        """Collective."""
        programs = multiprocessors(memory.device)
        self._memory = memory
        self._slots, self.endpoint = open_channel(memory, name, nbytes, programs, parts=memory.world)
        self._words = memory.signals(f"{name}: ready, stamp", memory.world + 1)
        self.ready, self._stamp = self._words.local[:-1], self._words.local[-1:]
        self._views: dict[tuple[torch.dtype, torch.Size], tuple[Tensor, list[Tensor]]] = {}

    def chunks(self, x: Tensor) -> Tensor:
        """This rank's [world, *x.shape], where all ranks' x of one shape and dtype come to be."""
        return self._places(x)[0]

    def _places(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(this rank's chunks; where x belongs among those of each rank)."""
        found = self._views.get((x.dtype, x.shape))
        return self._new_places(x) if found is None else found

    @torch.inference_mode(False)  # views are kept, and serve calls that need gradients too
    def _new_places(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        if len(self._views) >= _VIEWS:
            self._views.clear()
        rank, world = self._memory.rank, self._memory.world
        chunks = [slot.view(-1)[: world * x.nbytes].view(x.dtype).view(world, *x.shape) for slot in self._slots.peers]
        found = self._views[x.dtype, x.shape] = chunks[rank], [each[rank] for each in chunks]
        return found

    def send(self, x: Tensor, *, told: bool, keep: bool) -> None:
        """On the current stream: writes x, contiguous, to every rank's chunks; to this rank's own only if `keep`.

        told: a product waits for the chunks of all ranks, and ends the gather; else it ends here, once they are there.
        """
        memory, (_, places) = self._memory, self._places(x)
        rank, world = memory.rank, memory.world
        open_copies(self.endpoint, self._stamp)
        for step in range(1, world):
            peer = (rank - step) % world
            places[peer].copy_(x)
            if told:
                memory.signal(self._words, peer, rank, self._stamp)
        if keep:
            places[rank].copy_(x)
        if not told:
            close_copies(self.endpoint)
