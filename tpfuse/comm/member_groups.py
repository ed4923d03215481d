"""Process groups that only their members make, without the other ranks of the default group.

torch names such a group after its members and after the number of groups that the process has. That number differs
between ranks that are in different numbers of groups, which would then wait for each other in vain. So the members
agree on a number first.

If a device is bound to the default group, torch splits NCCL's communicator of all ranks for a new group, and waits for
every rank. So no device is bound while such a group is made, whose communicator NCCL then makes anew.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from tpfuse.comm.agreement import exchange
from tpfuse.comm.settings import settings

_next_number = 0


def free_number(group: dist.ProcessGroup, op: str) -> int:
    """Return a number from which on no rank of `group` has used one for `new_group`. Collective over this group alone.

    op: the name of the operation in errors. Raise PeerTimeout if a rank does not come.
    """
    own = max(_next_number, len(_names()))
    return int(max(exchange(own, group, op=op, within=settings().timeout)))


def new_group(ranks: list[int], group: dist.ProcessGroup, number: int) -> dist.ProcessGroup:
    """Return a new group of these ranks of the default group, which alone call this.

    It has the backend of `group` and the deadline of the settings. number: that of `free_number`, plus the number of
    groups that any rank may have made since; the same for all of these ranks.
    """
    with _counting(number), _unbound():
        new = dist.new_group(
            ranks,
            timeout=timedelta(seconds=settings().timeout),
            backend=dist.get_backend_config(group),
            use_local_synchronization=True,
        )
    assert isinstance(new, dist.ProcessGroup)
    return new


def subgroup(ranks: list[int], group: dist.ProcessGroup, op: str) -> dist.ProcessGroup | None:
    """Return a `new_group` of these ranks of `group`, None on its other ranks. Collective over `group` alone.

    op: the name of the operation in errors. Raise PeerTimeout if a rank does not come.
    """
    number = free_number(group, op)
    return new_group(ranks, group, number) if dist.get_rank() in ranks else None


@contextlib.contextmanager
def _counting(number: int) -> Iterator[None]:
    """Make this process count `number` groups within a with block, by names that stand for no group."""
    global _next_number
    fillers = {object(): f"filler {index}" for index in range(number - len(_names()))}
    _names().update(fillers)
    try:
        yield
    finally:
        _next_number = len(_names())
        for filler in fillers:
            del _names()[filler]


@contextlib.contextmanager
def _unbound() -> Iterator[None]:
    """Bind no device to the default group within a with block."""
    default = dist.distributed_c10d._get_default_group()
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device


def _names() -> dict[object, str]:
    """Return torch's table of the names of this process's groups."""
    names: dict[object, str] = dist.distributed_c10d._world.pg_names  # type: ignore[assignment]
    return names
