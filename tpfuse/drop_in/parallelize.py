"""`parallelize`: tensor parallelism for a model that exists, in place, and `restore`, which undoes it."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from tpfuse.comm.agreement import agreement, exchange
from tpfuse.comm.collectives.collective import broadcast_
from tpfuse.comm.collectives.one_model import share_generators
from tpfuse.comm.dispatch import meet
from tpfuse.comm.layout import has_values, is_sharded
from tpfuse.comm.mesh import all_groups_of, check_order, context_mesh, groups_of
from tpfuse.drop_in import huggingface
from tpfuse.drop_in.check import compare, small_batch, small_step
from tpfuse.drop_in.context_proof import separates_documents
from tpfuse.drop_in.conversion import Original, recorded, restore_module
from tpfuse.drop_in.outline import outline
from tpfuse.drop_in.parallel_forward import ATTENTION
from tpfuse.drop_in.structure import Recognised, recognise
from tpfuse.drop_in.styles import check_unconverted
from tpfuse.drop_in.weights import find_weights, offer_save_pretrained, read_weights, take_weights
from tpfuse.parallel.context import ContextParallel, ContextSchedule

Plan = str | Mapping[str, ParallelStyle]


@dataclass(frozen=True)
class Replacement:
    """The style that `parallelize` gave a module. reason: why not another one, "" if it has the one of its plan."""

    module: str
    kind: str
    style: str
    reason: str


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan = "auto",
    *,
    sequence_parallel: bool = True,
    context_parallel: ContextSchedule = "auto",
    weights: str | Path | None = None,
    check: bool = False,
) -> nn.Module:
    """Convert a model in place for the ranks of a mesh, and return it.

    model: whole, with the same weights on all ranks (those of the mesh's first rank count), or on the meta device on
    all ranks. mesh: one-dimensional, or with an axis "tp" for tensor parallelism, an axis "cp" (or "ring" and
    "ulysses") for context parallelism, or both. plan: "auto" recognises decoders of Hugging Face's transformers by
    their structure; or styles of `tpfuse.drop_in` and of torch.distributed.tensor.parallel by patterns of module names,
    in which * stands for any text (fnmatch). sequence_parallel: plan "auto" shards the activations between attention
    and MLP along the sequence. context_parallel: the schedule of `tpfuse.ring_attention`, if the mesh has an axis
    for it. weights: the folder of a Hugging Face model, or a safetensors file, that fills the model, which may be empty
    (`tpfuse.drop_in.weights.empty_model`): each rank reads only its shards, and converts them to the dtype of the
    model's parameters, which stay in memory until all is read. check: run the model on a few tokens before and after,
    without dropout; if the logits, the loss or a gradient differs by more than rounding (with weights: is not finite),
    or if the logits differ between ranks, the model is restored and the call raises ValueError. Each rank needs memory
    for the gradients of the whole model.

    The forward pass of a model of transformers takes and returns whole sequences on all ranks. With labels, its loss is
    computed without whole logits, and reading those of a training step is an error that names the way out
    (`tpfuse.drop_in.outputs`). Gradients are averaged over the ranks of context parallelism, which makes them those of
    one rank, but not over data-parallel ranks.

    Parameters become DTensors under their names. What was converted, and what was not and why, is in
    `replacements(model)`, and `tpfuse.explain` prints it. The call is a collective of the mesh.

    All ranks are given equal arguments, the whole batch of their model. The first calls and then one in so many compare
    them, and raise Disagreement on every rank (`tpfuse.comm.collectives.one_model`).

    The ranks of the mesh must draw equal random numbers, for dropout. So the call sets the states of torch's default
    generators to those of the mesh's first rank; whoever seeds them later must seed them equally. `generate` does so
    itself, along tp. Where attention drops probabilities, the first heads of all ranks draw the same mask, and so on.
    So do the ranks' shards of the sequence where a layer calls torch's dropout as a function, as OPT's do.

    Hidden states in a model's output, and what hooks of its layers see, are whole sequences with the gradients of one
    rank. With sequence_parallel, and over a context, hooks of modules in a layer see this rank's shard of the sequence.

    Raise ValueError, with the name of the module, for a model that is parallelized already, a mesh without the
    axis or with ranks that are not in ascending order along it, a pattern that matches no module, parameters that
    have hooks (register them after the call), and for modules that a style cannot convert: sizes that the ranks do not
    divide, weights that are not floats; and for files of `weights` with tensors that are missing, unexpected in a layer
    of the model, or of another shape, or that cannot be read. The model is then as it was. Later errors, such as too
    little memory for a shard, leave it converted in part and carry a note that says so. The first rank warns of tensors
    that the model has no layer for.
    """
    tensor_mesh, context = _meshes(mesh, context_parallel)
    check_order(tensor_mesh)
    _check_whole(model)
    ranks = 1 if tensor_mesh is None else tensor_mesh.size()
    decoder = huggingface.outermost(model)
    if decoder is not None:
        huggingface.register()
    if context.groups:
        huggingface.check_context(model, context, ranks)
    separates = decoder is not None and bool(context.groups) and separates_documents(decoder)
    styles: dict[str, list[ParallelStyle]] = {}
    kept: dict[str, str] = {}
    if not isinstance(plan, str):
        styles = _matched(model, plan)
    elif plan != "auto":
        raise ValueError(f'plan {plan!r}: expected "auto", or styles by patterns of module names')
    elif tensor_mesh is not None:
        recognised = recognise(model, ranks, sequence_parallel)
        styles, kept = recognised.styles, recognised.kept
    if styles and tensor_mesh is None:
        raise ValueError(f'mesh has the axes {mesh.mesh_dim_names}: expected one named "tp" for the plan')
    whole_logits = huggingface.whole_logits(model) if ranks > 1 else {}
    kept |= {name: reason for name, reason in whole_logits.items() if name in styles}
    batch = small_batch(model, mesh.size()) if check else {}
    before = small_step(model, batch) if check and weights is None else None
    done: list[Replacement] = []
    read: dict[str, torch.Tensor] = {}
    outlined = model
    if tensor_mesh is not None:
        outlined = outline(model, {})
        _apply(outlined, tensor_mesh, styles, kept, None)  # it finds all errors before the model is changed
        _check_ties(model, outlined)
    if weights is not None:
        read = _read(model, outlined, Path(weights), mesh)
    else:
        _share_values(model, outlined, mesh, tensor_mesh)
    with recorded(model):
        if tensor_mesh is not None:
            done = _apply(model, tensor_mesh, styles, kept, 0 if weights is None else None)
        if context.groups:
            reason = f"attention over cp {context.size}, schedule {context.schedule}"
            done.append(Replacement("", type(model).__name__, ATTENTION, reason))
        model.__dict__["replacements"] = done
        if weights is not None:
            take_weights(model, read, mesh.device_type)
        huggingface.adapt(model, context, tensor_mesh, not whole_logits, separates)
        if tensor_mesh is not None:
            huggingface.refuse_changes(model)
        offer_save_pretrained(model, mesh)
        model.__dict__["_ddp_params_and_buffers_to_ignore"] = _RefuseDDP(model)
        share_generators([*groups_of(tensor_mesh), *context.groups], mesh.device_type)
    if check:
        try:
            compare(before, small_step(model, batch), mesh)
        except Exception:
            restore(model)
            raise
    return model


def outlined_shards(model: nn.Module, mesh: DeviceMesh, recognised: Recognised) -> nn.Module:
    """Return this rank's model after `parallelize(model, mesh)`, on the meta device and without communication.

    mesh: one-dimensional. recognised: what `recognise` finds in the model for the ranks of the mesh. The result shows
    the shapes of the shards. Raise ValueError as `parallelize` does.
    """
    shards = outline(model, {})
    _apply(shards, mesh, recognised.styles, recognised.kept, None)
    return shards


def replacements(model: nn.Module) -> list[Replacement]:
    """Return what `parallelize` did with each module of its plan. Raise ValueError for another model."""
    done: list[Replacement] | None = model.__dict__.get("replacements")
    if done is None:
        raise ValueError("the model is not parallelized: call tpfuse.parallelize(model, mesh)")
    return done


@torch.no_grad()
def restore(model: nn.Module) -> nn.Module:
    """Undo `parallelize`: make the model again what it was, with whole parameters on every rank, and return it.

    The call is a collective of the mesh. Raise ValueError for a model that is not parallelized, and for parameters with
    hooks other than tpfuse's.
    """
    replacements(model)
    for name, x in model.named_parameters():
        hooks = [*(x._backward_hooks or {}).values(), *(x._post_accumulate_grad_hooks or {}).values()]
        if isinstance(x, DTensor) and any(not type(hook).__module__.startswith("tpfuse.") for hook in hooks):
            raise ValueError(f"restore: {name} has hooks, which would be lost: remove them, and register them after it")
    sharded = (x for x in model.parameters() if isinstance(x, DTensor) and is_sharded(x))
    for mesh in dict.fromkeys(x.device_mesh for x in sharded):
        meet("restore, which all ranks of the model call", *groups_of(mesh))
    huggingface.release(model)
    memo: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        restore_module(module, memo)
    return model


def _read(model: nn.Module, outlined: nn.Module, weights: Path, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return the tensors in files for a model that is not converted yet, this rank's shards as `outlined` shows them.

    The first rank warns of other tensors in the files. Raise ValueError on all ranks if one cannot read them.
    """
    op, groups = f"reading weights={str(weights)!r}", all_groups_of(mesh)
    with agreement(op, *groups):
        found, left_out = find_weights(model, weights)
    if left_out and not any(mesh._get_root_mesh().get_coordinate() or ()):
        warnings.warn(left_out, stacklevel=3)
    with agreement(op, *groups):
        return read_weights(outlined, found, mesh.device_type)


@torch.no_grad()
def _share_values(model: nn.Module, outlined: nn.Module, mesh: DeviceMesh, tensor_mesh: DeviceMesh | None) -> None:
    """Give all ranks of a context, and of tensor_mesh, the parameters and buffers of the first one.

    outlined: the model after `_apply`, which itself gives the ranks of tensor_mesh the parameters that it converts.
    Raise ValueError on all ranks if a tensor has values on some of them, and none on others.
    """
    context, along_tp = groups_of(context_mesh(mesh)), groups_of(tensor_mesh)
    converted = {name for name, x in outlined.named_parameters() if isinstance(x, DTensor)}
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    empty = sum(not has_values(x) for x in tensors.values())
    if len(set(exchange(empty, *context, *along_tp, op="parallelize"))) > 1:
        raise ValueError(
            "the model has values on some ranks of the mesh and is on the meta device on others: expected values on all"
            " ranks, or on none of them and weights=folder"
        )
    for name, x in tensors.items():
        groups = context if name in converted else (*context, *along_tp)
        for group in groups if has_values(x) and x.numel() else ():
            sent = x.to(mesh.device_type).contiguous()
            broadcast_([sent.view(-1).view(torch.uint8)], group)
            if not torch.equal(sent.to(x.device), x):  # an expanded buffer could not be written
                x.copy_(sent)


class _RefuseDDP:
    """torch's DDP asks a model for the names of tensors that it is to ignore; a parallelized model has this instead."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __iter__(self) -> Iterator[str]:
        """Return no names. Raise ValueError unless DDP has made plain parameters of all, as for a `device_mesh`."""
        name = next((name for name, x in self._model.named_parameters() if isinstance(x, DTensor)), None)
        if name is not None:
            raise ValueError(
                f"DistributedDataParallel: the model is parallelized, and {name} is a DTensor, which DDP does not take:"
                " use tpfuse.ZeroOptimizer with the mesh of all ranks, at stage 0 for what DDP does"
            )
        return iter(())


def _meshes(mesh: DeviceMesh, schedule: ContextSchedule) -> tuple[DeviceMesh | None, ContextParallel]:
    """Return the one-dimensional mesh of the tensor-parallel ranks, None if there is none, and the context."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}: expected a DeviceMesh")
    names = mesh.mesh_dim_names or ()
    shared = context_mesh(mesh)
    if shared is None and schedule != "auto":
        raise ValueError(f'context_parallel {schedule!r}: expected a mesh with an axis "cp"')
    context = ContextParallel(shared, schedule)
    if "tp" in names:
        return mesh["tp"], context
    if shared is not None:
        return None, context
    if mesh.ndim != 1:
        raise ValueError(f'mesh has the axes {names or mesh.ndim}: expected one named "tp", or one axis')
    return mesh, context


