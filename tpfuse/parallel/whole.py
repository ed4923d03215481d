"""Copies between whole tensors and sharded parameters, for loading and exporting a model."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpfuse.comm import collectives
from tpfuse.comm.layout import Slices, local_slices, local_tensor
from tpfuse.comm.mesh import groups_of


@torch.no_grad()
def gather_whole(parameter: Tensor) -> Tensor:
    """Return the whole parameter, on its device, on every rank. The call is a collective of the ranks of its mesh."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


@torch.no_grad()
def load_part_(parameter: Tensor, read: Callable[[Slices], Tensor]) -> None:
    """Fill this rank's shard with the tensor that `read` returns for its [start, stop) in each global dimension.

    No ranks communicate; `read` is not called if this rank's shard is empty. Raise ValueError if it returns another
    shape.
    """
    local, slices = local_tensor(parameter), local_slices(parameter)
    if not local.numel():
        return
    part = read(slices)
    if part.shape != local.shape:
        raise ValueError(f"read a tensor of shape {tuple(part.shape)}: expected {tuple(local.shape)}")
    local.copy_(part)


def anywhere(flag: bool, device_mesh: DeviceMesh | None) -> bool:
    """Return whether the flag is true on any rank of a mesh. The call is a collective of its ranks."""
    for group in groups_of(device_mesh):
        assert device_mesh is not None
        value = torch.tensor([int(flag)], device=device_mesh.device_type)
        flag = bool(collectives.all_reduce_max(value, group).item())
    return flag
