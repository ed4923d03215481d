"""Collectives along dimension 0, without autograd, by the implementation that serves the group best.

| implementation | what it is                                                           |
|----------------|----------------------------------------------------------------------|
| direct         | torch operations on shared memory (`tpfuse.comm.collectives.direct`) |
| fused          | Triton kernels on symmetric memory (`tpfuse.comm.collectives.fused`) |
| collective     | NCCL, Gloo (`tpfuse.comm.collectives.collective`)                    |

`tpfuse.comm.choice` chooses the implementation.

A group of None stands for a single rank and costs nothing. The functions `start_*` begin a collective and return the
result with a handle; the result may be read after `wait()` has returned. Every rank must call the same collectives of a
group in the same order, from one thread at a time. They raise PeerTimeout if a rank does not come.
"""

from collections.abc import Sequence
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.choice import Choice, choose_implementation
from tpfuse.comm.collectives import collective
from tpfuse.comm.collectives.direct import DirectCollectives
from tpfuse.comm.collectives.fused import FusedCollectives
from tpfuse.comm.collectives.handle import DONE, Handle
from tpfuse.comm.layout import check_local
from tpfuse.comm.mesh import check_group, groups_of
from tpfuse.comm.rank_order import rows_of
from tpfuse.kernels.endpoint import SUMMED

_Kind = TypeVar("_Kind", DirectCollectives, FusedCollectives)
_Symmetric = DirectCollectives | FusedCollectives
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[tuple[object, ...]]] = WeakKeyDictionary()  # for `agree_on_rows`
_instances: WeakKeyDictionary[dist.ProcessGroup, dict[type[_Symmetric], _Symmetric]] = WeakKeyDictionary()


def _direct(x: Tensor, group: dist.ProcessGroup) -> DirectCollectives | None:
    """Returns the direct collectives of CPU ranks of one host, also if fused kernels were chosen; else None."""
    choice = choose_implementation(x.device, x.dtype, group)
    return _instance(group, choice, DirectCollectives) if x.device.type == "cpu" else None


def _symmetric(x: Tensor, group: dist.ProcessGroup, *, summed: bool = False) -> _Symmetric | None:
    """Returns the group's collectives through symmetric memory, or None. summed: whether the collective sums x."""
    choice = choose_implementation(x.device, x.dtype, group)
    if choice.implementation == "fused" and (not summed or x.dtype in SUMMED):
        return _instance(group, choice, FusedCollectives)
    return _direct(x, group)


def _instance(group: dist.ProcessGroup, choice: Choice, kind: type[_Kind]) -> _Kind | None:
    if choice.memory is None:
        return None
    instances = _instances.setdefault(group, {})
    if kind not in instances:
        instances[kind] = kind(choice.memory)
    return cast(_Kind, instances[kind])


def _check(operator: str, x: Tensor, group: dist.ProcessGroup, *, rows: bool = True) -> None:
    """Raises ValueError if group is no process group, x is a DTensor, or rows are needed and x has no dimension."""
    check_group(operator, group)
    check_local(operator, x=x)
    if rows and not x.ndim:
        raise ValueError(f"{operator}: x has shape (): expected at least one dimension, as x.view(1) has")


def start_all_gather(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Handle]:
    """Begins to gather all ranks' `x` [n, ...], concatenated in rank order: [world * n, ...].

    The shapes must be equal on all ranks. Returns (the result, its handle).
    """
    if group is None:
        return x, DONE
    return _all_gather(x, group, later=True)


