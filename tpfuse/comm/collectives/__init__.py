"""Collectives along dimension 0, without autograd, by the implementation that serves the group best.

| implementation | what it is                                                           |
|----------------|----------------------------------------------------------------------|
| direct         | torch operations on shared memory (`tpfuse.comm.collectives.direct`) |
| fused          | Triton kernels on symmetric memory (`tpfuse.comm.collectives.fused`) |
| collective     | NCCL, Gloo (`tpfuse.comm.collectives.collective`)                    |

A group of None stands for a single rank and costs nothing. The functions `start_*` begin a collective and return the
result with a handle; the result may be read after `wait()` has returned. Every rank must call the same collectives of a
group in the same order, from one thread at a time. They raise PeerTimeout if a rank does not come.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.agreement import exchange
from tpfuse.comm.collectives import collective
from tpfuse.comm.collectives.collective import DONE, Handle, TorchCollectives
from tpfuse.comm.collectives.direct import DirectCollectives
from tpfuse.comm.collectives.fused import FusedCollectives
from tpfuse.comm.dispatch import Choice, Implementations, choose_implementation
from tpfuse.comm.errors import Disagreement, named
from tpfuse.comm.layout import check_local, is_traced
from tpfuse.comm.mesh import check_group
from tpfuse.kernels.endpoint import SUMMED

Collectives = DirectCollectives | FusedCollectives | TorchCollectives
_IMPLEMENTATIONS: Implementations[Collectives] = Implementations(
    TorchCollectives, direct=DirectCollectives, fused=FusedCollectives
)
_compared: WeakKeyDictionary[dist.ProcessGroup, set[tuple[object, ...]]] = WeakKeyDictionary()  # by `compare`


def collectives_of(x: Tensor, group: dist.ProcessGroup, *, kernels: bool = True) -> Collectives:
    """Return what serves x's device and dtype. kernels: whether there is a kernel for the collective.

    Without one, CPU ranks of one host use shared memory, even if kernels were chosen.
    """
    choice = choose_implementation(x.device, x.dtype, group)
    if choice.implementation == "fused" and not kernels:
        on_cpu = x.device.type == "cpu"
        choice = replace(choice, implementation="direct") if on_cpu else Choice("collective", "no kernel")
    return _IMPLEMENTATIONS.of(choice, group)


def _check(operator: str, x: Tensor, group: dist.ProcessGroup, *, rows: bool = True) -> None:
    """Raise ValueError if group is no process group, x is a DTensor, or rows are needed and x has no dimension."""
    check_group(operator, group)
    check_local(operator, x=x)
    if rows and not x.ndim:
        raise ValueError(f"{operator}: x has shape (): expected at least one dimension, as x.view(1) has")


def start_all_gather(
    x: Tensor, group: dist.ProcessGroup | None, *, by: Collectives | None = None, later: bool = True
) -> tuple[Tensor, Handle]:
    """Begin to gather all ranks' `x` [n, ...], concatenated in rank order: [world * n, ...].

    The shapes must be equal on all ranks. Return (the result, its handle). later: whether other work follows before the
    result is needed.
    """
    if group is None:
        return x, DONE
    _check("all_gather", x, group)
    x = x.detach().contiguous()
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    return out, (by or collectives_of(x, group)).all_gather(x, out, later=later)


def start_reduce_scatter(
    x: Tensor, group: dist.ProcessGroup | None, *, by: Collectives | None = None, later: bool = True
) -> tuple[Tensor, Handle]:
    """Begin to sum `x` [world * n, ...] over all ranks; this rank gets its [n, ...]. Return (the result, its handle).

    On CPUs the sum is taken in rank order, half types in float32. later: as in `start_all_gather`. Raise ValueError if
    the world does not divide the rows.
    """
    if group is None:
        return x, DONE
    _check("reduce_scatter", x, group)
    if x.shape[0] % group.size():
        refuse("reduce_scatter", x, x.shape, group, f"{len(x)} rows cannot be split among {group.size()} ranks")
    x = x.detach().contiguous()
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    return out, (by or _summing(x, group)).reduce_scatter(x, out, later=later)


def _summing(x: Tensor, group: dist.ProcessGroup) -> Collectives:
    """Return what sums tensors of x's device and dtype over the ranks."""
    return collectives_of(x, group, kernels=x.dtype in SUMMED)


def start_all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Handle:
    """Begin to replace the contiguous `x` by its sum over all ranks, in place. Return the handle."""
    if group is None:
        return DONE
    _check("all_reduce", x, group, rows=False)
    x = x.detach()
    return _summing(x, group).all_reduce(x, x, later=True)


