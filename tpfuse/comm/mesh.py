"""Device meshes and the rule by which a dimension is cut into shards.

The rule is DTensor's (and `torch.chunk`'s): every shard has ceil(size / world) entries but the last ones,
which may be shorter or empty. So a vocabulary that the world does not divide needs no padding entries that
could leak into a loss or an export.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def build_mesh(device_type: str, *, dp: int, tp: int) -> DeviceMesh:
    """The mesh ("dp", "tp") over all ranks of the default process group, tp varying fastest.

    Neighbouring ranks form a tensor-parallel group, so that it stays within a node. Raises ValueError where
    the world is not dp × tp ranks.
    """
    world = dist.get_world_size()
    if dp * tp != world:
        raise ValueError(f"dp {dp} x tp {tp} needs {dp * tp} ranks, but {world} are running")
    return init_device_mesh(device_type, (dp, tp), mesh_dim_names=("dp", "tp"))


def group_of(device_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group of a one-dimensional mesh; None where there is nobody to talk to.

    Raises ValueError for a mesh of several dimensions (slice it first: `mesh["tp"]`).
    """
    if device_mesh is None:
        return None
    if device_mesh.ndim != 1:
        raise ValueError(
            f"device_mesh has {device_mesh.ndim} dimensions {device_mesh.mesh_dim_names}, expected one:"
            ' slice it, as in mesh["tp"]'
        )
    return device_mesh.get_group() if device_mesh.size() > 1 else None


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in the group and the group's size; (0, 1) for None."""
    return (0, 1) if group is None else (group.rank(), group.size())


def shard_range(size: int, rank: int, world: int) -> tuple[int, int]:
    """[start, stop) of shard `rank` of a dimension of `size` entries cut into `world` shards."""
    chunk = -(-size // world)
    return min(rank * chunk, size), min((rank + 1) * chunk, size)


def named_group(name: str) -> dist.ProcessGroup:
    """The process group that has this `group_name`, by which nodes of torch.compile's graphs know it."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
