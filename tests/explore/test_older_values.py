"""The message of a race tells what the older values that weak memory may return do to the program."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests.explore.test_explore import changed, signal_kernel
from tpfuse.explore import Decided, RaceError, Sequential, explore, explore_all, explorer
from tpfuse.explore.mutants import surviving

EXAMPLE = Path(__file__).parents[2] / "examples" / "hand_over.py"
BARRIER, RELEASE = ("    tl.debug_barrier()\n", ""), ('"release"', '"relaxed"')


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Return a function that imports the example with a replacement."""

    def load(old="", new=""):
        text = EXAMPLE.read_text()
        assert text.count(old) == 1 or not old
        (tmp_path / "handed_over.py").write_text(text.replace(old, new) if old else text)
        spec = importlib.util.spec_from_file_location("handed_over", tmp_path / "handed_over.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "handed_over", module)
        spec.loader.exec_module(module)
        return module

    return load


def found(program, run=explore, **options):
    """Return the line of the race about older values, without its beginning; "" if there is none."""
    with pytest.raises(RaceError) as caught:
        run(program, 2, **options)
    lines = [x for x in str(caught.value).splitlines() if "older value" in x]
    assert len(lines) <= 1
    return "".join(lines).removeprefix("  with older values ")


@pytest.mark.parametrize("run", [explore, explore_all])
@pytest.mark.parametrize("change", [BARRIER, RELEASE], ids=["no barrier", "relaxed"])
def test_the_example_receives_what_was_there_before(imported, change, run) -> None:
    line = found(imported(*change).protocol, run)
    rank = 1 if run is explore else 0
    expected = f"({0.0} instead of {11.0 - rank}), which PTX allows: rank {rank} raised AssertionError at "
    assert line.startswith(expected) and line.endswith(": assert slots.local.eq(11.0 - memory.rank).all()")


@pytest.mark.parametrize(
    "change", [{"BARRIER": False}, {"RELEASE": "relaxed"}, {"RELEASE": "acquire"}, {"ACQUIRE": "relaxed"}]
)
def test_a_kernel_without_one_of_its_orders_computes_a_wrong_result(change) -> None:
    line = found(changed(**change), schedules=[Sequential()])
    assert line.startswith("(0.0 instead of 10.0), which PTX allows: rank 0 raised AssertionError: wrong result")


def boxes(check, ordered=(), unordered=(2.0,), dtype=torch.float32):
    """Return a program in which rank 0 writes into a box of rank 1, which then runs `check(memory, box, flags)`."""

    def program(memory):
        box, flags = memory.buffer("box", (4,), dtype), memory.signals("flags", 1)
        for value in ordered:
            if memory.rank == 0:
                box.peers[1].fill_(value)
            memory.barrier()
        if memory.rank == 0:
            for value in unordered:
                box.peers[1].fill_(value)
            memory.signal(flags, 1, 0, 1)
        else:
            check(memory, box, flags)

    return program


def wants(read, value):
    """Return a check for `boxes` that what `read(box)` returns is a value."""

    def check(memory, box, flags):
        assert (got := read(box)) == value, f"got {got}"

    return check


@triton.jit
def copy_kernel(box_ptr, out_ptr, ASSEMBLY: tl.constexpr):
    index = tl.arange(0, 4)
    if ASSEMBLY:
        x = tl.inline_asm_elementwise("ld.global.f32 $0, [$1];", "=f,l", [box_ptr + index], tl.float32, False, 1)
    else:
        x = tl.load(box_ptr + index, index != 1)
    tl.store(out_ptr + index, x)


def copied(box, assembly):
    out = torch.zeros(4)
    copy_kernel[(1,)](box.local, out, assembly)
    return out[3].item()


@pytest.mark.parametrize(
    "read",
    [
        lambda box: copied(box, False),
        lambda box: copied(box, True),
        lambda box: box.local[3].item(),
        lambda box: box.local.tolist()[3],
        lambda box: float(torch.cat([torch.ones(1), box.local])[-1]),
        lambda box: float(box.peers[0].copy_(box.local)[3]),
        lambda box: float(box.local.view(2, 2).t().contiguous().sum() / 4),
    ],
    ids=["kernel", "assembly", "item", "tolist", "cat", "copy", "sum"],
)
@pytest.mark.parametrize(("ordered", "older"), [((), 0.0), ((7.0, 1.0), 1.0)])
def test_a_read_finds_the_newest_value_that_its_rank_knows(read, ordered, older) -> None:
    line = found(boxes(wants(read, 3.0), ordered, (2.0, 3.0)), schedules=[Sequential()])
    assert line.startswith(f"({older} instead of 3.0), which PTX allows: rank 1 raised AssertionError: got {older}")


def test_a_rank_finds_what_it_has_written_and_waited_for() -> None:
    def check(memory, box, flags):
        found = [torch.add(box.local, box.local).tolist()]
        box.local[0] = 5.0
        found.append(box.local.tolist())
        memory.wait_signal(flags, 1, 0, 1, op="test")
        box.local[2:].mul_(3.0)
        raise AssertionError([*found, box.local.tolist()])

    line = found(boxes(check), schedules=[Sequential()])
    assert "AssertionError: [[0.0, 0.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0], [5.0, 2.0, 6.0, 6.0]] at" in line


@pytest.mark.parametrize(("value", "dtype"), [(0.0, torch.bfloat16), (0, torch.uint8)], ids=str)
def test_an_older_value_that_is_the_same_changes_no_result(value, dtype) -> None:
    line = found(boxes(wants(lambda box: box.local[0].item(), value), (), (value,), dtype), explore_all)
    assert line == f"({value}, the same), which PTX allows: the result does not change"


def test_a_program_without_a_check_passes_with_older_values() -> None:
    line = found(boxes(lambda memory, box, flags: box.local.sum()), explore_all)
    assert line == "(0.0 instead of 2.0), which PTX allows: no check of the program fails"


def test_no_later_race_ends_the_run_with_older_values() -> None:
    program = boxes(lambda memory, box, flags: [box.local.sum(), signal_kernel[(1,)](flags.local, "gpu")])
    line = found(program, schedules=[Sequential()])
    assert line == "(0.0 instead of 2.0), which PTX allows: no check of the program fails"


@triton.jit
def mixed_kernel(box_ptr, flag_ptr):
    tl.store(box_ptr, 1)
    tl.atomic_xchg(box_ptr + 1, 2, sem="relaxed", scope="sys")
    tl.atomic_xchg(flag_ptr, 1, sem="release", scope="sys")  # without a barrier it covers atomic operations alone


def test_of_two_elements_only_the_one_that_nothing_orders_is_older() -> None:
    def program(memory):
        box, flags = memory.buffer("box", (2,), torch.int32), memory.signals("flags", 1)
        if memory.rank == 0:
            mixed_kernel[(1,)](box.peers[1], flags.peers[1])
        else:
            memory.wait_signal(flags, 1, 0, 1, op="test")
            wants(lambda box: box.local.tolist(), [1, 2])(memory, box, flags)

    assert "AssertionError: got [0, 2]" in found(program)


def test_a_value_that_differs_is_shown_before_one_that_is_the_same() -> None:
    program = boxes(lambda memory, box, flags: [box.local.sum(), flags.local.sum()], unordered=(0.0,))
    line = found(program, schedules=[Sequential()])
    assert line == "(0 instead of 1), which PTX allows: no check of the program fails"


def test_words_that_may_be_addresses_are_the_newest() -> None:
    assert found(boxes(wants(lambda box: box.local[0].item(), 2), dtype=torch.int64), schedules=[Sequential()]) == ""


def test_a_decision_that_is_impossible_after_the_race_leaves_the_error_as_it_is() -> None:
    program = boxes(lambda memory, box, flags: [box.local.sum(), memory.signal(flags, 1, 0, 1)])
    assert found(program, schedules=[Decided({0: (0,)})]) and not found(program, schedules=[Decided({1: (7,)})])


@triton.jit
def wait_kernel(flags_ptr, box_ptr, out_ptr, VOLATILE: tl.constexpr):
    while tl.load(flags_ptr, volatile=VOLATILE) == 0:
        pass
    tl.store(out_ptr, tl.load(box_ptr))


@pytest.mark.parametrize(
    ("volatile", "line"),
    [
        (True, "(0.0 instead of 2.0), which PTX allows: rank 1 raised AssertionError: got 0.0"),
        (False, "(0 instead of 1), which PTX allows: deadlock: rank 0 has ended rank 1, program 0 waits at "),
    ],
    ids=["volatile", "weak"],
)
def test_a_wait_by_volatile_loads_ends(volatile, line) -> None:
    def check(memory, box, flags):
        out = torch.zeros(1)
        wait_kernel[(1,)](flags.local, box.local, out, volatile)
        assert out[0] == 2.0, f"got {out[0]}"

    assert found(boxes(check), schedules=[Sequential()]).startswith(line)


def test_right_programs_and_mutants_cost_no_more_runs(imported, monkeypatch) -> None:
    def refuse(*arguments):
        raise NotImplementedError

    right = imported()
    monkeypatch.setattr(explorer, "OlderValues", refuse)
    explore(right.protocol, 2)
    assert surviving(lambda changed: changed.protocol, [right], 2) == []
    with pytest.raises(NotImplementedError):
        explore(imported(*BARRIER).protocol, 2)
