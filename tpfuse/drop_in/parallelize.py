"""`parallelize`: tensor parallelism for a model that exists, in place, and `restore`, which undoes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tpfuse.drop_in.check import compare, small_forward
from tpfuse.drop_in.converted import Converted, Original, restore_module
from tpfuse.drop_in.structure import recognise

Plan = str | Mapping[str, ParallelStyle]


@dataclass(frozen=True)
class Replacement:
    """What `parallelize` did with one module. style: None if the module was left alone, for the reason given."""

    module: str
    kind: str
    style: str | None
    reason: str


def parallelize(
    model: nn.Module, mesh: DeviceMesh, plan: Plan = "auto", *, sequence_parallel: bool = True, check: bool = False
) -> nn.Module:
    """Convert a model in place for the ranks of a mesh, and return it.

    model: whole, with the same weights on all ranks (those of the mesh's first rank count), or on the meta device.
    mesh: one-dimensional, or with a dimension "tp". plan: "auto" recognises decoders of Hugging Face's transformers by
    their structure; or styles of `tpfuse.drop_in` and of torch.distributed.tensor.parallel by patterns of module names,
    in which * stands for any text (fnmatch). sequence_parallel: plan "auto" shards the activations between attention
    and MLP along the sequence. check: run the model on a few tokens before and after; if the logits differ by more than
    rounding, or between ranks, the model is restored and the call raises ValueError.

    Parameters become DTensors under their names. What was converted, and what was not and why, is in
    `replacements(model)`, and `tpfuse.explain` prints it. The call is a collective of the mesh.

    Raise ValueError, with the name of the module, for a model that is parallelized already, a mesh without the
    dimension, a pattern that matches no module, and for modules that a style cannot convert: sizes that the ranks do
    not divide, weights that are not floats. The model is then as it was.
    """
    mesh = _tensor_mesh(mesh)
    if any("original" in module.__dict__ for module in model.modules()):
        raise ValueError("the model is parallelized already: call tpfuse.restore(model) first")
    if isinstance(plan, str):
        if plan not in ("auto",):
            raise ValueError(f'plan {plan!r}: expected "auto", or styles by patterns of module names')
        recognised = recognise(model, mesh.size(), sequence_parallel)
        styles, kept = recognised.styles, recognised.kept
    else:
        styles, kept = _matched(model, plan), {}
    before = small_forward(model, mesh.size()) if check else None
    modules = dict(model.named_modules())
    for name, its_styles in styles.items():
        for style in its_styles:
            fits = getattr(style, "check", None)
            try:
                if fits is not None:
                    fits(modules[name], mesh)
            except ValueError as error:
                raise ValueError(f"{name or 'the model'}: {error}") from None
    done = []
    for name, its_styles in styles.items():
        for style in its_styles:
            kind = type(modules[name]).__name__
            style.src_data_rank = 0
            style._apply(modules[name], mesh)
            done.append(Replacement(name, kind, type(style).__name__, kept.get(name, "")))
        if isinstance(modules[name], Converted):
            modules[name].__dict__.update(module_name=name, reason=kept.get(name, ""))
    rest = [
        Replacement(name, type(modules[name]).__name__, None, why) for name, why in kept.items() if name not in styles
    ]
    model.__dict__["replacements"] = [*done, *rest]
    if check:
        try:
            compare(before, small_forward(model, mesh.size()), mesh)
        except ValueError:
            restore(model)
            raise
    return model


def replacements(model: nn.Module) -> list[Replacement]:
    """Return what `parallelize` did with each module of its plan. Raise ValueError for another model."""
    done: list[Replacement] | None = model.__dict__.get("replacements")
    if done is None:
        raise ValueError("the model is not parallelized: call tpfuse.parallelize(model, mesh)")
    return done


@torch.no_grad()
def restore(model: nn.Module) -> nn.Module:
    """Undo `parallelize`: make the model again what it was, with whole parameters on every rank, and return it.

    The call is a collective of the mesh. Raise ValueError for a model that is not parallelized.
    """
    replacements(model)
    memo: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module.__dict__.get("original"), Original):
            restore_module(module, memo)
    del model.__dict__["replacements"]
    return model


def _tensor_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the one-dimensional mesh of the tensor-parallel ranks."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}: expected a DeviceMesh")
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        return mesh["tp"]
    if mesh.ndim != 1:
        raise ValueError(f'mesh has the dimensions {names or mesh.ndim}: expected one named "tp", or one dimension')
    return mesh


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
