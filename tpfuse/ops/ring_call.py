"""What one call of ring attention asks for."""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tpfuse.kernels.sequence_runs import SequenceRuns
from tpfuse.ops.attention_pieces import Piece, pieces
from tpfuse.ops.sight import Sight, sights


@dataclass(frozen=True)
class RingCall:
    """What one call of ring attention asks for, of all its ranks alike but for `rank`.

    cu_seqlens: [S + 1] int32 or None. counters: int64 [world, B, H, n], with dropout: the number of (query, key 0) of
    each rank's queries among the elements of dropout's mask; the number of (query, key) is by the key's position more.
    key: [] int64. ring: whether blocks go from neighbour to neighbour, or from their owners to everybody.
    """

    runs: SequenceRuns
    rank: int
    causal: bool
    window: int | None
    scale: float
    cu_seqlens: Tensor | None = None
    dropout_p: float = 0.0
    counters: Tensor | None = None
    key: Tensor | None = None
    ring: bool = True

    @property
    def sources(self) -> list[int]:
        """The other ranks, in the order in which their blocks are taken."""
        direction = -1 if self.ring else 1
        return [(self.rank + direction * step) % self.runs.world for step in range(1, self.runs.world)]

    @property
    def own_counters(self) -> Tensor | None:
        """[B, H, n]: of this rank's queries."""
        return None if self.counters is None else self.counters[self.rank]

    def heads(self, heads: slice) -> "RingCall":
        """The call for these heads of q alone."""
        if self.counters is None:
            return self
        return replace(self, counters=self.counters[:, :, heads])

    def pieces(self, source: int, rank: int | None = None) -> tuple[Piece, ...]:
        """What a rank's queries see of the keys of `source`; default: this rank's."""
        documents = None if self.cu_seqlens is None else tuple(self.cu_seqlens.tolist())
        rank = self.rank if rank is None else rank
        return pieces(self.runs, rank, source, self.causal, self.window, documents)

    def span(self, source: int, rank: int) -> tuple[int, int]:
        """The keys [first, stop) of `source` among which all are that queries of `rank` see."""
        found = self.pieces(source, rank)
        if not found:
            return 0, 0
        return min(piece.first_key for piece in found), max(piece.stop_key for piece in found)

    def sights(self, rank: int, device: torch.device) -> tuple[Sight, Sight]:
        """(the keys that a rank's queries see, the queries that see its keys)."""
        if self.cu_seqlens is None:
            return _sights(self.runs, rank, self.causal, self.window, device)
        positions = self.runs.positions(rank, device)
        return sights(positions, self.runs.length, self.causal, self.window, self.cu_seqlens)


@functools.lru_cache(maxsize=64)
def _sights(
    runs: SequenceRuns, rank: int, causal: bool, window: int | None, device: torch.device
) -> tuple[Sight, Sight]:
    with torch.inference_mode(False):  # what is kept serves calls that need gradients too
        return sights(runs.positions(rank, device), runs.length, causal, window, None)


def computed(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of `dtype` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32
