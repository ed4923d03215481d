"""Vector clocks and shadow memory without a program: which operations order which accesses."""

import numpy as np
import pytest
import torch

from tpfuse.explore.clocks import Atomic, Clocks, Supposition
from tpfuse.explore.shadow import Region

WORD, LINE = (0, 0), ("kernel.py", 1)
RELEASE = {"releases": True, "line": ("kernel.py", 1)}
ACQUIRE = {"acquires": True, "line": ("kernel.py", 2)}


def pair(barrier_rule=True):
    """Return clocks of two streams, 0 and 2, and their programs 4 and 6, which have begun."""
    clocks = Clocks(barrier_rule)
    first, second, one, two = (clocks.new_chain() for _ in range(4))
    clocks.fork(first, one)
    clocks.fork(second, two)
    return clocks, one, two


def do(clocks, chain, word=WORD, line=LINE, **semantics):
    clocks.atomic(Atomic(chain, word, line, **semantics))


def knows(clocks, later, component, time):
    return clocks.knows[later, component] >= time


def test_a_release_covers_what_precedes_the_last_debug_barrier_and_all_atomics() -> None:
    clocks, one, two = pair()
    before = clocks.time(one)
    clocks.debug_barrier(one)
    after, atomic = clocks.time(one), clocks.time(one + 1)
    do(clocks, one, word=(0, 1))
    do(clocks, one, **RELEASE)
    last = clocks.time(one + 1)
    do(clocks, two, **ACQUIRE)
    assert knows(clocks, two, one, before) and not knows(clocks, two, one, after)
    assert knows(clocks, two, one + 1, atomic) and not knows(clocks, two, one + 1, last)


def test_without_the_rule_and_for_the_host_a_release_covers_all() -> None:
    for rule, host in ((False, False), (True, True)):
        clocks, one, two = pair(rule)
        time = clocks.time(one)
        do(clocks, one, host=host, **RELEASE)
        do(clocks, two, **ACQUIRE)
        assert knows(clocks, two, one, time)


def test_a_release_in_a_launch_covers_earlier_operations_of_its_stream() -> None:
    clocks = Clocks()
    stream, one, other = (clocks.new_chain() for _ in range(3))
    time = clocks.time(stream)
    clocks.fork(stream, one)
    do(clocks, one, **RELEASE)
    do(clocks, other, **ACQUIRE)
    assert knows(clocks, other, stream, time)


def test_a_launch_orders_the_programs_of_the_next_one() -> None:
    clocks = Clocks()
    stream, one, two = (clocks.new_chain() for _ in range(3))
    clocks.fork(stream, one)
    clocks.fork(stream, two)
    time = clocks.time(one)
    assert not knows(clocks, two, one, time)
    clocks.join(stream, [one, two])
    clocks.fork(stream, two)
    assert knows(clocks, two, one, time)


def test_which_operations_end_or_continue_a_release() -> None:
    """An acquire reads the last value; whether it takes over the release depends on the operations in between."""
    middle = {
        "relaxed read-modify-write": (lambda clocks, two: do(clocks, two), True),
        "releasing read-modify-write": (lambda clocks, two: do(clocks, two, **RELEASE), True),
        "relaxed store": (lambda clocks, two: do(clocks, two, modifies=False), False),
        "releasing store": (lambda clocks, two: do(clocks, two, modifies=False, **RELEASE), False),
        "load": (lambda clocks, two: do(clocks, two, modifies=False, stores=False), True),
        "failed swap": (lambda clocks, two: do(clocks, two, stores=False, **RELEASE), True),
    }
    for name, (operation, kept) in middle.items():
        clocks, one, two = pair()
        third = clocks.new_chain()
        time = clocks.time(one)
        clocks.debug_barrier(one)
        do(clocks, one, **RELEASE)
        operation(clocks, two)
        do(clocks, third, **ACQUIRE)
        assert knows(clocks, third, one, time) == kept, name


def test_a_failed_swap_and_a_relaxed_operation_publish_nothing() -> None:
    for semantics in ({"releases": True, "stores": False}, {"releases": False}):
        clocks, one, two = pair()
        time = clocks.time(one)
        clocks.debug_barrier(one)
        do(clocks, one, **semantics)
        do(clocks, two, **ACQUIRE)
        assert not knows(clocks, two, one, time)


def test_order_is_transitive_through_a_third_chain() -> None:
    clocks, one, two = pair()
    third = clocks.new_chain()
    time = clocks.time(one)
    clocks.debug_barrier(one)
    do(clocks, one, **RELEASE)
    do(clocks, two, **ACQUIRE)
    own = clocks.time(two)
    do(clocks, two, word=(0, 7), **RELEASE)  # without a debug_barrier, so it does not cover two's own accesses
    do(clocks, third, word=(0, 7), **ACQUIRE)
    assert knows(clocks, third, one, time) and not knows(clocks, third, two, own)


def test_there_may_be_any_number_of_chains() -> None:
    clocks, one, two = pair()
    time = clocks.time(one)
    clocks.debug_barrier(one)
    do(clocks, one, **RELEASE)
    more = [clocks.new_chain() for _ in range(100)]
    do(clocks, more[-1], **ACQUIRE)
    assert knows(clocks, more[-1], one, time) and not knows(clocks, two, one, time)


@pytest.mark.parametrize("change", ["release", "acquire", "debug_barrier"])
def test_a_log_can_be_run_again_with_one_line_changed(change) -> None:
    clocks, one, two = pair()
    time = clocks.time(one)
    if change != "debug_barrier":
        clocks.debug_barrier(one)
    do(clocks, one, line=("kernel.py", 1), releases=change != "release")
    do(clocks, two, line=("kernel.py", 2), acquires=change != "acquire")
    assert not knows(clocks, two, one, time)
    line = ("kernel.py", 2 if change == "acquire" else 1)
    other = clocks.suppose(Supposition(line, (change,)))
    assert knows(other, two, one, time)
    assert all(other.time(chain) == clocks.time(chain) for chain in (0, 1, 2, 3, one, one + 1, two, two + 1))
    assert not knows(clocks.suppose(Supposition(("kernel.py", 3), (change,))), two, one, time)


KINDS = {"load": (False, False), "store": (True, False), "atomic load": (False, True), "atomic": (True, True)}


@pytest.mark.parametrize("later", KINDS)
@pytest.mark.parametrize("earlier", KINDS)
def test_which_accesses_conflict(earlier, later) -> None:
    clocks, one, two = pair()
    region = Region("box", 0, torch.Size([8]), torch.float32)
    for chain, name in ((one, earlier), (two, later)):
        write, atomic = KINDS[name]
        conflict = region.access(clocks, np.array([3]), chain, 0, write=write, atomic=atomic)
    plain = not (KINDS[earlier][1] and KINDS[later][1])
    assert (conflict is not None) == (plain and (KINDS[earlier][0] or KINDS[later][0]))
    assert conflict is None or (conflict.element, conflict.component & ~1) == (3, one)


def test_the_elements_of_wide_and_narrow_accesses() -> None:
    region = Region("box", 0, torch.Size([4, 4]), torch.int16)
    addresses = np.array([region.base, region.base + 6], np.uint64)
    assert region.elements(addresses, 1).tolist() == region.elements(addresses, 2).tolist() == [0, 3]
    assert region.elements(addresses, 8).tolist() == [0, 1, 2, 3, 3, 4, 5, 6]
    assert region.name(7) == "box[1, 3] of rank 0"
