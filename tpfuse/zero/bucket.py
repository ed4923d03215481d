"""One bucket of parameters and gradients, as a rank has it: its layout, its exchange, and which gradients have come."""

from dataclasses import dataclass, field

from torch import Tensor

from tpfuse.zero.bucket_layout import BucketLayout
from tpfuse.zero.reducer.base import GradientReducer


@dataclass(eq=False)
class Bucket:
    """A bucket on this rank: bucket `index` of its exchange.

    kept: where gradients are accumulated, [size]; None at stage 2 as long as nothing is. room: where those of the last
    micro-batch go, at stage 2, when it is the bucket's turn; held: those that wait for it. missing, untouched:
    segments, by number, whose gradient of this micro-batch has not come, or that had none in this step.
    """

    layout: BucketLayout
    reducer: GradientReducer
    index: int
    kept: Tensor | None = None
    room: Tensor | None = None
    held: dict[int, Tensor] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    untouched: set[int] = field(default_factory=set)

    @property
    def values(self) -> Tensor:
        """The parameters, [size], of their dtype."""
        return self.reducer.values(self.index)

    @property
    def shard(self) -> range:
        """The elements that this rank updates."""
        return self.reducer.shard(self.index)

    @property
    def own(self) -> Tensor:
        """The parameters of the shard."""
        return self.values[self.shard.start : self.shard.stop]

    @property
    def sums(self) -> Tensor:
        """Σ over all ranks of the gradients of this rank's shard, between `finish()` and the next step."""
        return self.reducer.sums(self.index)
