"""The options of one call of ring attention, and the tokens that see each other under them."""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tpfuse.kernels.sequence_runs import SequenceRuns
from tpfuse.ops.ring_attention.rectangles import Rectangle, visible_rectangles
from tpfuse.ops.ring_attention.visibility import VisibleRange, visible_ranges


@dataclass(frozen=True)
class RingCall:
    """The options of one call of ring attention, which are the same on all its ranks except `rank`.

    cu_seqlens: [S + 1] int32 or None. head_rows, key, dropout_width: with dropout, as in `tpfuse.ops.attention`.
    softcap, sinks: as in `ring_attention`; blocks know of no sinks, which are merged into the result of all.
    ring: whether blocks go from neighbour to neighbour, or from their owners to every rank.
    """

    runs: SequenceRuns
    rank: int
    causal: bool
    window: int | None
    scale: float
    cu_seqlens: Tensor | None = None
    dropout_p: float = 0.0
    head_rows: Tensor | None = None
    key: Tensor | None = None
    dropout_width: int = 0
    ring: bool = True
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def sources(self) -> list[int]:
        """Return the other ranks, in the order in which this rank attends to their blocks."""
        direction = -1 if self.ring else 1
        return [(self.rank + direction * step) % self.runs.world for step in range(1, self.runs.world)]

    def described(self, op: str, q: Tensor, k: Tensor) -> str:
        """Return the description of the operation `op` on q and k, which must be the same on every rank.

        On CPUs it includes the documents' ends and the dropout key; on GPUs the host would wait for them.
        """
        runs, on_cpu = self.runs, k.device.type == "cpu"
        text = f"{op} {k.dtype} {q.shape[1]} heads {list(k.shape)} causal {self.causal} window {self.window}"
        text += f" scale {self.scale} ring {self.ring} runs {runs.world} x {runs.count}, {runs.step} of {runs.length}"
        text += f" softcap {self.softcap} sinks {self.sinks is not None}"
        if self.cu_seqlens is not None:
            text += f" documents {zlib.crc32(repr(self._documents).encode()) if on_cpu else ''}"
        if self.key is not None and self.dropout_p:
            text += f" dropout {self.dropout_p} key {self.key.tolist() if on_cpu else ''}"
        return text

    @functools.cached_property
    def own_counters(self) -> Tensor | None:
        """Return `counters` of this rank."""
        return self.counters(self.rank)

    def counters(self, rank: int) -> Tensor | None:
        """Return int64 [B, H, n] with dropout: the index of (query, key 0) in the mask, for each of a rank's queries.

        The index of (query, key) is larger by the key's position. The mask is that of the whole sequence on one rank.
        Without dropout return None.
        """
        if not self.dropout_p:
            return None
        assert self.head_rows is not None
        positions, width = self.runs.positions(rank, self.head_rows.device), self.dropout_width
        if self.cu_seqlens is None:
            return (self.head_rows.unsqueeze(-1) * width + positions) * width
        bounds = self.cu_seqlens.to(torch.int64)
        document = (torch.searchsorted(bounds, positions, right=True) - 1).clamp(max=len(self.head_rows) - 1)
        begin = bounds[document]
        return ((self.head_rows[document].T * width + (positions - begin)) * width - begin).unsqueeze(0)

    def heads(self, heads: slice) -> "RingCall":
        """Return the call for these heads of q alone."""
        return self if self.head_rows is None else replace(self, head_rows=self.head_rows[:, heads])

    @functools.cached_property
    def _documents(self) -> tuple[int, ...] | None:
        return None if self.cu_seqlens is None else tuple(self.cu_seqlens.tolist())

    def rectangles(self, source: int, rank: int | None = None, *, bands: bool = False) -> tuple[Rectangle, ...]:
        """Return the rectangles of the keys of `source` that a rank's queries see; default: this rank's queries.

        bands: as in `tpfuse.ops.ring_attention.rectangles.visible_rectangles`.
        """
        rank = self.rank if rank is None else rank
        return visible_rectangles(self.runs, rank, source, self.causal, self.window, self._documents, bands)

    def visible_keys(self, source: int, rank: int) -> tuple[int, int]:
        """Return the smallest range [first, stop) with all keys of `source` that queries of `rank` see."""
        rectangles = self.rectangles(source, rank)
        if not rectangles:
            return 0, 0
        return min(each.first_key for each in rectangles), max(each.stop_key for each in rectangles)

    def visible_ranges(self, rank: int, device: torch.device) -> tuple[VisibleRange, VisibleRange]:
        """Return (the keys that a rank's queries see, the queries that see a rank's keys)."""
        if self.cu_seqlens is None:
            return _visible_ranges(self.runs, rank, self.causal, self.window, device)
        positions = self.runs.positions(rank, device)
        return visible_ranges(positions, self.runs.length, self.causal, self.window, self.cu_seqlens)


@functools.lru_cache(maxsize=64)
def _visible_ranges(
    runs: SequenceRuns, rank: int, causal: bool, window: int | None, device: torch.device
) -> tuple[VisibleRange, VisibleRange]:
    with torch.inference_mode(False):  # calls that need gradients use the cached tensors too
        return visible_ranges(runs.positions(rank, device), runs.length, causal, window, None)


def joined_heads(parts: Sequence[Tensor]) -> Tensor:
    """Return the results of rounds of some heads each, [B, some H, ...], as one [B, H, ...]."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)