def _all_gather(x: Tensor, group: dist.ProcessGroup, *, later: bool) -> tuple[Tensor, Handle]:
    _check("all_gather", x, group)
    x = x.detach().contiguous()
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    symmetric = _symmetric(x, group)
    if symmetric is not None:
        return out, symmetric.all_gather(x, out, later=later)
    return out, collective.start_all_gather(x.view(-1), rows_of(out, group.size()), group)


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Handle]:
    """Begins to sum `x` [world * n, ...] over all ranks; this rank gets its [n, ...]. Returns (the result, its handle).

    On CPUs the sum is taken in rank order, half types in float32. Raises ValueError if the world does not divide the
    rows.
    """
    if group is None:
        return x, DONE
    return _reduce_scatter(x, group, later=True)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, *, later: bool) -> tuple[Tensor, Handle]:
    _check("reduce_scatter", x, group)
    world = group.size()
    if x.shape[0] % world:
        raise ValueError(f"reduce_scatter: {x.shape[0]} rows cannot be split among {world} ranks")
    x = x.detach().contiguous()
    out = x.new_empty(x.shape[0] // world, *x.shape[1:])
    symmetric = _symmetric(x, group, summed=True)
    if symmetric is not None:
        return out, symmetric.reduce_scatter(x, out, later=later)
    return out, collective.start_reduce_scatter(rows_of(x, world), out.view(-1), group)


def start_all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Handle:
    """Begins to replace the contiguous `x` by its sum over all ranks, in place. Returns the handle."""
    if group is None:
        return DONE
    x = x.detach()
    return _all_reduce(x, x, group, later=True)


def _all_reduce(x: Tensor, out: Tensor, group: dist.ProcessGroup, *, later: bool) -> Handle:
    _check("all_reduce", x, group, rows=False)
    symmetric = _symmetric(x, group, summed=True)
    if symmetric is not None:
        return symmetric.all_reduce(x, out, later=later)
    if out is not x:
        out.copy_(x)
    return collective.start_all_reduce(out, group)


def all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns all ranks' `x` [n, ...], concatenated in rank order: [world * n, ...]. All ranks have the same shape."""
    if group is None:
        return x
    out, handle = _all_gather(x, group, later=False)
    handle.wait()
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns this rank's [n, ...] of the sum of `x` [world * n, ...] over all ranks, as `start_reduce_scatter`."""
    if group is None:
        return x
    out, handle = _reduce_scatter(x, group, later=False)
    handle.wait()
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the sum of `x` over all ranks in a new tensor."""
    if group is None:
        return x
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    _all_reduce(x, out, group, later=False).wait()
    return out


def all_reduce_max(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the maximum of `x` over all ranks in a new tensor."""
    if group is None:
        return x
    _check("all_reduce_max", x, group, rows=False)
    x = x.detach().contiguous()
    direct = _direct(x, group)
    if direct is not None:
        out = torch.empty_like(x)
        direct.all_reduce_max(x, out).wait()
        return out
    out = x.clone()
    collective.start_all_reduce(out, group, op=dist.ReduceOp.MAX).wait()
    return out


def all_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns a tensor whose row r is row `rank` of rank r's x. x: [world, ...], of one shape on all ranks.

    Raises ValueError unless x has one row for each rank.
    """
    if group is None:
        return x
    _check("all_to_all", x, group)
    if x.shape[0] != group.size():
        raise ValueError(f"all_to_all: {x.shape[0]} rows: expected one for each of {group.size()} ranks")
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    symmetric = _symmetric(x, group)
    if symmetric is not None:
        handle: Handle = symmetric.all_to_all(x, out)
    else:
        handle = collective.start_all_to_all(rows_of(x, len(x)), rows_of(out, len(x)), group)
    handle.wait()
    return out


class _Handles:
    """The handle of several transfers together."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


def start_shift(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Handle]:
    """Begins to receive the x of the previous rank, of the same shape; the first rank receives that of the last rank.

    Returns (the result, its handle). NCCL or Gloo sends it: ranks that share memory do not need this function.
    """
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    return out, _Handles(collective.start_shift(x, out, group))


def agree_on_rows(rows: int, device: torch.device, *groups: dist.ProcessGroup, op: str, unit: str = "rows") -> None:
    """Raises ValueError, on every rank, if ranks have different numbers of rows for `op`.

    A collective of different numbers would not end or would give wrong results. On CPUs the ranks compare on every
    call; on GPUs, where the host would wait for the result, only if the number is new. groups: a group with this rank,
    or several along the dimensions of a mesh, in which case all ranks of the mesh compare.
    """
    agreed = _agreed.setdefault(groups[0], set())
    known = unit, rows, *(group.group_name for group in groups[1:])
    if device.type != "cpu" and known in agreed:
        return
    gathered = torch.tensor([rows], device=device)
    for group in groups:
        gathered = all_gather(gathered, group)
    counts = gathered.tolist()
    if any(other != rows for other in counts):
        raise ValueError(f"{op}: the ranks have {counts} {unit}: all must have the same number")
    agreed.add(known)


def anywhere(flag: bool, device_mesh: DeviceMesh | None) -> bool:
    """Return whether the flag is true on any rank of a mesh. The call is a collective of its ranks."""
    for group in groups_of(device_mesh):
        assert device_mesh is not None
        value = torch.tensor([int(flag)], device=device_mesh.device_type)
        flag = bool(all_reduce_max(value, group).item())
    return flag
