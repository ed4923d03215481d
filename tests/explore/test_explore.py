"""The explorer: its reports, deadlocks, schedules, replays and time-outs, and that it restores Triton's interpreter.

The tests run under other Triton versions too: PYTHONPATH=<their tree>:. python -m pytest tests/explore/test_explore.py
"""

import itertools
import operator
import re
import threading
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tpfuse.comm.errors import PeerTimeout
from tpfuse.explore import (
    PCT,
    DeadlockError,
    Decided,
    ExploreError,
    ProtocolError,
    RaceError,
    RoundRobin,
    Sequential,
    explore,
    explore_all,
)


@triton.jit
def shift_kernel(
    x_ptr, out_ptr, slots_ptr, flags_ptr, abort_ptr, epoch, rank, WORLD: tl.constexpr, N: tl.constexpr,
    BARRIER: tl.constexpr, RELEASE: tl.constexpr, ACQUIRE: tl.constexpr, SCOPE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Write x to the right neighbour's slot, program by program, and copy what the left neighbour has sent to out."""
    pid = tl.program_id(0)
    right = (rank + 1) % WORLD
    offs = pid * N + tl.arange(0, N)
    there = tl.load(slots_ptr + right).to(tl.pointer_type(tl.float32))
    flag = tl.load(flags_ptr + right).to(tl.pointer_type(tl.int32)) + pid
    tl.store(there + offs, tl.load(x_ptr + offs))
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem=RELEASE, scope=SCOPE)
    own = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32)) + pid
    aborted = 0
    if WAIT:
        while (tl.atomic_add(own, 0, sem=ACQUIRE, scope="sys") != epoch) & (aborted == 0):
            aborted = tl.atomic_add(abort_ptr, 0, sem="relaxed")
    if aborted == 0:
        here = tl.load(slots_ptr + rank).to(tl.pointer_type(tl.float32))
        tl.store(out_ptr + offs, tl.load(here + offs))


def shift(memory, guard=True, epochs=2, programs=2, **changes):
    settings = {"BARRIER": True, "RELEASE": "release", "ACQUIRE": "acquire", "SCOPE": "sys", "WAIT": True} | changes
    n = 4
    slots = memory.buffer("slots", (programs * n,), torch.float32)
    flags = memory.signals("flags", programs)
    for epoch in range(1, epochs + 1):
        x = torch.full((programs * n,), 10.0 * epoch + memory.rank)
        out = torch.zeros_like(x)
        shift_kernel[(programs,)](
            x, out, slots.addresses, flags.addresses, memory.abort, epoch, memory.rank, memory.world, n, **settings
        )  # fmt: skip
        assert (out == 10.0 * epoch + (memory.rank - 1) % memory.world).all(), "wrong result"
        if guard:
            memory.barrier()


def changed(**changes):
    """Return `shift` with changes that make it wrong."""

    def program(memory):
        shift(memory, **changes)

    return program


STORE = "tl.store(there + offs, tl.load(x_ptr + offs))"
SIGNAL = "tl.atomic_xchg(flag, epoch, sem=RELEASE, scope=SCOPE)"
POLL = 'while (tl.atomic_add(own, 0, sem=ACQUIRE, scope="sys") != epoch) & (aborted == 0):'
READ = "tl.store(out_ptr + offs, tl.load(here + offs))"


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


# Reports


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"BARRIER": False}, f"a tl.debug_barrier() before the release at {{}}: {SIGNAL} would order them"),
        ({"RELEASE": "relaxed"}, f"release semantics at {{}}: {SIGNAL} would order them"),
        ({"RELEASE": "acquire"}, f"release semantics at {{}}: {SIGNAL} would order them"),
        ({"ACQUIRE": "relaxed"}, f"acquire semantics at {{}}: {POLL} would order them"),
        ({"WAIT": False}, f"the first signals at {{}}: {SIGNAL}, but the second has not waited for that"),
    ],
)
def test_a_race_names_both_lines_and_what_would_have_ordered_them(changes, why) -> None:
    with pytest.raises(RaceError) as caught:
        explore(changed(**changes), 2, schedules=[RoundRobin()])
    lines = str(caught.value).splitlines()
    here = "tests/explore/test_explore.py"
    where = f"{here}:{line_of(POLL if 'ACQUIRE' in changes else SIGNAL)}"
    assert lines[0].startswith("race on slots[") and " of rank " in lines[0]
    for access, text in (("store", STORE), ("load", READ)):
        found = rf"  {access} by rank \d, program \d at {re.escape(f'{here}:{line_of(text)}: {text}')}"
        assert any(re.fullmatch(found, line) for line in lines), lines
    assert any(x.strip() == why.format(where) for x in lines), lines
    assert lines[-1] == "  replay: explore(program, 2, schedules=[RoundRobin()])"
    named = [str(step) in str(caught.value) for step in caught.value.steps]
    assert named.count(True) == 2 and named[-1], "the run's steps include the two accesses and end with the second"


