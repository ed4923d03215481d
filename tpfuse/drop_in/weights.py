"""Weights of parallelized models: read from safetensors files slice by slice, and written in Hugging Face's form.

    model = empty_model(AutoModelForCausalLM.from_config, AutoConfig.from_pretrained(folder))
    parallelize(model, mesh, weights=folder)
    model.save_pretrained(other_folder)

No rank ever holds more than its shards and one whole parameter while it loads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tpfuse.comm.agreement import agreement
from tpfuse.comm.dispatch import meet
from tpfuse.comm.layout import Slices, gather_whole, has_values, local_slices, local_tensor
from tpfuse.comm.mesh import all_groups_of, groups_of
from tpfuse.comm.stored_tensors import (
    UNQUANTIZED,
    StoredTensor,
    check_names,
    check_tensor,
    stored_tensors,
    twice,
    unwrapped,
)
from tpfuse.drop_in.huggingface import without_ignored
from tpfuse.drop_in.loaded_tensors import MergedTensor, loaded_tensors
from tpfuse.drop_in.structure import HEADS

_P = ParamSpec("_P")
_M = TypeVar("_M", bound=nn.Module)


def empty_model(make: Callable[_P, _M], *args: _P.args, **kwargs: _P.kwargs) -> _M:
    """Return `make(*args, **kwargs)`, a model, with its parameters on the meta device: they take no memory.

    Its buffers have their values, unlike those of a model made under `torch.device("meta")`: rotary embeddings and
    masks are not in a model's files. Raise ValueError for a buffer that `make` leaves uninitialised.
    """
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def emptied(module: nn.Module, name: str, parameter: Parameter | None) -> Parameter | None:
        """Return the parameter on the meta device, a shared one once."""
        if parameter is None or parameter.is_meta:
            return None
        if parameter not in moved:
            moved[parameter] = Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        return cast(Parameter, moved[parameter])

    hook = register_module_parameter_registration_hook(cast(Any, emptied))
    try:
        with _EmptyOnMeta():
            model = make(*args, **kwargs)
    finally:
        hook.remove()
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"{name} is a buffer without values: expected a model that computes it when it is made")
    return model


class _EmptyOnMeta(TorchFunctionMode):
    """Make uninitialised tensors, such as torch's own layers begin with, on the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


