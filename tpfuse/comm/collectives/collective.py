"""Collectives by torch.distributed (NCCL or Gloo), for ranks without symmetric memory, such as those of several hosts.

A rank that is lost or late raises PeerTimeout on the others here too. Gloo and NCCL do not know which rank it was: so
ranks that give up write that into the group's store, where a missing rank is silent. The group cannot be used again.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import trace, waits
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.rank_order import rows_of, sum_in_rank_order
from tpfuse.comm.rendezvous import announce, write_group_record
from tpfuse.comm.settings import settings


class Handle(Protocol):
    """The handle of a collective under way."""

    def wait(self) -> object:
        """Block the caller (on CUDA the current stream) until the result may be read. Raise PeerTimeout."""


class Handles:
    """The handle of several transfers together."""

    def __init__(self, handles: Sequence[Handle] = ()) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


DONE = Handles()  # the handle of a collective that has ended
PATIENCE = 2.0  # the seconds that a rank that gives up waits for the others to do the same
_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_Start = Callable[..., dist.Work | None]
# torch 2.13 renamed these two functions; older releases have only the second name.
all_gather_single: _Start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: _Start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def set_timeout(group: dist.ProcessGroup, seconds: float | None = None) -> None:
    """Set the deadline of the group's operations, by default that of the settings; torch's own is 10 or 30 minutes."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=settings().timeout if seconds is None else seconds), group)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error of torch.distributed means that a rank is lost or late; it has no class for that."""
    text = str(error)
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError)
        or any(word in text for word in ("Connection", "Timed out", "timed out", "gloo"))
    )


class CollectiveHandle:
    """The handle of a collective of torch.distributed. Every rank must make those of a group in one order.

    then: what `wait` does at its end.
    """

    def __init__(
        self, op: str, group: dist.ProcessGroup, work: dist.Work | None, then: Callable[[], None] = lambda: None
    ) -> None:
        self._op, self._group, self._work, self._then = op, group, work, then
        announce(group)
        self._number = _counts[group] = _counts.get(group, 0) + 1
        self._started = time.monotonic()
        # Gloo's wait takes a deadline. That of NCCL would block the host until the result is there; NCCL's watchdog has
        # its own deadline.
        self._deadline = (timedelta(seconds=settings().timeout),) if dist.get_backend(group) == "gloo" else ()
        if trace.is_observed() and work is not None:
            flow = self._flow()
            trace.signal(f"begin {flow}")
            if self._deadline:  # NCCL's future is done as soon as the collective is enqueued
                work.get_future().add_done_callback(lambda _: trace.signal(f"end {flow}"))

    def wait(self) -> None:
        if self._work is None:
            return
        flow = self._flow() if trace.is_observed() else ""
        with self.name_missing_rank(), trace.span("communication", self._op, flow=flow):
            self._work.wait(*self._deadline)
        self._then()

    def _flow(self) -> str:
        """Return the text that is equal in all ranks' spans of this collective."""
        return f"{dist.get_process_group_ranks(self._group)}: collective {self._number}"

    @contextlib.contextmanager
    def name_missing_rank(self) -> Iterator[None]:
        """Turn an error of torch.distributed about a lost rank into a PeerTimeout with the rank that is missing."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            waited, silent = time.monotonic() - self._started, _silent_ranks(self._group, self._number)
            ranks = dist.get_process_group_ranks(self._group)
            silent = [ranks[rank] for rank in silent]
            detail = "" if len(silent) < 2 else f"ranks {', '.join(map(str, silent))} are silent"
            peer = waits.last_that_gave_up(silent[0], 0.0) if len(silent) == 1 else None
            waits.give_up(peer)
            rank = ranks[self._group.rank()]
            missing = PeerTimeout(self._op, step=-1, rank=rank, peer=peer, waited=waited, detail=detail)
            write_group_record(self._group, missing)
            raise missing from error


def gather_objects(value: Any, group: dist.ProcessGroup, *, op: str) -> list[Any]:
    """Return the values of all ranks of the group, in rank order. They should be small, and are pickled.

    op: the name of the operation in the message. Raise PeerTimeout.
    """
    values: list[Any] = [None] * group.size()
    with CollectiveHandle(op, group, None).name_missing_rank():
        dist.all_gather_object(values, value, group=group)
    return values


def _silent_ranks(group: dist.ProcessGroup, number: int) -> list[int]:
    """Return the ranks that do not give up collective `number` within two seconds; none if the store fails."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
        store.set(f"tpfuse gives up {number}: {group.rank()}", "")
        deadline = time.monotonic() + PATIENCE
        while others and time.monotonic() < deadline:
            time.sleep(0.02)
            others = [rank for rank in others if not store.check([f"tpfuse gives up {number}: {rank}"])]
    except (RuntimeError, KeyError):
        return []
    return others