def test_a_scope_that_spans_one_gpu_is_named() -> None:
    with pytest.raises(RaceError, match='scope="gpu" spans no two ranks: "sys" is needed at .*' + "atomic_xchg"):
        explore(changed(SCOPE="gpu"), 2)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_narrow_scope_suffices_if_a_barrier_orders_the_accesses(ordered) -> None:
    """Rank 0 uses the word with the scope of its GPU; rank 1 uses it after a barrier."""

    def program(memory):
        word = memory.signals("word", 1)
        if memory.rank == 0:
            signal_kernel[(1,)](word.local, "gpu")
        if ordered:
            memory.barrier()
        if memory.rank == 1:
            signal_kernel[(1,)](word.peers[0], "sys")

    if ordered:
        explore(program, 2)
    else:
        with pytest.raises(RaceError, match="spans no two ranks"):
            explore(program, 2)


@triton.jit
def signal_kernel(flag_ptr, SCOPE: tl.constexpr):
    tl.atomic_add(flag_ptr, 1, sem="relaxed", scope=SCOPE)


def test_reuse_without_a_guard_is_a_race_between_iterations() -> None:
    """The values do not change, so the results are right under every schedule; the race is reported nevertheless."""

    def program(memory):
        flags, slots = memory.signals("flags", 1), memory.buffer("slots", (1,), torch.float32)
        for epoch in (1, 2):
            slots.peers[1 - memory.rank].fill_(1.0)
            memory.signal(flags, 1 - memory.rank, 0, epoch)
            memory.wait_signal(flags, memory.rank, 0, epoch, op="test")
            assert slots.local.item() == 1.0

    with pytest.raises(RaceError, match="the first signals nothing after it"):
        explore(program, 2, schedules=[RoundRobin()])


def test_the_rule_of_debug_barrier_can_be_switched_off() -> None:
    explore(changed(BARRIER=False), 2, barrier_rule=False)
    with pytest.raises(RaceError, match="release semantics at"):
        explore(changed(BARRIER=False, RELEASE="relaxed"), 2, barrier_rule=False)


@triton.jit
def failed_swap_kernel(flag_ptr, box_ptr):
    tl.store(box_ptr, 1.0)
    tl.debug_barrier()
    tl.atomic_cas(flag_ptr, 7, 8, sem="release", scope="sys")  # it is 0
    tl.atomic_xchg(flag_ptr, 1, sem="relaxed", scope="sys")


def test_a_swap_that_fails_releases_nothing() -> None:
    def program(memory):
        flag, box = memory.signals("flag", 1), memory.buffer("box", (1,), torch.float32)
        if memory.rank == 1:
            failed_swap_kernel[(1,)](flag.peers[0], box.peers[0])
        else:
            memory.wait_signal(flag, 0, 0, 1, op="test")
            box.local.item()

    with pytest.raises(RaceError, match="race on box"):
        explore(program, 2)


def test_making_a_buffer_orders_nothing() -> None:
    def program(memory):
        box = memory.buffer("box", (1,), torch.float32)
        if memory.rank == 0:
            box.local.fill_(1.0)
        memory.buffer("other", (1,), torch.float32)
        if memory.rank == 1:
            box.peers[0].item()

    with pytest.raises(RaceError):
        explore(program, 2)


@triton.jit
def number_kernel(box_ptr, out_ptr):
    tl.store(box_ptr + tl.program_id(0), 1.0)
    tl.load(box_ptr + tl.program_id(0))
    tl.store(out_ptr + tl.program_id(0), tl.program_id(0) * 100 + tl.num_programs(0))


def test_programs_keep_their_numbers_when_others_run_in_between() -> None:
    def program(memory):
        programs = 2 + memory.rank
        out = torch.zeros(programs, dtype=torch.int32)
        number_kernel[(programs,)](memory.buffer("box", (4,), torch.float32).local, out)
        assert out.tolist() == [100 * number + programs for number in range(programs)]

    for resident in (1, 2):
        explore(program, 3, resident=resident)


def test_priorities_of_pct_drop_at_the_steps_that_the_seed_draws() -> None:
    fallen = 0
    for seed in range(20):
        pick, running, chosen = PCT(seed, length=10, depth=2).start(), 0, []
        for step in range(1, 11):
            running = pick([0, 1], running, step)
            chosen.append(running)
        changes = sum(a != b for a, b in itertools.pairwise(chosen))
        assert changes <= 1
        fallen += changes
    assert fallen > 10


