"""A bucket of parameters and gradients on one rank: it collects gradients, and its reducer reduces them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpfuse.comm.sum_order import REAL_RANKS, TreeSums, VirtualRanks
from tpfuse.zero.bucket_layout import BucketLayout
from tpfuse.zero.reducer.base import GradientReducer


@dataclass(eq=False)
class Bucket:
    """A bucket on this rank: bucket `index` of its reducer.

    For each micro-batch call `begin`, then `take` for each gradient; where a pipeline's step reduces gradients once, it
    is one micro-batch in which the gradient of a segment arrives several times. In a micro-batch that is reduced call
    `copy_waiting` when the bucket's turn comes, and `start_reduce`; after the last one `end_backward`, then read
    `reduced_shard`. `drop` instead of the rest discards the step's gradients.

    uses: the uses of its parameter in a pass whose gradients are summed apart (`GradientBuckets`); otherwise 1.
    """

    layout: BucketLayout
    reducer: GradientReducer
    index: int
    gradient_dtype: torch.dtype  # in which gradients are accumulated
    virtual: VirtualRanks = REAL_RANKS
    uses: int = 1
    accumulated: list[Tensor] = field(default_factory=list)  # [size], for each use; empty at stage 2 without a gradient
    _sums: list[TreeSums] = field(default_factory=list)  # of the segments, in `accumulated`
    _reduce_buffer: Tensor | None = None  # the reducer's buffer at stage 2, from the bucket's turn to its reduction
    _waiting: dict[int, Tensor] = field(default_factory=dict)  # gradients that wait for that turn, by segment
    _arrivals: Sequence[int] = ()  # the number of times that each segment's gradient arrives in this micro-batch
    _pending: dict[int, int] = field(default_factory=dict)  # the segments with arrivals to come, and their number
    _waited: set[int] = field(default_factory=set)  # the segments whose gradients have waited since the last reduction

    @property
    def values(self) -> Tensor:
        """Return the parameters of the bucket, [size], in their dtype."""
        return self.reducer.values(self.index)

    @property
    def shard(self) -> range:
        """Return the range of elements that this rank updates."""
        return self.reducer.shard(self.index)

    @property
    def shard_values(self) -> Tensor:
        """Return the parameters of this rank's shard."""
        return self.values[self.shard.start : self.shard.stop]

    @property
    def reduced_shard(self) -> Tensor:
        """Return the sum over all ranks of the gradients of this rank's shard, between `finish()` and the next step."""
        return self.reducer.reduced_shard(self.index)

    @property
    def complete(self) -> bool:
        """Return whether all gradients of this micro-batch have arrived."""
        return not self._pending

    @property
    def shards_gradients(self) -> bool:
        """Return whether the sums of several reductions in a step can be added up in this rank's shard.

        A bucket of one rank has no shards, and a tied one is reduced once, at the end of a step.
        """
        return not self.reducer.keeps_gradients and self.layout.kind != "tied"

    def awaits(self, segment: int) -> bool:
        """Return whether the gradient of this segment is to arrive in this micro-batch, for the first time or again."""
        return segment in self._pending

    def keep_gradients(self) -> None:
        """Accumulate gradients in one tensor from now on, if the reducer keeps them from step to step."""
        if self.reducer.keeps_gradients:
            buffer = self.reducer.gradient_buffer(self.index)
            self._accumulate_in(buffer if buffer.dtype == self.gradient_dtype else self._zeros())

    def _zeros(self) -> Tensor:
        return torch.zeros(self.layout.size, dtype=self.gradient_dtype, device=self.values.device)

    def _accumulate_in(self, first: Tensor) -> None:
        """Accumulate gradients, of the first use in this tensor and its subtrees and of the others in new ones."""
        depths = self.virtual.here.bit_length()
        self.accumulated = [first, *(self._zeros() for _ in range(1, self.uses))]
        trees = [[whole, *(self._zeros() for _ in range(1, depths))] for whole in self.accumulated]
        view, segments = self.layout.view, self.layout.segments
        views = [[[view(flat, segment) for segment in segments] for flat in tree] for tree in trees]
        self._sums = [TreeSums(tree, self.virtual.here) for tree in views]

    def begin(self, arrivals: Sequence[int], *, first: bool) -> None:
        """Begin a micro-batch. first: whether it is the first of its step.

        arrivals: the number of times that the gradient of each segment arrives in it.
        """
        self._arrivals, self._pending = arrivals, {segment: count for segment, count in enumerate(arrivals) if count}
        if first:
            self._waited.clear()
            for sums in self._sums:
                sums.begin()

    def take(self, segment: int, gradient: Tensor, *, reduces: bool, leaf: int = 0, use: int = 0) -> None:
        """Take the gradient of a segment. reduces: whether the micro-batch is reduced.

        leaf: which of this rank's virtual ranks the micro-batch belongs to. use: which of its parameter's uses has this
        gradient. The gradient is accumulated. If the bucket has accumulated none, as at stage 2, and its gradients
        arrive once, a gradient that is reduced in this micro-batch waits for the bucket's turn instead.
        """
        if not self.accumulated and reduces and max(self._arrivals) == 1 and self.virtual.here == 1:
            self._waiting[segment] = gradient
            self._waited.add(segment)
        else:
            if not self.accumulated:
                self._accumulate_in(self._zeros())
            self._sums[use].add(segment, gradient, leaf)
        if segment in self._pending:
            self._pending[segment] -= 1
            if not self._pending[segment]:
                del self._pending[segment]

    def end_arrivals(self, segments: Iterable[int]) -> None:
        """Expect no more gradients of these segments in this micro-batch."""
        for segment in segments:
            self._pending.pop(segment, None)

    def fill_missing(self, value: float) -> None:
        """Take gradients that are `value` everywhere for the segments whose gradients have not all arrived."""
        gradient = torch.tensor(value, dtype=self.gradient_dtype, device=self.values.device)
        for segment in tuple(self._pending):
            self.take(segment, gradient.expand(self.layout.segments[segment].shape), reduces=True)

    def take_all(self) -> None:
        """Treat all gradients as taken, after the caller has written them to `accumulated`."""
        self._pending.clear()
        for sums in self._sums:
            sums.take_all()

    def copy_waiting(self) -> None:
        """Copy the waiting gradients, if there are any, into the reducer's buffer. This frees their memory."""
        if self._waiting:
            buffer = self._reduce_buffer = self._requested_buffer()
            for segment, gradient in self._waiting.items():
                self.layout.view(buffer, self.layout.segments[segment]).copy_(gradient)
            self._waiting.clear()

    def _requested_buffer(self) -> Tensor:
        return self.reducer.gradient_buffer(self.index) if self._reduce_buffer is None else self._reduce_buffer

    def start_reduce(self, *, more: bool) -> None:
        """Start the reduction of the bucket's gradients; the gradient of a segment that had none is zero.

        more: as in `GradientReducer.start_reduce`.
        """
        for sums in self._sums:
            sums.close()
        wholes, keeps = self.accumulated or [self._filled_buffer()], self.reducer.keeps_gradients
        if keeps:
            first, *others = wholes
            for other in others:
                first.add_(other)
            wholes = [first]
        for whole in wholes:
            buffer = self._requested_buffer()
            if whole is not buffer:
                buffer.copy_(whole)
            self._reduce_buffer = None
            self.reducer.start_reduce(self.index, more=more)
        if not keeps:
            self._forget()

    def _filled_buffer(self) -> Tensor:
        """Return the reducer's buffer with the gradients that have waited, and zero elsewhere."""
        layout = self.layout
        self.copy_waiting()
        buffer = self._reduce_buffer = self._requested_buffer()
        segments = [segment for index, segment in enumerate(layout.segments) if index in self._waited]
        ends, starts = [0, *(segment.stop for segment in segments)], [*(s.start for s in segments), layout.size]
        for start, end in zip(ends, starts, strict=True):  # the padding between segments is in the norm too
            buffer[start:end].zero_()
        return buffer

    def _forget(self) -> None:
        """Free the memory in which gradients are accumulated."""
        self.accumulated, self._sums = [], []
        self._waited.clear()

    @property
    def reductions(self) -> int:
        """Return the number of reductions that `start_reduce` starts."""
        return 1 if self.reducer.keeps_gradients else self.uses

    def end_backward(self) -> None:
        """Free waiting gradients and the reducer's buffer, also after an error in the backward pass."""
        self._waiting.clear()
        self._reduce_buffer = None

    def drop(self) -> None:
        """Free the gradients of a step that is not reduced."""
        self.end_backward()
        if not self.reducer.keeps_gradients:
            self._forget()
