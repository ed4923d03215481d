"""When the ranks of a pipeline compute what: the bubbles, the micro-batches in flight, and the messages under way.

`timeline` plays an order of computations with given durations. A rank begins an action as soon as it has ended the one
before, and as the message that the action needs is there. Durations that are known beforehand give the predicted idle
share of each rank; the durations that a step has measured give what its order makes of them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpfuse.parallel.pipeline.cut import Cost
from tpfuse.parallel.pipeline.order import Action, Kind, Order

Ends = list[list[float | None]]  # by stage and micro-batch; None if it has not ended yet


def usual_seconds(action: Action) -> float:
    """Return the duration of an action in units of a forward pass; a backward pass takes two of them."""
    return 2.0 if action.kind is Kind.BACKWARD else 1.0


class Interval(NamedTuple):
    """An action of a rank and when it begins and ends, in the unit of the durations."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated order. intervals: those of each rank, one after another."""

    order: Order
    intervals: tuple[tuple[Interval, ...], ...]

    @property
    def length(self) -> float:
        """Return when the last rank ends."""
        return max(row[-1].end for row in self.intervals)

    def busy(self, rank: int) -> float:
        """Return how long a rank computes."""
        return sum(interval.end - interval.start for interval in self.intervals[rank])

    def idle_share(self, rank: int) -> float:
        """Return the share of the step in which a rank does not compute."""
        return 1.0 - self.busy(rank) / self.length


def timeline(order: Order, seconds: Callable[[Action], float] = usual_seconds, delay: float = 0.0) -> Timeline:
    """Return the simulated order. seconds: the duration of an action; delay: that of a message between two ranks."""
    forward: Ends = [[None] * order.micro_batches for _ in range(order.stages)]
    inputs: Ends = [[None] * order.micro_batches for _ in range(order.stages)]
    rows: list[list[Interval]] = [[] for _ in range(order.ranks)]
    waiting = True
    while waiting:
        waiting = moved = False
        for rank, row in enumerate(rows):
            clock = row[-1].end if row else 0.0
            for action in order.actions[rank][len(row) :]:
                ready = _ready(order, action, forward, inputs, delay)
                if ready is None:
                    waiting = True
                    break
                start = max(clock, ready)
                clock = start + seconds(action)
                row.append(Interval(action, start, clock))
                if action.kind is Kind.FORWARD:
                    forward[action.stage][action.micro_batch] = clock
                elif action.kind is not Kind.WEIGHT:
                    inputs[action.stage][action.micro_batch] = clock
                moved = True
        assert moved or not waiting, "the order waits for itself"
    return Timeline(order, tuple(tuple(row) for row in rows))


def predicted(order: Order, costs: Sequence[Cost]) -> Timeline:
    """Return a step whose passes take time by their operations alone, in operations for each token.

    costs: of each stage. A stage without operations counts as one operation.
    """
    return timeline(order, lambda action: usual_seconds(action) * max(1, costs[action.stage].flops))


def _ready(order: Order, action: Action, forward: Ends, inputs: Ends, delay: float) -> float | None:
    """Return when what an action needs is there; None if it is not known yet.

    forward, inputs: when each stage's forward passes and gradients of its inputs have ended.
    """
    kind, stage, number = action
    if kind is Kind.FORWARD:
        if stage == 0:
            return 0.0
        source, end = stage - 1, forward[stage - 1][number]
    elif kind is Kind.WEIGHT:
        return 0.0
    elif stage == order.stages - 1:
        return forward[stage][number]
    else:
        source, end = stage + 1, inputs[stage + 1][number]
    if end is None or not delay or order.rank_of[source] == order.rank_of[stage]:
        return end
    return end + delay


def most_in_flight(order: Order, rank: int) -> int:
    """Return the most micro-batches, counted for each stage, whose activations a rank keeps at the same time.

    A micro-batch is in flight on a stage from its forward pass to the end of its backward pass, in its last part.
    """
    now = most = 0
    for action in order.actions[rank]:
        now += action.kind is Kind.FORWARD
        most = max(most, now)
        now -= action.ends
    return most


