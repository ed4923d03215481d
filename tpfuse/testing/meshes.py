"""The meshes of a rank of the pool, made once: every new mesh would make new process groups."""

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.mesh import build_mesh


@functools.cache
def mesh_of(dp: int, tp: int, cp: int = 1, ulysses: int = 1) -> DeviceMesh:
    """`build_mesh` over all CPU ranks. A collective of all ranks at its first call."""
    return build_mesh("cpu", dp=dp, tp=tp, cp=cp, ulysses=ulysses)


def tensor_mesh() -> DeviceMesh:
    """The one-dimensional mesh "tp" of all ranks."""
    return mesh_of(1, dist.get_world_size())["tp"]
