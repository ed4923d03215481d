"""The parts of a model that pipeline ranks have, and how many micro-batches they keep of each at the same time."""

from dataclasses import dataclass
from functools import cache
from operator import ge

from tpfuse.choices import PipelineSchedule
from tpfuse.cost.sizes import ModelSizes
from tpfuse.parallel.pipeline.cut import Cost, cut_layers
from tpfuse.parallel.pipeline.order import Kind, Order, order, stage_ranks
from tpfuse.parallel.pipeline.runner import routes
from tpfuse.parallel.pipeline.timeline import Holding, holdings

_ROUNDS = 2  # after this many micro-batches for each rank, a schedule repeats what it keeps


@dataclass(frozen=True)
class Part:
    """What a pipeline rank has.

    layers: the number of blocks of each of its stages. first, last: the positions of the model's first and last stage
    among them; None if it has them not. peaks: what it holds at the times when it holds the most.
    """

    layers: tuple[int, ...]
    first: int | None
    last: int | None
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
    sizes: ModelSizes,
    schedule: PipelineSchedule,
    ranks: int,
    stages_per_rank: int,
    micro_batches: int,
    equal: bool,
) -> tuple[tuple[Part, ...], int]:
    """Return the parts of the ranks of a pipeline, and the slots for messages of the rank that has the most.

    equal: as for `stage_blocks`. A rank is left out if another one has no less in any respect. Raise ValueError as
    `order` and `stage_blocks` do.
    """
    if ranks == 1:
        return (Part((sizes.layers,), 0, 0, (Holding((1,), (0,), 0),)),), 0
    repeating = micro_batches if schedule == "gpipe" else min(micro_batches, _ROUNDS * ranks)
    return _parts(sizes, schedule, ranks, stages_per_rank, repeating, equal)


@cache
def _parts(
    sizes: ModelSizes,
    schedule: PipelineSchedule,
    ranks: int,
    stages_per_rank: int,
    micro_batches: int,
    equal: bool,
) -> tuple[tuple[Part, ...], int]:
    made = order(schedule, ranks, stages_per_rank, min(micro_batches, _ROUNDS * ranks))
    layers = stage_blocks(sizes, made.rank_of, equal)
    found = [_part(made, layers, rank) for rank in range(ranks)]
    found = [_times(part, micro_batches) for part in found] if schedule == "gpipe" else found
    kept = [
        part
        for index, part in enumerate(found)
        if not any(_less(part, index, other, at) for at, other in enumerate(found))
    ]
    counts = dict.fromkeys(range(ranks), 0)
    for route in routes(made)[0]:
        waiting = micro_batches if schedule == "gpipe" and route.name.startswith("activations") else route.slots
        counts[route.target] += waiting
    return tuple(kept), max(counts.values())


def tied_apart(schedule: PipelineSchedule, ranks: int, stages_per_rank: int) -> bool:
    """Return whether the first and the last stage are on two ranks, which both have a tied embedding."""
    owners = stage_ranks(schedule, ranks, stages_per_rank)
    return owners[0] != owners[-1]


def _part(made: Order, layers: tuple[int, ...], rank: int) -> Part:
    stages, actions = made.stages_of(rank), made.actions[rank]
    # A forward pass frees nothing. So a rank holds no less after it than after the action before.
    most = {
        holding
        for holding, following in zip(holdings(made, rank), [*actions[1:], None], strict=True)
        if following is None or following.kind is not Kind.FORWARD
    }
    peaks: list[Holding] = []
    for holding in sorted(most, key=_count, reverse=True):  # the first of two that are not equal does not hold less
        if not any(_holds(peak, holding) for peak in peaks):
            peaks.append(holding)
    first = stages.index(0) if 0 in stages else None
    last = stages.index(made.stages - 1) if made.stages - 1 in stages else None
    return Part(tuple(layers[stage] for stage in stages), first, last, tuple(peaks))


def _times(part: Part, micro_batches: int) -> Part:
    return Part(part.layers, part.first, part.last, (Holding((micro_batches,), (0,), 0),))


def _count(holding: Holding) -> int:
    return sum(holding.saved) + sum(holding.gradients) + holding.passed


def _covers(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(map(ge, one, other))


def _holds(one: Holding, other: Holding) -> bool:
    """Return whether one holding has no less than the other in any respect."""
    return _covers(one.saved, other.saved) and _covers(one.gradients, other.gradients) and one.passed >= other.passed


def _less(part: Part, index: int, other: Part, at: int) -> bool:
    """Return whether `other` has no less than `part`; of two equal ones, only the first has more."""
    if index == at or (part.first, part.last) != (other.first, other.last):
        return False
    less = _covers(other.layers, part.layers) and all(
        any(_holds(peak, mine) for peak in other.peaks) for mine in part.peaks
    )
    return less and (at < index or (other.layers, set(other.peaks)) != (part.layers, set(part.peaks)))
