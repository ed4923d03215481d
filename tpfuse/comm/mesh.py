"""Device meshes and the rule by which a dimension is cut into shards.

The rule is that of DTensor and of `torch.chunk`: every shard has ceil(size / world) entries, but the last ones may be
shorter or empty. So a vocabulary that the world does not divide needs no padding entries, which could leak into a loss
or an export.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpfuse.comm.errors import set_coordinates
from tpfuse.comm.member_groups import subgroup
from tpfuse.kernels.launch import RESERVED

DATA_AXES = ("dp", "cp", "ring", "ulysses")  # along these axes, ranks have equal parameters and other tokens
AXES = ("pp", *DATA_AXES, "tp")


def build_mesh(device_type: str, *, dp: int, tp: int, cp: int = 1, ulysses: int = 1, pp: int = 1) -> DeviceMesh:
    """Return the mesh ("dp", "tp") over all ranks of the default process group, in which tp varies fastest.

    cp: the number of context-parallel ranks. If it is above 1, the mesh is ("dp", "cp", "tp"), or, if groups of
    `ulysses` of them exchange heads, ("dp", "ring", "ulysses", "tp"). pp: the number of pipeline-parallel ranks. If it
    is above 1, "pp" is the first axis of the mesh. Neighbouring ranks form a tensor-parallel group, so that it
    stays within a node, and then a context-parallel one; the ranks of a pipeline, which send the fewest bytes, are
    farthest apart. Raise ValueError unless the world has pp × dp × cp × tp ranks and ulysses divides cp.
    """
    world, ranks = dist.get_world_size(), pp * dp * cp * tp
    if ranks != world:
        parts = [f"pp {pp}"] * (pp != 1) + [f"dp {dp}"] + [f"cp {cp}"] * (cp != 1) + [f"tp {tp}"]
        raise ValueError(f"{' x '.join(parts)} needs {ranks} ranks, but {world} are running")
    if ulysses < 1 or cp % ulysses:
        raise ValueError(f"ulysses {ulysses} does not divide cp {cp}")
    context = {"ring": cp // ulysses, "ulysses": ulysses} if ulysses > 1 else {"cp": cp} if cp > 1 else {}
    sizes = {**({"pp": pp} if pp > 1 else {}), "dp": dp, **context, "tp": tp}
    mesh = init_device_mesh(
        device_type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=reducer_options("dp") if dp > 1 else None,
    )
    wide = {name: size for name, size in sizes.items() if size > 1}
    coordinates = itertools.product(*([f"{name} {index}" for index in range(size)] for name, size in wide.items()))
    set_coordinates({} if len(wide) < 2 else {rank: ", ".join(names) for rank, names in enumerate(coordinates)})
    return mesh


def reducer_options(*names: str, together: int = 2) -> Any:
    """Return torch's `backend_override` for axes of a mesh whose groups sum gradients; None without NCCL.

    Kernels of `together` groups at once then have no more programs than the multiprocessors that products leave to them
    (`Reservation`). There are two where some gradients are summed over "dp" and others over "dp" and "tp". Each group
    needs options of its own, because torch writes the group's name into them.
    """
    if "nccl" not in dist.get_backend():
        return None
    options = {name: dist.ProcessGroupNCCL.Options() for name in names}
    for each in options.values():
        each.config.max_ctas = RESERVED // together
    return options


def context_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the part of `build_mesh`'s mesh whose ranks share sequences: ("cp",), ("ring", "ulysses"), or None."""
    names = tuple(name for name in _names(device_mesh) if name in ("cp", "ring", "ulysses"))
    return device_mesh[names] if device_mesh is not None and names else None


