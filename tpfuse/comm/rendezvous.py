"""What ranks that share no memory write into the store of their process group.

That are values, for an exchange that names a rank that does not come, and which process each rank is, for the flight
record of a rank that has waited in vain without shared memory.
"""

import contextlib
import json
import os
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from tpfuse.comm import host
from tpfuse.comm.errors import Disagreement, PeerTimeout, named
from tpfuse.comm.flight_record import Process, write_record
from tpfuse.comm.stacks import has_ended

_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_announced: WeakSet[dist.ProcessGroup] = WeakSet()
_NO_STORE = (RuntimeError, KeyError)  # what torch raises if the store fails, or if the group has none


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


def stored(value: Any, group: dist.ProcessGroup, op: str, timeout: float) -> list[Any]:
    """Return every rank's value by the group's store (`tpfuse.comm.agreement.exchange`)."""
    announce(group)
    _counts[group] = count = _counts.get(group, 0) + 1
    store = dist.distributed_c10d._get_process_group_store(group)
    store.set(f"tpfuse exchange {count}: {group.rank()}", json.dumps([op, value]))
    values, ranks = [], dist.get_process_group_ranks(group)
    for rank in range(group.size()):
        key = f"tpfuse exchange {count}: {rank}"
        try:
            store.wait([key], timedelta(seconds=timeout))
            entry = store.get(key)
        except RuntimeError as error:
            detail = "it has not come to this exchange of the ranks"
            missing = PeerTimeout(
                op, step=-1, rank=ranks[group.rank()], peer=ranks[rank], waited=timeout, detail=detail
            )
            write_group_record(group, missing)
            raise missing from error
        other, found = json.loads(entry)
        if other != op:
            own = named(ranks[group.rank()])
            raise Disagreement(f"{named(ranks[rank])} runs {other}, {own} runs {op}")
        values.append(found)
    return values
