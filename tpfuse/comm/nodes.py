"""The split of a group by node, for sums that cross the network between nodes only once.

On N nodes of R ranks a sum over all ranks takes three steps: a reduce-scatter over the ranks of each node, which gives
every rank a shard of 1/R; a sum of that shard over the ranks with the same number on all nodes; and an all-gather over
the ranks of each node. So each of two nodes sends every element once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tpfuse.comm import host
from tpfuse.comm.agreement import exchange
from tpfuse.comm.member_groups import free_number, new_group
from tpfuse.comm.settings import settings


@dataclass(frozen=True)
class Nodes:
    """A group split by node. Ranks are in the order of the default group, as in every new group of torch.

    within: the ranks of this rank's node; across: the ranks with this rank's number in `within`, one of each node.
    successive: whether the ranks of each node follow one another in the group.
    """

    within: dist.ProcessGroup
    across: dist.ProcessGroup
    successive: bool

    @property
    def count(self) -> int:
        """Return the number of nodes."""
        return self.across.size()

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks of each node, at least two."""
        return self.within.size()


_splits: WeakKeyDictionary[dist.ProcessGroup, Nodes | str] = WeakKeyDictionary()


def split_by_node(group: dist.ProcessGroup) -> Nodes | None:
    """Return the nodes of `group`, or None if a split gains nothing (`why_not_split` gives the reason).

    The result is the same on every rank and is kept as long as the group. The first call is collective, over this group
    alone. The new groups have the deadline of the settings. Raise PeerTimeout if a rank does not come.
    """
    if group not in _splits:
        _splits[group] = _make_split(group)
    split = _splits[group]
    return split if isinstance(split, Nodes) else None


def why_not_split(group: dist.ProcessGroup) -> str:
    """Return why `split_by_node` returns None; empty if it does not. The first call is collective."""
    return "" if split_by_node(group) is not None else str(_splits[group])


def _make_split(group: dist.ProcessGroup) -> Nodes | str:
    identities = exchange(host.node_identity(), group, op="split by node", within=settings().timeout)
    nodes = ranks_by_node(dict(zip(dist.get_process_group_ranks(group), identities, strict=True)))
    reason = _why_not(nodes)
    if reason:
        return reason
    this_node = next(node for node in nodes if dist.get_rank() in node)
    index = this_node.index(dist.get_rank())
    number = free_number(group, "split by node")
    within = new_group(this_node, group, number)
    across = new_group([node[index] for node in nodes], group, number + 1)
    return Nodes(within, across, [rank for node in nodes for rank in node] == dist.get_process_group_ranks(group))


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
