"""The interface of a gradient reducer: the communication of ranks with equal parameters in a training step, by bucket.

At stage 0 every rank has the whole sum and updates all parameters. At stages 1 and 2 each rank owns a shard: it alone
sums the gradients of its elements, updates them, and sends the new parameters to all ranks.

    reducer.begin()                    before the first gradient of a step is written
    reducer.gradient_buffer(i).copy_(gradients)
    reducer.start_reduce(i)            during the backward pass, for buckets 0, 1, 2, … in this order
    reducer.end_backward()             after the last backward pass
    reducer.reduced_shard(i)           this rank's shard of the sum over ranks, added from rank 0 on
    reducer.update(updates)            new parameters on every rank: AdamW on the shards between two communications
    reducer.publish()                  sends the parameters of the shards to all, after other code has changed them
    reducer.abandon(begun=…, unsent=…)   instead of the rest, after an error: the next step begins from the start

At stage 2 the gradients of a bucket may be reduced several times in a step, as those of each micro-batch are, and the
buckets in any order that is the same on all ranks. The sums of a bucket are added in the order of these reductions.

Across nodes, direct and fused serve the ranks of a node; each rank then sums its node's sums with the ranks at its
position on the other nodes by NCCL or Gloo, so each byte of a gradient crosses the slow link once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.sum_order import summed_dtype
from tpfuse.comm.traffic import Traffic
from tpfuse.kernels.launch import Reservation
from tpfuse.zero.reducer.gradient_norm import Squares, of_shard
from tpfuse.zero.reducer.inter_node import Spans
from tpfuse.zero.reducer.shard_update import ShardUpdate


@dataclass(frozen=True)
class BucketSpec:
    """The properties of a flat bucket that its reducer needs.

    matrices: (first element, rows, columns) of the parameters that are matrices, for compression.
    """

    size: int  # elements, a multiple of world x 16
    dtype: torch.dtype  # of the parameters
    sent: torch.dtype  # in which gradients are sent
    matrices: Spans = ()

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of sums, masters and moments."""
        return summed_dtype(self.dtype)


class GradientReducer(ABC):
    """Reduces the buckets of one group of `world` ranks, at ZeRO's stage 0, 1 or 2.

    Every rank must call the same methods in the same order.
    """

    across: dist.ProcessGroup | None = None  # the ranks with which this rank sums between nodes, if it does so apart
    reservation: Reservation | None = None  # of multiprocessors for its sums, until `free`

    def __init__(self, specs: Sequence[BucketSpec], stage: int, shard_index: int, world: int) -> None:
        self.specs, self.stage, self.shard_index, self.world = tuple(specs), stage, shard_index, world
        self.traffic = Traffic()

    def shard(self, index: int) -> range:
        """Return the elements of bucket `index` that this rank updates: at stage 0 all of them."""
        size = self.specs[index].size
        if self.stage == 0:
            return range(size)
        part = size // self.world
        return range(self.shard_index * part, (self.shard_index + 1) * part)

    @abstractmethod
    def values(self, index: int) -> Tensor:
        """Return the parameters of a bucket, [size], in its dtype: always the same tensor."""

    @property
    def keeps_gradients(self) -> bool:
        """Return whether `gradient_buffer(i)` is the same tensor in all steps, so that gradients can be added to it."""
        return self.stage < 2

    @abstractmethod
    def begin(self) -> None:
        """Wait until the gradient buffer of every bucket may be written. Raise PeerTimeout."""

    @abstractmethod
    def gradient_buffer(self, index: int) -> Tensor:
        """Return the buffer in which the caller writes the gradients of a bucket, [size], of the dtype `sent`.

        This method may communicate: at stage 2 it may sum an earlier bucket, and wait until all ranks have read the
        bucket that was in this buffer before. At stage 2, request the buffers in the order of the reductions, each
        after `start_reduce` of the one before. Raise PeerTimeout.
        """

    @abstractmethod
    def start_reduce(self, index: int, *, more: bool = False) -> None:
        """Start the reduction of a bucket, whose gradients are in its buffer now.

        more: whether others of this bucket follow in this step, so that its sums need not be complete before.
        """

    @abstractmethod
    def end_backward(self) -> None:
        """End the backward passes: all buckets are sent. The parameters may be read until `update`."""

    @abstractmethod
    def reduced_shard(self, index: int) -> Tensor:
        """Return the sum over ranks of the gradients of this rank's shard. Raise PeerTimeout.

        This method may sum and wait. If ranks share memory the sum is float32 (float64 for float64), except the whole
        sums of stage 0; otherwise it has the dtype `sent`.
        """

    def squares(self, index: int) -> Squares:
        """Return the squares of `reduced_shard`."""
        return of_shard(self.reduced_shard(index))

    @abstractmethod
    def update(self, updates: Sequence[ShardUpdate | None]) -> None:
        """Apply one update to each bucket, and wait until all ranks' new parameters are here. Raise PeerTimeout.

        If `reduced_shard` of a bucket was not requested in this step, the update sums its gradients too. An update that
        is None was applied before: the parameters of the shard are new, and only have to be sent.
        """

    @abstractmethod
    def publish(self) -> None:
        """Send the parameters of this rank's shards to all ranks, and receive theirs. Raise PeerTimeout."""

    @abstractmethod
    def abandon(self, *, begun: bool, unsent: Sequence[int]) -> None:
        """Discard the gradients of a step, wherever each rank is in it; the next call must be `begin`.

        begun: whether this rank's last `begin` was for this step. unsent: the buckets of this backward pass that this
        rank has not sent. Raise PeerTimeout if a rank does not call it.
        """

    def free(self) -> None:
        """Free symmetric memory. Collective; the reducer and its tensors must not be used afterwards."""
        if self.reservation is not None:
            self.reservation.end()
