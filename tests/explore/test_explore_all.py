"""`explore_all`: all outcomes and faults of random programs, each class of executions once, and its error messages."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tpfuse.explore import (
    DeadlockError,
    Decided,
    ExploreError,
    ProtocolError,
    RaceError,
    Sequential,
    explore,
    explore_all,
    explorer,
)
from tpfuse.explore.executions import Redundant
from tpfuse.explore.memory import HOST_WAIT, Semantics
from tpfuse.explore.reduction import Reduction
from tpfuse.explore.run import RunOptions
from tpfuse.explore.spins import numbers_of
from tpfuse.kernels.signals import wait_signal, wrapped

# Random programs, all of whose interleavings a small model tries one by one

KINDS = (
    ("signal", "wait"),
    ("signal", "wait", "look"),
    ("signal", "wait", "look", "add", "barrier"),
    ("put", "get", "add"),
    ("signal", "wait", "store", "load"),
    ("signal", "wait", "store", "load", "add", "barrier"),
)


class Program(NamedTuple):
    """The operations of each rank: (kind, word or element, value)."""

    ranks: tuple[tuple[tuple[str, int, int], ...], ...]


class Outcomes(NamedTuple):
    """raced: whether some execution has a race, after which the others are not looked at. ends: for each end whether
    all ranks have ended, how far each one came and what it saw. classes: how many orders of dependent operations."""

    raced: bool
    ends: set[Any]
    classes: int


def drawn(seed: int) -> Program:
    draw = random.Random(seed)
    world, kinds, words = draw.choice((2, 2, 3)), draw.choice(KINDS), draw.choice((1, 2, 3))
    count = draw.randint(2, 5) if world == 2 else draw.randint(1, 3)
    ranks = [
        [(draw.choice(kinds), draw.randrange(words), draw.randint(1, 2)) for _ in range(count)] for _ in range(world)
    ]
    barriers = min(sum(kind == "barrier" for kind, *_ in rank) for rank in ranks)
    return Program(tuple(tuple(_with_barriers(rank, barriers)) for rank in ranks))


def _with_barriers(operations: list[tuple[str, int, int]], count: int) -> Iterator[tuple[str, int, int]]:
    for operation in operations:
        if operation[0] != "barrier" or (count := count - 1) >= 0:
            yield operation


class State(NamedTuple):
    """A state of the model. clocks: what each rank knows of each; published: the clock at each word; accesses: for each
    element the last store and load of each rank; order: the operations on words so far, and whether each changed it."""

    places: tuple[int, ...]
    words: dict[int, int]
    seen: tuple[tuple[int, ...], ...]
    clocks: tuple[tuple[int, ...], ...]
    published: dict[int, tuple[int, ...]]
    accesses: dict[tuple[str, int], dict[int, int]]
    order: tuple[tuple[tuple[int, int], int, bool], ...]
    arrived: frozenset[int]


class Raced(Exception):
    """Two accesses are not ordered."""


def modelled(program: Program) -> Outcomes:
    """Return what all interleavings of the operations lead to. A wait is one operation, once its value is there."""
    world = len(program.ranks)
    ends, classes = set[Any](), set[Any]()
    own = tuple(tuple(int(rank == other) for other in range(world)) for rank in range(world))
    stack = [State((0,) * world, {}, ((),) * world, own, {}, {}, (), frozenset())]
    try:
        while stack:
            state = stack.pop()
            following = [after for rank in range(world) if (after := _after(program, state, rank)) is not None]
            stack += following
            if not following:
                ended = state.places == tuple(map(len, program.ranks)) and not state.arrived
                ends.add((ended, state.places, state.seen))
                classes.add((state.places, _class(state.order)))
    except Raced:
        return Outcomes(True, set(), 0)
    return Outcomes(False, ends, len(classes))


def _class(order: tuple[tuple[tuple[int, int], int, bool], ...]) -> Any:
    """Return for each operation how many changes of its word come before it."""
    changes: dict[int, int] = {}
    places = []
    for operation, word, changing in order:
        changes[word] = changes.get(word, 0) + changing
        places.append((operation, changes[word]))
    return tuple(sorted(places))


def _after(program: Program, state: State, rank: int) -> State | None:
    """Return the state after the rank's next operation; None if it waits or has ended."""
    place = state.places[rank]
    if place == len(program.ranks[rank]) or rank in state.arrived:
        return None
    kind, word, value = program.ranks[rank][place]
    old, clocks, clock = state.words.get(word, 0), list(state.clocks), state.clocks[rank]
    if (kind == "wait" and old < value) or (kind == "put" and old) or (kind == "get" and old != 1):
        return None
    places = tuple(x + (other == rank) for other, x in enumerate(state.places))
    words, published, accesses, arrived = dict(state.words), dict(state.published), state.accesses, state.arrived
    if kind == "barrier":
        arrived |= {rank}
        if len(arrived) == len(clocks):
            clocks = [tuple(map(max, *clocks)) for _ in clocks]
            arrived = frozenset()
    elif kind in ("store", "load"):
        accesses = _accessed(state, rank, kind, word)
    else:
        if kind in ("wait", "look", "add", "get"):
            clock = tuple(map(max, clock, published.get(word, clock)))
        if kind in ("add", "put"):
            published[word] = tuple(map(max, clock, published.get(word, clock)))
        elif kind == "signal":
            published[word] = clock
        words[word] = {"signal": value, "add": old + value, "put": 1, "get": 0}.get(kind, old)
    clocks[rank] = clocks[rank] if kind == "barrier" else clock
    ticking = range(len(clocks)) if kind == "barrier" and not arrived else (rank,)
    for other in ticking:
        clocks[other] = tuple(x + (i == other) for i, x in enumerate(clocks[other]))
    sees = kind in ("look", "add")
    seen = tuple((*x, old) if sees and other == rank else x for other, x in enumerate(state.seen))
    on_word = kind not in ("store", "load", "barrier")
    order = (*state.order, ((rank, place), word, kind not in ("wait", "look"))) if on_word else state.order
    return State(places, words, seen, tuple(clocks), published, accesses, order, arrived)


