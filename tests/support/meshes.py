"""Device meshes on the ranks of a pool. Each mesh is made once per rank, since a new mesh makes new process groups."""

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.mesh import build_mesh


@functools.cache
def mesh_of(dp: int, tp: int, cp: int = 1, ulysses: int = 1, pp: int = 1) -> DeviceMesh:
    """Return `build_mesh` over all CPU ranks. The first call is a collective operation of all ranks."""
    return build_mesh("cpu", dp=dp, tp=tp, cp=cp, ulysses=ulysses, pp=pp)


def tensor_mesh() -> DeviceMesh:
    """Return the one-dimensional mesh "tp" of all ranks."""
    return mesh_of(1, dist.get_world_size())["tp"]


def mesh_from(group: dist.ProcessGroup) -> DeviceMesh:
    """Return the one-dimensional mesh "dp" of the ranks of a group."""
    mesh: DeviceMesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    return mesh
