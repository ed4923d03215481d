"""Tensor-parallel products of CPU ranks on memory that they share: a product reads its peers' data in place.

A rank writes what others need to its slot (its shard, or the partial sums that a product would have to send), signals,
and continues with the work that needs no peer; then it multiplies, or sums, in the slots of the others. So ranks may be
a little apart in time: they wait less than 0.5 ms of a step of 107 ms. They waited 1 to 4 ms when a rank computed its
own partial sums before the signal (1024 tokens x 768, 2 ranks, 2026-11-21). Each product needs one signal of each
rank, and so do both communications of an all-gather's backward together (`tpfuse.comm.channel` has the protocol). Sums
over ranks are taken in rank order, half types in float32.

Long shards are processed in rounds of some rows each, so that slots need not grow with them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tpfuse.comm.channel import Channel, slot_size
from tpfuse.comm.collectives.direct import ONE_SHOT_BYTES, SLOT_BYTES
from tpfuse.comm.sum_order import HALF, sum_in_rank_order, summed_dtype
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.comm.trace import span
from tpfuse.ops.gemm import activated, flat

ROUND_BYTES = 2**23  # the size of a slot's half; a row that is longer has a larger slot


class DirectLinear:
    """The products of one group's ranks. Tensors are on the CPU, of any float dtype and strides."""

    def __init__(self, memory: SymmetricMemory, round_bytes: int = ROUND_BYTES) -> None:
        """Prepare products on `memory`. All ranks create the object together."""
        self.memory, self._round_bytes = memory, round_bytes

    def all_gather(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None, keep: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        rows = flat(x)
        outs = [x.new_empty(self.memory.world, rows.shape[0], weight.shape[0]) for weight in weights]
        with self.memory.guard(f"all_gather_linear {x.dtype} {list(x.shape)}"):
            for rank, part, chunk in self._gathered(rows, "all_gather_linear"):
                for weight, bias, out in zip(weights, biases, outs, strict=True):
                    if bias is None:
                        torch.mm(chunk, weight.t(), out=out[rank, part])
                    else:
                        torch.addmm(bias, chunk, weight.t(), out=out[rank, part])
        shape = self.memory.world * x.shape[0], *x.shape[1:-1]
        return [activated(out.view(*shape, out.shape[-1]), activation, keep) for out in outs]

    def all_gather_backward(
        self, lefts: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needs: Sequence[bool], needs_x: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """See `ParallelLinear`. x and the partial sums of its gradient are staged together: one signal serves both."""
        op, memory = "all_gather_linear backward", self.memory
        own, world, width = memory.rank, memory.world, x.shape[-1]
        rows = flat(x)
        lefts = [left.reshape(world, rows.shape[0], left.shape[-1]) for left in lefts]
        gathers = any(needs)
        sums = [_WeightGradient(left, rows) if needed else None for left, needed in zip(lefts, needs, strict=True)]
        grad_x = rows.new_empty(rows.shape) if needs_x else None
        rounds = self._rounds(rows.shape[0], width * x.element_size() * (1 + world)) if gathers or needs_x else ()
        with memory.guard(f"{op} {x.dtype} {list(x.shape)} dx {needs_x} dw {gathers}"):
            for channel, part in rounds:
                slots = channel.next_slots(x.dtype, 1 + world, part.stop - part.start, width)
                if gathers:
                    with span("communication", "stage"):
                        slots[own][world].copy_(rows[part])
                if needs_x:
                    for rank in channel.others:
                        _sum_of_products([left[rank, part] for left in lefts], weights, slots[own][rank])
                epoch = channel.signal()
                if needs_x:
                    _sum_of_products([left[own, part] for left in lefts], weights, slots[own][own])
                for rank in (own, *channel.others):
                    if rank != own:
                        channel.wait_for(rank, epoch, op)
                    for total in sums:
                        if total is not None:
                            total.add(rank, part, slots[rank][world])
                if grad_x is not None:
                    sum_in_rank_order([slot[own] for slot in slots], grad_x[part])
        grad_weights = [None if total is None else total.result() for total in sums]
        return None if grad_x is None else grad_x.view(x.shape), grad_weights

    def reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        op, memory = "linear_reduce_scatter", self.memory
        own, world, width = memory.rank, memory.world, weight.shape[0]
        shape = x.shape[0] // world, *x.shape[1:-1], width
        out = x.new_empty(shape)
        sums = flat(out)
        rows = x.reshape(world, sums.shape[0], x.shape[-1])
        added = None if residual is None else flat(residual)
        with memory.guard(f"{op} {x.dtype} {[*x.shape[:-1], width]}"):
            for channel, part in self._rounds(sums.shape[0], width * x.element_size() * world):
                slots = channel.next_slots(x.dtype, world, part.stop - part.start, width)
                for rank in channel.others:
                    torch.mm(rows[rank, part], weight.t(), out=slots[own][rank])
                epoch = channel.signal()
                torch.mm(rows[own, part], weight.t(), out=slots[own][own])
                for rank in channel.others:
                    channel.wait_for(rank, epoch, op)
                sum_in_rank_order([slot[own] for slot in slots] + _terms(part, bias, added), sums[part])
        return out

    def reduce_scatter_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        op, world = "linear_reduce_scatter backward", self.memory.world
        needs_x, needs_weight, needs_bias = needs
        rows = flat(grad)
        right = x.reshape(world, rows.shape[0], x.shape[-1])
        grad_x = torch.empty_like(right) if needs_x else None
        total = _WeightGradient(right, rows, grad_arrives=True) if needs_weight else None
        wide = summed_dtype(rows.dtype)
        column_sums = rows.new_zeros(world, rows.shape[1], dtype=wide) if needs_bias else None
        with self.memory.guard(f"{op} {grad.dtype} {list(grad.shape)}"):
            for rank, part, chunk in self._gathered(rows, op):
                if grad_x is not None:
                    torch.mm(chunk, weight, out=grad_x[rank, part])
                if total is not None:
                    total.add(rank, part, chunk)
                if column_sums is not None:
                    column_sums[rank] += chunk.sum(0, dtype=column_sums.dtype)
        return (
            None if grad_x is None else grad_x.view(x.shape),
            None if total is None else total.result(),
            None if column_sums is None else column_sums.sum(0).to(grad.dtype),
        )

    def all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        op, memory = "linear_all_reduce", self.memory
        own, width = memory.rank, weight.shape[0]
        rows, out = flat(x), x.new_empty(*x.shape[:-1], width)
        sums, added = flat(out), None if residual is None else flat(residual)
        most = SLOT_BYTES if memory.world == 2 else ONE_SHOT_BYTES
        with memory.guard(f"{op} {x.dtype} {[*x.shape[:-1], width]}"):
            for channel, part in self._rounds(rows.shape[0], width * x.element_size()):
                slots = channel.next_slots(x.dtype, part.stop - part.start, width)
                torch.mm(rows[part], weight.t(), out=slots[own])
                epoch = channel.signal()
                for rank in channel.others:
                    channel.wait_for(rank, epoch, op)
                if slots[own].nbytes <= most:
                    sum_in_rank_order(slots + _terms(part, bias, added), sums[part])
                else:
                    _sum_by_row_slices(channel, slots, bias, None if added is None else added[part], sums[part], op)
        return out

    def _gathered(self, rows: Tensor, op: str) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield (rank, which of its rows, these rows in place): own first, then those of rank + 1, rank + 2, …

        The rows may be read until the next ones are yielded.
        """
        own = self.memory.rank
        for channel, part in self._rounds(rows.shape[0], rows.shape[1] * rows.element_size()):
            slots = channel.next_slots(rows.dtype, part.stop - part.start, rows.shape[1])
            with span("communication", "stage"):
                slots[own].copy_(rows[part])
            epoch = channel.signal()
            yield own, part, slots[own]
            for rank in channel.others:
                channel.wait_for(rank, epoch, op)
                yield rank, part, slots[rank]

    def _rounds(self, rows: int, row_bytes: int) -> Iterator[tuple[Channel, slice]]:
        """Yield the channel of each round and which of every rank's rows it takes; for no rows there is one round."""
        nbytes = self._round_bytes if row_bytes <= self._round_bytes else slot_size(row_bytes)
        channel = self.memory.channel(Channel, "direct linear", nbytes)
        size = nbytes // max(row_bytes, 1)
        for start in range(0, max(rows, 1), size):
            yield channel, slice(start, min(start + size, rows))


class _WeightGradient:
    """Σ over chunks of gradᵀ x. One factor is on this rank as a whole, the other arrives chunk by chunk.

    here: the former, [world, n, ...]; rows: a tensor like one rank's chunk. Chunks of half types are first collected in
    one tensor: their product is then rounded once, as it would be on one rank.
    """

    def __init__(self, here: Tensor, rows: Tensor, *, grad_arrives: bool = False) -> None:
        self._here, self._grad_arrives = here, grad_arrives
        self._total: Tensor | None = None
        self._copied = rows.new_empty(len(here), *rows.shape) if rows.dtype in HALF else None

    def add(self, rank: int, part: slice, chunk: Tensor) -> None:
        """Add the product with `chunk`, the rows `part` of a rank's rows."""
        if self._copied is not None:
            self._copied[rank, part].copy_(chunk)
            return
        grad, x = (chunk, self._here[rank, part]) if self._grad_arrives else (self._here[rank, part], chunk)
        if self._total is None:
            self._total = grad.t() @ x
        else:
            self._total.addmm_(grad.t(), x)

    def result(self) -> Tensor:
        """Return the sum, [N, K]."""
        if self._copied is not None:
            whole, here = self._copied.flatten(0, 1), self._here.flatten(0, 1)
            return whole.t() @ here if self._grad_arrives else here.t() @ whole
        assert self._total is not None
        return self._total


def _sum_by_row_slices(
    channel: Channel, slots: list[Tensor], bias: Tensor | None, residual: Tensor | None, out: Tensor, op: str
) -> None:
    """Write out = Σ slots + bias + residual: each rank sums some rows and reads the others', in one more epoch."""
    own, most = channel.memory.rank, -(-len(out) // len(slots))
    parts = [slice(rank * most, (rank + 1) * most) for rank in range(len(slots))]
    sums = channel.next_slots(out.dtype, most, out.shape[1])
    own_sums = sums[own][: len(out[parts[own]])]
    sum_in_rank_order([slot[parts[own]] for slot in slots] + _terms(parts[own], bias, residual), own_sums)
    epoch = channel.signal()
    out[parts[own]].copy_(own_sums)
    for rank in channel.others:
        channel.wait_for(rank, epoch, op)
        target = out[parts[rank]]
        target.copy_(sums[rank][: len(target)])


def _sum_of_products(grads: Sequence[Tensor], weights: Sequence[Tensor], out: Tensor) -> None:
    torch.mm(grads[0], weights[0], out=out)
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        out.addmm_(grad, weight)


def _terms(part: slice, bias: Tensor | None, residual: Tensor | None) -> list[Tensor]:
    """Return the tensors to add to the sum over ranks."""
    return [*([] if bias is None else [bias]), *([] if residual is None else [residual[part]])]