def _accessed(state: State, rank: int, kind: str, element: int) -> dict[tuple[str, int], dict[int, int]]:
    known = state.clocks[rank]
    for other in ("store", "load") if kind == "store" else ("store",):
        if any(time > known[who] for who, time in state.accesses.get((other, element), {}).items() if who != rank):
            raise Raced
    before = state.accesses.get((kind, element), {})
    return state.accesses | {(kind, element): before | {rank: known[rank]}}


def explored(program: Program, merging: bool) -> Outcomes:
    """Return what the executions that the reduction visits lead to."""
    both = Semantics(acquires=True, releases=True, scope=2, host=True)
    places, seen, ends, count = {}, {}, set[Any](), 0

    def run(memory: Any) -> None:
        rank, flags, box = memory.rank, memory.signals("flags", 3), memory.buffer("box", (3,), torch.float32)
        words, region = memory._run.memory, memory._word(flags, 0, 0)
        places[rank], seen[rank] = 0, ()
        for kind, word, value in program.ranks[rank]:
            places[rank] += kind == "barrier"  # a rank that has come there counts
            match kind:
                case "signal":
                    memory.signal(flags, 0, word, value)
                case "wait":
                    memory.wait_signal(flags, 0, word, value, op="test")
                case "look":
                    seen[rank] += (words.host_word("look", region, word, HOST_WAIT),)
                case "add":
                    seen[rank] += (words.host_word("add", region, word, both, lambda old, by=value: old + by),)
                case "put" | "get":
                    put = kind == "put"
                    memory.exchange(flags, 0, word, 1 - put, int(put), releases=put, peer=0, op=kind)
                case "store":
                    box.peers[0][word].fill_(1.0)
                case "load":
                    box.peers[0][word].item()
                case "barrier":
                    memory.barrier()
            places[rank] += kind != "barrier"

    reduction, options = Reduction(merging), RunOptions(patience=0)
    with explorer._exploring(explorer.interpreted) as enter:
        while True:
            try:
                explorer._execute(run, len(program.ranks), explorer._Following(reduction), options, enter)
            except RaceError:
                return Outcomes(True, set(), 0)
            except (Redundant, DeadlockError) as error:
                ended = None if isinstance(error, Redundant) else False
            else:
                ended = True
            if ended is not None:
                count += 1
                ends.add((ended, *(tuple(x[rank] for rank in sorted(x)) for x in (places, seen))))
            if not reduction.finish():
                return Outcomes(False, ends, count)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [0, *range(1000, 1008)])
