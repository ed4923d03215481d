"""Layers on a mesh, and their parameters: DTensors on the user's mesh, or plain tensors without one."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tpfuse.comm.collectives.collective import share_
from tpfuse.comm.layout import copy_whole_, from_local, gather_whole, has_values
from tpfuse.comm.mesh import check_order, group_of, rank_and_size, shard_range

_Layer = TypeVar("_Layer", bound=nn.Module)


class OnMesh:
    """A layer of the ranks of `device_mesh`, which is one-dimensional; None for one rank.

    The layer keeps the mesh and asks it for the process group on every use: copy.deepcopy and pickle can handle a mesh,
    which holds its groups by name, but not a group.
    """

    device_mesh: DeviceMesh | None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the process group of the mesh, None for one rank. Raise ValueError as `group_of` does."""
        return group_of(self.device_mesh)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ValueError: an embedding's `from_embedding` takes the mesh too."""
        raise ValueError(
            f"{cls.__name__}.from_pretrained is not supported: call {cls.__name__}.from_embedding("
            "torch.nn.Embedding.from_pretrained(...), device_mesh=...)"
        )

    def shapes_in_state(self, name: str, parameter: Tensor) -> list[torch.Size]:
        """Return the shapes that a parameter may have in state dicts: its own, and that with its parts in one."""
        shapes = [parameter.shape]
        if getattr(self, "parts", 1) > 1 and parameter.ndim > 1:
            parts, rows, *rest = parameter.shape
            shapes.append(torch.Size([parts * rows, *rest]))
        return shapes

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load tensors that are whole on every rank as well as DTensors."""
        parameters: dict[str, Tensor | None] = self._parameters  # type: ignore[attr-defined]
        for name, parameter in parameters.items():
            given = state_dict.get(prefix + name)
            if parameter is None or not isinstance(given, Tensor):
                continue
            if given.shape in self.shapes_in_state(name, parameter):  # otherwise torch says what is wrong
                state_dict[prefix + name] = _laid_out(given.detach(), parameter.detach())
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


def _laid_out(given: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of a state dict in the shape and with the placements of `like`, in its own dtype.

    The call is a collective of the mesh if `given` is a DTensor with another shape or other placements.
    """
    if isinstance(given, DTensor):
        if isinstance(like, DTensor) and given.shape == like.shape and given.placements == like.placements:
            return given
        given = gather_whole(given, "load_state_dict of other placements, which all ranks of the layer call")
    if not isinstance(like, DTensor):
        return given.reshape(like.shape)
    device = like.device if has_values(like) else given.device  # load_state_dict(assign=True)
    part = torch.empty_like(like, dtype=given.dtype, device=device)
    copy_whole_(part, given.reshape(like.shape))
    return part


def empty_parameter(
    shape: tuple[int, ...],
    dim: int | None,
    device_mesh: DeviceMesh | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Parameter:
    """Return an uninitialised parameter of global `shape`, sharded along `dim` or (None) replicated over the mesh.

    Raise ValueError as `tpfuse.comm.mesh.check_order` does.
    """
    check_order(device_mesh)
    local_shape = list(shape)
    if dim is not None:
        start, stop = shard_range(shape[dim], *rank_and_size(group_of(device_mesh)))
        local_shape[dim] = stop - start
    local = torch.empty(local_shape, device=device, dtype=dtype)
    return Parameter(from_local(local, device_mesh, dim, torch.Size(shape)))


def shared_generator(device_mesh: DeviceMesh | None) -> torch.Generator:
    """Return a CPU generator in a state that is the same on all ranks of the mesh, and another one at every call.

    Its seed is drawn from torch's global generator on the mesh's first rank.
    """
    seed = torch.randint(2**62, (1,), device="cpu")
    group = group_of(device_mesh)
    if group is not None:
        on_device = seed.to(device_mesh.device_type if device_mesh is not None else "cpu")
        share_(on_device, group)
        seed = on_device.cpu()
    return torch.Generator("cpu").manual_seed(int(seed))


def reset_linear_(layer: nn.Linear, device_mesh: DeviceMesh | None) -> None:
    """Initialise the whole layer as nn.Linear does, and keep this rank's shard of it."""
    generator = shared_generator(device_mesh)
    weight = torch.empty(layer.out_features, layer.in_features, device="cpu")
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    copy_whole_(layer.weight, weight.view(layer.weight.shape))
    if layer.bias is not None:
        bound = 1 / math.sqrt(layer.in_features) if layer.in_features else 0.0
        bias = torch.empty(layer.out_features, device="cpu").uniform_(-bound, bound, generator=generator)
        copy_whole_(layer.bias, bias.view(layer.bias.shape))


def take_(layer: _Layer, whole: nn.Module) -> _Layer:
    """Return `layer`, made on the meta device, with this rank's shards of the parameters of `whole`.

    The parameters have the same names in both modules. They are on the device of those of `whole`, and require
    gradients if those do.
    """
    for name, empty in list(layer.named_parameters(recurse=False)):
        source = getattr(whole, name)
        parameter = Parameter(torch.empty_like(empty, device=source.device), requires_grad=source.requires_grad)
        copy_whole_(parameter, source.detach().reshape(parameter.shape))
        layer.register_parameter(name, parameter)
    return layer


def check_kind(name: str, module: nn.Module, kind: type[nn.Module]) -> None:
    """Raise ValueError unless `module`, the argument `name` of a layer's constructor, computes what a `kind` does.

    kind: of torch.nn. A subclass may add nothing to its forward and to its parameters, and there may be no hooks.
    """
    own = ""
    if isinstance(module, kind):
        check_parameters(name, module)
        check_unhooked(name, module)
        if getattr(module.forward, "__func__", None) is kind.forward:
            return
        own = " with a forward of its own"
    raise ValueError(
        f"{name} is a {type(module).__module__}.{type(module).__name__}{own}: expected an nn.{kind.__name__}; if it"
        f" computes the same, load its state_dict() into an nn.{kind.__name__} and pass that"
    )


def check_unhooked(name: str, module: nn.Module) -> None:
    """Raise ValueError if a module, which a new layer replaces, has hooks. name: its name in the message."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise ValueError(f"{name} has hooks, which the new layer would not run: remove them, and set them on it")


def check_parameters(called: str, module: nn.Module) -> None:
    """Raise ValueError for other parameters than weight and bias, from which hooks compute these. called: its name."""
    more = [name for name, _ in module.named_parameters() if name not in ("weight", "bias")]
    if more:
        raise ValueError(
            f"{called} has the parameters {', '.join(more)}: expected weight and bias alone, as prune.remove,"
            " remove_weight_norm and parametrize.remove_parametrizations of torch.nn.utils leave them"
        )


def check_embedding(called: str, embedding: nn.Embedding) -> None:
    """Raise ValueError for an embedding with max_norm, scale_grad_by_freq or sparse gradients. called: its name."""
    for name, off in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
        if getattr(embedding, name) != off:
            raise ValueError(f"{called} has {name}={getattr(embedding, name)}: expected {off}")


def last_dimension(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return normalized_shape as the tuple of a norm. Raise ValueError unless it has one dimension, the last."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(shape) != 1:
        raise ValueError(f"normalized_shape {list(shape)}: expected the last dimension alone")
    return shape
