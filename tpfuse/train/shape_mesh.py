"""A device mesh for shapes alone: this process is its first rank, and a fake process group stands in for the others."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def shape_mesh(tp: int) -> Iterator[DeviceMesh | None]:
    """Yield a mesh of `tp` tensor-parallel ranks; None for one rank. This process must not have a process group."""
    if tp == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        yield init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()