def test_a_correct_program_passes_and_its_steps_are_counted() -> None:
    report = explore(shift, 3, seeds=range(2))
    assert [type(schedule) for schedule in report.schedules] == [Sequential, RoundRobin, PCT, PCT]
    assert report.schedules[3] == PCT(1, length=report.steps[0])
    assert str(report) == f"4 schedules, {sum(report.steps)} steps: no fault"
    assert all(len(log) == steps for log, steps in zip(report.logs, report.steps, strict=True))


def test_a_rank_that_raises_is_named() -> None:
    def program(memory):
        assert memory.rank != 1

    with pytest.raises(
        ProtocolError, match=r"(?s)rank 1 raised AssertionError.*  at tests/explore/test_explore.py:\d+: assert"
    ):
        explore(program, 3)


def test_a_kernel_that_raises_is_named_without_the_error_of_the_interpreter() -> None:
    with pytest.raises(
        ProtocolError, match=r"rank \d, program 0 raised ValueError: Memory semantic strange .*\n  at tests/explore"
    ):
        explore(changed(RELEASE="strange"), 2)


# Deadlocks


def test_a_deadlock_names_each_waiting_rank_and_its_word() -> None:
    def program(memory):
        flags = memory.signals("flags", 2)
        if memory.rank == 0:
            memory.wait_signal(flags, 1, 1, 5, op="test")
        elif memory.rank == 1:
            memory.barrier()

    with pytest.raises(DeadlockError) as caught:
        explore(program, 3)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[0] == "deadlock:"
    assert (
        lines[1].startswith("rank 0 waits at tests/explore/test_explore.py:")
        and "memory.wait_signal(flags, 1, 1, 5" in lines[1]
    )
    assert lines[2] == "flags[1] of rank 1 is 0"
    assert lines[3].startswith("rank 1 waits at ") and lines[3].endswith(": memory.barrier()")
    assert lines[-2] == "rank 2 has ended"


@triton.jit
def later_program_kernel(flags_ptr):
    if tl.program_id(0) == 0:
        while tl.atomic_add(flags_ptr, 0, sem="acquire", scope="gpu") == 0:
            pass
    else:
        tl.atomic_xchg(flags_ptr, 1, sem="release", scope="gpu")


def test_waiting_for_a_later_program_of_its_own_grid_is_a_deadlock() -> None:
    def program(memory):
        later_program_kernel[(2,)](memory.signals("flags", 1).local)

    with pytest.raises(
        DeadlockError, match=r"have not begun: 1 of rank .*\(resident=1\): does a program wait for a later"
    ):
        explore(program, 2)
    explore(program, 2, resident=2)


@triton.jit
def bounded_wait_kernel(flags_ptr, out_ptr):
    tries = 0
    while (tl.load(flags_ptr, volatile=True) == 0) & (tries < 30):
        tries += 1
    tl.store(out_ptr, tries)


def test_a_bounded_wait_is_no_deadlock_with_enough_patience() -> None:
    out = torch.zeros(1, dtype=torch.int32)

    def program(memory):
        bounded_wait_kernel[(1,)](memory.signals("flags", 1).local, out)

    explore(program, 1, schedules=[Sequential()], patience=40)
    assert out.item() == 30
    with pytest.raises(DeadlockError):
        explore(program, 1, schedules=[Sequential()], patience=10)


def test_a_run_without_an_end_is_stopped() -> None:
    def program(memory):
        flags = memory.signals("flags", 1)
        while True:
            memory.signal(flags, 0, 0, flags.local.item() + 1)

    with pytest.raises(DeadlockError, match="still running after 500 steps"):
        explore(program, 1, max_steps=500)


# Schedules


@pytest.mark.parametrize("schedule", [Sequential(), RoundRobin(), PCT(3, length=50), Decided({0: (2, 1, 1)})])
def test_a_schedule_makes_the_same_run_each_time(schedule) -> None:
    def program(memory):
        torch.rand(2)
        shift(memory)

    first, second = (explore(program, 3, schedules=[schedule], resident=2) for _ in range(2))
    assert first.logs == second.logs
    assert eval(repr(schedule)) == schedule


def test_random_numbers_are_the_same_in_every_run_and_the_callers_state_is_kept() -> None:
    drawn = []

    def program(memory):
        drawn.append(torch.rand(3))

    for seed in (7, 8):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        explore(program, 1)
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(values, drawn[0]) for values in drawn)


def test_a_failure_replays_from_its_expression() -> None:
    with pytest.raises(ExploreError) as caught:
        explore(wrong, 3, schedules=[PCT(5)], resident=2)
    assert caught.value.replay == "explore(wrong, 3, schedules=[PCT(seed=5, length=200, depth=3)], resident=2)"
    with pytest.raises(ExploreError) as again:
        eval(caught.value.replay, globals())
    assert str(again.value) == str(caught.value)


