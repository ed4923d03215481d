"""How long a step of a pipeline takes, for many different times of its stages.

`tpfuse.parallel.pipeline.timeline` plays an order once. Which action waits for which does not depend on how long they
take, so this module asks for it once, and then computes the ends of all actions in a plain loop.

On CPU ranks that share cores, an action takes the longer the more ranks compute at the same time.
"""

from collections.abc import Sequence
from functools import cache

from tpfuse.choices import PipelineSchedule
from tpfuse.parallel.pipeline.order import Action, Kind, order

KINDS = tuple(Kind)
_INDEX = {kind: index for index, kind in enumerate(KINDS)}


def index_of(action: Action) -> int:
    """Return the index of an action's seconds: those of the KINDS of the first stage come first."""
    return action.stage * len(KINDS) + _INDEX[action.kind]


def played_length(
    schedule: PipelineSchedule, ranks: int, stages_per_rank: int, micro_batches: int, seconds: Sequence[float]
) -> float:
    """Return the length of a step whose messages take no time. seconds: by `index_of`."""
    ends = [0.0]  # the first entry stands for what does not wait
    append = ends.append
    for index, before, needed in _waits(schedule, ranks, stages_per_rank, micro_batches):
        start, ready = ends[before], ends[needed]
        append((start if start > ready else ready) + seconds[index])
    return max(ends)


def shared_length(
    schedule: PipelineSchedule,
    ranks: int,
    stages_per_rank: int,
    micro_batches: int,
    seconds: Sequence[float],
    cores: float,
) -> float:
    """Return the length of a step of ranks that share `cores` equally while more of them compute.

    seconds: as for `played_length`, of a rank that has a core for itself.
    """
    waits = _waits(schedule, ranks, stages_per_rank, micro_batches)
    after: list[list[int]] = [[] for _ in range(len(waits) + 1)]
    open_needs = [0] * (len(waits) + 1)
    for number, (_, before, needed) in enumerate(waits, start=1):
        for other in {before, needed} - {0}:
            after[other].append(number)
            open_needs[number] += 1
    left = {number: seconds[waits[number - 1][0]] for number in range(1, len(waits) + 1) if not open_needs[number]}
    length = 0.0
    while left:
        rate = min(1.0, cores / len(left))
        least = min(left.values())
        length += least / rate
        left = {number: rest - least for number, rest in left.items()}
        for ended in [number for number, rest in left.items() if rest <= 1e-9 * least]:
            del left[ended]
            for number in after[ended]:
                open_needs[number] -= 1
                if not open_needs[number]:
                    left[number] = seconds[waits[number - 1][0]]
    return length


@cache
def _waits(
    schedule: PipelineSchedule, ranks: int, stages_per_rank: int, micro_batches: int
) -> list[tuple[int, int, int]]:
    """Return for each action the index of its seconds, and the numbers of two actions that it waits for.

    These are the one before it on its rank and the one whose result it takes; 0 stands for none. Actions are numbered
    from 1, each after those that it waits for.
    """
    made = order(schedule, ranks, stages_per_rank, micro_batches)
    last = made.stages - 1
    forward, inputs = ([[0] * micro_batches for _ in range(made.stages)] for _ in range(2))  # numbers; 0: not yet
    done, newest, waits = [0] * ranks, [0] * ranks, list[tuple[int, int, int]]()
    count = sum(map(len, made.actions))
    while len(waits) < count:
        before = len(waits)
        for rank, actions in enumerate(made.actions):
            for action in actions[done[rank] :]:
                kind, stage, batch = action
                needed = 0
                if kind is Kind.FORWARD and stage > 0:
                    needed = forward[stage - 1][batch]
                elif kind is Kind.BACKWARD or kind is Kind.INPUT:
                    needed = forward[last][batch] if stage == last else inputs[stage + 1][batch]
                if not needed and kind is not Kind.WEIGHT and (kind is not Kind.FORWARD or stage > 0):
                    break
                waits.append((index_of(action), newest[rank], needed))
                newest[rank] = len(waits)
                done[rank] += 1
                if kind is Kind.FORWARD:
                    forward[stage][batch] = len(waits)
                elif kind is not Kind.WEIGHT:
                    inputs[stage][batch] = len(waits)
        assert len(waits) > before, "the order waits for itself"
    return waits
