"""Data-parallel ranks begin with the model of the first of them, as under PyTorch's DDP.

A comparison alone would require users to seed all ranks equally for the model, and then differently for the data. The
broadcast of 43M float32 parameters between two CPU ranks over Gloo takes 0.22 s, once; drawing the parameters takes 1 s
(2 cores, torch 2.13, 2026-11-23).
"""

from collections.abc import Collection, Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfuse.comm.agreement import exchange
from tpfuse.comm.collectives import collective
from tpfuse.comm.layout import local_tensor


def broadcast_model(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    tied: Collection[str] = (),
    tied_group: dist.ProcessGroup | None = None,
) -> None:
    """Copy the parameters and buffers of the group's first rank to all its ranks; for DTensors, the local shards.

    tied: the names of parameters that are then copied from the first rank of `tied_group`. Collective: the ranks of a
    group are done with `group` before they come to `tied_group`. Raise ValueError on every rank if names, shapes,
    dtypes or what is frozen differ, for a name that no parameter has, and PeerTimeout if a rank does not take part.
    """
    parameters = dict(model.named_parameters())
    for name in tied:
        if name not in parameters:
            raise ValueError(f"tied parameter {name}: the model has no parameter of this name")
        if tied_group is None:
            raise ValueError(f"{name} is tied to a parameter of another rank: expected `ends` in SharedParameters")
    _broadcast(
        parameters | dict(model.named_buffers()), group, "data-parallel ranks have different parameters or buffers"
    )
    shared = {name: x for name, x in parameters.items() if name in tied}
    _broadcast(shared, tied_group if shared else None, "the ends of the pipeline have different tied parameters")


def _broadcast(found: Mapping[str, Tensor], group: dist.ProcessGroup | None, difference: str) -> None:
    if group is None or group.size() == 1:
        return
    _compare(found, group, difference)
    tensors = {name: local_tensor(x) for name, x in found.items()}
    sent = {name: x.contiguous() for name, x in tensors.items() if x.numel()}
    collective.broadcast_([x.view(-1).view(torch.uint8) for x in sent.values()], group)
    for name, x in sent.items():
        if x is not tensors[name]:
            once = tuple(slice(None if stride else 1) for stride in tensors[name].stride())  # of an expanded dimension
            tensors[name][once].copy_(x[once])


def _compare(found: Mapping[str, Tensor], group: dist.ProcessGroup, difference: str) -> None:
    """Raise ValueError on every rank for tensors that cannot be sent as they are in memory.

    Raise it, beginning with `difference`, if the ranks' tensors differ in more than their values.
    """
    descriptions = []
    special = [name for name, x in found.items() if x.layout is not torch.strided or x.is_conj() or x.is_neg()]
    for name, x in found.items():
        frozen = " frozen" if isinstance(x, nn.Parameter) and not x.requires_grad else ""
        descriptions.append(f"{name} {str(x.dtype).removeprefix('torch.')} {list(local_tensor(x).shape)}{frozen}")
    answers = exchange((descriptions, special), group, op="comparison of parameters")
    by_rank, ranks = [each for each, _ in answers], dist.get_process_group_ranks(group)
    for rank, (_, names) in zip(ranks, answers, strict=True):
        if names:
            raise ValueError(
                f"{names[0]} of rank {rank} is sparse, or a view with other signs than its memory: expected its values,"
                " as to_dense(), resolve_conj() and resolve_neg() return them"
            )
    for rank, others in zip(ranks, by_rank, strict=True):
        for first, other in zip_longest(by_rank[0], others, fillvalue="nothing"):
            if first != other:
                raise ValueError(f"{difference}: rank {rank} has {other} where rank {ranks[0]} has {first}")
