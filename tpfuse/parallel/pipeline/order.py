"""The order in which the ranks of a pipeline compute: which stage, which micro-batch, forward or backward.

| schedule         | stages a rank | backward | source                                                        |
|------------------|---------------|----------|---------------------------------------------------------------|
| gpipe            | 1             | whole    | Huang et al., arXiv:1811.06965                                |
| 1f1b             | 1             | whole    | Narayanan et al., arXiv:2006.09503 (PipeDream-flush)          |
| interleaved_1f1b | 2 or more     | whole    | Narayanan et al., arXiv:2104.04473                            |
| zero_bubble      | 1 or more     | split    | Qi et al., arXiv:2401.10241, whose memory is that of 1f1b     |
| zbv              | 2             | split    | Qi et al., arXiv:2401.10241, section 6                        |

A split backward computes the gradient of the stage's input first, which the previous stage waits for, and the gradients
of the stage's weights later, where the rank would otherwise be idle.

The orders are those of torch.distributed.pipelining, which this module asks for them. Its classes of gpipe and 1f1b
have no order but a loop (and torch 2.13 has a table of 1f1b whose last rank skips a micro-batch), so `_single` writes
down what these loops do. `tpfuse.parallel.pipeline` runs the orders itself: torch's runtime waits without naming the
rank that is missing, keeps a receive buffer for every micro-batch of a step, and sets weight gradients past the hooks
by which ZeRO reduces them while other stages compute.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import NamedTuple, get_args

from torch import nn

from tpfuse.choices import PipelineSchedule as PipelineSchedule

SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
_CLASSES: dict[PipelineSchedule, str] = {  # the names of torch's classes
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
_MOST = 64  # the numbers of micro-batches that are tried for an error message


class Kind(Enum):
    """A pass of one micro-batch through a stage. INPUT and WEIGHT are the two parts of a split backward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input gradient"
    WEIGHT = "weight gradient"

    __hash__ = object.__hash__  # that of Enum calls Python for each lookup, of which the planner makes millions


_KINDS = {  # by torch's names
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.INPUT,
    "BACKWARD_WEIGHT": Kind.WEIGHT,
}


class Action(NamedTuple):
    """A computation of one stage for one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def ends(self) -> bool:
        """Return whether the stage needs nothing of the micro-batch after this action of a training step."""
        return self.kind in (Kind.BACKWARD, Kind.WEIGHT)


@dataclass(frozen=True)
class Order:
    """The order of a step. rank_of: the rank of each stage. actions: what each rank computes, one after another."""

    schedule: PipelineSchedule
    micro_batches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Return the number of stages of all ranks."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in the order of the model."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def last_passes(self, rank: int) -> list[Action]:
        """Return the last action of each stage of a rank in a step, in their order."""
        last = {action.stage: index for index, action in enumerate(self.actions[rank]) if action.ends}
        return [self.actions[rank][index] for index in sorted(last.values())]


def usual_stages(schedule: PipelineSchedule) -> int:
    """Return the number of stages of a rank by default."""
    return 2 if schedule in ("interleaved_1f1b", "zbv") else 1


def stage_ranks(schedule: PipelineSchedule, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage: stage s is on rank s modulo `ranks`; under zbv every second round is reversed.

    Raise ValueError for an unknown schedule, and for a number of stages that the schedule does not have.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}")
    if ranks < 1:
        raise ValueError(f"pp {ranks}: expected at least 1")
    single, least = schedule in ("gpipe", "1f1b"), 2 if schedule == "interleaved_1f1b" else 1
    if single and stages_per_rank != 1:
        raise ValueError(f"schedule {schedule} with {stages_per_rank} stages on each rank: expected 1")
    if schedule == "zbv" and stages_per_rank != 2:
        raise ValueError(f"schedule zbv with {stages_per_rank} stages on each rank: expected 2")
    if stages_per_rank < least:
        raise ValueError(f"schedule {schedule} with {stages_per_rank} stages on each rank: expected at least {least}")
    turns = range(stages_per_rank)
    return tuple(
        ranks - 1 - rank if schedule == "zbv" and turn % 2 else rank for turn in turns for rank in range(ranks)
    )


@functools.cache
def order(schedule: PipelineSchedule, ranks: int, stages_per_rank: int, micro_batches: int) -> Order:
    """Return the order of a step of `micro_batches` micro-batches.

    Raise ValueError as `stage_ranks` does, and for a number of micro-batches that the schedule refuses: the message
    lists the numbers that it accepts.
    """
    rank_of = stage_ranks(schedule, ranks, stages_per_rank)
    if micro_batches >= 1 and schedule in ("gpipe", "1f1b"):
        return Order(schedule, micro_batches, rank_of, _single(schedule, ranks, micro_batches))
    actions = _interleaved(schedule, ranks, stages_per_rank, micro_batches)
    if actions is None:
        tried = range(1, _MOST + 1)
        accepted = [n for n in tried if schedule not in _CLASSES or _interleaved(schedule, ranks, stages_per_rank, n)]
        raise ValueError(
            f"{micro_batches} micro-batches of each rank in a step: schedule {schedule} on {ranks} ranks accepts"
            f" {_listed(accepted, micro_batches)}"
        )
    return Order(schedule, micro_batches, rank_of, actions)


def _single(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the order of gpipe, or of 1f1b, where a rank is a micro-batch ahead for each rank after it."""
    rows = []
    for rank in range(ranks):
        ahead = micro_batches if schedule == "gpipe" else min(micro_batches, ranks - 1 - rank)
        row = [Action(Kind.FORWARD, rank, number) for number in range(ahead)]
        for number in range(micro_batches):
            if ahead + number < micro_batches:
                row.append(Action(Kind.FORWARD, rank, ahead + number))
            row.append(Action(Kind.BACKWARD, rank, number))
        rows.append(tuple(row))
    return tuple(rows)


@functools.cache
def _interleaved(
    schedule: PipelineSchedule, ranks: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[Action, ...], ...] | None:
    """Return torch's order of another schedule; None for a number of micro-batches that it refuses."""
    if micro_batches < 1:
        return None
    from torch.distributed.pipelining import schedules  # it takes longer to import than the rest of this package

    # Torch's classes spend the most time on the messages of their own runtime, which nobody needs here.
    theirs = getattr(schedules, _CLASSES[schedule])
    kind = type(theirs.__name__, (theirs,), {"_prepare_schedule_with_comms": lambda *_: None})
    stages = [  # what torch's classes read of stages to make the order of all ranks
        SimpleNamespace(
            num_stages=ranks * stages_per_rank,
            group_size=ranks,
            group_rank=0,
            stage_index=turn * ranks,
            submod=nn.Identity(),
        )
        for turn in range(stages_per_rank)
    ]
    try:
        rows = kind(stages, micro_batches).pipeline_order
    except ValueError:
        return None
    found = {each.computation_type for row in rows.values() for each in row if each is not None}
    kinds = {each: _KINDS[each.name] for each in found if each.name in _KINDS}
    return tuple(
        tuple(
            Action(kinds[each.computation_type], each.stage_index, each.microbatch_index)
            for each in rows[rank]
            if each is not None and each.computation_type in kinds
        )
        for rank in range(ranks)
    )


def _listed(numbers: Sequence[int], wanted: int) -> str:
    """Return the accepted numbers of micro-batches around the wanted one in words."""
    if list(numbers) == list(range(numbers[0], _MOST + 1)):
        return f"{numbers[0]} or more"
    near = [n for n in numbers if n < wanted][-3:] + [n for n in numbers if n > wanted][:3]
    return f"for example {', '.join(map(str, near[:-1]))} or {near[-1]}"