def wrong(memory):
    shift(memory, guard=False)


# Time-outs


def test_every_wait_ends_and_ranks_can_continue() -> None:
    ended = []

    def program(memory):
        flags = memory.signals("late", 1)
        try:
            with memory.guard("late"):
                if memory.rank == 0:
                    memory.signal(flags, 1, 0, 1)
                memory.wait_signal(flags, memory.rank, 0, 1, op="late", peer=2)
            memory.barrier("after")
        except PeerTimeout as error:
            ended.append((memory.rank, error.op, error.peer))
        with pytest.raises(PeerTimeout), memory.guard("next"):
            raise AssertionError("not reached")
        memory.reset()
        assert memory.generation == 1 and flags.local.item() == 0 and memory.abort.item() == 0
        shift(memory)

    with pytest.raises(DeadlockError):
        explore(program, 3)
    ended.clear()
    explore(program, 3, schedules=[Sequential(), RoundRobin()], timeouts=True)
    assert sorted(ended) == [(0, "late", 2)] * 2 + [(1, "after", 0)] * 2 + [(2, "late", 2)] * 2


def test_a_kernel_leaves_its_wait_when_the_abort_word_is_set() -> None:
    def program(memory):
        if memory.rank == 1:  # does not launch the kernel
            memory.buffer("slots", (8,), torch.float32), memory.signals("flags", 2)
            with pytest.raises(PeerTimeout):
                memory.barrier()
        else:
            wrong_result = pytest.raises(AssertionError, match="wrong result")
            with pytest.raises(PeerTimeout), memory.guard("shift"), wrong_result:
                shift(memory)
        memory.reset()
        shift(memory)

    explore(program, 3, timeouts=True)


def test_a_kernel_that_polls_no_abort_word_is_a_deadlock_even_with_time_outs() -> None:
    def program(memory):
        later_program_kernel[(1,)](memory.signals("flags", 1).local)

    with pytest.raises(DeadlockError, match="atomic_add"):
        explore(program, 2, timeouts=True)


def test_a_reset_that_a_rank_never_reaches_times_out() -> None:
    def program(memory):
        with pytest.raises(PeerTimeout):
            memory.wait_signal(memory.signals("flags", 1), 0, 0, 1, op="test")
        if memory.rank:
            with pytest.raises(PeerTimeout, match=r"reset: rank 1 waited .* for rank 0"):
                memory.reset()

    explore(program, 2, timeouts=True)


# The state after an exploration


@triton.jit
def fill_kernel(ptr, value, N: tl.constexpr):
    tl.store(ptr + tl.arange(0, N), tl.full((N,), value, tl.float32))


def _interpreter():
    names = ("program_id", "load", "store", "atomic_add", "debug_barrier", "static_range", "range", "sum", "zeros")
    return (
        dict(vars(interpreter.interpreter_builder)),
        {name: getattr(tl, name) for name in names},
        dict(vars(tl.tensor)),
        dict(vars(tl.core.tensor)),
        interpreter._patch_lang,
        interpreter.GridExecutor.__call__,
        threading.active_count(),
    )


@pytest.mark.parametrize("program", [shift, wrong, lambda memory: 1 / 0], ids=["right", "race", "error"])
def test_triton_is_restored(program) -> None:
    out = torch.zeros(4)
    fill_kernel[(1,)](out, 1.0, 4)
    before = _interpreter()
    if program is shift:
        explore(program, 2)
    else:
        with pytest.raises(ExploreError):
            explore(program, 2)
    assert _interpreter() == before
    fill_kernel[(1,)](out, 2.0, 4)
    assert out.tolist() == [2.0] * 4


def test_one_exploration_at_a_time() -> None:
    def program(memory):
        with pytest.raises(RuntimeError, match="one exploration at a time"):
            explore(shift, 2)

    explore(program, 1)
    explore(shift, 2)


def test_without_the_interpreter_the_error_names_the_variable_to_set(monkeypatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        explore(shift, 2)


def test_exploring_nothing_is_refused() -> None:
    for schedules in ([], iter(())):
        with pytest.raises(ValueError, match="got no schedule: expected at least one"):
            explore(shift, 2, schedules=schedules)
    with pytest.raises(ValueError, match="world=0: expected at least one rank"):
        explore(shift, 0)
    with pytest.raises(ValueError, match="seconds=0: expected a positive number"):
        explore_all(shift, 2, seconds=0)


def test_a_fault_of_the_explorer_is_not_blamed_on_the_program(monkeypatch) -> None:
    monkeypatch.setattr("tpfuse.explore.memory.explain", operator.index)
    with pytest.raises(TypeError):
        explore(wrong, 2)
