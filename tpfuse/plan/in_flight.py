"""The parts of a model that pipeline ranks have, and the most micro-batches that they keep of each."""

from dataclasses import dataclass, replace
from functools import cache
from operator import ge

from tpfuse.choices import PipelineSchedule
from tpfuse.parallel.pipeline.cut import Cost, cut_layers
from tpfuse.parallel.pipeline.order import Kind, Order, order, stage_ranks
from tpfuse.parallel.pipeline.runner import routes
from tpfuse.parallel.pipeline.timeline import Holding, holdings
from tpfuse.plan.sizes import ModelSizes

_ROUNDS = 2  # after this many micro-batches for each rank, a schedule repeats what it keeps


Pipeline = tuple[PipelineSchedule, int, int]  # the schedule, the ranks, and the stages of each


@dataclass(frozen=True)
class HeldPart:
    """A pipeline rank's part of a model, and how much of it the rank holds."""

    rank: int
    # The number of blocks in each stage.
    layers: tuple[int, ...]
    # The positions of the model's first and last stage among its stages; None if it does not have them.
    first: int | None
    last: int | None
    # What it holds at the times when it holds the most.
    peaks: tuple[Holding, ...]


@cache
def stage_blocks(sizes: ModelSizes, rank_of: tuple[int, ...], equal: bool) -> tuple[int, ...]:
    """Return the number of blocks of each stage, as `tpfuse train` cuts models, or as equal as possible.

    rank_of: the rank of each stage. Raise ValueError for fewer blocks than stages.
    """
    stages = len(rank_of)
    if equal and sizes.layers >= stages:
        return tuple(sizes.layers // stages + (stage < sizes.layers % stages) for stage in range(stages))
    products = sizes.block_weights
    attention = 12 * sizes.tokens * sizes.heads * sizes.head_size
    block = Cost(6 * products + attention, sizes.block_parameters)
    table = sizes.table_parameters
    embeddings = Cost(0, table + sizes.positions * sizes.width)
    head = Cost(6 * table, table + sizes.width * (1 + sizes.norm_bias))
    return tuple(len(stage.layers) for stage in cut_layers([block] * sizes.layers, embeddings, head, rank_of))


def parts(
    sizes: ModelSizes, pipeline: Pipeline, micro_batches: int, equal: bool, blocks: tuple[int, ...] = ()
) -> tuple[tuple[HeldPart, ...], int]:
    """Return the parts of the ranks of a pipeline, and the message slots of the rank that has the most.

    equal: as for `stage_blocks`. blocks: the number of blocks of each stage; () for `stage_blocks`. Raise ValueError as
    `order` and `stage_blocks` do.
    """
    schedule, ranks, _ = pipeline
    if ranks == 1:
        return (HeldPart(0, (sizes.layers,), 0, 0, (Holding((1,), (0,), 0),)),), 0
    repeating = micro_batches if schedule == "gpipe" else min(micro_batches, _ROUNDS * ranks)
    return _parts(sizes, pipeline, repeating, equal, blocks)


@cache
def _parts(
    sizes: ModelSizes, pipeline: Pipeline, micro_batches: int, equal: bool, blocks: tuple[int, ...]
) -> tuple[tuple[HeldPart, ...], int]:
    schedule, ranks, stages_per_rank = pipeline
    made = order(schedule, ranks, stages_per_rank, min(micro_batches, _ROUNDS * ranks))
    layers = blocks or stage_blocks(sizes, made.rank_of, equal)
    found = [_part(made, layers, rank) for rank in range(ranks)]
    if schedule == "gpipe":  # a rank holds all micro-batches, of which `made` has fewer
        found = [replace(part, peaks=(Holding((micro_batches,), (0,), 0),)) for part in found]
    counts = dict.fromkeys(range(ranks), 0)
    for route in routes(made)[0]:
        waiting = micro_batches if schedule == "gpipe" and route.name.startswith("activations") else route.slots
        counts[route.target] += waiting
    return tuple(found), max(counts.values())


def tied_apart(pipeline: Pipeline) -> bool:
    """Return whether the first and the last stage are on two ranks, which both have a tied embedding."""
    owners = stage_ranks(*pipeline)
    return owners[0] != owners[-1]


def _part(made: Order, layers: tuple[int, ...], rank: int) -> HeldPart:
    stages, actions = made.stages_of(rank), made.actions[rank]
    # A forward pass frees nothing. So a rank holds no less after it than after the action before.
    most = {
        holding
        for holding, following in zip(holdings(made, rank), [*actions[1:], None], strict=True)
        if following is None or following.kind is not Kind.FORWARD
    }
    peaks: list[Holding] = []
    for holding in sorted(most, key=lambda each: sum(_flat(each)), reverse=True):
        if not any(all(map(ge, _flat(peak), _flat(holding))) for peak in peaks):  # no peak has as much of everything
            peaks.append(holding)
    first = stages.index(0) if 0 in stages else None
    last = stages.index(made.stages - 1) if made.stages - 1 in stages else None
    return HeldPart(rank, tuple(layers[stage] for stage in stages), first, last, tuple(peaks))


def _flat(holding: Holding) -> tuple[int, ...]:
    return *holding.saved, *holding.gradients, holding.passed