def start_all_gather(x: Tensor, out: Tensor, group: dist.ProcessGroup) -> CollectiveHandle:
    """Begin an all-gather: out[r] becomes rank r's x. x: [n] contiguous; out: [world, n]."""
    return CollectiveHandle("all_gather", group, all_gather_single(out.view(-1), x, group=group, async_op=True))


def start_reduce_scatter(x: Tensor, out: Tensor, group: dist.ProcessGroup) -> CollectiveHandle:
    """Begin a reduce-scatter: out becomes the sum over ranks of x[this rank]. x: [world, n] contiguous; out: [n].

    With Gloo each rank sends its partial sums to their owners, which add them in rank order, half types in float32: the
    result does not depend on the rank, and it takes two thirds of the time of Gloo's own reduce-scatter (1 MB, 2 ranks,
    torch 2.13: 0.56 ms against 0.84).
    """
    if dist.get_backend(group) == "gloo":
        received = torch.empty_like(x)
        sent = dist.all_to_all_single(received.view(-1), x.view(-1), group=group, async_op=True)
        return CollectiveHandle("reduce_scatter", group, sent, lambda: sum_in_rank_order(received.unbind(), out))
    return CollectiveHandle("reduce_scatter", group, reduce_scatter_single(out, x.view(-1), group=group, async_op=True))


def start_all_to_all(
    x: Tensor, out: Tensor, group: dist.ProcessGroup, counts: tuple[list[int], list[int]] | None = None
) -> CollectiveHandle:
    """Begin an all-to-all: out[r] becomes rank r's x[this rank]. x, out: [world, n] contiguous.

    counts: the elements for each rank and those from each rank, in flat x and out; None if all are equally many.
    """
    sent, received = counts or (None, None)
    sizes = {"output_split_sizes": received, "input_split_sizes": sent}
    work = dist.all_to_all_single(out.view(-1), x.view(-1), group=group, async_op=True, **sizes)
    return CollectiveHandle("all_to_all", group, work)


def start_all_reduce(
    x: Tensor, group: dist.ProcessGroup, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> CollectiveHandle:
    """Begin to replace the contiguous `x` by its sum, or the reduction `op`, over all ranks."""
    return CollectiveHandle("all_reduce", group, dist.all_reduce(x, op=op, group=group, async_op=True))


def broadcast_(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace the contiguous tensors on all ranks by those of the group's first rank. Raise PeerTimeout."""
    works = [dist.broadcast(x, group=group, group_src=0, async_op=True) for x in tensors]
    for work in [CollectiveHandle("broadcast", group, work) for work in works]:
        work.wait()


def share_(x: Tensor, group: dist.ProcessGroup) -> None:
    """Replace x, contiguous, on all ranks by that of the group's first rank. Raise PeerTimeout.

    The deadline is that of torch's group, as for `gather_objects`: before training, one rank may read files for long.
    """
    with CollectiveHandle("broadcast", group, None).name_missing_rank():
        dist.broadcast(x, group=group, group_src=0)


def start_shift(x: Tensor, out: Tensor, group: dist.ProcessGroup) -> Handles:
    """Begin a shift: out becomes the previous rank's x, on the first rank that of the last one.

    x, out: contiguous, of one shape and dtype.
    """
    rank, world = group.rank(), group.size()
    ends = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % world),
        dist.P2POp(dist.irecv, out, group=group, group_peer=(rank - 1) % world),
    ]
    return Handles([CollectiveHandle("shift", group, work) for work in dist.batch_isend_irecv(ends)])


class TorchCollectives:
    """The collectives of one group, with the methods of `DirectCollectives`. All begin early, even without `later`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_gather(self, x: Tensor, out: Tensor, *, later: bool = False) -> Handle:
        return start_all_gather(x.view(-1), rows_of(out, self._group.size()), self._group)

    def all_to_all(self, x: Tensor, out: Tensor) -> Handle:
        return start_all_to_all(rows_of(x, len(x)), rows_of(out, len(x)), self._group)

    def reduce_scatter(self, x: Tensor, out: Tensor, *, later: bool = False) -> Handle:
        return start_reduce_scatter(rows_of(x, self._group.size()), out.view(-1), self._group)

    def all_reduce(self, x: Tensor, out: Tensor, *, later: bool = False) -> Handle:
        return start_all_reduce(out if out is x else out.copy_(x), self._group)

    def all_reduce_max(self, x: Tensor, out: Tensor) -> Handle:
        return start_all_reduce(out.copy_(x), self._group, op=dist.ReduceOp.MAX)
