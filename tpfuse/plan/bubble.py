"""The cut of a model's blocks into pipeline stages, and the duration of a step of all stages.

We simulate a few micro-batches and extrapolate: in steady state the length grows linearly. Schedules that split the
backward pass reach this state later than the others.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from tpfuse.choices import PipelineSchedule
from tpfuse.parallel.pipeline.order import Kind, order, stage_ranks
from tpfuse.parallel.pipeline.timeline import timeline
from tpfuse.plan.in_flight import stage_blocks
from tpfuse.plan.sizes import ModelSizes

_STEPS = 16  # a ratio of times is rounded to 1 / _STEPS, so that few different steps are simulated
_SPLIT = {Kind.FORWARD: (0, 1.0), Kind.BACKWARD: (1, 1.0), Kind.INPUT: (1, 0.5), Kind.WEIGHT: (1, 0.5)}

StageSeconds = tuple[float, float]  # of the forward and of the backward pass


class StageKind(NamedTuple):
    """A kind of stages, which take equally long."""

    # The number of blocks of each.
    blocks: int
    # Whether the kind is the model's first or last stage alone.
    first: bool
    last: bool


class Cut(NamedTuple):
    """The stages of a pipeline."""

    # The kinds of its stages.
    kinds: tuple[StageKind, ...]
    # The index of each stage's kind.
    of_stages: tuple[int, ...]
    # The indices of a rank's stages, each combination once.
    of_ranks: tuple[tuple[int, ...], ...]
    # Those of the rank with the last stage.
    of_last: tuple[int, ...]

    @property
    def last_blocks(self) -> int:
        """Return the number of blocks of the rank with the last stage."""
        return sum(self.kinds[index].blocks for index in self.of_last)


@cache
def usual_cut(sizes: ModelSizes, schedule: PipelineSchedule, ranks: int, turns: int, equal: bool) -> Cut:
    """Return the cut of `tpfuse train`; with `equal`, one into equally many blocks. turns: the stages of a rank."""
    rank_of = stage_ranks(schedule, ranks, turns) if ranks > 1 else (0,)
    return cut_of(stage_blocks(sizes, rank_of, equal), rank_of)


def cut_of(blocks: Sequence[int], rank_of: Sequence[int]) -> Cut:
    """Return the cut into stages of these numbers of blocks. rank_of: the rank of each stage."""
    stages = [StageKind(count, stage == 0, stage == len(blocks) - 1) for stage, count in enumerate(blocks)]
    kinds = tuple(dict.fromkeys(stages))
    indices = tuple(map(kinds.index, stages))
    on_ranks: list[list[int]] = [[] for _ in range(max(rank_of) + 1)]
    for index, rank in zip(indices, rank_of, strict=True):
        on_ranks[rank].append(index)
    different = dict.fromkeys(tuple(sorted(each)) for each in on_ranks)
    return Cut(kinds, indices, tuple(different), tuple(on_ranks[rank_of[-1]]))


def step_length(
    schedule: PipelineSchedule,
    ranks: int,
    turns: int,
    micro_batches: int,
    cut: Cut,
    times: Sequence[StageSeconds],
) -> float:
    """Return the seconds of a step. times: of each kind of stages; their ratios are rounded."""
    unit = max(forward for forward, _ in times)
    rounded = tuple(
        (max(1, round(_STEPS * forward / unit)), max(1, round(_STEPS * backward / unit))) for forward, backward in times
    )
    length = _units(schedule, ranks, turns, micro_batches, cut.of_stages, rounded)
    return length * _busiest(cut, times) / _busiest(cut, rounded)


def _busiest(cut: Cut, times: Sequence[StageSeconds]) -> float:
    """Return how long the rank that computes the most is busy with a micro-batch."""
    return max(sum(sum(times[index]) for index in indices) for indices in cut.of_ranks)


@cache
def _units(
    schedule: PipelineSchedule,
    ranks: int,
    turns: int,
    micro_batches: int,
    of_stages: tuple[int, ...],
    times: tuple[StageSeconds, ...],
) -> float:
    """Return the length of a step, which is extended beyond 2 or 3 micro-batches for each rank."""
    rounds = 2 if schedule in ("zero_bubble", "zbv") else 1
    least, more = rounds * ranks, (rounds + 1) * ranks
    if micro_batches <= more:
        return simulated(schedule, ranks, turns, micro_batches, [times[index] for index in of_stages])
    short, long = (_units(schedule, ranks, turns, count, of_stages, times) for count in (least, more))
    return long + (micro_batches - more) * (long - short) / (more - least)


def simulated(
    schedule: PipelineSchedule, ranks: int, turns: int, micro_batches: int, stages: Sequence[StageSeconds]
) -> float:
    """Return the length of a step without messages, by simulating all micro-batches. stages: the times of each."""
    made = order(schedule, ranks, turns, micro_batches)
    return timeline(made, lambda action: pass_seconds(stages[action.stage], action.kind)).length


def pass_seconds(stage: StageSeconds, kind: Kind) -> float:
    """Return the seconds of an action of a stage. The parts of a backward pass take equally long."""
    part, share = _SPLIT[kind]
    return stage[part] * share
