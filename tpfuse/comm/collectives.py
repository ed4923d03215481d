"""Collectives along dimension 0, without autograd, by whatever serves the group best.

| implementation | where                                                                                        |
|----------------|----------------------------------------------------------------------------------------------|
| direct         | CPU ranks of one host: torch operations on shared memory (`tpfuse.comm.direct`)              |
| fused          | CUDA ranks with peer access, and CPU ranks that interpret: `--kernels triton` (`.launched`)  |
| collective     | all else: NCCL, Gloo (`tpfuse.comm.process_group`)                                           |

A group of None stands for a single rank and costs nothing. `start_*` begin a collective and return the result with a
handle; the result may be read once `wait()` has returned. Every rank calls the same collectives of a group in the same
order, from one thread at a time. Raise PeerTimeout where a rank does not come.
"""

from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import process_group
from tpfuse.comm.connect import connect
from tpfuse.comm.direct import DirectCollectives
from tpfuse.comm.errors import Unavailable
from tpfuse.comm.handle import DONE, Handle
from tpfuse.comm.launched import LaunchedCollectives
from tpfuse.kernel_choice import chosen_kernels, use_triton
from tpfuse.kernels.endpoint import SUMMED

CUDA_BYTES = 0  # up to here `--kernels auto` has kernels in NCCL's place. Not measured yet, so none (rule 13 of DESIGN)
_Kind = TypeVar("_Kind", DirectCollectives, LaunchedCollectives)
_Symmetric = DirectCollectives | LaunchedCollectives
_made: WeakKeyDictionary[dist.ProcessGroup, dict[type[_Symmetric], _Symmetric]] = WeakKeyDictionary()


def _direct(x: Tensor, group: dist.ProcessGroup) -> DirectCollectives | None:
    """What serves CPU ranks of one host."""
    return None if x.device.type != "cpu" else _of(group, x.device, DirectCollectives)


def _symmetric(x: Tensor, group: dist.ProcessGroup, *, summed: bool = False) -> _Symmetric | None:
    """What serves the group through symmetric memory; None where nothing does."""
    wanted = x.device.type != "cuda" or x.nbytes <= CUDA_BYTES or chosen_kernels() == "triton"
    if wanted and use_triton(x) and (not summed or x.dtype in SUMMED):
        return _of(group, x.device, LaunchedCollectives)
    return _direct(x, group)


def _of(group: dist.ProcessGroup, device: torch.device, kind: type[_Kind]) -> _Kind | None:
    made = _made.setdefault(group, {})
    if kind not in made:
        try:
            made[kind] = kind(connect(group, device))
        except Unavailable:
            return None
    return cast(_Kind, made[kind])


def start_all_gather(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Handle]:
    """All ranks' `x` [n, ...] behind each other in rank order: [world * n, ...]. Shapes must agree."""
    if group is None:
        return x, DONE
    return _all_gather(x, group, later=True)


def _all_gather(x: Tensor, group: dist.ProcessGroup, *, later: bool) -> tuple[Tensor, Handle]:
    x = x.detach().contiguous()
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    flat, rows = x.view(-1), out.view(group.size(), -1)
    symmetric = _symmetric(x, group)
    if symmetric is not None:
        return out, symmetric.all_gather(flat, rows, later=later)
    return out, process_group.start_all_gather(flat, rows, group)


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Handle]:
    """This rank's [n, ...] of the sum over all ranks of `x` [world * n, ...].

    On CPUs the sum is taken in rank order, half types in float32. Raises ValueError where the world does not divide
    the rows.
    """
    if group is None:
        return x, DONE
    return _reduce_scatter(x, group, later=True)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, *, later: bool) -> tuple[Tensor, Handle]:
    world = group.size()
    if x.shape[0] % world:
        raise ValueError(f"reduce_scatter: {x.shape[0]} rows cannot be split among {world} ranks")
    x = x.detach().contiguous()
    out = x.new_empty(x.shape[0] // world, *x.shape[1:])
    rows, flat = x.view(world, out.numel()), out.view(-1)
    symmetric = _symmetric(x, group, summed=True)
    if symmetric is not None:
        return out, symmetric.reduce_scatter(rows, flat, later=later)
    return out, process_group.start_reduce_scatter(rows, flat, group)


def start_all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Handle:
    """Replaces the contiguous `x` by its sum over all ranks, in place."""
    if group is None:
        return DONE
    x = x.detach()
    return _all_reduce(x, x, group, later=True)


def _all_reduce(x: Tensor, out: Tensor, group: dist.ProcessGroup, *, later: bool) -> Handle:
    symmetric = _symmetric(x, group, summed=True)
    if symmetric is not None:
        return symmetric.all_reduce(x.view(-1), out.view(-1), later=later)
    if out is not x:
        out.copy_(x)
    return process_group.start_all_reduce(out, group)


def all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`start_all_gather`, waited for."""
    if group is None:
        return x
    out, handle = _all_gather(x, group, later=False)
    handle.wait()
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`start_reduce_scatter`, waited for."""
    if group is None:
        return x
    out, handle = _reduce_scatter(x, group, later=False)
    handle.wait()
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A new tensor: the sum of `x` over all ranks."""
    if group is None:
        return x
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    _all_reduce(x, out, group, later=False).wait()
    return out


def all_reduce_max(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A new tensor: the maximum of `x` over all ranks."""
    if group is None:
        return x
    x = x.detach().contiguous()
    direct = _direct(x, group)
    if direct is not None:
        out = torch.empty_like(x)
        direct.all_reduce_max(x.view(-1), out.view(-1)).wait()
        return out
    out = x.clone()
    process_group.start_all_reduce(out, group, op=dist.ReduceOp.MAX).wait()
    return out


def all_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Row r of the result is row `rank` of rank r's x. x: [world, ...], of one shape on all ranks.

    Raises ValueError where x does not have a row for each rank.
    """
    if group is None:
        return x
    if x.shape[0] != group.size():
        raise ValueError(f"all_to_all: {x.shape[0]} rows: expected one for each of {group.size()} ranks")
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    rows = x.view(len(x), -1), out.view(len(x), -1)
    symmetric = _symmetric(x, group)
    handle = process_group.start_all_to_all(*rows, group) if symmetric is None else symmetric.all_to_all(*rows)
    handle.wait()
    return out
