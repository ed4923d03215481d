"""The memory of a rank, by kind: the formula behind `tpfuse memory`, `tpfuse plan` and the first lines of a run."""

from dataclasses import dataclass
from typing import Any

from tpfuse.comm.channel import slot_size
from tpfuse.parallel.pipeline.timeline import Held, holding_bytes
from tpfuse.plan.activations import Activations, activations
from tpfuse.plan.in_flight import HeldPart, parts, tied_apart
from tpfuse.plan.muon import update_bytes
from tpfuse.plan.sizes import ModelSizes, RankLayout, TrainingProgram
from tpfuse.plan.states import RankPart, states


@dataclass(frozen=True)
class RankMemory:
    """The bytes of a rank, by kind."""

    parameters: float = 0.0
    gradients: float = 0.0
    # Masters and moments.
    optimizer: float = 0.0
    # Gathered parameters and gradients that are sent, and the slots of messages between stages.
    buffers: float = 0.0
    # What autograd keeps of the micro-batches in flight; 0 if `uncounted` says why.
    activations: float = 0.0
    # The largest short-lived tensors, such as logits, and what the allocator and libraries keep.
    workspace: float = 0.0

    @property
    def total(self) -> float:
        """Return the bytes of all kinds."""
        return float(sum(vars(self).values()))

    @property
    def held(self) -> float:
        """Return the bytes of all kinds but the workspace."""
        return self.total - self.workspace


def uncounted(sizes: ModelSizes, program: TrainingProgram) -> str:
    """Return the models whose activations the formula does not know, if this is one of them; otherwise ""."""
    if sizes.other_matrices:
        return "blocks without an MLP, such as mixtures of experts,"
    if not all(sizes.kept):
        return "models whose forward pass depends on values"
    return "models of transformers under autocast" if program.autocast_bytes and not sizes.is_gpt else ""


def rank_memory(sizes: ModelSizes, layout: RankLayout, program: TrainingProgram) -> RankMemory:
    """Return the memory of the rank that needs the most. It must be fast, as `step_times` must. Raise ValueError."""
    return max(memories(sizes, layout, program).values(), key=lambda memory: memory.total)


def memories(
    sizes: ModelSizes, layout: RankLayout, program: TrainingProgram, blocks: tuple[int, ...] = ()
) -> dict[int, RankMemory]:
    """Return the memory of each pipeline rank, by its number.

    blocks: the number of blocks in each pipeline stage; () for the cut of `tpfuse train`. Raise ValueError for
    stages or micro-batches that the pipeline's schedule does not accept.
    """
    kept = activations(sizes, layout.share, program)
    pipeline = layout.schedule, layout.pp, layout.stages_per_rank
    found, slots = parts(sizes, pipeline, layout.micro_batches, program.equal_stages, blocks)
    slots *= slot_size(kept.message) if program.symmetric_slots else kept.message
    apart = layout.pp > 1 and tied_apart(pipeline)
    return {part.rank: _memory(sizes, layout, program, part, kept, slots, apart) for part in found}


def _memory(
    sizes: ModelSizes,
    layout: RankLayout,
    program: TrainingProgram,
    part: HeldPart,
    kept: Activations,
    slots: int,
    apart: bool,
) -> RankMemory:
    has = RankPart(sum(part.layers), part.first is not None, part.last is not None, apart)
    replicas, accumulating, pipelined = layout.dp * layout.cp, layout.micro_batches > 1, layout.pp > 1
    held = states(sizes, has, layout.tp, replicas, layout.zero, accumulating, pipelined, program, layout.copies)
    stages = [_stage(part, index, kept) for index in range(len(part.layers))]
    in_flight = max(holding_bytes(peak, stages, kept.message) for peak in part.peaks)
    if uncounted(sizes, program):
        in_flight = 0
    workspace: float = kept.block_peak
    if has.last:  # what the last stage keeps for the loss is free when the blocks' gradients are computed
        workspace = max(kept.loss_peak, kept.block_peak - kept.last)
    if program.placeholder_gradients:
        workspace += sizes.block_weights // layout.tp * program.parameter_bytes
    if program.symmetric_slots and layout.tp > 1:  # two halves, which hold what is gathered or scattered
        workspace += 2 * slot_size(kept.message * layout.tp)
    if program.muon_steps:  # the update begins when the activations are free
        workspace = max(workspace, update_bytes(sizes, has.blocks, layout, program) - in_flight)
    counted: dict[str, Any] = held._asdict() | {"buffers": held.buffers + slots}
    return RankMemory(**counted, activations=in_flight, workspace=workspace + program.reserve)


def _stage(part: HeldPart, index: int, kept: Activations) -> Held:
    """Return what a stage of a rank holds of a micro-batch. Its input is a message, unless it is the model's first.

    A block whose input is offloaded keeps no message.
    """
    layers, first, last = part.layers[index], part.first == index, part.last == index
    shared = 0 if first or (layers and not kept.block) else kept.message
    size = layers * kept.block + kept.stage + kept.first * first + kept.last * last - shared
    gradients = layers * kept.block_gradients + (kept.last_gradients if last else -kept.output_gradient)
    return Held(size, gradients * (not first))