def test_random_programs_have_the_outcomes_of_all_interleavings(first: int) -> None:
    """Without merging, the number of executions is that of the orders of dependent operations too."""
    count, faults, merged, classes = 40 if first == 0 else 250, 0, 0, 0
    for seed in range(first * 10, first * 10 + count):
        program = drawn(seed)
        expected, found, fewer = modelled(program), explored(program, False), explored(program, True)
        assert found == expected, (seed, program)
        assert (fewer.raced, fewer.ends) == (expected.raced, expected.ends), (seed, program)
        assert fewer.classes <= found.classes
        faults += expected.raced or any(not ended for ended, *_ in expected.ends)
        merged, classes = merged + fewer.classes, classes + found.classes
    assert count // 4 < faults < count and merged < 0.9 * classes


SIGNALS = tuple(("signal", 0, value) for value in range(1, 9))
# Programs for which parts of the reduction are there, and the number of their merged executions
CHOSEN = {
    "a thread that wants to run, but only after another": (
        ((("signal", 1, 1),), (("signal", 0, 1), ("look", 1, 0)), (("look", 1, 0),), (("signal", 0, 2),)), 8,
    ),
    "a wait that an earlier value ends": (((("get", 1, 0),), (("put", 1, 0),), (("get", 1, 0),)), 2),
    "values that come one after another": ((SIGNALS, (("wait", 0, 1),)), 1),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "merged"), CHOSEN.values(), ids=list(CHOSEN))
def test_chosen_programs_have_the_outcomes_of_all_interleavings(ranks: Any, merged: int) -> None:
    program = Program(ranks)
    expected, fewer = modelled(program), explored(program, True)
    assert explored(program, False) == expected
    assert fewer == expected._replace(classes=merged)


# Kernels


@triton.jit
def relay_kernel(flags_ptr, boxes_ptr, abort_ptr, epoch, rank, WORLD: tl.constexpr, BARRIER: tl.constexpr):
    """Write to the next rank's box, signal, wait for the signal of the one before, and read."""
    right = (rank + 1) % WORLD
    tl.store(tl.load(boxes_ptr + right).to(tl.pointer_type(tl.float32)), 1.0 * epoch)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(tl.load(flags_ptr + right).to(tl.pointer_type(tl.int32)), epoch, sem="release", scope="sys")
    if wait_signal(tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32)), epoch, abort_ptr):
        tl.load(tl.load(boxes_ptr + rank).to(tl.pointer_type(tl.float32)))


def relay(rounds: int, guard: bool = True, BARRIER: bool = True) -> Any:
    def program(memory: Any) -> None:
        flags, boxes = memory.signals("flags", 1), memory.buffer("boxes", (1,), torch.float32)
        for epoch in range(1, rounds + 1):
            arguments = flags.addresses, boxes.addresses, memory.abort, epoch, memory.rank, memory.world
            relay_kernel[(1,)](*arguments, BARRIER=BARRIER)
            if guard:
                memory.barrier()

    return program


def test_waits_of_kernels_do_not_multiply_executions() -> None:
    """A poll that goes on waiting is no event, and what a wait reads makes no difference once its effect is known."""
    for rounds in (1, 3):
        report = explore_all(relay(rounds), 3)
        assert report.exhausted and len(report.schedules) == 1
    assert str(report) == "3 ranks, 1 execution, all of them: no fault"


@pytest.mark.parametrize("changes", [{"guard": False}, {"BARRIER": False}], ids=str)
def test_races_of_kernels_are_found(changes: dict[str, bool]) -> None:
    with pytest.raises(RaceError, match="race on boxes"):
        explore_all(relay(2, **changes), 2)


