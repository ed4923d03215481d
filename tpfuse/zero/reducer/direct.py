"""Buckets in memory that ranks share: peers read gradients where they are, and write parameters where they are used.

No data is staged: peers read the gradients that a rank's backward pass writes, and write the parameters that they
update directly into the rank's own. Four counters on each rank, written by that rank alone, order all these accesses:

| counter         | counts                | meaning                                                                    |
|-----------------|-----------------------|----------------------------------------------------------------------------|
| buckets_written | buckets, of all steps | the gradients of this many buckets are complete                            |
| buckets_reduced | buckets, of all steps | this rank has read this many; at stage 0 the sums of its part have         |
|                 |                       | replaced its own gradients there                                           |
| updates_begun   | steps                 | nobody reads this rank's parameters any more: peers may write them         |
| steps_done      | steps                 | this rank reads and writes no other rank's memory any more                 |

Stages 0 and 1: the owner's sum replaces the owner's gradients of its shard, which no other rank reads. Before a rank
writes a gradient again, every rank has set steps_done for the step. Stage 2: the reductions of buckets use three
gradient buffers in turn, so that no rank waits for the bucket that has just been sent. A rank writes the gradients of
reduction i into their buffer after all ranks have read those of reduction i - 3, which were in the same buffer. Sums
are in separate memory, where those of a bucket that is reduced several times in a step are added up.

Across nodes, each rank sums for its node the shard of all ranks at its position, and these ranks then sum the results
of all nodes: each of them owns a part of that shard. Of a bucket that is reduced several times in a step they sum what
has been added up, once. Sources: ZeRO, arXiv:1910.02054; the order of sums is rule 1 of docs/architecture.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tpfuse.comm.sum_order import sum_in_tree
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.zero.reducer.base import BucketSpec, GradientReducer
from tpfuse.zero.reducer.gradient_norm import Squares, of_blocks, squared
from tpfuse.zero.reducer.inter_node import InterNodeReducer, Spans
from tpfuse.zero.reducer.shard_update import CPU_BLOCK, ShardUpdate

_BUFFER_ALIGNMENT = 64  # bytes
GRADIENT_BUFFERS = 3  # at most; fewer buckets need one each


@dataclass
class _Counters:
    """The values of this rank's counters. The order of the fields is that of the words in the ranks' memory."""

    buckets_written: int = 0
    buckets_reduced: int = 0
    updates_begun: int = 0
    steps_done: int = 0


class _Turn(NamedTuple):
    """A reduction of a bucket, by its place in a step: at stages 0 and 1 that of the bucket."""

    bucket: int
    again: bool  # whether its sum is added to what earlier ones of the bucket have left in `_separate_sums`
    more: bool


_WORDS = {field.name: word for word, field in enumerate(fields(_Counters))}


class DirectReducer(GradientReducer):
    """The reducer of the ranks that share `memory`, where it has this name, or, with `inter_node`, of one node."""

    def __init__(
        self,
        specs: Sequence[BucketSpec],
        stage: int,
        memory: SymmetricMemory,
        name: str,
        inter_node: InterNodeReducer | None = None,
        leaves: Sequence[int] | None = None,
    ) -> None:
        """Allocate the buffers in the ranks' memory. Collective.

        leaves: the memory's ranks in the order of the leaves of a sum (`tree_order`), by default their own.
        """
        nodes, node = (1, 0) if inter_node is None else (inter_node.nodes, inter_node.node)
        super().__init__(specs, stage, memory.rank * nodes + node, memory.world * nodes)
        self.memory, self._name, self._inter_node = memory, name, inter_node
        self.across = None if inter_node is None else inter_node.group
        self._others = [(memory.rank + i) % memory.world for i in range(1, memory.world)]
        self._leaves = range(memory.world) if leaves is None else leaves
        self._counter_words = memory.signals(f"{name}: flags", 4)
        self._counters, self._generation = _Counters(), memory.generation
        self._steps = 0  # the number of steps whose backward passes have ended
        self._buckets_before = 0  # the number of buckets that were sent before this step
        self._reduced_shards: list[Tensor | None] = [None] * len(self.specs)
        self._squares: list[Squares | None] = [None] * len(self.specs)
        self._separate_sums: dict[int, Tensor] = {}
        self._turns: list[_Turn] = []  # of this step
        self._last_turns: dict[int, int] = {}  # by bucket
        self._added: set[int] = set()  # the buckets to whose sums the next turn's is added
        self._turns_summed = 0  # at stage 2
        self._reduced_between_nodes: set[int] = set()  # the buckets that this step has summed over the nodes
        self._allocate()

    @torch.inference_mode(False)  # the views are used outside of inference mode later
    def _allocate(self) -> None:
        specs = self.specs
        if self.stage == 0:
            device = self.memory.device
            self._values = [[torch.zeros(s.size, dtype=s.dtype, device=device)] * self.memory.world for s in specs]
        else:
            starts, total = _offsets([s.size * s.dtype.itemsize for s in specs])
            self._values = self._buffers_of_ranks("parameters", total, starts, [s.dtype for s in specs])
        sizes, sent = [s.size * s.sent.itemsize for s in specs], [s.sent for s in specs]
        in_turn = self.stage == 2
        starts, total = _offsets([max(sizes)] * min(GRADIENT_BUFFERS, len(specs)) if in_turn else sizes)
        places = [[at] * len(specs) for at in starts] if in_turn else [starts]
        self._gradient_buffers = [self._buffers_of_ranks("gradients", total, each, sent) for each in places]
        for index, spec in enumerate(specs):
            if self.stage == 2 or spec.sent != spec.state_dtype:
                size = spec.size // self.memory.world
                self._separate_sums[index] = torch.zeros(size, dtype=spec.state_dtype, device=self.memory.device)

    def _buffers_of_ranks(
        self, what: str, total: int, starts: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> list[list[Tensor]]:
        whole = self.memory.buffer(f"{self._name}: {what}", (total,), torch.uint8).peers
        return [
            [x[at : at + spec.size * dtype.itemsize].view(dtype) for x in whole]
            for spec, at, dtype in zip(self.specs, starts, dtypes, strict=True)
        ]

    def free(self) -> None:
        super().free()
        for what in (["parameters"] if self.stage else []) + ["gradients", "flags"]:
            self.memory.free(f"{self._name}: {what}")

    def _node_shard(self, index: int, rank: int | None = None) -> slice:
        """Return the elements that a rank, by default this one, sums for its node."""
        size, rank = self.specs[index].size // self.memory.world, self.memory.rank if rank is None else rank
        return slice(rank * size, (rank + 1) * size)

    def _rank_gradients(self, index: int, turn: int) -> list[Tensor]:
        """Return every rank's gradients of a bucket in this turn of the step."""
        return self._gradient_buffers[(self._buckets_before + turn) % len(self._gradient_buffers)][index]

    def _set_counter(self, name: str, value: int) -> None:
        setattr(self._counters, name, value)
        self.memory.signal(self._counter_words, self.memory.rank, _WORDS[name], value)

    def _wait_for_peers(self, name: str, value: int, op: str) -> None:
        for rank in self._others:
            self._wait_for_peer(rank, name, value, op)

    def _wait_for_peer(self, rank: int, name: str, value: int, op: str) -> None:
        self.memory.wait_signal(self._counter_words, rank, _WORDS[name], value, op=op)

    def values(self, index: int) -> Tensor:
        return self._values[index][self.memory.rank]

    def begin(self) -> None:
        with self.memory.guard("begin a step"):
            if self._generation != self.memory.generation:  # a reset has set all counters to 0
                self._counters, self._steps, self._generation = _Counters(), 0, self.memory.generation
            self._buckets_before = self._counters.buckets_written
            self._reduced_shards, self._squares = [None] * len(self.specs), [None] * len(self.specs)
            self._turns, self._last_turns, self._turns_summed = [], {}, 0
            self._added, self._reduced_between_nodes = set(), set()
            if self._counters.steps_done != self._steps:  # the step before had no update
                self._set_counter("steps_done", self._steps)
            self._wait_for_peers("steps_done", self._steps, "begin a step")

    def gradient_buffer(self, index: int) -> Tensor:
        turn, count = len(self._turns), len(self._gradient_buffers)
        if self.stage < 2:
            turn = index
        elif turn >= count or len(self.specs) > count:  # otherwise nothing of this step has been in the buffer
            lag = max(count - 1, 1)
            if turn >= lag:
                self._sum_turns(turn - lag)
            if turn >= count:
                self._wait_until_read(turn - count)
        return self._rank_gradients(index, turn)[self.memory.rank]

    def _wait_until_read(self, turn: int) -> None:
        """Wait until every rank has read the gradients of a turn. `begin` has checked what the last step left."""
        op = f"buffer of bucket {self._turns[turn].bucket}"
        with self.memory.guard(op):
            self._wait_for_peers("buckets_reduced", self._buckets_before + turn + 1, op)

    def start_reduce(self, index: int, *, more: bool = False) -> None:
        self._begin_turn(index, more)
        self._set_counter("buckets_written", self._buckets_before + len(self._turns))

    def _begin_turn(self, index: int, more: bool) -> int:
        """Return the number of the turn in which the bucket's gradients are reduced."""
        turn = self._last_turns[index] = len(self._turns)
        self._turns.append(_Turn(index, index in self._added, more))
        if more or self._inter_node is None:
            self._added.add(index)
        else:
            self._added.discard(index)
        return turn

    def end_backward(self) -> None:
        self._steps += 1

    def reduced_shard(self, index: int) -> Tensor:
        reduced = self._reduced_shards[index]
        if reduced is None:
            if self.stage == 0:
                self._sum_whole_buckets()
            elif self.stage == 1:
                self._reduced_shards[index] = self._reduce_between_nodes(index, self._sum_part(index))
        if self.stage == 2:
            self._sum_turns(self._last_turns[index])
        reduced = self._reduced_shards[index]
        return self._separate_sums[index] if reduced is None else reduced  # the former if more was to follow

    def squares(self, index: int) -> Squares:
        squares = self._squares[index]
        # At stage 0 and with other nodes, these are not the squares of `reduced_shard`.
        if self.stage == 0 or self._inter_node is not None or squares is None:
            return super().squares(index)
        return squares

    def _sum_turns(self, last: int) -> None:
        """Sum this rank's shard in each turn of stage 2 up to this one that is not summed yet, in their order."""
        for turn in range(self._turns_summed, last + 1):
            index, _, more = self._turns[turn]
            part = self._sum_part(turn)
            self._set_counter("buckets_reduced", self._buckets_before + turn + 1)
            self._turns_summed = turn + 1
            if not more:
                earlier, reduced = self._reduced_shards[index], self._reduce_between_nodes(index, part)
                again = self._inter_node is not None and earlier is not None
                self._reduced_shards[index] = earlier.add_(reduced) if again and earlier is not None else reduced

    def _sum_part(self, turn: int) -> Tensor:
        """Return the sum over the node's ranks of this rank's part of a turn's bucket, and of its turns before."""
        index, again, _ = self._turns[turn]
        node_shard, op = self._node_shard(index), f"sum of bucket {index}"
        with self.memory.guard(op):
            self._wait_for_peers("buckets_written", self._buckets_before + turn + 1, op)
            gradients = self._rank_gradients(index, turn)
            parts = [gradients[rank][node_shard] for rank in self._leaves]
            out = self._separate_sums.get(index, gradients[self.memory.rank][node_shard])
            squares, scratch = list[Tensor](), torch.empty(min(CPU_BLOCK, len(out)) if again else 0, dtype=out.dtype)
            for a in range(0, len(out), CPU_BLOCK):
                b = min(a + CPU_BLOCK, len(out))
                sum_in_tree([part[a:b] for part in parts], scratch[: b - a] if again else out[a:b])
                if again:
                    out[a:b] += scratch[: b - a]
                squares.append(squared(out[a:b]))  # while the block is in the cache
            self._squares[index] = of_blocks(squares, out.dtype)
            self.traffic.exchange((self.memory.world - 1) * parts[0].nbytes)
        return out

    def _matrices(self, index: int) -> Spans:
        """Return the whole rows of matrices in this rank's part of the bucket; elements count from its beginning."""
        node_shard, matrices = self._node_shard(index), []
        for first, rows, columns in self.specs[index].matrices:
            top = max(0, -(-(node_shard.start - first) // columns))
            bottom = min(rows, (node_shard.stop - first) // columns)
            if top < bottom:
                matrices.append((first + top * columns - node_shard.start, bottom - top, columns))
        return matrices

    def _reduce_between_nodes(self, index: int, part: Tensor) -> Tensor:
        """Sum the node's part over all nodes: at stage 0 in place, otherwise return this rank's shard of the sum."""
        self._reduced_between_nodes.add(index)
        if self._inter_node is None:
            return part
        if self.stage == 0:
            self._inter_node.all_reduce(part, index, self._matrices(index), self.traffic)
            return part
        return self._inter_node.reduce_scatter(part, index, self._matrices(index), self.traffic)

    def _sum_whole_buckets(self) -> None:
        """Compute all sums of all buckets on every rank, at stage 0; then this rank reads no other rank's gradients."""
        own = self.memory.rank
        for index in range(len(self.specs)):
            part = self._sum_part(index)
            self._reduce_between_nodes(index, part)
            if index in self._separate_sums:
                self._rank_gradients(index, index)[own][self._node_shard(index)].copy_(part)
            self._set_counter("buckets_reduced", self._buckets_before + index + 1)
        for index in range(len(self.specs)):
            op, gradients = f"sums of bucket {index}", self._rank_gradients(index, index)
            with self.memory.guard(op):
                for rank in self._others:
                    self._wait_for_peer(rank, "buckets_reduced", self._buckets_before + index + 1, op)
                    node_shard = self._node_shard(index, rank)
                    gradients[own][node_shard].copy_(gradients[rank][node_shard])
                    self.traffic.exchange(gradients[own][node_shard].nbytes)
            self._reduced_shards[index] = gradients[own]
        self._set_counter("steps_done", self._steps)

    def update(self, updates: Sequence[ShardUpdate | None]) -> None:
        if self.stage == 0:
            sums = [self.reduced_shard(index) for index in range(len(updates))]
            with self.memory.guard("update"):  # it waits for no rank, but a rank without an update raises Disagreement
                for index, update in enumerate(updates):
                    if update is not None:
                        update.apply(sums[index], self.values(index))
            return
        self._set_counter("updates_begun", self._steps)  # the caller may read the parameters until it comes here
        for index, update in enumerate(updates):
            if update is not None and self._must_sum_first(index, update):
                self.reduced_shard(index)
        with self.memory.guard("update"):
            self._wait_for_peers("updates_begun", self._steps, "update")  # all ranks have then sent all buckets
            for index, update in enumerate(updates):
                if update is None:
                    self._write_to_peers(index)
                else:
                    self._update_shard(index, update)
            self._set_counter("steps_done", self._steps)
            self._wait_for_peers("steps_done", self._steps, "update")

    def _must_sum_first(self, index: int, update: ShardUpdate) -> bool:
        return self._inter_node is not None or self._turns[self._last_turns[index]].again

    def _update_shard(self, index: int, update: ShardUpdate) -> None:
        """Update a shard and write its parameters to all ranks; also sum its gradients if they are not summed yet."""
        shard, sums, parts = self.shard(index), self._reduced_shards[index], []
        if sums is None:
            gradients = self._rank_gradients(index, self._last_turns[index])
            parts = [gradients[rank][shard.start : shard.stop] for rank in self._leaves]
            self.traffic.exchange((self.memory.world - 1) * parts[0].nbytes)
            scratch = torch.empty(min(CPU_BLOCK, len(shard)), dtype=self.specs[index].state_dtype)
        values = [x[shard.start : shard.stop] for x in self._values[index]]
        own = values[self.memory.rank]
        for a, b in update.blocks():
            if sums is None:
                sum_in_tree([part[a:b] for part in parts], scratch[: b - a])
            update.block(a, b, scratch[: b - a] if sums is None else sums[a:b], own[a:b])
            if self._inter_node is None:
                for rank in self._others:
                    values[rank][a:b].copy_(own[a:b])
        if self._inter_node is None:
            self.traffic.exchange((self.memory.world - 1) * own.nbytes)
        else:
            self._write_to_peers(index)

    def _write_to_peers(self, index: int) -> None:
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

    def abandon(self, *, begun: bool, unsent: Sequence[int]) -> None:
        if self._generation == self.memory.generation:  # another reducer, or the caller, may have reset it
            self.memory.reset()
        if self._inter_node is not None:  # it has no reset: send NaN to other nodes, which may wait for sums
            for index, spec in enumerate(self.specs):
                if not (begun and index in self._reduced_between_nodes):
                    shape, device = (spec.size // self.memory.world,), self.memory.device
                    nothing = torch.full(shape, torch.nan, dtype=spec.state_dtype, device=device)
                    self._reduce_between_nodes(index, nothing)


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each of these buffers begins, and where the last one ends."""
    aligned = [-(-size // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT for size in sizes]
    *starts, end = accumulate(aligned, initial=0)
    return starts, end
