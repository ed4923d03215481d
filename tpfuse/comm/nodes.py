"""Which ranks of a group are on the same node: for sums that cross the network between nodes only once.

On N nodes of R ranks a sum over all of them is three: a reduce-scatter over the ranks of each node, which gives every
rank a shard of 1/R; a sum over the ranks with the same number on all nodes, of their shard alone; and an all-gather
over the ranks of each node. So of two nodes each sends every element once.
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
    """A group split by node. Ranks are in the order of the default group, as torch has them in every new group.

    within: the ranks of this rank's node; across: those with this rank's number in `within`, one of each node.
    """

    within: dist.ProcessGroup
    across: dist.ProcessGroup

    @property
    def count(self) -> int:
        """Number of nodes."""
        return self.across.size()

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node, at least two."""
        return self.within.size()


_splits: WeakKeyDictionary[dist.ProcessGroup, Nodes | str] = WeakKeyDictionary()


def split_by_node(group: dist.ProcessGroup) -> Nodes | None:
    """The nodes of `group`; None where there is nothing to gain (`why_not_split` says why). The same on every rank.

    Collective when first asked for, over this group alone; kept as long as the group. The new groups have the deadline
    of the settings. Under NCCL with a device bound to the default group, all groups of a mesh dimension are to be split
    at the same time: NCCL splits its communicators among all ranks. Raises PeerTimeout where a rank does not come.
    """
    split = _split(group)
    return split if isinstance(split, Nodes) else None


def why_not_split(group: dist.ProcessGroup) -> str:
    """Why `split_by_node` gives None; empty where it does not. Collective when first asked for."""
    split = _split(group)
    return split if isinstance(split, str) else ""


def _split(group: dist.ProcessGroup) -> Nodes | str:
    split = _splits.get(group)
    if split is None:
        split = _splits[group] = _make_split(group)
    return split


def _make_split(group: dist.ProcessGroup) -> Nodes | str:
    entries = exchange(group, (host.node_identity(), _numbers.free()), "split by node", settings().timeout)
    ranks = dist.get_process_group_ranks(group)
    nodes = ranks_by_node({rank: node for rank, (node, _) in zip(ranks, entries, strict=True)})
    reason = _why_not(nodes)
    if reason:
        return reason
    this_node = next(node for node in nodes if dist.get_rank() in node)
    index = this_node.index(dist.get_rank())
    with _numbers.agreed(max(free for _, free in entries)):
        return Nodes(_new_group(this_node, group), _new_group([node[index] for node in nodes], group))


class _GroupNumbers:
    """torch names a group that its members alone have made after them and after the number of groups that the process
    has: unlike on ranks that are in other numbers of groups, which then wait for each other in vain. So ranks agree.
    """

    def __init__(self) -> None:
        self._next = 0

    def free(self) -> int:
        """The first number that this rank has not used."""
        return max(self._next, len(_names()))

    @contextlib.contextmanager
    def agreed(self, number: int) -> Iterator[None]:
        """Fills up the names of groups to `number`."""
        fillers = {object(): f"filler {index}" for index in range(number - len(_names()))}
        _names().update(fillers)
        try:
            yield
        finally:
            self._next = len(_names())
            for filler in fillers:
                del _names()[filler]


def _names() -> dict[object, str]:
    """Of this process's groups."""
    names: dict[object, str] = dist.distributed_c10d._world.pg_names  # type: ignore[assignment]
    return names


_numbers = _GroupNumbers()


def ranks_by_node(identities: Mapping[int, str]) -> list[list[int]]:
    """The ranks that say the same, in ascending order; nodes in the order of their first ranks."""
    nodes: dict[str, list[int]] = {}
    for rank in sorted(identities):
        nodes.setdefault(identities[rank], []).append(rank)
    return list(nodes.values())


def _why_not(nodes: Sequence[Sequence[int]]) -> str:
    """Why there is nothing to gain; empty where there is."""
    sizes = [len(node) for node in nodes]
    if len(nodes) == 1:
        return "all ranks are on one node"
    if max(sizes) == 1:
        return f"each of the {len(nodes)} nodes has one rank"
    if min(sizes) != max(sizes):
        return f"the {len(nodes)} nodes have unequal numbers of ranks: {', '.join(map(str, sizes))}"
    return ""


def _new_group(ranks: list[int], group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of these ranks of the default group, made by its members alone."""
    new = dist.new_group(
        ranks,
        timeout=timedelta(seconds=settings().timeout),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
    )
    assert isinstance(new, dist.ProcessGroup)
    return new