def _check_whole(model: nn.Module) -> None:
    """Raise ValueError, which names a module, for a part that is parallelized already or has hooks of parameters."""
    for name, module in model.named_modules():
        called = name or "the model"
        if isinstance(module.__dict__.get("unconverted"), Original):
            raise ValueError(f"{called} is parallelized already: call tpfuse.restore(model) first")
        try:
            check_unconverted(module)
        except ValueError as error:
            raise ValueError(f"{called}: {error}") from None


def _apply(
    model: nn.Module,
    mesh: DeviceMesh,
    styles: Mapping[str, list[ParallelStyle]],
    kept: Mapping[str, str],
    source: int | None,
) -> list[Replacement]:
    """Apply styles to the modules of a model. source: the rank of the mesh whose values count; None for no values.

    Raise ValueError, with the name of the module, for a module that a style cannot convert.
    """
    modules, done = dict(model.named_modules()), []
    for name, its_styles in styles.items():
        module = modules[name]
        kind = type(module).__name__
        for style in its_styles:
            style.src_data_rank = source
            try:
                style._apply(module, mesh)
            except (ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError) as error:
                line, kind_of_style = str(error).partition("\n")[0], type(style).__name__
                where = "" if line.startswith(f"{kind_of_style} of ") else f"{kind_of_style}: "
                raise ValueError(f"{name or 'the model'}: {where}{line}") from error
            done.append(Replacement(name, kind, type(style).__name__, kept.get(name, "")))
        module.__dict__.update(module_name=name, reason=kept.get(name, ""))
    whole = (name for name in kept if name not in styles)
    return done + [Replacement(name, type(modules[name]).__name__, "its own forward", kept[name]) for name in whole]


def _check_ties(model: nn.Module, outlined: nn.Module) -> None:
    """Raise ValueError if modules that share a parameter share none in `outlined`, to which the plan was applied."""
    converted = dict(outlined.named_parameters(remove_duplicate=False))
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(parameter, name)
        if converted[name] is not converted[other]:
            raise ValueError(
                f"{name} is {other}, the same parameter: expected a plan with styles of tpfuse that keep equal shards"
                " for both modules"
            )


def _matched(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> dict[str, list[ParallelStyle]]:
    """Return the styles of modules by their names. Raise ValueError for a pattern that matches no module."""
    styles: dict[str, list[ParallelStyle]] = {}
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ValueError(f"plan {pattern!r}: {type(style).__name__} is no ParallelStyle")
        names = [name for name, _ in model.named_modules() if fnmatchcase(name, pattern)]
        if not names:
            known = ", ".join(name for name, _ in model.named_children())
            raise ValueError(f"plan {pattern!r} matches no module; the model has {known}")
        for name in names:
            styles.setdefault(name, []).append(style)
    return styles