@triton.jit
def counting_kernel(count_ptr, out_ptr):
    tl.store(out_ptr + tl.program_id(0), tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu"))


@pytest.mark.parametrize(("resident", "orders"), [(1, 1), (2, 4), (3, 6)])
def test_programs_of_a_grid_come_in_every_order_that_their_places_allow(resident: int, orders: int) -> None:
    """With two places for three programs, the third one begins after another one has ended."""
    found = set()

    def program(memory: Any) -> None:
        out = torch.zeros(3, dtype=torch.int32)
        counting_kernel[(3,)](memory.signals("count", 1).local, out)
        found.add(tuple(out.tolist()))

    report = explore_all(program, 1, resident=resident)
    assert report.exhausted and len(found) == orders


@triton.jit
def bounded_wait_kernel(flag_ptr, out_ptr):
    tries = 0
    while (tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0) & (tries < 3):
        tries += 1
    tl.store(out_ptr, tries)


def test_a_wait_that_gives_up_does_so_after_every_number_of_polls() -> None:
    found = set()

    def program(memory: Any) -> None:
        flag, out = memory.signals("flag", 1), torch.zeros(1, dtype=torch.int32)
        if memory.rank == 0:
            memory.signal(flag, 1, 0, 1)
        else:
            bounded_wait_kernel[(1,)](flag.local, out)
            found.add(out.item())

    assert explore_all(program, 2).exhausted
    assert found == {0, 1, 2, 3}


@triton.jit
def two_words_kernel(flags_ptr, abort_ptr):
    """Wait for either of two words, by turns."""
    while (tl.atomic_add(flags_ptr, 0, sem="acquire", scope="sys") == 0) & (
        tl.atomic_add(flags_ptr + 1, 0, sem="acquire", scope="sys") == 0
    ):
        pass


@pytest.mark.parametrize("word", [0, 1, None])
def test_a_wait_for_one_of_two_words_ends_or_is_a_deadlock(word: int | None) -> None:
    def program(memory: Any) -> None:
        flags = memory.signals("flags", 2)
        if memory.rank == 1:
            two_words_kernel[(1,)](flags.local, memory.abort)
        elif word is not None:
            memory.signal(flags, 1, word, 1)

    if word is None:
        with pytest.raises(DeadlockError, match=r"rank 1, program 0 waits at .*\n    flags\[\d\] of rank 1 is 0"):
            explore_all(program, 2)
    else:
        assert explore_all(program, 2).exhausted


@triton.jit
def odd_wait_kernel(flag_ptr, out_ptr):
    value = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while value % 2 == 0:
        value = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    tl.store(out_ptr, value)


def test_a_wait_ends_with_every_value_that_ends_it_whatever_else_happens() -> None:
    """Between them lie values with which it goes on waiting."""
    found = set()
    both = Semantics(acquires=True, releases=True, scope=2, host=True)

    def program(memory: Any) -> None:
        flag, count, out = memory.signals("flag", 1), memory.signals("count", 1), torch.zeros(1, dtype=torch.int32)
        if memory.rank == 0:
            for value in (1, 2, 3):
                memory.signal(flag, 0, 0, value)
        elif memory.rank == 1:
            odd_wait_kernel[(1,)](flag.peers[0], out)
            seen["value"] = out.item()
        else:
            word = memory._word(count, 0, 0)
            seen[memory.rank] = memory._run.memory.host_word("add", word, 0, both, lambda old: old + 1)
        memory.barrier()
        found.add((seen["value"], seen[2]))

    seen: dict[Any, int] = {}
    assert explore_all(program, 4).exhausted
    assert found == {(value, order) for value in (1, 3) for order in (0, 1)}


@triton.jit
def relaxed_wait_kernel(flag_ptr):
    while tl.atomic_add(flag_ptr, 0, sem="relaxed", scope="sys") == 0:
        pass


@triton.jit
def late_wait_kernel(flag_ptr, box_ptr, abort_ptr):
    if wait_signal(flag_ptr, 2, abort_ptr):
        tl.load(box_ptr)


def test_a_poll_that_goes_on_waiting_orders_nothing() -> None:
    """Rank 1 may poll between the signals, the first of which orders the box, and then it reads the box in order."""

    def program(memory: Any) -> None:
        flags, box = memory.signals("flags", 1), memory.buffer("box", (1,), torch.float32)
        if memory.rank == 0:
            box.local.fill_(1.0)
            memory.signal(flags, 1, 0, 1)
            memory.signal(flags, 2, 0, 1)
        elif memory.rank == 1:
            late_wait_kernel[(1,)](flags.local, box.peers[0], memory.abort)
        else:
            relaxed_wait_kernel[(1,)](flags.local)
            memory.signal(flags, 1, 0, 2)

    with pytest.raises(RaceError, match="race on box"):
        explore_all(program, 3)


@triton.jit
def first_places_kernel(words_ptr, out_ptr):
    """Let two programs write a word each, and the third one, which begins when either has ended, read both."""
    program = tl.program_id(0)
    if program < 2:
        tl.atomic_xchg(words_ptr + program, 1, sem="relaxed", scope="gpu")
    else:
        first = tl.atomic_add(words_ptr, 0, sem="relaxed", scope="gpu")
        tl.store(out_ptr, first + 2 * tl.atomic_add(words_ptr + 1, 0, sem="relaxed", scope="gpu"))


def test_a_program_begins_when_any_other_has_ended() -> None:
    found = set()

    def program(memory: Any) -> None:
        out = torch.zeros(1, dtype=torch.int32)
        first_places_kernel[(3,)](memory.signals("words", 2).local, out)
        found.add(out.item())

    assert explore_all(program, 1, resident=2).exhausted
    assert found == {1, 2, 3}


def _place_among(places: list[tuple[str, int, int]], address: int) -> tuple[str, int, int] | None:
    return next((place for place in places if place[1] <= address < place[2]), None)


def test_addresses_are_the_same_in_every_run() -> None:
    """Also those past the end of a tensor, and many of two tensors."""
    few, many = set(), set()
    for box, out in ((1 << 30, 1 << 31), (1 << 32, 1 << 29)):
        place = partial(_place_among, [("box", box, box + 400), ("out", out, out + 8)])
        few.add(numbers_of(np.array([out + 4, out + 8], np.uint64), place))
        many.add(numbers_of(np.array([out - 4, out, *range(box, box + 404, 4)], np.uint64), place))
    assert few == {(("out", 4), ("out", 8))} and len(many) == 1


# Programs of rounds


def hand_round(memory: Any) -> Iterator[tuple[int, int]]:
    """Write to the other rank's half of a box, and signal; the halves take turns."""
    flags, box = memory.signals("flags", 1), memory.buffer("box", (2,), torch.float32)
    for epoch in range(1, 5):
        box.peers[1 - memory.rank][epoch % 2] = float(epoch % 2)
        memory.signal(flags, 1 - memory.rank, 0, epoch)
        memory.wait_signal(flags, memory.rank, 0, epoch, op="test")
        assert box.local[epoch % 2] == epoch % 2
        yield epoch, epoch % 2


def test_states_that_were_there_before_prove_any_number_of_rounds() -> None:
    assert str(explore_all(hand_round, 2)) == "2 ranks, 1 execution, all of them, for any number of rounds: no fault"


@pytest.mark.parametrize(
    ("kind", "grows"),
    [
        ("a wait that does not count on", "flags[0] of rank 0"),
        ("another content", "the contents of box of rank 0"),
        ("another value", "what the ranks yield"),
        ("one rank counts", "the distance between the ranks' epochs"),
    ],
)
def test_what_is_another_after_each_round_is_named(kind: str, grows: str) -> None:
    """The wait ends in all of these rounds, and not in the tenth."""

    def program(memory: Any) -> Iterator[tuple[int, int]]:
        flags, box = memory.signals("flags", 1), memory.buffer("box", (1,), torch.float32)
        memory.signal(flags, memory.rank, 0, 9)
        for epoch in range(1, 4):
            if kind == "a wait that does not count on":
                memory.wait_signal(flags, memory.rank, 0, epoch, op="test")
            box.local.fill_(epoch if kind == "another content" else 1)
            counts = memory.rank or kind != "one rank counts"
            yield epoch if counts else 0, epoch if kind == "another value" else 0

    report = explore_all(program, 2)
    assert report.exhausted and report.grows == grows
    assert str(report) == f"2 ranks, 1 execution, all of them, and {grows} grows: no fault"


RELAXED = Semantics(acquires=False, releases=False, scope=2, host=True)


def turned(memory: Any, changes: bool = True) -> int:
    """Count in a word of rank 0, up to the number of ranks, or only read it; return what it was."""
    word, world = memory._word(memory.signals("turned", 1), 0, 0), memory.world
    turn = lambda old: (old + 1) % world if changes else None  # noqa: E731
    old: int = memory._run.memory.host_word("turn", word, 0, RELAXED, turn)
    return old


def test_the_orders_of_a_round_are_not_multiplied_by_those_of_other_rounds() -> None:
    found = set()

    def program(memory: Any) -> Iterator[int]:
        for epoch in range(1, 4):
            found.add((epoch, memory.rank, turned(memory)))
            memory.barrier()
            yield epoch

    report = explore_all(program, 3)
    assert report.grows == "" and len(report.schedules) == 1 + 5 + 5, "the states after two rounds are those after one"
    assert {(epoch, rank, old) for epoch in (1, 2) for rank in range(3) for old in range(3)} <= found


def look_at(memory: Any, index: int, least: int | None = None) -> None:
    """Read a word of rank 0 and acquire what it has; or wait until it is at least so much, and acquire nothing."""
    words, word = memory._run.memory, memory._word(memory.signals("flags", 3), 0, 0)
    if least is None:
        words.host_word("look", word, index, HOST_WAIT)
        return

    def there(value: int) -> bool:
        return value >= least

    memory._repeat(lambda: there(words.host_word("wait", word, index, RELAXED, ends=there)), "test", 0)


def test_which_accesses_a_rank_does_not_know_is_a_part_of_the_state() -> None:
    """Rank 1 may acquire what rank 0 writes in a round there or in the next one, and races only if it does neither."""

    def program(memory: Any) -> Iterator[tuple[int, int]]:
        flags, box = memory.signals("flags", 3), memory.buffer("box", (2,), torch.float32)
        for epoch in range(1, 6):
            half = epoch % 2
            if memory.rank == 0:
                memory.wait_signal(flags, 0, 2, epoch - 1, op="test")
                box.peers[0][half] = 1.0
                memory.signal(flags, 0, half, epoch)
            else:
                look_at(memory, half)
                box.peers[0][1 - half].item()
                look_at(memory, half, least=epoch)
                memory.signal(flags, 0, 2, epoch)
            yield epoch, half

    with pytest.raises(RaceError, match="race on box"):
        explore_all(program, 2)


@pytest.mark.parametrize("kind", ["both change", "in one of two executions", "waits for the next round"])
def test_rounds_that_overlap_are_explored_as_one_program(kind: str) -> None:
    """Rank 0 changes a word in the second round: after it was changed in the first one only if it has read that."""

    def program(memory: Any) -> Iterator[int]:
        flags = memory.signals("flags", 1)
        for epoch in range(1, 5):
            if kind == "both change":
                turned(memory)
            elif kind == "in one of two executions":
                if epoch % 2 or memory.rank == 0:
                    turned(memory, changes=memory.rank == epoch % 2)
                if epoch % 2 == 0:
                    memory.barrier()
            elif memory.rank == 0 and epoch < 4:
                memory.wait_signal(flags, 0, 0, epoch, op="test")
            elif memory.rank == 1:
                memory.signal(flags, 0, 0, epoch - 1)
            yield epoch, epoch % 2

    report = explore_all(program, 2)
    assert report.exhausted and report.grows is None
    assert len(report.schedules) == len(explore_all(lambda memory: list(program(memory)), 2).schedules)


@pytest.mark.parametrize("first", [2**31 - 2, 2**32 - 2])
def test_words_of_rounds_wrap_around(first: int) -> None:
    def program(memory: Any) -> Iterator[int]:
        flags = memory.signals("flags", 1)
        memory.signal(flags, memory.rank, 0, wrapped(first))
        memory.barrier()
        for epoch in (first + 1, first + 2):
            memory.signal(flags, 1 - memory.rank, 0, wrapped(epoch))
            memory.wait_signal(flags, memory.rank, 0, wrapped(epoch), op="test")
            yield epoch

    assert explore_all(program, 2).grows == ""


def late_round(memory: Any) -> Iterator[int]:
    """Let the second round read a box if the other rank has not come to a word yet."""
    flags, box = memory.signals("flags", 2), memory.buffer("box", (1,), torch.float32)
    memory.signal(flags, memory.rank, 1, 1)
    yield 0
    if memory.rank == 1:
        memory.signal(flags, 1, 0, 1)
        box.peers[1].fill_(1.0)
    elif memory._run.memory.host_word("look", memory._word(flags, 1, 0), 0) == 0:
        box.peers[1].item()
    yield 0


def test_a_fault_in_a_round_is_replayed_without_rounds() -> None:
    with pytest.raises(RaceError, match="race on box") as caught:
        explore_all(late_round, 2)
    with pytest.raises(RaceError, match="race on box") as again:
        eval(caught.value.replay, globals())
    assert again.value.replay == caught.value.replay


@triton.jit
def look(word_ptr):
    return tl.atomic_add(word_ptr, 0, sem="relaxed", scope="sys")


@triton.jit
def added_kernel(words_ptr, out_ptr, CALL: tl.constexpr):
    """Read two words in one statement: the first value is in no variable when the second word is read."""
    if CALL:
        out = look(words_ptr) + 2 * look(words_ptr + 1)
    else:
        out = (
            tl.atomic_add(words_ptr, 0, sem="relaxed", scope="sys")  # in another line
            + 2 * tl.atomic_add(words_ptr + 1, 0, sem="relaxed", scope="sys")
        )
    tl.store(out_ptr, out)


@pytest.mark.parametrize("call", [True, False])
def test_values_that_are_in_no_variable_count(call: bool) -> None:
    found, seen = set(), dict[int, int]()
    both = Semantics(acquires=True, releases=True, scope=2, host=True)

    def program(memory: Any) -> None:
        words, out = memory.signals("words", 4), torch.zeros(1, dtype=torch.int32)
        if memory.rank == 0:
            memory.wait_signal(words, 0, 3, 1, op="go on")  # so the other order comes when both values are known
            memory.signal(words, 0, 0, 1)
        elif memory.rank == 1:
            added_kernel[(1,)](words.peers[0], out, call)
            seen[1] = out.item()
        else:
            word = memory._word(words, 0, 0)
            seen[memory.rank] = memory._run.memory.host_word("add", word, 2, both, lambda old: old + 1)
        if memory.rank == 3:
            memory.signal(words, 0, 3, 1)
        memory.barrier()
        found.add((seen[1], seen[2]))

    assert explore_all(program, 4).exhausted
    assert found == {(value, ticket) for value in (0, 1) for ticket in (0, 1)}


@triton.jit
def lanes_kernel(flag_ptr):
    while tl.max(tl.atomic_add(flag_ptr + tl.zeros((2,), tl.int32), 0, sem="acquire", scope="sys"), 0) == 0:
        pass


def test_lanes_that_wait_for_one_word_wait_as_one() -> None:
    def program(memory: Any) -> None:
        flag = memory.signals("flag", 1)
        if memory.rank == 0:
            memory.signal(flag, 1, 0, 1)
        else:
            lanes_kernel[(1,)](flag.local)

    assert len(explore_all(program, 2).schedules) == 1


def repeated(program: Program, rounds: int) -> Any:
    """Return the signals, waits, stores, loads and barriers of a random program as rounds, with words that count."""

    def run(memory: Any) -> Iterator[tuple[int, int]]:
        flags, box = memory.signals("flags", 3), memory.buffer("box", (6,), torch.float32)
        for epoch in range(1, rounds + 1):
            for kind, word, value in program.ranks[memory.rank]:
                match kind:
                    case "signal":
                        memory.signal(flags, 0, word, epoch)
                    case "wait":
                        memory.wait_signal(flags, 0, word, epoch + value - 2, op="test")
                    case "store":
                        box.peers[0][word + 3 * (epoch % 2)].fill_(1.0)
                    case "load":
                        box.peers[0][word + 3 * (epoch % 2)].item()
                    case "barrier":
                        memory.barrier()
            yield epoch, epoch % 2

    return run


@pytest.mark.exhaustive
def test_random_rounds_have_the_faults_of_more_rounds() -> None:
    """Five rounds that stand for any number have no fault if seven that are explored as one program have none."""
    found: dict[str, int] = {}
    for seed in range(200):
        program, faults = drawn(seed), []
        seven = repeated(program, 7)
        for run in (repeated(program, 5), lambda memory, seven=seven: list(seven(memory))):
            try:
                report = explore_all(run, len(program.ranks), seconds=3)
                faults.append("" if report.exhausted and report.grows in ("", None) else "open")
            except ExploreError as error:
                faults.append(type(error).__name__)
        assert faults[0] == faults[1] or "open" in faults, (seed, faults)
        found[faults[0]] = found.get(faults[0], 0) + 1
    assert found[""] > 20 and found["RaceError"] > 20 and found["DeadlockError"] > 5, found


# Messages, pictures and the command
def check_then_act(memory):
    """Take a ticket; both ranks take it if one is interrupted after it has read the word and before it writes it."""
    tickets = memory.signals("tickets", 1)
    taken = memory.signals("taken", 1)
    here = memory._run.memory.host_word("look", memory._word(tickets, 0, 0), 0)
    if here == 0:
        memory.signal(tickets, 0, 0, 1)
        memory.signal(taken, memory.rank, 0, 1)
    memory.barrier()
    assert sum(int(part.item()) for part in taken.peers) == 1


def test_a_fault_that_one_decision_shows_is_replayed_by_it() -> None:
    explore(check_then_act, 2, schedules=[Sequential()])
    with pytest.raises(ProtocolError) as caught:
        explore_all(check_then_act, 2)
    assert caught.value.replay == "explore(check_then_act, 2, schedules=[Decided(decisions={1: (0,)})])"
    with pytest.raises(ProtocolError) as again:
        eval(caught.value.replay, globals())
    assert again.value.replay == caught.value.replay


def test_decisions_of_another_program_are_refused() -> None:
    with pytest.raises(ValueError, match=r"event 0: thread \(2,\) cannot continue: decisions of another program"):
        explore(check_then_act, 2, schedules=[Decided({0: (2,)})])


def test_time_that_runs_out_is_said() -> None:
    def program(memory: Any) -> None:
        flags = memory.signals("flags", 1)
        for value in range(20):
            memory.signal(flags, 0, 0, value)

    assert str(explore_all(program, 2, seconds=0.001)) == "2 ranks, 1 execution, not all: no fault"


@triton.jit
def counting_wait_kernel(flag_ptr, out_ptr):
    tries = 0
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:
        tries += 1
    tl.store(out_ptr, tries)


def test_a_wait_that_counts_for_ever_is_refused_by_name() -> None:
    def program(memory: Any) -> None:
        counting_wait_kernel[(1,)](memory.signals("flag", 1).local, torch.zeros(1, dtype=torch.int32))

    with pytest.raises(ProtocolError, match=r"read the same 101 times, in states that differ: .*:\d+: while tl.atomic"):
        explore_all(program, 1)


def explored_by_command(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "relay.py").write_text(text)
    command = [sys.executable, "-m", "tpfuse.explore", "relay.py", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.processes
def test_the_command_explores_a_file_and_shows_a_race_as_a_picture(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "examples" / "hand_over.py").read_text()
    right = explored_by_command(text, tmp_path)
    assert (right.returncode, right.stdout) == (0, "2 ranks, 1 execution, all of them: no fault\n"), right.stderr
    wrong = explored_by_command(text.replace("    tl.debug_barrier()\n", ""), tmp_path)
    assert wrong.returncode == 1, wrong.stderr
    title, *steps = wrong.stdout.partition("\n\n")[2].splitlines()
    assert title.split() == ["rank", "0", "|", "rank", "1"]
    assert [step.partition("relay:")[0].strip() for step in steps if "\u2192" in step] == [
        "| \u2192 store 0",
        "\u2192 read",
    ]


@pytest.mark.exhaustive
def test_the_command_says_what_it_has_not_found(tmp_path: Path) -> None:
    text = "def protocol(memory):\n    word = memory.signals('w', 1)\n"
    endless = f"{text}    for i in range(40):\n        memory.signal(word, 0, 0, i)"
    result = explored_by_command(endless, tmp_path, "--seconds", "0.01", "--json")
    assert result.returncode == 3 and not json.loads(result.stdout)["all"]
    missing = explored_by_command("", tmp_path)
    assert missing.returncode == 2 and "relay.py has no function 'protocol'" in missing.stderr
