"""Modules that were converted in place: the same object, with a parallel class and with DTensor parameters.

A module is converted by changing its class, as `fully_shard` does. So its hooks, its names, its place in the model and
all references to it stay as they are, and `restore_module` can undo it. A converted nn.Linear is still an nn.Linear.

Parameters become DTensors on the mesh under their names, in their order, and with their Python attributes. A parameter
that two modules share is converted once and shared again. Weights that pack matrices one after another are kept as
[parts, rows, ...], so that each matrix is sharded by itself; `state_dict` and `load_state_dict` speak of the whole
tensor in its original shape.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from tpfuse.comm.layout import gather_whole, has_values, local_tensor
from tpfuse.comm.mesh import check_order
from tpfuse.layers.local_parameter import Borrowed


@dataclass
class Original:
    """A module as it was before its conversion, for `restore_module`."""

    kind: type[nn.Module]
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # the whole shapes of its parameters
    replaced: dict[str, Any] = field(default_factory=dict)  # the attributes that were replaced, with their values
    added: set[str] = field(default_factory=set)
    hooks: list[RemovableHandle] = field(default_factory=list)  # of those that were registered, with their options


# Converted parameter -> (its DTensor, write counts of both at that time), since modules may share parameters.
# What `parallelize` adds is forgotten at its end, since a caller may still hold the old parameters and use them again.
# With torch's `parallelize_module`, whose end we do not see, a write to one of the two ends what they have in common.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()


def shard_parameter(
    parameter: Parameter, mesh: DeviceMesh, dim: int | None, shape: Sequence[int] | None, source: int | None
) -> Parameter:
    """Return `parameter` as a DTensor, sharded along dimension `dim` of `shape` or (None) replicated over `mesh`.

    shape: the shape to view the parameter in first, None for its own. source: the rank of the mesh whose values count;
    None for each rank's own. If the parameter was converted before, its DTensor is returned again.

    Raise ValueError if it was converted to another layout.
    """
    placement = Replicate() if dim is None else Shard(dim)
    shape = parameter.shape if shape is None else torch.Size(shape)
    known, written = _replaced.get(parameter, (None, ()))  # type: ignore[no-untyped-call]
    if known is not None and known.device_mesh == mesh and written == _writes(parameter, known):
        if known.shape != shape or known.placements != (placement,):
            raise ValueError(
                f"it shares a parameter that is {tuple(known.shape)} with {known.placements}: expected"
                f" {tuple(shape)} with {(placement,)}"
            )
        return cast(Parameter, known)
    whole = parameter.detach().reshape(shape)
    tensor: Tensor = distribute_tensor(whole, mesh, [placement], src_data_rank=source if has_values(whole) else None)
    if local_tensor(tensor).untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr():
        tensor = tensor.clone()  # otherwise the shard would keep the whole parameter in memory
    new = Parameter(tensor, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    _replaced[parameter] = new, _writes(parameter, new)
    return new


def _writes(*tensors: Tensor) -> list[int]:
    """Return autograd's counts of writes to tensors, of which a DTensor and its local tensor count apart."""
    counted = [x for tensor in tensors for x in (tensor, local_tensor(tensor))]
    return [0 if x.is_inference() else x._version for x in counted]


def convert(
    module: nn.Module,
    kind: type[nn.Module],
    mesh: DeviceMesh,
    layouts: Mapping[str, tuple[int | None, Sequence[int] | None]],
    source: int | None,
    **attributes: Any,
) -> None:
    """Make `module` a `kind` with these attributes. layouts: (dim, shape) of each parameter for `shard_parameter`.

    Raise ValueError as `check_order` and `shard_parameter` do, and for a forward that is set on the module, unless
    `attributes` replace it; the module is then as it was.
    """
    check_order(mesh)
    if "forward" in module.__dict__ and "forward" not in attributes:
        raise ValueError("its forward is set on the module: expected that of its class, or a plan without the module")
    new = {
        name: shard_parameter(parameter, mesh, *layouts[name], source)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    original = _original_of(module)
    original.shapes = {name: module._parameters[name].shape for name in new}  # type: ignore[union-attr]
    module.__dict__.update(attributes, device_mesh=mesh)
    module._parameters.update(new)
    module.__class__ = kind


def _original_of(module: nn.Module) -> Original:
    known: Original = module.__dict__.setdefault("unconverted", Original(type(module)))
    return known


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[None]:
    """Record which attributes and hooks of a model's modules the block replaces and adds, for `restore_module`.

    An error of the block gets a note, since it leaves a model that is converted in part.
    """
    before = {module: dict(module.__dict__) for module in model.modules()}
    hooks = {module: _hooks(module) for module in before}
    _replaced.clear()
    try:
        yield
    except BaseException as error:
        error.add_note("tpfuse.parallelize has converted a part of the model: load the model again")
        raise
    finally:
        _replaced.clear()
    for module, attributes in before.items():
        now = module.__dict__
        added = now.keys() - attributes.keys() - {"unconverted"}
        replaced = {name: x for name, x in attributes.items() if now[name] is not x}
        new = [_handle(now[name], key) for name, key in _hooks(module) - hooks[module]]
        if added or replaced or new:
            original = _original_of(module)
            original.added, original.replaced, original.hooks = added, replaced, new


def _hooks(module: nn.Module) -> set[tuple[str, int]]:
    """Return (the attribute that holds it, its key there) of each hook of a module, and of each option of a hook."""
    held = ((name, x) for name, x in module.__dict__.items() if "_hooks" in name and isinstance(x, OrderedDict))
    return {(name, key) for name, x in held for key in x}


def _handle(hooks: dict[int, Any], key: int) -> RemovableHandle:
    """Return a handle of a hook. Where it is unpickled, torch gives its key to no other hook."""
    handle = RemovableHandle(hooks)
    handle.id = key
    return handle


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the module has, or had before its conversion."""
    known: Original | None = module.__dict__.get("unconverted")
    return type(module) if known is None else known.kind


@torch.no_grad()
def restore_module(module: nn.Module, memo: dict[int, Parameter]) -> None:
    """Make a module again what it was, with whole parameters. The call is a collective of its mesh: its ranks have met.

    A module that a style of torch converted has no `Original` but the hooks in it; its parameters become whole too.

    memo: the parameters restored so far, by the id of their DTensor, so that shared parameters stay shared.
    """
    original: Original = module.__dict__.pop("unconverted", None) or Original(type(module))
    parameters: dict[str, Any] = module._parameters
    for name, parameter in list(parameters.items()):
        if isinstance(parameter, DTensor):
            if id(parameter) not in memo:
                whole = gather_whole(parameter).reshape(original.shapes.get(name, parameter.shape))
                memo[id(parameter)] = Parameter(whole, requires_grad=parameter.requires_grad)
                attributes = {key: x for key, x in parameter.__dict__.items() if not isinstance(x, Borrowed)}
                memo[id(parameter)].__dict__.update(attributes)
            parameters[name] = memo[id(parameter)]
    for parameter in module.parameters(recurse=False):
        parameter.__dict__.pop("seen_part", None)  # what `tpfuse.explain` warns of is over
    for name, buffer in module._buffers.items():
        if isinstance(buffer, DTensor):  # torch's styles replicate buffers
            module._buffers[name] = gather_whole(buffer)
    for handle in original.hooks:
        handle.remove()
    for name in (*original.added, "looked_at"):
        module.__dict__.pop(name, None)
    module.__dict__.update(original.replaced)
    module.__class__ = original.kind