def tensor_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the part of a mesh whose ranks share layers: its axis "tp", or its only axis; None for one such rank.

    Along the other axes of `build_mesh` ranks share no layers. Raise ValueError for a mesh with any others but one.
    """
    names = _names(device_mesh)
    if device_mesh is None or (names and set(names) <= {*AXES} - {"tp"}):
        return None
    if "tp" not in names and device_mesh.ndim > 1:
        raise ValueError(f'mesh has the axes {names or device_mesh.ndim}: expected one named "tp", or one axis')
    mesh = device_mesh["tp"] if "tp" in names else device_mesh
    return None if mesh.size() == 1 else mesh


def flat_group(device_mesh: DeviceMesh | None, *names: str) -> dist.ProcessGroup | None:
    """Return the group of all ranks along these axes of a mesh; None for one rank.

    Axes that the mesh does not have are ignored. Collective: all ranks of the mesh request the same groups in the
    same order.
    """
    if device_mesh is None:
        return None
    wide = tuple(name for name in _names(device_mesh) if name in names and device_mesh[name].size() > 1)
    if not wide:
        return None
    submesh = device_mesh[wide]
    if len(wide) == 1:
        return submesh.get_group()
    options = reducer_options("dp") if "dp" in wide else None
    return submesh._flatten("_".join(wide), backend_override=options and options["dp"]).get_group()


def group_of_ends(device_mesh: DeviceMesh, first: int, last: int, *names: str) -> dist.ProcessGroup | None:
    """Return the group of this rank's peers at two ranks of axis "pp", and along the axes `names`.

    The peers differ from each other in these axes only. None on other ranks, and if `first` is `last`.
    Collective: all ranks of the mesh request the same groups.
    """
    if first == last:
        return None
    group = flat_group(device_mesh, "pp", *names)
    assert group is not None, "the mesh has two ranks along pp"
    axis = _names(device_mesh).index("pp")
    ends = set(device_mesh.mesh.index_select(axis, torch.tensor([first, last])).flatten().tolist())
    ranks = [rank for rank in dist.get_process_group_ranks(group) if rank in ends]
    return subgroup(ranks, group, "group of both ends of a pipeline")


def check_order(device_mesh: DeviceMesh | None) -> None:
    """Raise ValueError, on all ranks alike, unless ranks are in ascending order along each axis of a mesh.

    Raise it too on a rank that is not in the mesh.

    torch numbers the ranks of a group in ascending order, and operators and kernels go by that number, but DTensor cuts
    a tensor by a rank's place in its mesh. In this order the two are one. Whatever takes a mesh from a user calls this.
    """
    if device_mesh is None:
        return
    _check_member(device_mesh)
    names = _names(device_mesh)
    for axis in range(device_mesh.ndim):
        # A slice shows a rank its own group alone; the mesh that it was cut from has the groups of all ranks.
        mesh, at, called = device_mesh, axis, names[axis] if names else str(axis)
        if called in _names(device_mesh._get_root_mesh()):
            mesh = device_mesh._get_root_mesh()
            at = _names(mesh).index(called)
        with unset_fake_temporarily():  # the ranks are known under FakeTensorMode too
            rows = mesh.mesh.movedim(at, -1).reshape(-1, mesh.size(at)).tolist()
        for row in rows:
            if row != sorted(row):
                raise ValueError(
                    f"device_mesh has the ranks {row} along axis {called}: expected ascending order, as in a mesh"
                    " of init_device_mesh, since torch numbers the ranks of a group in that order"
                )


def _check_member(device_mesh: DeviceMesh) -> None:
    """Raise ValueError if this rank is not in the mesh."""
    if device_mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in device_mesh, which has the ranks {device_mesh.mesh.tolist()}: only these"
            " ranks make what is on it"
        )


def _names(device_mesh: DeviceMesh | None) -> tuple[str, ...]:
    return () if device_mesh is None else device_mesh.mesh_dim_names or ()


def group_of(device_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of a one-dimensional mesh; None if it has one rank.

    Raise ValueError for a mesh of several axes (slice it first: `mesh["tp"]`), for one without this rank, and for
    anything but a mesh.
    """
    if device_mesh is None:
        return None
    if not isinstance(device_mesh, DeviceMesh):
        raise ValueError(
            f"device_mesh is {shown(device_mesh)}: expected a one-dimensional DeviceMesh, or None for one rank"
        )
    if device_mesh.ndim != 1:
        raise ValueError(
            f"device_mesh has {device_mesh.ndim} axes {device_mesh.mesh_dim_names}, expected one:"
            ' slice it, as in mesh["tp"]'
        )
    _check_member(device_mesh)
    return device_mesh.get_group() if device_mesh.size() > 1 else None


def groups_of(device_mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """Return this rank's process group of each axis of a mesh that has more than one rank."""
    if device_mesh is None:
        return []
    return [device_mesh.get_group(axis) for axis in range(device_mesh.ndim) if device_mesh.size(axis) > 1]


def all_groups_of(device_mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """Return the default group if the mesh has all ranks, else `groups_of`.

    The default group's deadline is that of the user, so that one rank may read or write files for long.
    """
    everyone = default_group()
    return [everyone] if device_mesh and everyone and device_mesh.size() == everyone.size() else groups_of(device_mesh)


def check_group(operator: str, group: object) -> None:
    """Raise ValueError, with the operator's name, unless `group` is a process group or None."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        cure = "its get_group()" if isinstance(group, DeviceMesh) else "a process group, or None for one rank"
        raise ValueError(f"{operator}: group is {shown(group)}: expected {cure}")


def shown(value: object) -> str:
    """Return the name of a wrong argument in a message: its text, or its type."""
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def default_group() -> dist.ProcessGroup | None:
    """Return torch's default process group; None for one rank, even if torch.distributed is not initialised."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this rank's number in the group and the group's size; (0, 1) for None."""
    return (0, 1) if group is None else (group.rank(), group.size())


def shard_range(size: int, rank: int, world: int) -> tuple[int, int]:
    """Return [start, stop) of shard `rank` where a dimension of `size` entries is cut into `world` shards."""
    chunk = -(-size // world)
    return min(rank * chunk, size), min((rank + 1) * chunk, size)


def named_group(name: str) -> dist.ProcessGroup:
    """Return the process group with this `group_name`, which is how nodes of torch.compile's graphs refer to it."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
