"""The memory of a rank, by kind."""

from dataclasses import dataclass

from tpfuse.comm.channel import slot_size
from tpfuse.cost.activations import Saved, saved
from tpfuse.cost.in_flight import Part, parts, tied_apart
from tpfuse.cost.layout import Layout
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.cost.states import held
from tpfuse.parallel.pipeline.timeline import Held, holding_bytes


@dataclass(frozen=True)
class Memory:
    """The bytes of the rank that needs the most, by kind, as `tpfuse memory` counts them.

    workspace: the largest short-lived tensors, such as logits, and what the allocator and libraries keep.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0
    workspace: float = 0.0

    @property
    def total(self) -> float:
        """Return the bytes of all kinds."""
        return float(sum(vars(self).values()))


def rank_memory(sizes: ModelSizes, layout: Layout, program: Program) -> Memory:
    """Return the memory of the rank that needs the most. It must be fast, as `step_times` must.

    Raise ValueError for stages or micro-batches that the pipeline's schedule does not accept.
    """
    return max(memories(sizes, layout, program), key=lambda memory: memory.total)


def memories(sizes: ModelSizes, layout: Layout, program: Program) -> list[Memory]:
    """Return the memory of each pipeline rank, except of ranks that need no more than another one."""
    kept = saved(sizes, layout.share, program)
    pipeline = layout.schedule, layout.pp, layout.stages_per_rank
    found, slots = parts(sizes, *pipeline, layout.micro_batches, program.equal_stages)
    slots *= slot_size(kept.message) if program.symmetric_slots else kept.message
    apart = layout.pp > 1 and tied_apart(*pipeline)
    return [_memory(sizes, layout, program, part, kept, slots, apart) for part in found]


def _memory(
    sizes: ModelSizes, layout: Layout, program: Program, part: Part, kept: Saved, slots: int, apart: bool
) -> Memory:
    has = sum(part.layers), part.first is not None, part.last is not None, apart
    replicas, accumulating = layout.dp * layout.cp, layout.micro_batches > 1
    states = held(sizes, has, layout.tp, replicas, layout.zero, accumulating, layout.pp > 1, program)
    stages = [_stage(part, index, kept) for index in range(len(part.layers))]
    activations = max(holding_bytes(peak, stages, kept.message) for peak in part.peaks)
    workspace = kept.block_peak
    if part.last is not None:  # what the last stage keeps for the loss is free when the blocks' gradients are computed
        workspace = max(kept.loss_peak, kept.block_peak - kept.last)
    if program.placeholder_gradients:
        workspace += sizes.block_weights // layout.tp * program.parameter_bytes
    if program.symmetric_slots and layout.tp > 1:  # two halves, which hold what is gathered or scattered
        workspace += 2 * slot_size(kept.message * layout.tp)
    return Memory(
        states.parameters,
        states.gradients,
        states.master + states.moments,
        states.buffers + slots,
        activations,
        workspace + program.reserve,
    )


def _stage(part: Part, index: int, kept: Saved) -> Held:
    """Return what a stage of a rank holds of a micro-batch. Its input is a message, unless it is the model's first."""
    layers, first, last = part.layers[index], part.first == index, part.last == index
    size = layers * kept.block + kept.stage + kept.first * first + kept.last * last - kept.message * (not first)
    gradients = layers * kept.block_gradients + (kept.last_gradients if last else -kept.inside)
    return Held(size, gradients * (not first))
