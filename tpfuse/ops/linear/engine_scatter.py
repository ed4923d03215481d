"""Reduce-scatters of large products whose partial sums are copied to their owners by copy engines.

`tpfuse.kernels.engine_scatter` has the protocol. An operation is `open`, `multiply`, `send`, `sum`, in this order.
"""

import functools

import torch
from torch import Tensor

from tpfuse.comm.collectives.fused import open_channel
from tpfuse.comm.symmetric_memory import SymmetricBuffer, SymmetricMemory
from tpfuse.kernels.engine_gather import open_copies
from tpfuse.kernels.engine_scatter import await_part, sum_parts
from tpfuse.kernels.gemm_reduce_scatter import gemm_for_copies
from tpfuse.kernels.launch import cdiv, multiprocessors

_VIEWS = 64  # the most views that are kept: the shapes of a training step occur again


class EngineScatter:
    """The reduce-scatters of products of up to `nbytes`: one rank's end."""

    def __init__(self, memory: SymmetricMemory, name: str, nbytes: int) -> None:
        """Open the channel. The call is collective."""
        self._memory, world = memory, memory.world
        slots, self._endpoint = open_channel(memory, name, nbytes, multiprocessors(memory.device))
        programs = self._endpoint.programs
        self._words = memory.signals(f"{name}: ready, stamp, stored", world + 1 + programs * world)
        words = self._words.local
        self._ready, self._stamp = words[:world], words[world : world + 1]
        self._stored = words[world + 1 :].view(programs, world)
        self._parts = functools.lru_cache(_VIEWS)(functools.partial(_make_parts, slots, memory.rank))

    def open(self) -> None:
        """Wait until all ranks have come here. Must be called on the stream of copies."""
        open_copies(self._endpoint, self._stamp)

    def multiply(self, x: Tensor, weight: Tensor, *, other_tiles: bool) -> None:
        """Write x Wᵀ to this rank's memory. x: [M, K]; weight: [N, K]; other_tiles: as in `choose_configuration`."""
        gemm_for_copies(x, weight, self._endpoint, self._stored, other_tiles=other_tiles)

    def send(self, m: int, n: int, dtype: torch.dtype) -> None:
        """Copy each owner's rows of the product [m, n] to it as soon as they are computed.

        Must be called on the stream of copies.
        """
        memory, parts = self._memory, self._parts(m, n, dtype)
        rank, world = memory.rank, memory.world
        for step in range(1, world):
            owner = (rank + step) % world
            await_part(self._endpoint, self._stored, self._stamp, owner)
            destination, part = parts[owner]
            destination.copy_(part)
            memory.signal(self._words, owner, rank, self._stamp)

    def sum(self, m: int, n: int, dtype: torch.dtype, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """Wait for all parts and return this rank's rows of all ranks' summed product [m, n], + bias + residual."""
        chunk = cdiv(m, self._memory.world)
        rows = min(max(m - self._memory.rank * chunk, 0), chunk)
        out = torch.empty(rows, n, dtype=dtype, device=self._endpoint.slots.device)
        sum_parts(out, self._endpoint, self._ready, chunk, bias=bias, residual=residual)
        return out


@torch.inference_mode(False)  # views are kept, and calls that need gradients use them too
def _make_parts(slots: SymmetricBuffer, rank: int, m: int, n: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return for each owner (this rank's part in the owner's memory, the owner's rows in this rank's memory)."""
    world = len(slots.peers)
    chunk = cdiv(m, world)

    def halves(slot: Tensor) -> tuple[Tensor, Tensor]:
        received, computed = (
            half[: world * chunk * n * dtype.itemsize].view(dtype).view(world, chunk, n) for half in slot
        )
        return received, computed

    computed = halves(slots.local)[1]
    parts = []
    for owner, slot in enumerate(slots.peers):
        rows = min(max(m - owner * chunk, 0), chunk)
        parts.append((halves(slot)[0][rank, :rows], computed[owner, :rows]))
    return parts
