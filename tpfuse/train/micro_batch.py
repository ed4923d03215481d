"""The size of micro-batches where none is given: as many sequences as the free memory holds, for the fewest passes.

The need is that of `tpfuse.plan.memory`. Which sequences a step has does not depend on its micro-batches, and its loss
and gradients do only by rounding.
"""

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.agreement import exchange
from tpfuse.comm.mesh import default_group
from tpfuse.errors import UserError
from tpfuse.plan.memory import memories, uncounted
from tpfuse.train.hardware import free_bytes
from tpfuse.train.memory import counted_model
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import micro_batch_size, micro_batch_sizes
from tpfuse.train.predicted import layout_of
from tpfuse.train.rank_model import ModelConfig
from tpfuse.train.step_graph import replays

_USABLE = 0.95  # the share of the free memory that a step may need: the formula is about so exact


def with_micro_batch(
    options: TrainCommand,
    config: ModelConfig,
    mesh: DeviceMesh | None,
    device: torch.device,
    local_world: int,
    kept: int | None,
) -> tuple[TrainCommand, str]:
    """Return the options with a size that fits the free memory of all ranks, and why in words; "" if one was given, or
    follows from virtual ranks.

    options: with the layout filled in. mesh: the tensor-parallel mesh. local_world: the ranks of this host, which share
    its memory. kept: that of the checkpoint to continue from, which stays if it fits, so that the same run computes the
    same bits again. Where all sequences fit, the options do not change. Collective, if no size is given.
    """
    if options.train.micro_batch is not None or options.train.virtual_ranks:
        return options, ""
    found = exchange(free_bytes(device, local_world), default_group(), op="agreeing on the size of micro-batches")
    known = [free for free in found if free is not None]
    usual = micro_batch_size(options)
    if len(known) < len(found):
        return options, f"micro-batch {usual}: the free memory is not known (--train.micro-batch)"
    free, said = min(known), f"of {min(known) / 2**30:.1f} GiB of free memory"
    try:
        needs = needed_bytes(options, config, mesh, device)
    except UserError as error:
        return options, f"micro-batch {usual}: what it needs {said} is not counted: {error}"
    sizes = [size for size in needs if needs[size] <= _USABLE * free]
    if usual in sizes and kept in (None, usual):
        return options, f"micro-batch {usual}: it needs {needs[usual] / 2**30:.1f} {said}"
    least = min(needs)
    size = kept if kept in sizes else max(sizes, default=least)
    assert size is not None
    more = "" if sizes else ", which may be too little: give --train.recompute full or more ranks"
    chosen = replace(options, train=replace(options.train, micro_batch=size))
    return chosen, f"micro-batch {size} (--train.micro-batch): it needs {needs[size] / 2**30:.1f} {said}{more}"


def needed_bytes(
    options: TrainCommand, config: ModelConfig, mesh: DeviceMesh | None, device: torch.device
) -> dict[int, float]:
    """Return the bytes of the rank that needs the most, by each size that a run may take.

    A replayed step keeps its tensors, beside which evaluations need a workspace of their own. Raise UserError if the
    formula does not know the model.
    """
    sizes, program, blocks = counted_model(options, config, mesh)
    if unknown := uncounted(sizes, program):
        raise UserError(f"activations of {unknown} are not known")
    unused = program.reserve if device.type == "cpu" else 0.0  # CUDA's context and what its allocator keeps
    layout, needs = layout_of(options), {}
    graph = replays(options, device, layout.ranks)
    for size in micro_batch_sizes(options):
        ranks = memories(sizes, replace(layout, micro_batch=size), program, blocks).values()
        needs[size] = max(each.total + each.workspace * graph for each in ranks) - unused
    return needs
