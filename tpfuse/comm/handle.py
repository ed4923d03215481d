"""The handle of a collective of torch.distributed, which names the rank that a wait has missed.

Gloo and NCCL do not know which rank it was: so ranks that give up write that into the group's store, where a missing
rank is silent. The group cannot be used again. The store also says which process each rank is, for the flight record of
a rank that has waited in vain without shared memory.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from tpfuse.comm import host, trace, waits
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.flight_record import Process, write_record
from tpfuse.comm.settings import settings
from tpfuse.comm.stacks import has_ended

PATIENCE = 2.0  # the seconds that a rank that gives up waits for the others to do the same
_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_announced: WeakSet[dist.ProcessGroup] = WeakSet()
_NO_STORE = (RuntimeError, KeyError)  # what torch raises if the store fails, or if the group has none


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
    except _NO_STORE:
        return []
    return others


def announce(group: dist.ProcessGroup) -> None:
    """Tell the other ranks of the group which process this rank is. Only the first call does anything."""
    if group not in _announced:
        _announced.add(group)
        with contextlib.suppress(*_NO_STORE):
            store = dist.distributed_c10d._get_process_group_store(group)
            store.set(_process_key(group.rank()), json.dumps([host.node_identity(), os.getpid()]))


def write_group_record(group: dist.ProcessGroup, error: PeerTimeout) -> None:
    """Write the flight record of a rank that has waited in vain without shared memory.

    It has the processes on this host that have announced themselves. Their operations are not recorded.
    """
    write_record(error, lambda: _processes(group))


def _processes(group: dist.ProcessGroup) -> list[Process]:
    found, node = [], host.node_identity()
    with contextlib.suppress(*_NO_STORE):
        store = dist.distributed_c10d._get_process_group_store(group)
        for rank, global_rank in enumerate(dist.get_process_group_ranks(group)):
            if store.check([_process_key(rank)]):
                other, pid = json.loads(store.get(_process_key(rank)))
                if other == node:
                    found.append(Process(global_rank, pid, has_ended(pid)))
    return found


def _process_key(rank: int) -> str:
    return f"tpfuse process: {rank}"
