"""The split of a group by node, for sums that cross the network between nodes only once.

On N nodes of R ranks a sum over all ranks takes three steps: a reduce-scatter over the ranks of each node, which gives
every rank a shard of 1/R; a sum of that shard over the ranks with the same number on all nodes; and an all-gather over
the ranks of each node. So each of two nodes sends every element once.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tpfuse.comm import host
from tpfuse.comm.rendezvous import exchange
from tpfuse.comm.settings import settings


@dataclass(frozen=True)
class Nodes:
    """A group split by node. Ranks are in the order of the default group, as in every new group of torch.

    within: the ranks of this rank's node; across: the ranks with this rank's number in `within`, one of each node.
    """

    within: dist.ProcessGroup
    across: dist.ProcessGroup

    @property
    def count(self) -> int:
        """Return the number of nodes."""
        return self.across.size()

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks of each node, at least two."""
        return self.within.size()


_splits: WeakKeyDictionary[dist.ProcessGroup, Nodes | str] = WeakKeyDictionary()
_next_number = 0


def split_by_node(group: dist.ProcessGroup) -> Nodes | None:
    """Return the nodes of `group`, or None if a split gains nothing (`why_not_split` gives the reason).

    The result is the same on every rank and is kept as long as the group. The first call is collective, over this group
    alone. The new groups have the deadline of the settings. Under NCCL with a device bound to the default group, all
    groups of a mesh dimension must be split at the same time, because NCCL splits its communicators among all ranks.
    Raise PeerTimeout if a rank does not come.
    """
    if group not in _splits:
        _splits[group] = _make_split(group)
    split = _splits[group]
    return split if isinstance(split, Nodes) else None


def why_not_split(group: dist.ProcessGroup) -> str:
    """Return why `split_by_node` returns None; empty if it does not. The first call is collective."""
    return "" if split_by_node(group) is not None else str(_splits[group])


def _make_split(group: dist.ProcessGroup) -> Nodes | str:
    entries = exchange(group, (host.node_identity(), _free_number()), "split by node", settings().timeout)
    ranks = dist.get_process_group_ranks(group)
    nodes = ranks_by_node({rank: node for rank, (node, _) in zip(ranks, entries, strict=True)})
    reason = _why_not(nodes)
    if reason:
        return reason
    this_node = next(node for node in nodes if dist.get_rank() in node)
    index = this_node.index(dist.get_rank())
    with _agreed(max(free for _, free in entries)):
        return Nodes(_new_group(this_node, group), _new_group([node[index] for node in nodes], group))


def _free_number() -> int:
    """Return the first number of a group that this rank has not used.

    If only its members make a group, torch names it after them and after the number of groups that the process has.
    That number differs between ranks that are in different numbers of groups, which then wait for each other in vain.
    """
    return max(_next_number, len(_names()))


@contextlib.contextmanager
def _agreed(number: int) -> Iterator[None]:
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


def _names() -> dict[object, str]:
    """Return torch's table of the names of this process's groups."""
    names: dict[object, str] = dist.distributed_c10d._world.pg_names  # type: ignore[assignment]
    return names


def ranks_by_node(identities: Mapping[int, str]) -> list[list[int]]:
    """Return the ranks of each node: those with the same identity, ascending; nodes are ordered by their first ranks.

    identities: the node's identity for each rank.
    """
    nodes: dict[str, list[int]] = {}
    for rank in sorted(identities):
        nodes.setdefault(identities[rank], []).append(rank)
    return list(nodes.values())


def _why_not(nodes: Sequence[Sequence[int]]) -> str:
    """Return why a split gains nothing; empty if it does."""
    sizes = [len(node) for node in nodes]
    if len(nodes) == 1:
        return "all ranks are on one node"
    if max(sizes) == 1:
        return f"each of the {len(nodes)} nodes has one rank"
    if min(sizes) != max(sizes):
        return f"the {len(nodes)} nodes have unequal numbers of ranks: {', '.join(map(str, sizes))}"
    return ""


def _new_group(ranks: list[int], group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group of these ranks of the default group. Only its members call this."""
    new = dist.new_group(
        ranks,
        timeout=timedelta(seconds=settings().timeout),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
    )
    assert isinstance(new, dist.ProcessGroup)
    return new
