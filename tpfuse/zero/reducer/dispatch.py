"""The choice of the reducer for the buckets of a group, with the reason."""

from collections.abc import Sequence
from functools import partial
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tpfuse.comm.dispatch import choose_implementation
from tpfuse.comm.nodes import split_by_node, why_not_split
from tpfuse.comm.sum_order import sum_in_tree, sum_leaves, tree_order
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels.launch import RESERVED
from tpfuse.zero.reducer.base import BucketSpec, GradientReducer
from tpfuse.zero.reducer.collective import CollectiveReducer
from tpfuse.zero.reducer.direct import DirectReducer
from tpfuse.zero.reducer.fused import FusedReducer
from tpfuse.zero.reducer.inter_node import Compression, InterNodeReducer

_indices: WeakKeyDictionary[SymmetricMemory, "count[int]"] = WeakKeyDictionary()


def make_reducer(
    specs: Sequence[BucketSpec],
    stage: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    compression: Compression | None = None,
    first_bucket: int = 0,
    dp: int = 1,
    inner: int = 1,
    ordered: bool = False,
) -> tuple[GradientReducer, str]:
    """Return the reducer for these buckets, and the reason for its class. Collective.

    dp, inner: as in `tree_order`. ordered: whether every sum must have the order of
    `tpfuse.comm.sum_order.tree_order`, whatever the backend and the nodes.
    compression: the compression of gradients that are sent between nodes; nothing is compressed within a node.
    first_bucket: the number of buckets that other reducers of the group have; it tells the compression them apart.
    """

    def symmetric(kind: str, memory: SymmetricMemory, inter_node: InterNodeReducer | None = None) -> GradientReducer:
        # All ranks make reducers in one order, so that a reducer's name is the same on each of them.
        name = f"reducer {next(_indices.setdefault(memory, count()))}"
        order = leaves if inter_node is None else None
        return (FusedReducer if kind == "fused" else DirectReducer)(specs, stage, memory, name, inter_node, order)

    reducer, reason, total = None, "one rank", None
    if group is not None and group.size() == 1:
        group = None
    if group is not None:
        leaves = tree_order(group.size(), dp, inner)
        total = partial(sum_leaves, leaves) if ordered else None
        choice = choose_implementation(device, specs[0].sent, group)
        reason = f"{choice.implementation}: {choice.reason}"
        if choice.memory is not None:
            reducer = symmetric(choice.implementation, choice.memory)
        elif choice.state == "fallback":
            nodes = split_by_node(group)
            within = None if nodes is None else choose_implementation(device, specs[0].sent, nodes.within)
            if ordered and nodes is not None and not (nodes.successive and leaves == sorted(leaves)):
                reason += "; the order of sums is not that of nodes"
            elif nodes is not None and within is not None and within.memory is not None:
                between = sum_in_tree if ordered else None
                inter_node = InterNodeReducer(nodes.across, compression, first_bucket, between)
                reducer = symmetric(within.implementation, within.memory, inter_node)
                reason = f"{nodes.count} nodes of {nodes.ranks_per_node} ranks, within one {within.implementation}"
                reason += f": {within.reason}"
            else:
                reason += f"; {why_not_split(group) if within is None else within.reason}"
    if reducer is None:
        reducer = CollectiveReducer(specs, stage, group, device, total)
    if reducer.reservation is not None:
        reason += f"; products leave {RESERVED} multiprocessors to {reducer.reservation.owner}"
    return reducer, reason
