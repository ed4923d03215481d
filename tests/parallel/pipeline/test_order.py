"""The orders of a pipeline are those that torch runs, they are complete, and numbers that do not fit are refused."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

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
CLASSES: dict[str, Any] = {
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}
LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT: "I", Kind.WEIGHT: "W"}


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


def written(actions: tuple[Action, ...]) -> list[str]:
    """Return actions as torch writes them, for example 2F5: stage, letter and micro-batch."""
    return [f"{action.stage}{LETTERS[action.kind]}{action.micro_batch}" for action in actions]


def run_by_torch(kind: Any, ranks: int, rank: int, micro_batches: int) -> list[str]:
    """Return what the loop of a schedule of torch calls on a stage that computes nothing."""
    calls: list[str] = []
    stage = SimpleNamespace(
        stage_index=rank,
        get_fwd_recv_ops=lambda i: [],
        get_fwd_send_ops=lambda i: [],
        get_bwd_recv_ops=lambda i: [],
        get_bwd_send_ops=lambda i: [],
        forward_one_chunk=lambda i, *_, **__: calls.append(f"{rank}F{i}"),
        backward_one_chunk=lambda i, **_: calls.append(f"{rank}B{i}"),
        perform_reduce_grad=lambda factor: None,
    )
    nothing: list[Any] = [None] * micro_batches
    schedule = SimpleNamespace(
        _stage=stage,
        _num_stages=ranks,
        _n_microbatches=micro_batches,
        _check_inputs=lambda *_: (nothing, nothing),
        _initialize_stage=lambda *_: None,
        _maybe_compute_loss=lambda *_: None,
        _maybe_get_loss=lambda *_: None,
        _update_losses=lambda *_: None,
        scale_grads=False,
    )
    try:
        kind._step_microbatches(schedule)
    except (AttributeError, TypeError) as error:
        pytest.skip(f"the loops of this version of torch need more than a stage: {error}")
    return calls


@pytest.mark.parametrize(("schedule", "kind"), [("gpipe", schedules.ScheduleGPipe), ("1f1b", schedules.Schedule1F1B)])
def test_the_orders_with_one_stage_a_rank_are_what_the_loops_of_torch_run(schedule: Any, kind: Any) -> None:
    for ranks in RANKS:
        for count in MICRO_BATCHES:
            made = order(schedule, ranks, 1, count)
            for rank in range(ranks):
                assert written(made.actions[rank]) == run_by_torch(kind, ranks, rank, count), (ranks, count, rank)


@pytest.mark.parametrize("schedule", CLASSES)
def test_the_other_orders_are_the_tables_of_torch(schedule: Any) -> None:
    for ranks, turns in layouts(schedule):
        indices = [turn * ranks for turn in range(turns)]
        stages = [
            SimpleNamespace(num_stages=ranks * turns, group_size=ranks, group_rank=0, stage_index=i, submod=None)
            for i in indices
        ]
        for count in (ranks, 2 * ranks):
            table = CLASSES[schedule](stages, count).pipeline_order
            for rank, actions in enumerate(order(schedule, ranks, turns, count).actions):
                kept = [str(each) for each in table[rank] if each is not None and "REDUCE_GRAD" not in str(each)]
                assert written(actions) == kept, (ranks, turns, count, rank)


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
            assert [a for a in actions if a.kind is Kind.FORWARD] == made.forwards(rank)
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