def all_gather(x: Tensor, group: dist.ProcessGroup | None, *, by: Collectives | None = None) -> Tensor:
    """Return all ranks' `x` [n, ...], concatenated in rank order: [world * n, ...]. All ranks have the same shape."""
    out, handle = start_all_gather(x, group, by=by, later=False)
    handle.wait()
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None, *, by: Collectives | None = None) -> Tensor:
    """Return this rank's [n, ...] of the sum of `x` [world * n, ...] over all ranks, as `start_reduce_scatter`."""
    out, handle = start_reduce_scatter(x, group, by=by, later=False)
    handle.wait()
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, *, by: Collectives | None = None) -> Tensor:
    """Return the sum of `x` over all ranks in a new tensor."""
    if group is None:
        return x
    _check("all_reduce", x, group, rows=False)
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    (by or _summing(x, group)).all_reduce(x, out).wait()
    return out


def all_reduce_max(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the maximum of `x` over all ranks in a new tensor."""
    if group is None:
        return x
    _check("all_reduce_max", x, group, rows=False)
    x = x.detach().contiguous()
    out, chosen = torch.empty_like(x), collectives_of(x, group, kernels=False)
    assert not isinstance(chosen, FusedCollectives)
    chosen.all_reduce_max(x, out).wait()
    return out


def all_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return a tensor whose row r is row `rank` of rank r's x. x: [world, ...], of one shape on all ranks.

    Raise ValueError unless x has one row for each rank.
    """
    if group is None:
        return x
    _check("all_to_all", x, group)
    if x.shape[0] != group.size():
        refuse("all_to_all", x, x.shape, group, f"{len(x)} rows: expected one for each of {group.size()} ranks")
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    collectives_of(x, group).all_to_all(x, out).wait()
    return out


def start_shift(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Handle]:
    """Begin to receive the x of the previous rank, of the same shape; the first rank receives that of the last rank.

    Return (the result, its handle). NCCL or Gloo sends it: ranks that share memory do not need this function.
    """
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    return out, collective.start_shift(x, out, group)


def compare(operation: str, device: torch.device, *groups: dist.ProcessGroup, by: Collectives | None = None) -> None:
    """Raise Disagreement, on every rank, if ranks are about to run different operations.

    A collective of different shapes or dtypes would not end or would give wrong results. On CPUs the ranks compare on
    every call; on GPUs, where the host would wait for the result, only if the operation is new. operation: its name,
    dtype, shape and options, the same on every rank; device: where it runs. groups: a group with this rank, or several
    along the axes of a mesh, in which case all ranks of the mesh compare.
    """
    compared = _compared.setdefault(groups[0], set())
    known = operation, *(group.group_name for group in groups[1:])
    if known in compared:
        return
    digests = torch.tensor([zlib.crc32(operation.encode())], device=device)
    for group in groups:
        digests = all_gather(digests, group, by=by)
    if len(set(digests.tolist())) > 1:
        sides = exchange((dist.get_rank(), operation), *groups, op=operation)
        rank, other = next(side for side in sides if side[1] != operation)
        raise Disagreement(f"{named(rank)} runs {other}, {named(dist.get_rank())} runs {operation}")
    if device.type != "cpu":
        compared.add(known)


def refuse(operator: str, x: Tensor, shape: Sequence[int], group: dist.ProcessGroup, problem: str) -> NoReturn:
    """Raise ValueError for what `operator` would communicate, of x's dtype and `shape`. problem: what is wrong with it.

    The ranks compare first, so that none waits for one that stops alone: if others have another shape, every rank
    raises Disagreement. Ranks that share no memory compare products only, as always.
    """
    if not is_traced(x):
        operation = f"{operator} {x.dtype} {list(shape)}"
        memory = choose_implementation(x.device, x.dtype, group).memory
        if memory is not None:
            memory.barrier(operation)
        elif operator not in ("reduce_scatter", "all_to_all"):
            compare(operation, x.device, group, by=TorchCollectives(group))
    raise ValueError(f"{operator}: {problem}")


def on_any_rank(flag: bool, device: torch.device, *groups: dist.ProcessGroup | None) -> bool:
    """Return whether the flag is true on any rank of a group, or of a mesh with a group along each axis.

    The call is a collective of the groups on `device`.
    """
    for group in groups:
        flag = bool(all_reduce_max(torch.tensor([int(flag)], device=device), group).item())
    return flag
