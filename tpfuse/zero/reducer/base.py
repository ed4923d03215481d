"""What ranks with equal parameters exchange in a training step, bucket by bucket: gradients, sums, new parameters.

A bucket is a flat buffer of parameters and one of gradients (`tpfuse.zero.bucket_layout`). `stage` is ZeRO's
(arXiv:1910.02054): at 0 every rank has the whole sum and updates everything; at 1 and 2 each rank owns a shard: it
alone sums the gradients of its elements, updates them, and gives the new parameters to all; at 2 the gradients
themselves are given up as soon as they are summed.

    exchange.begin()                            before the first gradient of a step is written
    exchange.room(i).copy_(gradients); send(i)  during the backward pass, for buckets 0, 1, 2, … in this order
    exchange.end_backward()                     nobody computes with the parameters any more
    exchange.sums(i)                            this rank's shard of Σ over ranks, rank 0 first
    exchange.update(updates)                    new parameters everywhere: AdamW on the shards between two exchanges
    exchange.publish()                          parameters of the shards to all, where something else has changed them
    exchange.abandon(begun=…)                   instead of the rest, after an error: the next step begins anew

| implementation | what it is                                                                     |
|----------------|--------------------------------------------------------------------------------|
| alone          | one rank (here)                                                                |
| direct         | torch operations on memory that the ranks share (`tpfuse.zero.reducer.direct`) |
| fused          | Triton kernels on symmetric memory (`tpfuse.zero.reducer.fused`)               |
| collective     | NCCL, Gloo (`tpfuse.zero.reducer.collective`)                                  |

Across nodes direct and fused serve the ranks of a node, and what a rank has summed there passes to the same ranks of
the other nodes by NCCL or Gloo: each byte of a gradient crosses the slow link once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.rank_order import summed_dtype
from tpfuse.comm.traffic import Traffic
from tpfuse.zero.reducer.shard_update import CPU_BLOCK, ShardUpdate


@dataclass(frozen=True)
class BucketSpec:
    """A flat bucket as its exchange needs to know it.

    size: elements, which world x 16 divides; dtype: of the parameters; sent: of the gradients as they are exchanged;
    matrices: (first element, rows, columns) of the parameters that are matrices, for compression.
    """

    size: int
    dtype: torch.dtype
    sent: torch.dtype
    matrices: tuple[tuple[int, int, int], ...] = ()

    @property
    def state_dtype(self) -> torch.dtype:
        """Of sums, masters and moments."""
        return summed_dtype(self.dtype)


def squared(block: Tensor) -> float:
    """The squared norm of a block on the CPU; float32 sums of few enough elements to be as good as any."""
    return float(torch.dot(block, block))


class GradientReducer(ABC):
    """The buckets of one group. Every rank calls the same methods in the same order.

    stage: 0, 1 or 2; world: ranks that share the buckets; shard_index: which shard is this rank's, of `world`; traffic: bytes
    that passed between ranks.
    """

    def __init__(self, specs: Sequence[BucketSpec], stage: int, shard_index: int, world: int) -> None:
        self.specs, self.stage, self.shard_index, self.world = tuple(specs), stage, shard_index, world
        self.traffic = Traffic()

    def shard(self, index: int) -> range:
        """The elements of bucket `index` that this rank updates: all at stage 0."""
        size = self.specs[index].size
        if self.stage == 0:
            return range(size)
        part = size // self.world
        return range(self.shard_index * part, (self.shard_index + 1) * part)

    @abstractmethod
    def values(self, index: int) -> Tensor:
        """The parameters of a bucket, [size], of its dtype: the same tensor as long as the exchange lives."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether `gradient_buffer(i)` is the same tensor in all steps, into which gradients may be added one by one."""
        return self.stage < 2

    @property
    def across(self) -> dist.ProcessGroup | None:
        """The ranks with which this rank sums across nodes; None where sums do not pass between nodes apart."""
        return None

    @abstractmethod
    def begin(self) -> None:
        """Before a step: afterwards `gradient_buffer` of every bucket may be written. Raises PeerTimeout."""

    @abstractmethod
    def gradient_buffer(self, index: int) -> Tensor:
        """Where the gradients of a bucket are to be written, [size], of the dtype `sent`.

        At stage 2 it is to be asked for bucket after bucket, right before `start_reduce`. Raises PeerTimeout.
        """

    @abstractmethod
    def start_reduce(self, index: int) -> None:
        """The gradients of the bucket are in its room: their reduction may begin."""

    @abstractmethod
    def end_backward(self) -> None:
        """All buckets are sent, and this rank needs parameters no more before the update."""

    @abstractmethod
    def reduced_shard(self, index: int) -> Tensor:
        """Σ over ranks of the gradients of this rank's shard. Raises PeerTimeout.

        float32 (float64 for float64) where ranks share memory, but for the whole sums of stage 0; otherwise as sent.
        """

    def squared_norm(self, index: int) -> Tensor:
        """Of `reduced_shard`, float64 []."""
        sums, dtype = self.reduced_shard(index), self.specs[index].state_dtype
        if sums.device.type == "cpu":
            starts = range(0, len(sums), CPU_BLOCK)
            squares = [squared(sums[start : start + CPU_BLOCK].to(dtype)) for start in starts]
            return torch.tensor(sum(squares), dtype=torch.float64)
        norm: Tensor = torch.linalg.vector_norm(sums, dtype=dtype)
        return norm.double().square()

    @abstractmethod
    def update(self, updates: Sequence[ShardUpdate]) -> None:
        """One update for each bucket; ends when all ranks' new parameters are here. Raises PeerTimeout.

        Where `reduced_shard` of a bucket was not asked for in this step, its gradients are summed on the way.
        """

    @abstractmethod
    def publish(self) -> None:
        """The parameters of this rank's shards to all, and theirs to this rank. Raises PeerTimeout."""

    @abstractmethod
    def abandon(self, *, begun: bool) -> None:
        """Gives up the gradients of a step, wherever each rank is in it; the next call is `begin`.

        begun: whether this rank's last `begin` was for this step. Raises PeerTimeout where a rank does not come.
        """

    def free(self) -> None:  # noqa: B027 - most have nothing to give back
        """Gives symmetric memory back. Collective; the exchange and its tensors are of no use afterwards."""


