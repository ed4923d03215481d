"""Buckets in symmetric memory, with Triton kernels for the work that `direct` does block by block.

`tpfuse.kernels.shard_sum` sums a shard during the backward pass. `tpfuse.kernels.sharded_adamw` updates a shard and
writes the new parameters to all ranks; if the sums were not requested before, it computes them in the same pass. Both
kernels have their own rounds of signals. The counters of `DirectReducer` order the copies: whole sums at stage 0, data
that crosses nodes, and the parameters of a state that is in the host's memory.

A gradient buffer of stage 2 is written again after the sum of the next bucket, which is earlier on the stream or has
been joined. Every rank begins that sum after it has read this buffer, and the sum ends after every rank has begun it.
If there is one bucket alone, and it is reduced again in the same step, a barrier takes the place of that sum. The
kernel overwrites its output: the sum of a bucket that is reduced again is written to a buffer of its own and added from
there, by the next kernel of the same stream.

Where each rank has a GPU of its own, the sum of a bucket begins beside the backward pass on the memory's second stream,
as soon as the bucket is complete. It starts `RESERVED` programs, while a launch on the computing stream may start one
for each multiprocessor. Events order the two streams: a sum waits for the gradients of its bucket; the computing stream
waits for a sum before it writes to the buffers that the sum has read, and for all of them when the backward pass ends.

No ranks wait in a circle. The programs of a sum wait for peers, and so do those of products. A `Reservation` keeps them
apart: both grids fit on the GPU together, so neither waits for the other's place. The sums of all reducers are on one
stream, and all other kernels end by themselves. A sum therefore waits only for the same sum on other ranks, which waits
for what those ranks computed before it. Every rank begins the sums in one order, so that the first sum that has not
ended can end: before the end of the backward pass its rank waits for earlier sums alone.

Sums begin later, on the computing stream, if layers have opened channels. Those that were opened before the reducer
would leave no multiprocessors. If layers use the reducer's own memory, its operations would wait for each other, and
ranks whose gradients arrive in other orders would run them in other orders.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tpfuse.comm.collectives.fused import most_programs, open_channel
from tpfuse.comm.dispatch import connected
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.launch import RESERVED, Reservation
from tpfuse.kernels.shard_sum import shard_sum
from tpfuse.kernels.sharded_adamw import sharded_adamw_
from tpfuse.zero.reducer.base import BucketSpec
from tpfuse.zero.reducer.direct import DirectReducer
from tpfuse.zero.reducer.gradient_norm import Squares
from tpfuse.zero.reducer.inter_node import InterNodeReducer
from tpfuse.zero.reducer.shard_update import ShardUpdate

_SLOT_BYTES = 16  # bytes; only signals pass through the channel
_OWNER = "sums beside the backward pass"  # of the reservation


class FusedReducer(DirectReducer):
    """The reducer of CUDA ranks that reach each other's memory; on CPUs its kernels are interpreted."""

    def __init__(
        self,
        specs: Sequence[BucketSpec],
        stage: int,
        memory: SymmetricMemory,
        name: str,
        inter_node: InterNodeReducer | None = None,
        leaves: Sequence[int] | None = None,
    ) -> None:
        """Make the reducer as `DirectReducer` does, and a channel for the kernels' signals. Collective."""
        super().__init__(specs, stage, memory, name, inter_node, leaves)
        self._address_tensors: dict[int, Tensor] = {}
        overlaps = memory.has_second_stream and (
            _OWNER in Reservation.held or not any(other.has_channels for other in connected())
        )
        channel = f"{name}: channel{f', {_OWNER}' * overlaps}"  # ranks compare it
        _, self._endpoint = open_channel(memory, channel, _SLOT_BYTES, most_programs(memory))
        self._beside = replace(self._endpoint, programs=min(RESERVED, self._endpoint.programs))
        if overlaps:
            self.reservation = Reservation(_OWNER)
        shape = len(self.specs), self._endpoint.programs
        self._square_parts = torch.zeros(shape, dtype=torch.float64, device=memory.device)
        self._depths = [0] * len(self.specs)  # of these parts
        self._later: Tensor | None = None  # the sums of a later turn, before they are added; made when there is one
        self._ends: dict[int, object] = {}  # of the sums that have begun beside the backward pass, by turn

    def begin(self) -> None:
        super().begin()
        self._ends = {}

    def start_reduce(self, index: int, *, more: bool = False) -> None:
        turn = self._begin_turn(index, more)
        self._counters.buckets_written += 1
        if self._turns[turn].again:
            self._later_sums(index)  # makes a tensor, which belongs to the computing stream
        if self.reservation is not None and not self.memory.has_channels:
            gradients = self._rank_gradients(index, turn)
            self._addresses(gradients)  # likewise
            self._ends[turn] = self.memory.beside(partial(self._sum_shard, turn, gradients, self._beside))

    def end_backward(self) -> None:
        for end in self._ends.values():
            self.memory.join(end)
        super().end_backward()

    def _wait_until_read(self, turn: int) -> None:
        """Do nothing: the next turn's sum is already on the stream and ends after all ranks have read this one."""
        if len(self._gradient_buffers) == 1:
            self.memory.barrier(f"buffer of bucket {self._turns[turn].bucket}")

    def _sum_part(self, turn: int) -> Tensor:
        index, again, _ = self._turns[turn]
        gradients, end = self._rank_gradients(index, turn), self._ends.get(turn)
        if end is None:
            self._sum_shard(turn, gradients, self._endpoint)
        else:
            self.memory.join(end)
        part = gradients[self.memory.rank][self._node_shard(index)]
        self._squares[index] = None if again else Squares(self._square_parts[index], self._depths[index])
        self.traffic.exchange((self.memory.world - 1) * part.nbytes)
        return self._separate_sums.get(index, part)

    def _later_sums(self, index: int) -> Tensor:
        sums = self._separate_sums[index]
        if self._later is None:
            self._later = torch.empty_like(max(self._separate_sums.values(), key=len))
        return self._later[: len(sums)]

    def _sum_shard(self, turn: int, gradients: Sequence[Tensor], endpoint: Endpoint) -> None:
        """Launch the sum of this rank's part of a turn's bucket on the current stream, where it allocates nothing."""
        index, again, _ = self._turns[turn]
        node_shard, own = self._node_shard(index), gradients[self.memory.rank]
        sums = self._separate_sums.get(index, own[node_shard])
        out = self._later_sums(index) if again else sums
        with self.memory.guard(f"sum of bucket {index}", kernel=True):
            self._depths[index] = shard_sum(
                own, self._addresses(gradients), out, self._square_parts[index], node_shard.start, endpoint
            )
        if again:
            sums += out

    def _must_sum_first(self, index: int, update: ShardUpdate) -> bool:
        beside = self._last_turns[index] in self._ends
        return beside or self._turns[self._last_turns[index]].again or self._needs_copies(update)

    def _needs_copies(self, update: ShardUpdate) -> bool:
        """Return whether copies between ranks follow the update, which `sharded_adamw` then does not do."""
        return self._inter_node is not None or update.staging is not None

    def _update_shard(self, index: int, update: ShardUpdate) -> None:
        if self._needs_copies(update):
            super()._update_shard(index, update)
            return
        shard, sums, values = self.shard(index), self._reduced_shards[index], self._values[index]
        gradients = self._rank_gradients(index, self._last_turns[index])
        own, rates = values[self.memory.rank], update.rates
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
        """Return the addresses of all ranks' buffers here, in the order of their sum, int64 [world]."""
        key = id(tensors)
        if key not in self._address_tensors:
            pointers = [tensors[rank].data_ptr() for rank in self._leaves]
            self._address_tensors[key] = torch.tensor(pointers, dtype=torch.int64, device=self.memory.device)
        return self._address_tensors[key]
