"""Collectives as torch operations on shared memory: every rank stages its part and reads the others' in place.

A rank writes what its peers read once, into a slot that is small enough to stay in the cache, so that large tensors
pass through in pieces at about the speed of one copy. Sums are taken in absolute rank order, half types in float32:
they are bitwise the same on every rank and from run to run.

An operation may be begun and finished later: its first piece is staged and signalled at once, and the next operation on
the same channel finishes it first.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from torch import Tensor

from tpfuse.comm.channel import Channel
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.sum_order import Sum, max_in_rank_order, rows_of, sum_in_rank_order
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.comm.trace import span

# The bytes of half a slot, and of half the slot for larger tensors, which takes 16 MiB of each rank after the first
# such tensor. Larger pieces mean fewer rounds, which cost most if there are more ranks than cores. Measured on 2 cores,
# 2 and 4 ranks, all-reduce of 64 MiB: with 1 MiB 35 and 106 ms, 4 MiB 28 and 70, 8 MiB 24 and 63 (2026-11-21).
SLOT_BYTES, LARGE_SLOT_BYTES = 2**20, 2**23
# Up to this size each of more than two ranks sums the whole tensor. Above it each sums its part, which the others read.
ONE_SHOT_BYTES = 2**15


_FINISHED = object()


def _whole(x: Tensor) -> Tensor:
    return x


class DirectHandle:
    """The handle of an operation under way."""

    def __init__(self, collectives: "DirectCollectives", op: str, rounds: Iterator[None]) -> None:
        self._collectives, self._op, self._rounds = collectives, op, rounds
        self._generation = collectives.memory.generation
        self.done = False

    @property
    def lost(self) -> bool:
        """Return whether a reset has ended the operation."""
        return self._generation != self._collectives.memory.generation

    def begin(self) -> None:
        """Stages and signals the first piece."""
        self.done = next(self._rounds, _FINISHED) is _FINISHED

    def wait(self) -> None:
        """Block until the result may be read. Raise PeerTimeout."""
        if not self.done:
            op = f"wait for {self._op}"
            with self._collectives.memory.guard(op), span("communication", op):
                self.finish()

    def finish(self) -> None:
        """Do the rest of the operation. The caller is within a guard."""
        memory = self._collectives.memory
        self.done = True
        if self.lost:
            rank, detail = memory.global_rank, "begun before a reset"
            raise PeerTimeout(self._op, step=memory.step, rank=rank, peer=None, waited=0.0, detail=detail)
        for _ in self._rounds:
            pass


class DirectCollectives:
    """The collectives of one group. Tensors are contiguous, on the CPU, of any dtype; x has one shape on all ranks."""

    def __init__(
        self, memory: SymmetricMemory, slot_bytes: int = SLOT_BYTES, large_slot_bytes: int = LARGE_SLOT_BYTES
    ) -> None:
        """Open the channel. Collective.

        slot_bytes: the bytes of a piece; large_slot_bytes: the bytes of a piece of a tensor above slot_bytes.
        """
        self.memory, self._large_slot_bytes = memory, large_slot_bytes
        self._small = memory.channel(Channel, "direct collectives", slot_bytes)
        self._pending: DirectHandle | None = None

    def all_gather(self, x: Tensor, out: Tensor, *, later: bool = False) -> DirectHandle:
        """Make part r of out rank r's x. x: [n, ...]; out: [world * n, ...] or [world, n, ...].

        later: only begins the operation; waiting for its handle finishes it.
        """
        rounds = self._copies("all_gather", x.view(-1), rows_of(out, self.memory.world), _whole)
        return self._run("all_gather", x, rounds, later)

    def all_to_all(self, x: Tensor, out: Tensor) -> DirectHandle:
        """Make out[r] rank r's x[this rank]. x, out: [world, ...]."""
        rows = rows_of(x, self.memory.world), rows_of(out, self.memory.world)
        rounds = self._copies("all_to_all", *rows, itemgetter(self.memory.rank))
        return self._run("all_to_all", x, rounds, later=False)

    def reduce_scatter(self, x: Tensor, out: Tensor, *, later: bool = False, total: Sum | None = None) -> DirectHandle:
        """Make out Σ over ranks of part `rank` of their x. x: [world * n, ...] or [world, n, ...]; out: [n, ...].

        total: the order of the sum, by default that of the ranks.
        """
        rows, add = rows_of(x, self.memory.world), total or sum_in_rank_order
        rounds = self._one_shot("reduce_scatter", rows, out.view(-1), add, itemgetter(self.memory.rank))
        return self._run("reduce_scatter", x, rounds, later)

    def all_reduce(self, x: Tensor, out: Tensor, *, later: bool = False) -> DirectHandle:
        """Make out Σ over ranks of x. x, out: of one shape; they may be the same tensor."""
        limit = self._small.nbytes if self.memory.world == 2 else ONE_SHOT_BYTES
        if x.nbytes <= limit:
            rounds = self._one_shot("all_reduce", x.view(-1), out.view(-1), sum_in_rank_order)
        else:
            rounds = self._all_reduce_two_shot(x.view(-1), out.view(-1))
        return self._run("all_reduce", x, rounds, later)

    def all_reduce_max(self, x: Tensor, out: Tensor) -> DirectHandle:
        """Make out the maximum over ranks of x, NaN if one is. x, out: of one shape; they may be the same tensor."""
        rounds = self._one_shot("all_reduce_max", x.view(-1), out.view(-1), max_in_rank_order)
        return self._run("all_reduce_max", x, rounds, later=False)

    def _run(self, op: str, x: Tensor, rounds: Iterator[None], later: bool) -> DirectHandle:
        op = f"{op} {x.dtype} {list(x.shape)}"
        with self.memory.guard(op), span("communication", op):
            handle = DirectHandle(self, op, rounds)
            self._finish_pending()
            if later:
                handle.begin()
                self._pending = handle
            else:
                handle.finish()
        return handle

    def _channel_of(self, x: Tensor) -> Channel:
        """Return the channel for x. All ranks open the large one when it is first needed."""
        if x.nbytes <= self._small.nbytes:
            return self._small
        return self.memory.channel(Channel, "direct collectives", self._large_slot_bytes)

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.done and not pending.lost:  # the wait for a lost one raises
            pending.finish()

    def _staged(self, x: Tensor) -> Iterator[tuple[Channel, int, int, int, Tensor, list[Tensor]]]:
        """Stage and signal x [..., n] piece by piece; yield (channel, epoch, start, size, the piece, all slots).

        An empty x takes a round too: other ranks may have elements, and compare with this one in their rounds.
        """
        channel = self._channel_of(x)
        size = channel.nbytes // x.element_size() // x.shape[:-1].numel()
        for start in range(0, max(x.shape[-1], 1), size):
            piece = _cut(x, start, size)
            slots = channel.next_slots(x.dtype, *piece.shape)
            slots[self.memory.rank].copy_(piece)
            yield channel, channel.signal(), start, size, piece, slots

    def _copies(self, op: str, x: Tensor, out: Tensor, part: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Copy this part of each rank's x to the rank's row of out."""
        for channel, epoch, start, size, piece, slots in self._staged(x):
            yield
            targets = _cut(out, start, size).unbind()
            targets[self.memory.rank].copy_(part(piece))
            for rank in channel.others:
                channel.wait_for(rank, epoch, op)
                targets[rank].copy_(part(slots[rank]))

    def _one_shot(
        self,
        op: str,
        x: Tensor,
        out: Tensor,
        combine: Callable[[Sequence[Tensor], Tensor], None],
        part: Callable[[Tensor], Tensor] = _whole,
    ) -> Iterator[None]:
        """Reduce in one epoch: every rank reads and combines this part of each rank's x."""
        for channel, epoch, start, size, _, slots in self._staged(x):
            yield
            _wait_for_all(channel, epoch, op)
            combine([part(slot) for slot in slots], _cut(out, start, size))

    def _all_reduce_two_shot(self, x: Tensor, out: Tensor) -> Iterator[None]:
        """Reduce in two epochs: every rank sums its part in the first, and reads the other parts in the second."""
        channel, this_rank, world = self._channel_of(x), self.memory.rank, self.memory.world
        size = channel.nbytes // x.element_size()
        for start in range(0, x.numel(), size):
            piece, target = _cut(x, start, size), _cut(out, start, size)
            part = -(-piece.numel() // world)
            slots = channel.next_slots(x.dtype, piece.numel())
            for rank in channel.others:
                _cut(slots[this_rank], rank * part, part).copy_(_cut(piece, rank * part, part))
            epoch = channel.signal()
            yield
            _wait_for_all(channel, epoch, "all_reduce")
            shares = [_cut(slot, this_rank * part, part) for slot in slots]
            shares[this_rank] = _cut(piece, this_rank * part, part)
            sums = channel.next_slots(x.dtype, part)
            own_sum = _cut(sums[this_rank], 0, shares[this_rank].numel())
            sum_in_rank_order(shares, own_sum)
            epoch = channel.signal()
            _cut(target, this_rank * part, part).copy_(own_sum)
            for rank in channel.others:
                channel.wait_for(rank, epoch, "all_reduce")
                peer_part = _cut(target, rank * part, part)
                peer_part.copy_(sums[rank][: peer_part.numel()])


def _wait_for_all(channel: Channel, epoch: int, op: str) -> None:
    for rank in channel.others:
        channel.wait_for(rank, epoch, op)


def _cut(x: Tensor, start: int, size: int) -> Tensor:
    """Return x[..., start : start + size], or x itself if that is all of it, as it mostly is."""
    return x if start == 0 and size >= x.shape[-1] else x[..., start : start + size]