class LazyBuffers:
    """Buffers of zeros that are made when they are first asked for: while parameters move in, bucket by bucket, what
    they leave is free for the next ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, Tensor] = {}

    def get(self, index: int, size: int, dtype: torch.dtype) -> Tensor:
        """Buffer `index`, [size]."""
        if index not in self._buffers:
            self._buffers[index] = torch.zeros(size, dtype=dtype, device=self._device)
        return self._buffers[index]

    def drop(self, index: int) -> None:
        """The next time it is asked for it is another one."""
        self._buffers.pop(index, None)


class SingleRankReducer(GradientReducer):
    """One rank: nothing is exchanged."""

    def __init__(self, specs: Sequence[BucketSpec], stage: int, device: torch.device) -> None:
        super().__init__(specs, stage, 0, 1)
        self._values, self._gradients = LazyBuffers(device), LazyBuffers(device)

    @property
    def keeps_gradients(self) -> bool:
        return True

    def values(self, index: int) -> Tensor:
        return self._values.get(index, self.specs[index].size, self.specs[index].dtype)

    def begin(self) -> None:
        pass

    def gradient_buffer(self, index: int) -> Tensor:
        return self._gradients.get(index, self.specs[index].size, self.specs[index].sent)

    def start_reduce(self, index: int) -> None:
        pass

    def end_backward(self) -> None:
        pass

    def reduced_shard(self, index: int) -> Tensor:
        return self.gradient_buffer(index)

    def update(self, updates: Sequence[ShardUpdate]) -> None:
        for index, update in enumerate(updates):
            update.apply(self.reduced_shard(index), self.values(index))

    def publish(self) -> None:
        pass

    def abandon(self, *, begun: bool) -> None:
        pass
