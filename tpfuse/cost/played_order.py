"""How long a step of a pipeline takes, for many different times of its stages.

`tpfuse.parallel.pipeline.timeline` plays an order once. Which action waits for which does not depend on how long they
take, so this module asks for it once, and then computes the ends of all actions in a plain loop.
"""

from collections.abc import Sequence
from functools import cache

from tpfuse.choices import PipelineSchedule
from tpfuse.parallel.pipeline.order import Action, Kind, Order, order
from tpfuse.parallel.pipeline.timeline import timeline

KINDS = tuple(Kind)


def class_of(action: Action, stages: int) -> int:
    """Return the index of an action's seconds: KINDS of the first stage, of those in the middle, and of the last."""
    place = 0 if action.stage == 0 else 2 if action.stage == stages - 1 else 1
    return place * len(KINDS) + KINDS.index(action.kind)


def played_length(
    schedule: PipelineSchedule, ranks: int, stages_per_rank: int, micro_batches: int, seconds: Sequence[float]
) -> float:
    """Return the length of a step whose messages take no time. seconds: by `class_of`."""
    ends = [0.0]  # the first entry stands for what does not wait
    for index, before, needed in _waits(schedule, ranks, stages_per_rank, micro_batches):
        start, ready = ends[before], ends[needed]
        ends.append((start if start > ready else ready) + seconds[index])
    return max(ends)


@cache
def _waits(
    schedule: PipelineSchedule, ranks: int, stages_per_rank: int, micro_batches: int
) -> list[tuple[int, int, int]]:
    """Return for each action its class, and the numbers of the actions before it on its rank and in the data's path.

    Actions are numbered from 1 in an order in which each comes after those that it waits for.
    """
    made = order(schedule, ranks, stages_per_rank, micro_batches)
    rows = enumerate(timeline(made).intervals)
    intervals = [(each.start, each.end, rank, each.action) for rank, row in rows for each in row]
    numbers: dict[tuple[Kind, int, int] | None, int] = {}
    newest = [0] * ranks
    waits = []
    for number, (_, _, rank, action) in enumerate(sorted(intervals, key=lambda each: each[:3]), 1):
        waits.append((class_of(action, made.stages), newest[rank], numbers.get(_needed(made, action), 0)))
        newest[rank] = number
        numbers[Kind.INPUT if action.kind is Kind.BACKWARD else action.kind, action.stage, action.micro_batch] = number
    return waits


def _needed(made: Order, action: Action) -> tuple[Kind, int, int] | None:
    """Return what an action waits for besides its own rank; None if there is nothing."""
    stage, kind = action.stage, action.kind
    if kind is Kind.WEIGHT or (kind is Kind.FORWARD and stage == 0):
        return None
    if kind is Kind.FORWARD:
        return kind, stage - 1, action.micro_batch
    if stage == made.stages - 1:
        return Kind.FORWARD, stage, action.micro_batch
    return Kind.INPUT, stage + 1, action.micro_batch
