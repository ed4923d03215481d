"""The orders of a pipeline are complete and can be kept, and numbers that do not fit are refused."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tpfuse.parallel.pipeline.order import (
    SCHEDULES,
    Action,
    Kind,
    Order,
    PipelineSchedule,
    order,
    stage_ranks,
    usual_stages,
)
from tpfuse.parallel.pipeline.timeline import timeline

RANKS, TURNS, MICRO_BATCHES = range(1, 6), range(1, 4), range(1, 13)


def layouts(schedule: PipelineSchedule) -> Iterator[tuple[int, int]]:
    """Yield (ranks, stages of each rank) that a schedule has."""
    for ranks in RANKS:
        for turns in TURNS:
            single = schedule in ("gpipe", "1f1b")
            least, most = {"interleaved_1f1b": (2, 3), "zbv": (2, 2)}.get(schedule, (1, 1 if single else 3))
            if least <= turns <= most:
                yield ranks, turns


def orders(schedule: PipelineSchedule) -> Iterator[Order]:
    """Yield the orders of a schedule. Only whole rounds of the ranks are needed by interleaved schedules."""
    for ranks, turns in layouts(schedule):
        for count in MICRO_BATCHES:
            rounds = max(1, count // ranks)
            if schedule in ("gpipe", "1f1b", "zbv") or count % rounds == 0:
                yield order(schedule, ranks, turns, count)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_computes_each_micro_batch_once_and_in_an_order_that_can_be_kept(schedule: PipelineSchedule) -> None:
    whole = (Kind.FORWARD, Kind.BACKWARD)
    split = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    for made in orders(schedule):
        numbers = range(made.micro_batches)
        for rank, actions in enumerate(made.actions):
            kinds = split if schedule in ("zero_bubble", "zbv") else whole
            expected = [Action(kind, stage, n) for stage in made.stages_of(rank) for n in numbers for kind in kinds]
            assert Counter(actions) == Counter(expected)
            at = {action: index for index, action in enumerate(actions)}
            for stage in made.stages_of(rank):
                for n in numbers:
                    places = [at[Action(kind, stage, n)] for kind in kinds]
                    assert places == sorted(places)
        timeline(made)  # an assertion fails there if ranks wait for each other in a circle


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_begins_and_ends_micro_batches_in_the_order_of_their_numbers(schedule: PipelineSchedule) -> None:
    # Messages between two stages have no numbers but their order, and slots are used in turn.
    for made in orders(schedule):
        for rank, actions in enumerate(made.actions):
            for stage in made.stages_of(rank):
                of_stage = [action for action in actions if action.stage == stage]
                for kind in Kind:
                    found = [action.micro_batch for action in of_stage if action.kind is kind]
                    assert found in ([], list(range(made.micro_batches))), (made.ranks, made.micro_batches, stage)


def test_the_ranks_of_stages() -> None:
    assert stage_ranks("1f1b", 4, 1) == (0, 1, 2, 3)
    assert stage_ranks("interleaved_1f1b", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert stage_ranks("zbv", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert order("zbv", 3, 2, 6).stages_of(1) == [1, 4]
    assert [usual_stages(schedule) for schedule in SCHEDULES] == [1, 1, 2, 1, 2]


def test_what_ends_a_micro_batch() -> None:
    assert [kind for kind in Kind if Action(kind, 0, 0).ends] == [Kind.BACKWARD, Kind.WEIGHT]


def _refused(*arguments: Any) -> str:
    with pytest.raises(ValueError) as refused:
        order(*arguments)
    return str(refused.value)


def test_refusals_name_what_was_received_and_what_is_accepted() -> None:
    names = "gpipe, 1f1b, interleaved_1f1b, zero_bubble, zbv"
    assert _refused("gpip", 2, 1, 4) == f"schedule 'gpip': expected one of {names}"
    assert _refused("1f1b", 0, 1, 4) == "pp 0: expected at least 1"
    assert _refused("1f1b", 2, 2, 4) == "schedule 1f1b with 2 stages on each rank: expected 1"
    assert _refused("gpipe", 2, 0, 4) == "schedule gpipe with 0 stages on each rank: expected 1"
    assert _refused("zbv", 2, 3, 4) == "schedule zbv with 3 stages on each rank: expected 2"
    assert "expected at least 2" in _refused("interleaved_1f1b", 2, 1, 4)
    assert "expected at least 1" in _refused("zero_bubble", 2, 0, 4)
    for schedule in SCHEDULES:
        found = _refused(schedule, 2, usual_stages(schedule), 0)
        assert found.startswith(f"0 micro-batches of each rank in a step: schedule {schedule} on 2 ranks accepts ")
        if schedule in ("gpipe", "1f1b", "zbv"):
            assert found.endswith("accepts 1 or more")


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble"])
def test_numbers_in_a_refusal_are_accepted_and_are_the_nearest(schedule: PipelineSchedule) -> None:
    found = _refused(schedule, 4, 2, 13)
    assert found.endswith("on 4 ranks accepts for example 8, 10, 12, 15, 16 or 20")
    accepted = [8, 10, 12, 15, 16, 20]
    for count in range(8, 21):
        if count in accepted:
            assert order(schedule, 4, 2, count).micro_batches == count
        else:
            assert "accepts for example" in _refused(schedule, 4, 2, count)