@dataclass(frozen=True)
class Held:
    """The bytes that a stage holds of a micro-batch in flight, without tensors that pass between stages.

    saved: what autograd saves, from the forward pass to the end. gradients: what the second part of a split backward
    pass needs of the first part, and in addition to `saved`.
    """

    saved: int
    gradients: int = 0


class Holding(NamedTuple):
    """The tensors that a rank holds after one of its actions, counted in the order of its stages.

    saved, gradients: by stage, the number of micro-batches of which it holds `Held.saved` and `Held.gradients`. passed:
    the number of tensors between two stages that it holds outside slots.
    """

    saved: tuple[int, ...]
    gradients: tuple[int, ...]
    passed: int


def holdings(order: Order, rank: int) -> Iterator[Holding]:
    """Yield what a rank holds after each of its actions.

    A tensor that comes from another rank is in a slot, and not counted. One that comes from a stage of the same rank is
    held to the end of the stage that takes it. If the schedule splits backward passes, a stage also holds its output
    until it has computed the gradient of its input: the runner gives torch the tensor.
    """
    splits = any(action.kind is Kind.INPUT for action in order.actions[rank])
    saved = dict.fromkeys(order.stages_of(rank), 0)
    gradients = dict.fromkeys(saved, 0)
    holders: dict[tuple[bool, int, int], set[int]] = {}  # by (whether it is a gradient, source, micro-batch): stages

    def let_go(tensor: tuple[bool, int, int], stage: int) -> None:
        if tensor in holders:
            holders[tensor].discard(stage)
            if not holders[tensor]:
                del holders[tensor]

    for action in order.actions[rank]:
        stage, number, forward = action.stage, action.micro_batch, action.kind is Kind.FORWARD
        ends_first_part = action.kind is Kind.INPUT and stage > 0  # the first stage has no input gradient
        saved[stage] += forward
        gradients[stage] += ends_first_part
        if forward and splits and stage < order.stages - 1:
            holders.setdefault((False, stage, number), set()).add(stage)
        target = stage + 1 if forward else stage - 1
        if target in saved and (forward or ends_first_part or action.kind is Kind.BACKWARD):
            holders.setdefault((not forward, stage, number), set()).add(target)
        if ends_first_part or action.ends:
            let_go((False, stage, number), stage)
        if action.ends:
            saved[stage] -= 1
            gradients[stage] -= action.kind is Kind.WEIGHT and stage > 0
            let_go((False, stage - 1, number), stage)
            let_go((True, stage + 1, number), stage)
        yield Holding(tuple(saved.values()), tuple(gradients.values()), len(holders))


def holding_bytes(holding: Holding, stages: Sequence[Held], passed: int) -> int:
    """Return the bytes of a holding. stages: those of the rank, in order. passed: of a tensor between two stages."""
    saved = sum(count * stage.saved for count, stage in zip(holding.saved, stages, strict=True))
    gradients = sum(count * stage.gradients for count, stage in zip(holding.gradients, stages, strict=True))
    return saved + gradients + passed * holding.passed


def slots(simulated: Timeline) -> dict[tuple[int, bool], int]:
    """Return the slots for messages to each stage with which no sender ever waits.

    simulated: the order, in which all actions take their usual time. The keys are the stage, and whether the messages
    are activations, which the previous stage sends; otherwise they are gradients. A slot is in use from the end of the
    action that sends the message to the end of the backward pass that frees it. Since that order keeps to these
    slots, no order of events on real ranks can make them wait for each other in a circle.
    """
    last = simulated.order.stages - 1
    sent: dict[tuple[int, bool], list[float]] = {}
    freed: list[list[float]] = [[] for _ in range(last + 1)]
    for row in simulated.intervals:
        for (kind, stage, _), _, end in row:
            if kind is Kind.FORWARD:
                if stage < last:
                    sent.setdefault((stage + 1, True), []).append(end)
                continue
            if kind is not Kind.WEIGHT and stage > 0:
                sent.setdefault((stage - 1, False), []).append(end)
            if kind is not Kind.INPUT:
                freed[stage].append(end)
    for ends in (*sent.values(), *freed):
        ends.sort()
    # What is freed before a message is sent was sent before it.
    return {
        key: max(index - bisect_right(freed[key[0]], end) for index, end in enumerate(ends, start=1))
        for key, ends in sent.items()
    }
