"""The difference between the clocks of ranks on several hosts, measured by messages."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tpfuse.comm.agreement import exchange
from tpfuse.comm.host import node_identity

_ROUNDS = 20  # messages to a host; the one that travels fastest counts


def clock_offset(
    group: dist.ProcessGroup | None, device: torch.device, now: Callable[[], int] = time.time_ns
) -> tuple[int, int]:
    """Return (ns to add to this rank's clock for that of the group's first rank, the largest error in ns). Collective.

    The ranks of a host have one clock, so messages travel only between hosts (as in NTP: the reply's time belongs to
    the middle of the fastest round trip, RFC 5905). group: None for a single rank. now: the clock, in ns.
    """
    if group is None:
        return 0, 0
    hosts = exchange(node_identity(), group, op="measurement of clocks")
    offsets = {hosts[0]: (0, 0)}
    for rank, host in enumerate(hosts):
        if host not in offsets:
            offsets[host] = _between_hosts(group, rank, device, now)
    measured: dict[str, tuple[int, int]] = exchange(offsets, group, op="measurement of clocks")[0]
    return measured[hosts[group.rank()]]


def _between_hosts(
    group: dist.ProcessGroup, other: int, device: torch.device, now: Callable[[], int]
) -> tuple[int, int]:
    """Return (offset, error) of the rank `other`, on the first rank; (0, 0) on all others."""
    time_ns = torch.zeros(1, dtype=torch.int64, device=device)
    best: tuple[int, int] | None = None
    for _ in range(_ROUNDS):
        if group.rank() == 0:
            sent = now()
            dist.send(time_ns, group=group, group_dst=other)
            dist.recv(time_ns, group=group, group_src=other)
            theirs, received = int(time_ns), now()
            if best is None or received - sent < 2 * best[1]:
                best = (sent + received) // 2 - theirs, (received - sent) // 2
        elif group.rank() == other:
            dist.recv(time_ns, group=group, group_src=0)
            time_ns.fill_(now())
            dist.send(time_ns, group=group, group_dst=0)
    return best or (0, 0)
