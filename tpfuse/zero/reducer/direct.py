"""Buckets in memory that ranks share: gradients are summed where they lie, parameters written where they are needed.

Nothing is staged: what a rank's backward pass writes its peers read, and what they update they write into its
parameters. All that orders this are four counters on each rank, written by it alone:

| word   | counts                 | says                                                                               |
|--------|------------------------|------------------------------------------------------------------------------------|
| BUCKETS_WRITTEN   | buckets, in all steps  | the gradients of that many are whole                                               |
| BUCKETS_REDUCED | buckets, in all steps  | this rank has read that many; at stage 0 the sums of its part stand in its own     |
| BACKWARDS_DONE   | backward passes        | this rank computes with its parameters no more: peers may write them               |
| STEPS_DONE  | steps                  | this rank reads and writes nothing of others any more                              |

Stages 0 and 1: the owner's sum takes the place of its own gradients, which nobody else reads there. Before a gradient
is written again everybody has STEPS_DONE the step. Stage 2: three rooms take the buckets in turn, so that nobody waits for
what has just been sent. The one of bucket i is filled when all have read i - 3, which lay there. Sums are kept apart.

Across nodes a rank sums for its node the part of all ranks in its place, and they sum what all nodes have: each has a
piece of that part for its shard. Sources: ZeRO, arXiv:1910.02054; the order of sums is DESIGN's rule 1.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.rank_order import sum_in_rank_order
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.zero.reducer.base import BucketSpec, GradientReducer, squared
from tpfuse.zero.reducer.inter_node import InterNodeReducer
from tpfuse.zero.reducer.shard_update import CPU_BLOCK, ShardUpdate

BUCKETS_WRITTEN, BUCKETS_REDUCED, BACKWARDS_DONE, STEPS_DONE = range(4)
_BUFFER_ALIGNMENT = 64  # bytes
GRADIENT_BUFFERS = 3  # at most: one for each bucket is enough


class DirectReducer(GradientReducer):
    """Ranks of one host or, with `inter_node`, of one node.

    memory: theirs; name: of this exchange in it; inter_node: to the ranks in this rank's place on the other nodes.
    """

    def __init__(
        self,
        specs: Sequence[BucketSpec],
        stage: int,
        memory: SymmetricMemory,
        name: str,
        inter_node: InterNodeReducer | None = None,
    ) -> None:
        """Collective."""
        nodes, node = (1, 0) if inter_node is None else (inter_node.nodes, inter_node.node)
        super().__init__(specs, stage, memory.rank * nodes + node, memory.world * nodes)
        self.memory, self._name, self._inter_node = memory, name, inter_node
        self._others = [(memory.rank + i) % memory.world for i in range(1, memory.world)]
        self._counter_words = memory.signals(f"{name}: flags", 4)
        self._counters, self._generation = [0, 0, 0, 0], memory.generation  # what this rank's counters are
        self._buckets_before = 0  # buckets that were sent before this step
        self._reduced_shards: list[Tensor | None] = [None] * len(self.specs)
        self._squared_norms: list[Tensor | None] = [None] * len(self.specs)
        self._separate_sums: dict[int, Tensor] = {}
        self._reduced_between_nodes = 0  # buckets that this step has summed over the nodes
        self._allocate()

    @torch.inference_mode(False)  # views are kept
    def _allocate(self) -> None:
        specs = self.specs
        if self.stage == 0:
            device = self.memory.device
            self._values = [[torch.zeros(s.size, dtype=s.dtype, device=device)] * self.memory.world for s in specs]
        else:
            sizes = [s.size * s.dtype.itemsize for s in specs]
            starts, total = _offsets(sizes)
            self._values = self._buffers_of_ranks("parameters", total, starts, [s.dtype for s in specs])
        sizes = [s.size * s.sent.itemsize for s in specs]
        sent = [s.sent for s in specs]
        if self.stage < 2:
            starts, total = _offsets(sizes)
            self._gradient_buffers = [self._buffers_of_ranks("gradients", total, starts, sent)]
        else:
            starts, total = _offsets([max(sizes)] * min(GRADIENT_BUFFERS, len(specs)))
            self._gradient_buffers = [
                self._buffers_of_ranks("gradients", total, [at] * len(specs), sent) for at in starts
            ]
        for index, spec in enumerate(specs):
            if self.stage == 2 or spec.sent != spec.state_dtype:
                size = spec.size // self.memory.world
                self._separate_sums[index] = torch.zeros(size, dtype=spec.state_dtype, device=self.memory.device)

    def _buffers_of_ranks(
        self, what: str, total: int, starts: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> list[list[Tensor]]:
        """Of each bucket, every rank's buffer."""
        whole = self.memory.buffer(f"{self._name}: {what}", (total,), torch.uint8).peers
        return [
            [x[at : at + spec.size * dtype.itemsize].view(dtype) for x in whole]
            for spec, at, dtype in zip(self.specs, starts, dtypes, strict=True)
        ]

    def free(self) -> None:
        for what in (["parameters"] if self.stage else []) + ["gradients", "flags"]:
            self.memory.free(f"{self._name}: {what}")

    def _node_shard(self, index: int) -> slice:
        """What this rank sums for its node."""
        return self._node_shard_of(index, self.memory.rank)

    def _node_shard_of(self, index: int, rank: int) -> slice:
        size = self.specs[index].size // self.memory.world
        return slice(rank * size, (rank + 1) * size)

    def _rank_gradients(self, index: int) -> list[Tensor]:
        """Every rank's gradients of a bucket, in this step."""
        return self._gradient_buffers[(self._buckets_before + index) % len(self._gradient_buffers)][index]

    def _set_counter(self, word: int, value: int) -> None:
        self._counters[word] = value
        self.memory.signal(self._counter_words, self.memory.rank, word, value)

    def _wait_for_peers(self, word: int, value: int, op: str) -> None:
        for rank in self._others:
            self.memory.wait_signal(self._counter_words, rank, word, value, op=op)

    @property
    def across(self) -> dist.ProcessGroup | None:
        return None if self._inter_node is None else self._inter_node.group

    def values(self, index: int) -> Tensor:
        return self._values[index][self.memory.rank]

    def begin(self) -> None:
        with self.memory.guard("begin a step"):
            if self._generation != self.memory.generation:  # a reset has made all counters 0
                self._counters, self._generation = [0, 0, 0, 0], self.memory.generation
            self._buckets_before = self._counters[BUCKETS_WRITTEN]
            self._reduced_shards, self._squared_norms = [None] * len(self.specs), [None] * len(self.specs)
            self._reduced_between_nodes = 0
            if self._counters[STEPS_DONE] != self._counters[BACKWARDS_DONE]:  # there was no update
                self._set_counter(STEPS_DONE, self._counters[BACKWARDS_DONE])
            self._wait_for_peers(STEPS_DONE, self._counters[BACKWARDS_DONE], "begin a step")

    def gradient_buffer(self, index: int) -> Tensor:
        if self.stage == 2 and len(self.specs) > GRADIENT_BUFFERS:
            if index >= GRADIENT_BUFFERS - 1:
                self._reduce_shard(index - GRADIENT_BUFFERS + 1)
            if index >= GRADIENT_BUFFERS:
                self._wait_until_read(index - GRADIENT_BUFFERS)
        return self._rank_gradients(index)[self.memory.rank]

    def _wait_until_read(self, index: int) -> None:
        """By everybody. Of what the step before has left in the rooms `begin` knows it."""
        op = f"room of bucket {index}"
        with self.memory.guard(op):
            self._wait_for_peers(BUCKETS_REDUCED, self._buckets_before + index + 1, op)

    def start_reduce(self, index: int) -> None:
        self._set_counter(BUCKETS_WRITTEN, self._buckets_before + index + 1)

    def end_backward(self) -> None:
        self._set_counter(BACKWARDS_DONE, self._counters[BACKWARDS_DONE] + 1)

    def reduced_shard(self, index: int) -> Tensor:
        reduced = self._reduced_shards[index]
        if reduced is None:
            if self.stage == 0:
                self._sum_whole_buckets()
            else:
                self._reduce_shard(index)
            reduced = self._reduced_shards[index]
            assert reduced is not None
        return reduced

    def squared_norm(self, index: int) -> Tensor:
        squares = self._squared_norms[index]
        if self.stage == 0 or self._inter_node is not None or squares is None:  # squares are of a part that went on
            return super().squared_norm(index)
        return squares

    def _reduce_shard(self, index: int) -> None:
        """Takes the sum of this rank's shard."""
        if self._reduced_shards[index] is None:
            part = self._sum_part(index)
            if self.stage == 2:
                self._set_counter(BUCKETS_REDUCED, self._buckets_before + index + 1)
            self._reduced_shards[index] = self._reduce_between_nodes(index, part)

    def _sum_part(self, index: int) -> Tensor:
        """The node's sum of this rank's part."""
        node_shard, op = self._node_shard(index), f"sum of bucket {index}"
        with self.memory.guard(op):
            self._wait_for_peers(BUCKETS_WRITTEN, self._buckets_before + index + 1, op)
            parts = [gradients[node_shard] for gradients in self._rank_gradients(index)]
            out = self._separate_sums.get(index, parts[self.memory.rank])
            squares = 0.0
            for a, b in _blocks(len(out)):
                self._sum_block(parts, a, b, out[a:b])
                squares += squared(out[a:b])  # while it is in the cache
            self._squared_norms[index] = torch.tensor(squares, dtype=torch.float64)
            self.traffic.exchange((self.memory.world - 1) * parts[0].nbytes)
        return out

    def _sum_block(self, parts: Sequence[Tensor], a: int, b: int, out: Tensor) -> None:
        """out = the sum of parts[:][a:b]; it may be this rank's own one."""
        blocks, own = [part[a:b] for part in parts], self.memory.rank
        if out.data_ptr() == blocks[own].data_ptr() and own > 1:  # it is needed when the first two have been added
            blocks[own] = blocks[own].clone()
        sum_in_rank_order(blocks, out)

    def _matrices(self, index: int) -> tuple[tuple[int, int, int], ...]:
        """The whole rows of matrices that lie in this rank's part, counted from its beginning."""
        node_shard, matrices = self._node_shard(index), []
        for first, rows, columns in self.specs[index].matrices:
            top = max(0, -(-(node_shard.start - first) // columns))
            bottom = min(rows, (node_shard.stop - first) // columns)
            if top < bottom:
                matrices.append((first + top * columns - node_shard.start, bottom - top, columns))
        return tuple(matrices)

    def _reduce_between_nodes(self, index: int, part: Tensor) -> Tensor:
        """Sums the node's part over all nodes: in place at stage 0, otherwise this rank's shard of it."""
        self._reduced_between_nodes = index + 1
        if self._inter_node is None:
            return part
        if self.stage == 0:
            self._inter_node.all_reduce(part, index, self._matrices(index), self.traffic)
            return part
        return self._inter_node.reduce_scatter(part, index, self._matrices(index), self.traffic)

    def _sum_whole_buckets(self) -> None:
        """Stage 0: all sums of all buckets, on every rank; afterwards this rank has read what it needs."""
        own = self.memory.rank
        for index in range(len(self.specs)):
            part = self._sum_part(index)
            self._reduce_between_nodes(index, part)
            if index in self._separate_sums:
                self._rank_gradients(index)[own][self._node_shard(index)].copy_(part)
            self._set_counter(BUCKETS_REDUCED, self._buckets_before + index + 1)
        for index in range(len(self.specs)):
            op, gradients = f"sums of bucket {index}", self._rank_gradients(index)
            with self.memory.guard(op):
                for rank in self._others:
                    self.memory.wait_signal(
                        self._counter_words, rank, BUCKETS_REDUCED, self._buckets_before + index + 1, op=op
                    )
                    node_shard = self._node_shard_of(index, rank)
                    gradients[own][node_shard].copy_(gradients[rank][node_shard])
                    self.traffic.exchange(gradients[own][node_shard].nbytes)
            self._reduced_shards[index] = gradients[own]
        self._set_counter(STEPS_DONE, self._counters[BACKWARDS_DONE])

    def update(self, updates: Sequence[ShardUpdate]) -> None:
        if self.stage == 0:
            for index, update in enumerate(updates):
                update.apply(self.reduced_shard(index), self.values(index))
            return
        for index, update in enumerate(updates):
            if self._must_sum_first(update):
                self.reduced_shard(index)
        step = self._counters[BACKWARDS_DONE]
        with self.memory.guard("update"):
            self._wait_for_peers(BACKWARDS_DONE, step, "update")  # and so they have sent all buckets
            for index, update in enumerate(updates):
                self._update_shard(index, update)
            self._set_counter(STEPS_DONE, step)
            self._wait_for_peers(STEPS_DONE, step, "update")

    def _must_sum_first(self, update: ShardUpdate) -> bool:
        """Whether an update cannot sum on its way."""
        return self._inter_node is not None

    def _update_shard(self, index: int, update: ShardUpdate) -> None:
        """The update of a shard, and its parameters to all; its gradients are summed on the way if they are not yet."""
        shard, sums, parts = self.shard(index), self._reduced_shards[index], []
        if sums is None:
            parts = [gradients[shard.start : shard.stop] for gradients in self._rank_gradients(index)]
            self.traffic.exchange((self.memory.world - 1) * parts[0].nbytes)
            scratch = torch.empty(min(CPU_BLOCK, len(shard)), dtype=self.specs[index].state_dtype)
        values = [x[shard.start : shard.stop] for x in self._values[index]]
        own = values[self.memory.rank]
        for a, b in update.blocks():
            if sums is None:
                self._sum_block(parts, a, b, scratch[: b - a])
            update.block(a, b, scratch[: b - a] if sums is None else sums[a:b], own[a:b])
            if self._inter_node is None:
                for rank in self._others:
                    values[rank][a:b].copy_(own[a:b])
        if self._inter_node is None:
            self.traffic.exchange((self.memory.world - 1) * own.nbytes)
        else:
            self._write_to_peers(index)

    def _write_to_peers(self, index: int) -> None:
        """The parameters of this rank's shard to all."""
        node_shard, values = self._node_shard(index), self._values[index]
        own = values[self.memory.rank]
        if self._inter_node is not None:
            shard = self.shard(index)
            self._inter_node.all_gather(own[shard.start : shard.stop], own[node_shard], self.traffic)
        for rank in self._others:
            values[rank][node_shard].copy_(own[node_shard])
        self.traffic.exchange((self.memory.world - 1) * own[node_shard].nbytes)

    def publish(self) -> None:
        if self.stage == 0:
            return
        self.memory.barrier("publish")
        for index in range(len(self.specs)):
            self._write_to_peers(index)
        self.memory.barrier("published")

    def abandon(self, *, begun: bool) -> None:
        if self._generation == self.memory.generation:  # another exchange, or the caller, may have reset it
            self.memory.reset()
        if self._inter_node is not None:  # which has no reset: other nodes, which may wait for sums, get NaN
            for index in range(self._reduced_between_nodes if begun else 0, len(self.specs)):
                size = self.specs[index].size // self.memory.world
                dtype = self.specs[index].state_dtype
                self._reduce_between_nodes(
                    index, torch.full((size,), torch.nan, dtype=dtype, device=self.memory.device)
                )


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of these sizes begin in a common one, and its size; in bytes."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT
    return starts, end


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    for a in range(0, size, CPU_BLOCK):
        yield a, min(a + CPU_BLOCK, size)
