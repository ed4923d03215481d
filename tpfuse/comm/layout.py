"""The position of a local tensor in its global one, for plain tensors and DTensors alike."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tpfuse.comm.dispatch import meet
from tpfuse.comm.mesh import check_order, groups_of, shard_range

Slices = tuple[tuple[int, int], ...]


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; without parameters the CPU."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def local_tensor(x: Tensor) -> Tensor:
    """Return the part of `x` that is in this rank's memory. It shares storage and is outside autograd."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def has_values(x: Tensor) -> bool:
    """Return whether `x` holds numbers. On the meta device and under torch's FakeTensorMode it is only a shape."""
    held = x._local_tensor if isinstance(x, DTensor) else x
    return not (held.is_meta or isinstance(held, FakeTensor))


def is_traced(x: Tensor) -> bool:
    """Return whether an operator on `x` gives a node of a graph, or only a shape, and is not computed now."""
    return torch.compiler.is_compiling() or not has_values(x)


def check_local(operator: str, **tensors: Tensor | None) -> None:
    """Raise ValueError if one of an operator's tensors is a DTensor. tensors: by the names of its arguments."""
    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise ValueError(f"{operator}: {name} is a DTensor: expected this rank's part of it, {name}.to_local()")


def local_slices(x: Tensor) -> Slices:
    """Return [start, stop) of the local part in each global dimension.

    Raise ValueError for placements other than Replicate, Shard and the strided shard that `fully_shard` makes, and for
    a mesh with ranks in another order than `check_order` expects.
    """
    ranges = [(0, size) for size in x.shape]
    if isinstance(x, DTensor):
        check_order(x.device_mesh)
        for axis, dim in _order_of_cuts(x):
            start, stop = ranges[dim]
            rank, world = x.device_mesh.get_local_rank(axis), x.device_mesh.size(axis)
            lower, upper = shard_range(stop - start, rank, world)
            ranges[dim] = (start + lower, start + upper)
    return tuple(ranges)


def _order_of_cuts(x: DTensor) -> list[tuple[int, int]]:
    """Return (axis of the mesh, dimension of the tensor) for one cut after another.

    An axis with Shard cuts what the axes before it leave. An axis with _StridedShard cuts what the axes after it leave:
    so `fully_shard` describes shards of a dimension that tensor parallelism has already cut into `split_factor` shards.
    """
    first: list[tuple[int, int]] = []
    then: list[tuple[int, int]] = []
    later_shards = dict.fromkeys(range(x.ndim), 1)  # shards that the axes after this one make of each dimension
    for axis, placement in reversed(list(enumerate(x.placements))):
        if isinstance(placement, Replicate):
            continue
        strided = isinstance(placement, _StridedShard) and placement.split_factor == later_shards[placement.dim]
        if not strided and type(placement) is not Shard:
            raise ValueError(f"placement {placement} of a tensor {tuple(x.shape)}: expected Shard or Replicate")
        dim: int = placement.dim  # type: ignore[attr-defined]
        later_shards[dim] *= x.device_mesh.size(axis)
        if strided:
            then.append((axis, dim))
        else:
            first.insert(0, (axis, dim))
    return first + then


def is_sharded(x: Tensor) -> bool:
    """Return whether ranks hold different parts of `x`."""
    return isinstance(x, DTensor) and any(not isinstance(p, Replicate) for p in x.placements)


def from_local(local: Tensor, device_mesh: DeviceMesh | None, dim: int | None, shape: torch.Size) -> Tensor:
    """Return the tensor of global `shape` whose shard along `dim` is `local`, without communication.

    dim: None for a replica; device_mesh: of one axis, or None for one rank.
    """
    if device_mesh is None:
        return local
    placement = Replicate() if dim is None else Shard(dim)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, device_mesh, [placement], run_check=False, shape=shape, stride=stride)


def copy_whole_(x: Tensor, whole: Tensor) -> None:
    """Copy the local part of `whole` (x's global shape, any dtype and device) into `x`.

    Raise ValueError if the shapes differ.
    """
    if whole.shape != x.shape:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} does not fit one of {tuple(x.shape)}")
    part = whole[tuple(slice(start, stop) for start, stop in local_slices(x))]
    local_tensor(x).copy_(part)


@torch.no_grad()
def gather_whole(parameter: Tensor, op: str = "") -> Tensor:
    """Return the whole parameter, on its device, on every rank. The call is a collective of the ranks of its mesh.

    op: the operation by whose name the ranks wait for each other first (`tpfuse.comm.dispatch.meet`), if the parameter
    is sharded; torch gathers it without the deadline of the settings. Without a name, the ranks have met.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    if op and is_sharded(parameter):
        meet(op, *groups_of(parameter.device_mesh))
    return parameter.full_tensor()


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