def find_weights(model: nn.Module, folder_or_file: Path) -> tuple[dict[str, list[StoredTensor]], str]:
    """Return the tensors in the files of every parameter and persistent buffer of a whole model, by its name.

    They are renamed and merged as transformers does when it loads a model (`loaded_tensors`). A parameter that modules
    share may have several. Names may lack the model's `base_model_prefix`, or have it where the model does not, and may
    have those of torch's wrappers (`unwrapped`). Tensors that transformers drops without a word, and those of buffers
    that the model computes, may be in the files too; of others the second value tells (`check_names`).

    Raise ValueError for files as `stored_tensors` does, and for tensors that are missing, unexpected in a layer of the
    model, of another shape, or not floats where the model has floats.
    """
    prefix = getattr(model, "base_model_prefix", "")

    def short(name: str) -> str:
        return unwrapped(name).removeprefix(f"{prefix}." if prefix else "")

    stored: dict[str, StoredTensor] = {}
    others: dict[str, str] = {}  # the tensors that no part of the model was found to be, by their whole names
    for name, tensor in loaded_tensors(model, stored_tensors(folder_or_file)):
        if short(name) in stored:
            raise ValueError(twice(tensor, stored[short(name)]))
        stored[short(name)], others[short(name)] = tensor, name
    values: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    computed = dict(model.named_buffers(remove_duplicate=False))
    values |= {name: computed.pop(name) for name in list(computed) if is_persistent(model, name)}
    groups: dict[int, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(id(value), []).append(name)
    found: dict[str, list[StoredTensor]] = {}
    for names in groups.values():
        tensors = [stored[short(name)] for name in names if short(name) in stored]
        for tensor in tensors:
            check_tensor(tensor, values[names[0]].shape, floating=values[names[0]].is_floating_point())
        found |= dict.fromkeys(names, tensors)
    missing = [names[0] for names in groups.values() if not found[names[0]]]
    for name in (*values, *computed):
        others.pop(short(name), None)
    extra = {short(name): stored[short(name)] for name in without_ignored(model, others.values())}
    way = UNQUANTIZED if getattr(getattr(model, "config", None), "quantization_config", None) else ""
    if not way and missing and all(name.rpartition(".")[0] in HEADS for name in missing):
        way = 'expected them, or "tie_word_embeddings": true in config.json if the embedding is the head too'
    return found, check_names(folder_or_file, missing, extra, map(short, values), way)


def is_persistent(model: nn.Module, buffer: str) -> bool:
    """Return whether a buffer is in the model's files."""
    module, _, name = buffer.rpartition(".")
    return name not in model.get_submodule(module)._non_persistent_buffers_set


@torch.no_grad()
def read_weights(
    shards: nn.Module, found: Mapping[str, Sequence[StoredTensor]], device: torch.device | str
) -> dict[str, Tensor]:
    """Return new tensors on `device` for a parallelized model's parameters, and for the buffers that files have.

    shards: the model, or its outline after the conversion, whose tensors stay as they are. found: what `find_weights`
    found for the whole model; each rank reads its own slices alone, and parameters for which nothing was found are left
    uninitialised. Tensors of any float dtype are converted to the dtype that the parameter has. Shared ones are read
    once. Raise ValueError for files that cannot be read any more, and for tensors of one shared parameter that differ.
    """
    new: dict[str, Tensor] = dict(shards.named_parameters(remove_duplicate=False))
    new |= {name: x for name, x in shards.named_buffers(remove_duplicate=False) if found.get(name)}
    read: dict[int, Tensor] = {}
    for name, x in new.items():
        if id(x) not in read:
            filled = torch.empty_like(x, device=device)
            read_shard(local_tensor(filled), local_slices(filled), filled.shape, found.get(name, ()))
            is_parameter = isinstance(x, Parameter)
            read[id(x)] = Parameter(filled, requires_grad=x.requires_grad) if is_parameter else filled
        new[name] = read[id(x)]
    return new


@torch.no_grad()
def take_weights(model: nn.Module, read: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Give a parallelized model the tensors of `read_weights`, and move its buffers to `device`.

    Shards, and parameters without values, are replaced. Other tensors are written in place.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            new = cast(Parameter, read[prefix + name])
            if has_values(parameter) and not isinstance(parameter, DTensor):
                parameter.copy_(new)
            else:
                new.__dict__.update(parameter.__dict__)
                module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if prefix + name in read:
                    buffer.copy_(read[prefix + name])
                module._buffers[name] = buffer.to(device)


def read_shard(local: Tensor, slices: Slices, shape: Sequence[int], tensors: Sequence[StoredTensor]) -> None:
    """Fill a shard, the `slices` of a parameter of `shape`, from a file's tensor. All `tensors` must be equal there.

    Raise ValueError for tensors that differ, and for files that cannot be read.
    """
    for index, tensor in enumerate(tensors if local.numel() else ()):
        values = tensor[...] if isinstance(tensor, MergedTensor) else tensor  # merged once for all pieces
        for target, ranges in file_pieces(local, slices, shape, tensor.shape):
            part = values[tuple(slice(*bounds) for bounds in ranges)]
            if index == 0:
                target.copy_(part)
            elif not torch.equal(target, part.to(target)):
                raise ValueError(f"{tensor.file}: {tensor.name} differs from another tensor, but the model shares them")


def file_pieces(
    local: Tensor, slices: Slices, shape: Sequence[int], stored: Sequence[int]
) -> Iterator[tuple[Tensor, Slices]]:
    """Yield (piece of this rank's shard, [start, stop) of it in each dimension of the tensor in a file).

    local: the `slices` of a parameter of `shape`. stored: the shape of the tensor in the file. If it is not `shape`,
    the parameter has a dimension of it as two: (parts, rows).
    """
    if tuple(shape) == tuple(stored):
        yield local, slices
        return
    dim = next(dim for dim in range(len(stored)) if shape[dim] * shape[dim + 1] == stored[dim] != shape[dim])
    rows = shape[dim + 1]
    for index, part in enumerate(range(*slices[dim])):
        start, stop = slices[dim + 1]
        yield (local.select(dim, index), (*slices[:dim], (part * rows + start, part * rows + stop), *slices[dim + 2 :]))


def offer_save_pretrained(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make `save_pretrained` of a model on a mesh, and of its modules that have it, the function below."""
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            module.__dict__["save_pretrained"] = partial(save_pretrained, module, mesh)


@torch.no_grad()
def save_pretrained(model: nn.Module, mesh: DeviceMesh, folder: str | Path, **options: Any) -> None:
    """Write a parallelized model of transformers as its own `save_pretrained` does, with the same names and shapes.

    mesh: that of `parallelize`, which makes this the model's own `save_pretrained`. options: those of transformers'
    method, such as max_shard_size; with a state_dict of whole tensors, it is the rank that calls that writes it.
    Otherwise all ranks that hold the model's parameters call this; the first of them gathers the whole parameters and
    writes. If several replicas call it, only the first writes. An error on the writing rank is raised on all.
    """
    write = cast(Any, type(model)).save_pretrained
    given: dict[str, Any] | None = options.pop("state_dict", None)
    if given is None:
        meet("save_pretrained, which all ranks of the model call", *groups_of(mesh))
    state = model.state_dict(keep_vars=True) if given is None else given
    meshes = [value.device_mesh for value in state.values() if isinstance(value, DTensor)]
    if given is not None and not meshes:
        write(model, folder, state_dict=given, **options)
        return
    mesh = max(meshes, key=lambda mesh: mesh.ndim) if meshes else mesh
    writes = options.pop("is_main_process", True) and not any(mesh._get_root_mesh().get_coordinate() or ())
    whole: dict[int, tuple[Any, Any]] = {}
    tensors: dict[str, Any] = {}
    for name, value in state.items():
        if id(value) not in whole:
            gathered = gather_whole(value) if isinstance(value, Tensor) else value
            whole[id(value)] = value, _compact(gathered) if writes else None
        tensors[name] = whole[id(value)][1]
    with agreement(f"save_pretrained({str(folder)!r})", *all_groups_of(mesh)):
        if writes:
            # transformers asks the model which rank writes, and would answer rank 0 of all ranks.
            model.__dict__["should_save_on_this_rank"] = bool
            try:
                write(model, folder, state_dict=tensors, **options)
            finally:
                del model.__dict__["should_save_on_this_rank"]


def _compact(value: Any) -> Any:
    """Return a tensor on the CPU whose storage has its size: transformers takes the storage's for the tensor's."""
    if not isinstance(value, Tensor):
        return value
    value = value.cpu().contiguous()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
