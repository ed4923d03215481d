"""How the blocks of a model are cut into pipeline stages, and how long a step of all stages takes.

A step is played (`tpfuse.parallel.pipeline.timeline`). Only a few micro-batches are: in steady state each further group
of micro-batches takes as long as the one before, and so the length grows linearly. Schedules that split the backward
pass reach this state later than the others.

cores: on a CPU, those of each pipeline, which its ranks share equally while more of them compute.
"""

from functools import cache
from math import inf
from typing import NamedTuple

from tpfuse.choices import PipelineSchedule
from tpfuse.cost.in_flight import stage_blocks
from tpfuse.cost.played_order import KINDS, played_length, shared_length
from tpfuse.cost.sizes import ModelSizes
from tpfuse.parallel.pipeline.order import Kind

_STEPS = 16  # a ratio of times is rounded to 1 / _STEPS, so that few different steps are played
_SPLIT = {Kind.FORWARD: (0, 1.0), Kind.BACKWARD: (1, 1.0), Kind.INPUT: (1, 0.5), Kind.WEIGHT: (1, 0.5)}

Stage = tuple[float, float]  # the seconds of its forward and of its backward pass
StageTimes = tuple[Stage, Stage, Stage]  # of the first stage, of each in the middle, and of the last


class Stages(NamedTuple):
    """The blocks of the last stage, and the most of any other stage."""

    middle: int
    last: int


@cache
def cut(sizes: ModelSizes, stages: int, equal: bool) -> Stages:
    """Return the cut of `tpfuse train`; with `equal`, one into equally many blocks."""
    blocks = stage_blocks(sizes, stages, equal)
    return Stages(max(blocks[:-1], default=blocks[-1]), blocks[-1])


def step_length(
    schedule: PipelineSchedule, ranks: int, turns: int, micro_batches: int, times: StageTimes, cores: float = inf
) -> float:
    """Return the seconds of a step. turns: the stages of a rank. Ratios of `times` are rounded."""
    unit = times[1][0]
    first, middle, last = (tuple(max(1, round(_STEPS * part / unit)) for part in stage) for stage in times)
    rounded = _units(schedule, ranks, turns, micro_batches, (first, middle, last), cores)
    busiest = max(sum(times[2]) + (turns - 1) * sum(times[1]), sum(times[1]) * turns)
    in_units = max(sum(last) + (turns - 1) * sum(middle), sum(middle) * turns)
    return rounded * busiest / in_units


@cache
def _units(
    schedule: PipelineSchedule, ranks: int, turns: int, micro_batches: int, times: StageTimes, cores: float
) -> float:
    """Return the length of a step, which is extended beyond 2 or 3 micro-batches for each rank."""
    rounds = 2 if schedule in ("zero_bubble", "zbv") else 1
    least, more = rounds * ranks, (rounds + 1) * ranks
    if micro_batches <= more:
        return played(schedule, ranks, turns, micro_batches, times, cores)
    short, long = (_units(schedule, ranks, turns, count, times, cores) for count in (least, more))
    return long + (micro_batches - more) * (long - short) / (more - least)


def played(
    schedule: PipelineSchedule, ranks: int, turns: int, micro_batches: int, times: StageTimes, cores: float = inf
) -> float:
    """Return the length of a step, all micro-batches of which are played."""
    if cores >= ranks:
        return played_length(schedule, ranks, turns, micro_batches, _by_class(times))
    return shared_length(schedule, ranks, turns, micro_batches, _by_class(times), cores)


def pass_seconds(stage: Stage, kind: Kind) -> float:
    """Return the seconds of an action of a stage. The parts of a backward pass take equally long."""
    part, share = _SPLIT[kind]
    return stage[part] * share


def _by_class(times: StageTimes) -> list[float]:
    """Return the seconds of each class of actions (`class_of`)."""
    return [pass_seconds(stage, kind) for stage in times for kind in KINDS]
