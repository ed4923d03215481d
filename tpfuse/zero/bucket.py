"""One bucket of parameters and gradients, as a rank has it: its layout, its exchange, and which gradients have come."""

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
        """The parameters, [size], of their dtype."""
        return self.reducer.values(self.index)

    @property
    def shard(self) -> range:
        """The elements that this rank updates."""
        return self.reducer.shard(self.index)

    @property
    def shard_values(self) -> Tensor:
        """The parameters of the shard."""
        return self.values[self.shard.start : self.shard.stop]

    @property
    def reduced_shard(self) -> Tensor:
        """Σ over all ranks of the gradients of this rank's shard, between `finish()` and the next step."""
        return self.reducer.reduced_shard(self.index)
