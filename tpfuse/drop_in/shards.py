"""Shards of activations on the ranks of a mesh: as plain tensors, padded to equal lengths, and as DTensors."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_map_only

from tpfuse.comm.layout import from_local
from tpfuse.comm.mesh import rank_and_size
from tpfuse.ops.collectives import all_gather, gather_last, replicate, split_last


def as_local(x: Tensor, dim: int | None, mesh: DeviceMesh | None) -> tuple[Tensor, bool]:
    """Return (this rank's plain tensor of x, whether its gradient may be a part of the sum over the ranks).

    dim: the dimension along which a shard is wanted, None for a whole tensor. A plain x is taken to be that already; a
    DTensor is redistributed. A shard of a length that the ranks do not divide is padded.
    """
    if not isinstance(x, DTensor):
        return x, False
    if dim is None:
        whole = x.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()]), True
    dim %= x.ndim
    ranks = x.device_mesh.size()
    share = -(-x.shape[dim] // ranks)
    part = x.redistribute(placements=[Shard(dim)]).to_local()
    return _padded(part, dim, share - part.shape[dim]), False


def as_dtensor(x: Tensor, mesh: DeviceMesh | None, dim: int | None, shape: Sequence[int]) -> Tensor:
    return from_local(x.contiguous(), mesh, dim, torch.Size(shape))


def shard_as_dtensor(x: Tensor, mesh: DeviceMesh | None, dim: int, length: int) -> Tensor:
    """Return the DTensor of `length` entries along `dim` of which x is this rank's padded shard."""
    assert mesh is not None
    dim %= x.ndim
    start = mesh.get_local_rank() * x.shape[dim]
    x = x.narrow(dim, 0, max(0, min(x.shape[dim], length - start)))
    return as_dtensor(x, mesh, dim, (*x.shape[:dim], length, *x.shape[dim + 1 :]))


def with_summed_gradients(values: Any, group: Any) -> Any:
    """Return the values, in which the gradient of each tensor that wants one is the sum over the ranks."""
    return tree_map_only(Tensor, lambda x: replicate(x, group) if x.requires_grad else x, values)


def check_divided(called: str, length: int, ranks: int) -> None:
    """Raise ValueError for a sequence whose plain shards would be padded, where what follows does not know its length.

    A module that gathers them would take the padding for tokens.
    """
    if length % ranks:
        raise ValueError(
            f"{called}: {ranks} ranks do not divide the {length} tokens of a sequence, and plain tensors do not say how"
            " many there are: give the styles use_local_output=False, or sequences that the ranks divide"
        )


def pad_sequence(x: Tensor, dim: int, ranks: int) -> Tensor:
    """Return x with zeros appended along `dim`, up to a multiple of the number of ranks."""
    return _padded(x, dim, -x.shape[dim] % ranks)


def _padded(x: Tensor, dim: int, zeros: int) -> Tensor:
    if statically_known_true(zeros == 0):  # of a length that torch.compile does not know, one graph pads none or some
        return x
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim % x.ndim) + (0, zeros))


def gather_sequence(x: Tensor, dim: int, group: Any, length: int | None, *, sum_gradients: bool = False) -> Tensor:
    """Return the whole sequences of which x is this rank's padded shard along `dim`; `length`: without the padding.

    All ranks compute the same from the result: in backward each keeps its own part of the gradient. With sum_gradients
    each computes a part of the gradient, and they are summed. The result is contiguous, as the whole model's
    activations are: a module that is left alone may view them in another shape.
    """
    if sum_gradients:
        out = all_gather(x.movedim(dim, 0).contiguous(), group).movedim(0, dim)
    else:
        out = gather_last(x.movedim(dim, -1), group).movedim(-1, dim)
    return (out if length is None else out.narrow(dim, 0, length)).contiguous()


def split_sequence(x: Tensor, dim: int, group: Any) -> Tensor:
    """Return this rank's padded shard along `dim` of x, which is equal on all ranks. It is contiguous."""
    padded = pad_sequence(x, dim, rank_and_size(group)[1])
    return split_last(padded.movedim(dim, -1), group).movedim(-1, dim).contiguous()
