"""Where a local tensor lies in its global one, for plain tensors and DTensors alike."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpfuse.comm.mesh import shard_range

Slices = tuple[tuple[int, int], ...]


def local_tensor(x: Tensor) -> Tensor:
    """The part of `x` that is in this rank's memory, sharing storage, outside autograd."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def local_slices(x: Tensor) -> Slices:
    """[start, stop) of the local part in each global dimension.

    Raises ValueError for placements other than Shard and Replicate.
    """
    ranges = [(0, size) for size in x.shape]
    if isinstance(x, DTensor):
        for axis, placement in enumerate(x.placements):
            if isinstance(placement, Replicate):
                continue
            if type(placement) is not Shard:
                raise ValueError(f"placement {placement} of a tensor {tuple(x.shape)}: expected Shard or Replicate")
            start, stop = ranges[placement.dim]
            rank, world = x.device_mesh.get_local_rank(axis), x.device_mesh.size(axis)
            lower, upper = shard_range(stop - start, rank, world)
            ranges[placement.dim] = (start + lower, start + upper)
    return tuple(ranges)


def is_sharded(x: Tensor) -> bool:
    """Whether ranks hold different parts of `x`."""
    return isinstance(x, DTensor) and any(isinstance(p, Shard) for p in x.placements)


def from_local(local: Tensor, device_mesh: DeviceMesh | None, dim: int | None, shape: torch.Size) -> Tensor:
    """The tensor of global `shape` whose shard along `dim` (None: a replica) this rank holds; no communication."""
    if device_mesh is None:
        return local
    placement = Replicate() if dim is None else Shard(dim)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, device_mesh, [placement], run_check=False, shape=shape, stride=stride)


def copy_whole_(x: Tensor, whole: Tensor) -> None:
    """Copies the local part out of `whole` (x's global shape, any dtype and device) into `x`.

    Raises ValueError where the shapes differ.
    """
    if whole.shape != x.shape:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} does not fit one of {tuple(x.shape)}")
    part = whole[tuple(slice(start, stop) for start, stop in local_slices(x))]
    local_tensor(x).copy_(part)
