"""The choice of the reducer for the buckets of a group, with the reason."""

from collections.abc import Sequence
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tpfuse.comm.dispatch import Choice, choose_implementation
from tpfuse.comm.nodes import split_by_node, why_not_split
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
) -> tuple[GradientReducer, str]:
    """Return the reducer for these buckets, and the reason for its class. Collective.

    compression: the compression of gradients that are sent between nodes; nothing is compressed within a node.
    """
    reducer, reason = _made(specs, stage, group, device, compression)
    if reducer.reservation is not None:
        reason += f"; products leave {RESERVED} multiprocessors to {reducer.reservation.owner}"
    return reducer, reason


def _made(
    specs: Sequence[BucketSpec],
    stage: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    compression: Compression | None,
) -> tuple[GradientReducer, str]:
    if group is None or group.size() == 1:
        return CollectiveReducer(specs, stage, None, device), "one rank"
    choice = choose_implementation(device, specs[0].sent, group)
    if choice.memory is not None:
        reducer = _reducer_class(choice)(specs, stage, choice.memory, _name(choice.memory))
        return reducer, f"{choice.implementation}: {choice.reason}"
    reason = choice.reason
    if choice.state == "fallback":
        nodes = split_by_node(group)
        within = None if nodes is None else choose_implementation(device, specs[0].sent, nodes.within)
        if nodes is not None and within is not None and within.memory is not None:
            inter_node = InterNodeReducer(nodes.across, compression)
            reducer = _reducer_class(within)(specs, stage, within.memory, _name(within.memory), inter_node)
            where = f"{nodes.count} nodes of {nodes.ranks_per_node} ranks"
            return reducer, f"{where}, within one {within.implementation}: {within.reason}"
        reason += f"; {why_not_split(group) if within is None else within.reason}"
    return CollectiveReducer(specs, stage, group, device), f"collective: {reason}"


def _reducer_class(choice: Choice) -> type[DirectReducer]:
    return FusedReducer if choice.implementation == "fused" else DirectReducer


def _name(memory: SymmetricMemory) -> str:
    """Return a new reducer's name in its memory. It is the same on every rank: all make reducers in one order."""
    return f"reducer {next(_indices.setdefault(memory, count()))}"
