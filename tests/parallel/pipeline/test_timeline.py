"""Simulated orders have the idle shares and the micro-batches in flight of the papers, and slots that are enough."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from tpfuse.parallel.pipeline.order import Action, Kind, Order, PipelineSchedule, order
from tpfuse.parallel.pipeline.timeline import Timeline, most_in_flight, slots, timeline, usual_seconds

Slots = Mapping[tuple[int, bool], int]  # the slots for messages to a stage, of its activations or of its gradients


def simulated(schedule: PipelineSchedule, ranks: int, turns: int, micro_batches: int) -> Timeline:
    """Return the timeline of an order with the usual durations."""
    return timeline(order(schedule, ranks, turns, micro_batches))


def check_idle(found: Timeline, idle: int, of: int) -> None:
    """Assert that each rank is idle for exactly `idle` / `of` of the step. Durations are whole numbers."""
    for rank in range(found.order.ranks):
        assert (found.length - found.busy(rank)) * of == idle * found.length
        assert found.idle_share(rank) == pytest.approx(idle / of, abs=1e-15)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", range(1, 6))
def test_the_bubble_of_one_stage_a_rank(schedule: PipelineSchedule, ranks: int) -> None:
    for count in range(1, 13):
        check_idle(simulated(schedule, ranks, 1, count), ranks - 1, count + ranks - 1)


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("turns", [2, 3])
def test_more_stages_a_rank_make_the_bubble_smaller(ranks: int, turns: int) -> None:
    for rounds in (1, 2, 4):  # arXiv:2104.04473, section 2.2
        found = simulated("interleaved_1f1b", ranks, turns, rounds * ranks)
        check_idle(found, ranks - 1, turns * rounds * ranks + ranks - 1)


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (1.0, 1.25, 0.25)])
def test_the_bubble_of_a_split_backward(ranks: int, turns: int, forward: float, inputs: float, weights: float) -> None:
    times = {Kind.FORWARD: forward, Kind.INPUT: inputs, Kind.WEIGHT: weights}
    for rounds in (1, 2, 4):
        count = rounds * ranks
        found = timeline(order("zero_bubble", ranks, turns, count), lambda action: times[action.kind])
        # That of ZB-H1, arXiv:2401.10241, table 2: with equal times a step takes 3 m + p - 1.
        bubble = (ranks - 1) * (forward + inputs - weights)
        assert found.length == turns * count * (forward + inputs + weights) + bubble


@pytest.mark.parametrize("ranks", range(1, 6))
def test_zbv_is_idle_only_until_the_last_rank_has_begun(ranks: int) -> None:
    for count in range(2 * ranks, 13, 2):
        found = simulated("zbv", ranks, 2, count)
        assert found.length == 2 * 3 * count + ranks - 1
        assert [row[0].start for row in found.intervals] == list(range(ranks))


def test_durations_and_delays_move_what_follows() -> None:
    one = order("1f1b", 2, 1, 1)
    found = timeline(one, lambda action: 3.0 if action.stage == 0 else usual_seconds(action), delay=0.5)
    (first, last), (forward, backward) = found.intervals
    assert (first.start, first.end, forward.start, forward.end) == (0.0, 3.0, 3.5, 4.5)
    assert (backward.start, backward.end, last.start, last.end) == (4.5, 6.5, 7.0, 10.0)
    assert (found.length, found.busy(0), found.busy(1)) == (10.0, 6.0, 3.0)
    assert found.idle_share(1) == pytest.approx(0.7)
    turning = timeline(order("zbv", 1, 2, 1), delay=0.5)  # a stage hands over to another one on its rank at once
    assert turning.length == 6.0


@pytest.mark.parametrize("ranks", range(1, 6))
def test_the_micro_batches_in_flight(ranks: int) -> None:
    for count in range(1, 13):
        one, all_first = order("1f1b", ranks, 1, count), order("gpipe", ranks, 1, count)
        assert [most_in_flight(one, rank) for rank in range(ranks)] == [
            min(ranks - rank, count) for rank in range(ranks)
        ]
        assert [most_in_flight(all_first, rank) for rank in range(ranks)] == [count] * ranks
    for rounds in (2, 3):
        count = rounds * ranks
        for turns in (2, 3):
            many = order("interleaved_1f1b", ranks, turns, count)
            assert most_in_flight(many, 0) == ranks * turns + ranks - 1  # p v (1 + (p - 1) / (p v)), arXiv:2104.04473
        assert {most_in_flight(order("zero_bubble", ranks, 1, count), rank) for rank in range(ranks)} == {ranks}
        assert {most_in_flight(order("zbv", ranks, 2, count), rank) for rank in range(ranks)} == {2 * ranks}


@dataclass
class Simulated:
    """How a step with real slots went: when each rank ended, or None if ranks waited for each other for ever.

    waited: how long ranks waited for slots.
    """

    ended: list[float] | None
    waited: float


def simulate(made: Order, counts: Slots, seconds: Callable[[Action], float]) -> Simulated:
    """Run a step in which a rank that has computed a message waits until the slot of its number is free."""
    computed: dict[tuple[bool, int, int], float] = {}  # when messages arrived, by forward, target and micro-batch
    freed: dict[tuple[int, bool], list[float]] = {key: [] for key in counts}
    sent: dict[tuple[int, bool], int] = dict.fromkeys(counts, 0)
    clocks, next_ones, waited = [0.0] * made.ranks, [0] * made.ranks, 0.0
    unsent: list[float | None] = [None] * made.ranks  # when a message was computed that has no slot yet
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(made.actions):
            while next_ones[rank] < len(actions):
                action = actions[next_ones[rank]]
                stage, forward = action.stage, action.kind is Kind.FORWARD
                source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
                sends = action.kind is not Kind.WEIGHT
                end = unsent[rank]
                if end is None:
                    arrived = 0.0
                    if sends and 0 <= source < made.stages:
                        if (forward, stage, action.micro_batch) not in computed:
                            break
                        arrived = computed[forward, stage, action.micro_batch]
                    end = unsent[rank] = max(clocks[rank], arrived) + seconds(action)
                if sends and (target, forward) in counts:
                    late = sent[target, forward] - counts[target, forward]
                    if late >= len(freed[target, forward]):
                        break
                    free = freed[target, forward][late] if late >= 0 else 0.0
                    waited += max(0.0, free - end)
                    end = max(end, free)
                    sent[target, forward] += 1
                if sends:
                    computed[forward, target, action.micro_batch] = end
                for key in ((stage, True), (stage, False)):
                    if action.ends and key in counts:
                        freed[key].append(end)
                clocks[rank], unsent[rank], moved = end, None, True
                next_ones[rank] += 1
    done = all(index == len(actions) for index, actions in zip(next_ones, made.actions, strict=True))
    return Simulated(clocks if done else None, waited)


def slots_of(made: Order) -> dict[tuple[int, bool], int]:
    """Return the slots for all messages between ranks."""
    return {
        (stage, forward): count
        for (stage, forward), count in slots(timeline(made)).items()
        if made.rank_of[stage] != made.rank_of[stage - 1 if forward else stage + 1]
    }


SMALL: list[tuple[PipelineSchedule, int, int, int]] = [
    ("gpipe", 3, 1, 4),
    ("1f1b", 2, 1, 5),
    ("1f1b", 4, 1, 7),
    ("interleaved_1f1b", 2, 2, 4),
    ("interleaved_1f1b", 3, 3, 6),
    ("zero_bubble", 3, 1, 6),
    ("zero_bubble", 2, 2, 6),
    ("zbv", 2, 2, 5),
    ("zbv", 4, 2, 8),
]


@pytest.mark.parametrize("case", SMALL)
def test_with_its_slots_no_rank_waits_for_a_slot_and_no_durations_stop_the_pipeline(
    case: tuple[PipelineSchedule, int, int, int],
) -> None:
    made = order(*case)
    counts = slots_of(made)
    usual = simulate(made, counts, usual_seconds)
    assert usual.waited == 0.0
    assert usual.ended == [row[-1].end for row in timeline(made).intervals]
    random_numbers = random.Random(1)
    for _ in range(112):  # 1008 in all cases together
        durations: dict[Action, float] = {
            action: random_numbers.expovariate(1.0) for actions in made.actions for action in actions
        }
        assert simulate(made, counts, durations.__getitem__).ended is not None


@pytest.mark.parametrize("case", SMALL)
def test_with_a_slot_less_a_rank_waits(case: tuple[PipelineSchedule, int, int, int]) -> None:
    made = order(*case)
    counts = slots_of(made)
    for key in counts:
        less = simulate(made, {**counts, key: counts[key] - 1}, usual_seconds)
        assert less.ended is None or less.waited > 0.0, key


def test_slots_do_not_grow_with_the_number_of_micro_batches() -> None:
    few, many = (slots_of(order("1f1b", 4, 1, count)) for count in (8, 64))
    assert few == many == {(1, True): 4, (2, True): 3, (3, True): 2, (0, False): 1, (1, False): 1, (2, False): 1}
    assert max(slots_of(order("zbv", 2, 2, 64)).values()) == 3


def test_too_few_slots_can_stop_a_pipeline() -> None:
    made = order("gpipe", 2, 1, 4)
    assert simulate(made, {(1, True): 3, (0, False): 1}, usual_seconds).ended is None
