"""A bucket of parameters and gradients on one rank: its layout, its reducer, and which gradients have arrived."""

from dataclasses import dataclass, field

from torch import Tensor

from tpfuse.zero.bucket_layout import BucketLayout
from tpfuse.zero.reducer.base import GradientReducer


@dataclass(eq=False)
class Bucket:
    """A bucket on this rank: bucket `index` of its reducer.

    accumulated: the tensor [size] in which gradients are accumulated; None at stage 2 while there is none.
    reduce_buffer: the reducer's buffer for the gradients of the last micro-batch at stage 2, from the bucket's turn on.
    waiting: the gradients that wait for that turn, by segment. pending: the segments whose gradient of this micro-batch
    has not arrived. without_gradient: the segments that have had no gradient in this step.
    """

    layout: BucketLayout
    reducer: GradientReducer
    index: int
    accumulated: Tensor | None = None
    reduce_buffer: Tensor | None = None
    waiting: dict[int, Tensor] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    without_gradient: set[int] = field(default_factory=set)

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
        """Return the parameters of this rank's shard, a view of `values`."""
        return self.values[self.shard.start : self.shard.stop]

    @property
    def reduced_shard(self) -> Tensor:
        """Return the sum over all ranks of the gradients of this rank's shard, between `finish()` and the next step."""
        return self.reducer.reduced_shard(self.index)
