"""Buckets in symmetric memory, with Triton kernels for the work that `direct` does block by block.

`tpfuse.kernels.shard_sum` sums a shard during the backward pass. `tpfuse.kernels.sharded_adamw` updates a shard and
writes the new parameters to all ranks; if the sums were not requested before, it computes them in the same pass. Both
kernels have their own rounds of signals. The counters of `DirectReducer` order the copies: whole sums at stage 0, data
that crosses nodes, and the parameters of a state that is in the host's memory.

A gradient buffer of stage 2 is written again after the sum of the next bucket, which is earlier on the stream. Every
rank begins that sum after it has read this buffer, and the sum ends after every rank has begun it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tpfuse.comm.collectives.fused import most_programs, open_channel
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels.shard_sum import shard_sum
from tpfuse.kernels.sharded_adamw import sharded_adamw_
from tpfuse.zero.reducer.base import BucketSpec
from tpfuse.zero.reducer.direct import DirectReducer
from tpfuse.zero.reducer.inter_node import InterNodeReducer
from tpfuse.zero.reducer.shard_update import ShardUpdate

_SLOT_BYTES = 16  # bytes; only signals pass through the channel


class FusedReducer(DirectReducer):
    """The reducer of CUDA ranks that reach each other's memory; on CPUs its kernels are interpreted."""

    def __init__(
        self,
        specs: Sequence[BucketSpec],
        stage: int,
        memory: SymmetricMemory,
        name: str,
        inter_node: InterNodeReducer | None = None,
    ) -> None:
        """Make the reducer as `DirectReducer` does, and a channel for the kernels' signals. Collective."""
        super().__init__(specs, stage, memory, name, inter_node)
        self._address_tensors: dict[int, Tensor] = {}
        _, self._endpoint = open_channel(memory, f"{name}: channel", _SLOT_BYTES, most_programs(memory))

    def start_reduce(self, index: int) -> None:
        self._counters.buckets_written += 1

    def _wait_until_read(self, index: int) -> None:
        """Do nothing: the next bucket's sum is already on the stream and ends after all ranks have read this one."""

    def _sum_part(self, index: int) -> Tensor:
        node_shard, gradients = self._node_shard(index), self._rank_gradients(index)
        own = gradients[self.memory.rank]
        out = self._separate_sums.get(index, own[node_shard])
        squares = torch.empty(self._endpoint.programs, dtype=torch.float32, device=own.device)
        with self.memory.guard(f"sum of bucket {index}", kernel=True):
            shard_sum(own, self._addresses(gradients), out, squares, node_shard.start, self._endpoint)
        self._squared_norms[index] = squares.double().sum()
        self.traffic.exchange((self.memory.world - 1) * own[node_shard].nbytes)
        return out

    def _must_sum_first(self, update: ShardUpdate) -> bool:
        return self._inter_node is not None or update.staging is not None

    def _update_shard(self, index: int, update: ShardUpdate) -> None:
        if self._must_sum_first(update):
            super()._update_shard(index, update)
            return
        shard, sums, values = self.shard(index), self._reduced_shards[index], self._values[index]
        own, gradients, rates = values[self.memory.rank], self._rank_gradients(index), update.rates
        scalar = torch.full((2,), rates.lr, dtype=torch.float32, device=own.device)
        scalar[1] = rates.factor
        sharded_adamw_(
            own,
            self._addresses(values),
            gradients[self.memory.rank] if sums is None else sums,
            self._addresses(gradients) if sums is None else None,
            update.master,
            update.exp_avg,
            update.exp_avg_sq,
            start=shard.start,
            decay_end=min(max(update.decay_end, 0), len(shard)),
            lr=scalar[:1],
            beta1=rates.beta1,
            beta2=rates.beta2,
            eps=rates.eps,
            weight_decay=rates.weight_decay,
            step=rates.step,
            clip=None if rates.factor == 1.0 else scalar[1:],
            endpoint=self._endpoint,
        )
        self.traffic.exchange((self.memory.world - 1) * own[shard.start : shard.stop].nbytes)
        if sums is None:
            self.traffic.exchange((self.memory.world - 1) * len(shard) * gradients[0].element_size())

    def _addresses(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the addresses of all ranks' buffers in this rank's address space, int64 [world]."""
        key = id(tensors)
        if key not in self._address_tensors:
            pointers = [x.data_ptr() for x in tensors]
            self._address_tensors[key] = torch.tensor(pointers, dtype=torch.int64, device=self.memory.device)
        return self._address_tensors[key]
