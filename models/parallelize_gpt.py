"""`parallelize_gpt` puts a whole GPT on the ranks of a mesh: its layers, stages and sequences, and what it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.mesh import context_mesh, tensor_mesh
from tpfuse.layers.on_mesh import check_unhooked, take_
from tpfuse.models.gpt import GPT, Transformer
from tpfuse.parallel.context import Balance, ContextParallel, ContextSchedule
from tpfuse.parallel.offloaded_inputs import OffloadedInputs
from tpfuse.parallel.pipeline.cut import Stage
from tpfuse.parallel.recompute import Recompute, check_recompute, recomputed_whole


@dataclass(frozen=True)
class GPTOptions:
    """The division of a GPT among the ranks of a mesh, and what they keep for the backward pass.

    context_schedule, context_balance: as for `tpfuse.ops.ring_attention.ring_attention`. recompute: the activations
    that the backward pass computes again, as for `tpfuse.parallel.recompute`. offload_activations: whether what "full"
    keeps is in the host's memory (`tpfuse.parallel.offloaded_inputs`). stages: the pipeline stages of this rank, which
    alone it has; None for the whole model. The tied embedding is on the rank of the first stage and on that of the last
    one.
    """

    context_schedule: ContextSchedule = "auto"
    context_balance: Balance = "zigzag"
    recompute: Recompute = "none"
    offload_activations: bool = False
    stages: Sequence[Stage] | None = None


def parallelize_gpt(model: GPT, mesh: DeviceMesh | None, options: GPTOptions | None = None) -> GPT:
    """Put a whole GPT on the ranks of a mesh, in place, and return it. No ranks communicate.

    model: with the same values on all ranks, or on the meta device, so that no rank needs memory for all of it:
    `to_empty(device=...)` then allocates this rank's shards. mesh: None for one rank; with one axis, whose ranks share
    the layers; or with an axis "tp" for those, and an axis "cp" (or "ring" and "ulysses") for ranks that share each
    sequence. Other axes do not matter. options: by default `GPTOptions()`.

    Context-parallel ranks have equal parameters. Each of them computes the gradients of its own tokens, which must be
    summed over these ranks as over data-parallel ranks (`tpfuse.zero.gradient_buckets`). Raise ValueError for a
    configuration that the mesh cannot hold, for unknown options, and for a model that is parallelized already or has
    hooks in layers that are replaced (register them after the call); the model is then as it was.
    """
    options = options or GPTOptions()
    layers = tensor_mesh(mesh)
    context = ContextParallel(context_mesh(mesh), options.context_schedule, options.context_balance)
    _check(model, layers, context, options)
    # Tensor and sequence parallelism: each rank has a shard of the layers, and between them a shard of the tokens.
    if layers is not None:
        _shard_layers(model, layers)
    # Pipeline parallelism: each rank has the layers of its stages alone.
    if options.stages is not None:
        _cut(model, options.stages)
    # Context parallelism: each rank has a part of every sequence, and attention reads the others.
    model.context = context
    model.sum_over_context = context if context.groups else None
    for block in model.blocks:
        block.attn.context = context
    # Recomputation: a block keeps its input, or all but the results of attention and of the activation.
    if options.recompute == "full":
        model.recomputed = recomputed_whole
    elif options.recompute == "selective":
        for block in model.blocks:
            block.recompute_selectively()
    # Offloading: what a block keeps waits in the host's memory.
    if options.offload_activations:
        model.recomputed = partial(OffloadedInputs(), recomputed_whole)
    model.parallelized = mesh is not None or options != GPTOptions()  # else nothing has changed
    return model


def _check(model: GPT, layers: DeviceMesh | None, context: ContextParallel, options: GPTOptions) -> None:
    if model.parallelized:
        raise ValueError("the GPT is parallelized already: expected a new one")
    tp = 1 if layers is None else layers.size()
    model.config.check(tp)
    check_recompute(options.recompute)
    if options.offload_activations and options.recompute != "full":
        raise ValueError(f"offload_activations is for recompute full, not for {options.recompute}")
    context.check(model.config.n_positions, model.config.n_head // tp)
    for name, layer in model.transformer.named_modules() if layers is not None else ():
        check_unhooked(f"transformer.{name}", layer)


def _shard_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Replace the layers by layers of the ranks of a mesh, each with its shard of the parameters."""
    whole = model.transformer
    with torch.device("meta"):
        model.transformer = Transformer(model.config, mesh).to(whole.wte.weight.dtype).train(whole.training)
    for layer, whole_layer in zip(model.transformer.modules(), whole.modules(), strict=True):
        take_(layer, whole_layer)
    model.device_mesh, model.rank, model.tp = mesh, mesh.get_local_rank(), mesh.size()


def _cut(model: GPT, stages: Sequence[Stage]) -> None:
    """Remove what the stages do not need. Blocks of others are nn.Identity, so that all blocks keep their numbers."""
    model.stages = list(stages)
    whole, here = model.transformer, {layer for stage in stages for layer in stage.layers}
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    for layer in set(range(model.config.n_layer)) - here:
        whole.h[layer] = nn.Identity()
    for name, needed in (("wte", first or last), ("wpe", first), ("drop", first), ("ln_f", last)):
        if not needed:
            delattr(whole, name)
