"""The control block of the ranks of one host: exchanges, comparisons and resets, even if a rank is missing."""

import fcntl
import gc
import os
import pickle
import resource
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tpfuse.comm import host, rank_state, waits
from tpfuse.comm.control_block import ControlBlock
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import Disagreement, PeerTimeout, Unavailable
from tpfuse.comm.rank_state import Mapping
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.comm.watchdog import is_late
from tpfuse.testing.patience import wait_until
from tpfuse.testing.ranks import on_ranks


def _control_block(timeout: float = 60.0) -> ControlBlock:
    group = dist.group.WORLD
    assert group is not None
    return ControlBlock(group, timeout)


def _open() -> tuple[int, int]:
    """Return the number of descriptors of this process, and of its mappings of tpfuse's memory."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/self/maps").read_text().count("memfd:tpfuse")


@pytest.mark.parametrize("world", [1, 3])
@on_ranks("world")
def test_an_exchange_returns_the_texts_of_all_ranks() -> None:
    control = _control_block()
    for text in ("", "short", "ü" * 500, "x", "y" * 4088, "after the longest"):
        every = [text if len(text) >= 4000 else f"{text}{rank}" for rank in range(control.world)]
        assert control.exchange(every[control.rank].encode(), "test") == [text.encode() for text in every]


@on_ranks(3)
def test_a_text_is_not_overwritten_before_it_is_read() -> None:
    control = _control_block()
    for turn in range(500):
        texts = control.exchange(b"%d %d" % (turn, control.rank) + b"." * (turn * 37 % 300), "test")
        assert [text.rstrip(b".") for text in texts] == [b"%d %d" % (turn, rank) for rank in range(control.world)]


@on_ranks(2)
def test_operations_that_differ_are_named_without_a_wait() -> None:
    """Ranks begin the same operations, other ones, and more of them than other ranks."""
    control, errors = _control_block(), []

    def begin(*ops: str) -> None:
        for op in ops:
            control.begin(op)
        dist.barrier()
        try:
            control.compare()
            errors.append("")
        except Disagreement as error:
            errors.append(str(error))
        dist.barrier()
        assert control.disagreed is bool(errors[-1]) and not control.aborted
        if control.disagreed:
            control.reset(lambda: None)

    begin("all_gather [4]", "all_gather [5]")
    begin("all_gather [4]", f"all_gather [{4 + control.rank}]", f"all_gather [{6 + control.rank}]")
    begin("all_gather [4]")
    begin(*["all_reduce [4]"] * (rank_state.RECORDS - 1))
    begin(*[f"only rank {control.rank}"] * control.rank)
    begin(*["all_reduce [4]"] * (control.world - 1 - control.rank))
    begin(*["all_reduce [4]"] * 2 * rank_state.RECORDS)
    begin("long " * 50 + str(control.rank))
    other = 1 - control.rank
    assert errors[1] == (
        f"operation 4: rank {other} runs all_gather [{4 + other}], rank {control.rank} runs all_gather"
        f" [{4 + control.rank}]"
    )
    assert [bool(text) for text in errors] == [False, True, False, False, False, True, False, True]


@on_ranks(2)
def test_an_operation_that_is_overwritten_is_not_compared() -> None:
    """Rank 0, which is far ahead, compares as a watchdog does while it begins one more operation."""
    control = _control_block()
    for _ in range(1 if control.rank else rank_state.RECORDS):
        control.begin("turn")
    dist.barrier()
    if control.rank == 0:
        control._digests[1] = (
            rank_state.RECORDS + 1
        ) << 32  # as in the middle of `begin`, which has not published it yet
        control.compare()
    dist.barrier()


@on_ranks(3)
def test_a_rank_that_was_told_to_stop_keeps_the_reason() -> None:
    """Rank 1 waits too long for rank 2, which is told so and goes on before rank 0 looks."""
    control = _control_block()
    if control.rank < 2:
        control.begin("operation")
    if control.rank == 1:
        control.fail("operation", 2, 1.0)
    wait_until(lambda: control.aborted, "rank 1 has told this rank to stop")
    if control.rank == 2:
        control.begin("the next one")
    dist.barrier()
    if control.rank == 0:
        control.stop_if_others_differ()
        error = control.fail("operation", 2, 1.0)
        assert isinstance(error, PeerTimeout) and error.peer == 2


@on_ranks(3)
def test_ranks_that_wait_for_a_rank_in_another_operation_get_an_error() -> None:
    """Rank 0 waits for an exchange to which the others never come; it names the one that it compared with first."""
    control = _control_block()
    rank, own = control.rank, f"operation of {min(control.rank, 1)}"
    control.begin(own)
    with pytest.raises(Disagreement) as caught:
        if rank == 0:
            control.exchange(b"", "test")
        else:
            wait_until(lambda: control.states[0].begun, "rank 0 has begun")
            control.stop_if_others_differ()
            assert control.aborted
            raise control.fail("test", None, 0.0)
    control.reset(lambda: None)
    others = (0,) if rank else (1, 2)
    expected = [f"operation 1: rank {x} runs operation of {min(x, 1)}, rank {rank} runs {own}" for x in others]
    assert str(caught.value) in expected
    assert control.exchange(b"%d" % rank, "after") == [b"0", b"1", b"2"]


@on_ranks(3)
def test_the_flight_record_holds_the_last_operations() -> None:
    control = _control_block()
    assert control.local.operations() == [] and control.local.last_operation() == ""
    for number in range(1, rank_state.RECORDS + 11):
        begun = control.begin(f"operation {number} " + "n" * 300)
        if number % 2:
            control.end(begun)
    operations = control.local.operations()
    assert [entry["number"] for entry in operations] == list(range(11, rank_state.RECORDS + 11))
    assert str(operations[-1]["operation"]).startswith(f"operation {rank_state.RECORDS + 10} nnn")
    assert bool(operations[-2]["ended_ns"]) and not operations[-1]["ended_ns"]
    control.begin("x" + "ü" * 300)  # The record cuts it within a letter.
    assert control.local.last_operation().startswith("x" + "ü" * 70)
    control.begin("short")
    assert control.local.last_operation() == "short"
    control.exchange(b"", "test")
    for state in control.states:
        assert state.operations()[-1]["operation"] == "short"
    assert control.slowest() is None
    control.exchange(b"", "test")
    if control.rank != 1:
        control.begin("one more")
    control.exchange(b"", "test")
    assert control.slowest() == (None if control.rank == 1 else 1)


@on_ranks(3)
def test_an_abort_ends_the_waits_of_every_rank_until_the_reset() -> None:
    control = _control_block()
    control.step = 5
    if control.rank == 0:
        control.abort(1, 2)
        control.abort(1, 0)  # It is too late: only the first call counts.
    with pytest.raises(PeerTimeout) as caught:
        control.exchange(b"", "second")
        control.exchange(b"", "third")
    error = caught.value
    assert error.op in ("second", "third") and (error.rank, error.step, error.peer) == (control.rank, 5, 2)
    control.reset(lambda: None)
    assert not control.aborted and control.exchange(b"%d" % control.rank, "after") == [b"0", b"1", b"2"]


@on_ranks(2)
def test_a_reset_to_which_no_other_rank_came_can_be_tried_again() -> None:
    control = _control_block()
    if control.rank == 0:
        control.timeout = 0.3
        with pytest.raises(PeerTimeout) as caught:
            control.reset(lambda: None)
        assert caught.value.peer == 1 and caught.value.op == "reset"
        control.timeout = 60.0
    dist.barrier()
    cleared: list[int] = []
    for turn in range(3):
        control.reset(lambda: cleared.append(1))
        assert control.exchange(b"%d" % turn, "after") == [b"%d" % turn] * control.world
    assert len(cleared) == 3


@on_ranks(2)
def test_a_rank_may_end_after_it_has_come() -> None:
    """Rank 1 comes, and its process ends, after rank 0 has read its word and before rank 0 checks its process."""
    group = dist.group.WORLD
    assert group is not None
    memory = SharedMemory(group, 60.0)
    flags, looks = memory.signals("flags", 1), memory.signals("looks", 1)
    if memory.rank == 0:

        def ended(rank: int) -> bool:
            """Report at each check of rank 1's process that it has ended, but only after rank 1 has gone on."""
            look = int(looks.peers[1][0]) + 1
            memory.signal(looks, 1, 0, look)
            if look == 1:
                wait_until(lambda: int(flags.peers[1][0]), "rank 1 has come to the wait")
            else:
                wait_until(lambda: epoch() == memory.control._epoch, "rank 1 has come to the barrier")
            return True

        def epoch() -> int:
            return int(memory.control.states[1].numbers[rank_state.EPOCH])

        memory.control.has_ended = ended  # type: ignore[method-assign]
        memory.wait_signal(flags, 1, 0, 1, op="test")
        memory.barrier()
        assert int(looks.peers[1][0]) == 2, "both waits have looked at the process"
    else:
        memory.wait_signal(looks, 1, 0, 1, op="the first look")
        memory.signal(flags, 1, 0, 1)
        memory.wait_signal(looks, 1, 0, 2, op="the second look")
        memory.barrier()


@on_ranks(2)
def test_messages_are_recorded_beside_the_operations_and_not_compared() -> None:
    """Ranks have other messages, and other numbers of them."""
    control = _control_block()
    control.begin_message(f"only rank {control.rank}")
    assert control.local.last_operation() == f"only rank {control.rank}"
    control.end(control.begin("all_gather"))
    assert control.local.last_operation() == "all_gather"
    for number in range(70 * control.rank):
        control.end(control.begin_message(f"message {number}"))
    control.exchange(b"", "test")
    control.compare()
    assert control.slowest() is None and control.states[1].begun == 1 and control.states[1].messages == 71
    first, second = ([entry["number"] for entry in state.operations()] for state in control.states)
    assert first == [-1, 1] and second == [1, *range(-8, -72, -1)]
    assert control.states[1].last_operation() == "message 69"
    assert "last seen in message 69" in control.describe(1)
    last = control.states[1].operations()[-1]
    assert last["ended_ns"] and not control.states[0].operations()[0]["ended_ns"]
    dist.barrier()
    error = control.fail("receive x", 1 - control.rank, 2.0)
    assert isinstance(error, PeerTimeout) and error.waited == 2.0
    control.begin_message("another one")
    error = control.fail("another one", 1 - control.rank, 2.0)
    assert isinstance(error, PeerTimeout) and error.waited is None, "it cannot begin after the failure"


def test_a_kernel_that_waits_for_one_rank_is_late_a_second_after_that_rank_has_left() -> None:
    control = mock.Mock(timeout=60.0)
    for left, first_left, peer, waited, late in (
        (True, None, 1, 0.5, False),  # it may have signalled before it left
        (True, None, 1, 1.5, True),
        (False, None, 1, 1.5, False),
        (False, None, 1, 60.5, True),
        (True, None, None, 1.5, False),  # it is through the operation
        (True, 2, None, 0.0, True),
        (False, None, None, 60.5, True),
    ):
        control.has_left.return_value, control.first_left.return_value = left, first_left
        assert is_late(control, peer, waited) == late


@on_ranks(2)
def test_the_end_of_a_chain_of_waits_is_none_if_ranks_wait_for_each_other() -> None:
    control = _control_block()
    other = 1 - control.rank
    for awaited, expected in ((other, None), (None, other)):
        dist.barrier()
        waits.give_up(awaited)  # it holds, however long the barrier takes
        dist.barrier()
        assert control.last_of_chain(other) == expected
    waits.forget()


@on_ranks(2)
def test_a_rank_has_left_only_if_it_did_not_end_the_operation() -> None:
    control = _control_block()
    with pytest.MonkeyPatch.context() as patch:
        for number in range(3):
            begun = control.begin(f"operation {number}")
            for ended in (False, True):
                control.exchange(b"begun or ended", "test")
                patch.setattr(control, "has_ended", lambda rank: rank == 1)
                assert control.first_left() == (1 if control.rank == 0 and not ended else None)
                patch.undo()
                control.exchange(b"seen", "test")
                if control.rank == 1 or ended:
                    control.end(begun)


@on_ranks(3)
def test_ranks_on_two_hosts_get_the_reason() -> None:
    reason = f"the group spans hosts or containers: rank 0 is on {socket.gethostname()}, rank 1 on elsewhere"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Unavailable, match=f"^{reason}$"):
        if dist.get_rank() == 1:
            patch.setattr(host, "node_identity", lambda: "boot pid:[1] net:[1] elsewhere")
        _control_block()


@on_ranks(3)
def test_a_failure_on_one_rank_is_reported_on_all() -> None:
    """A system call fails on one rank."""
    for rank, function, verb in ((0, "memfd_create", "made"), (0, "posix_fallocate", "made"), (2, "_map", "opened")):
        before = _open()
        many = mock.Mock(side_effect=OSError(23, "Too many open files in system"))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Unavailable) as caught:
            if dist.get_rank() == rank:
                patch.setattr(rank_state if function == "_map" else os, function, many)
            _control_block()
        message = str(caught.value)
        del caught  # Its traceback keeps what was open.
        assert f"bytes of shared memory for control block cannot be {verb}" in message
        assert "Too many open files in system" in message and _open() == before


def test_the_error_of_a_mapping_that_is_too_large_has_the_reason() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(Unavailable, match=r"100000 bytes of shared memory for x cannot be made: .*too large"):
            Mapping("x", 100000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(Unavailable, match=r"for y cannot be opened \(made by process 1\)"):
        Mapping("y", 4096, (1, 12345))


def test_time_outs_have_all_details_and_can_be_pickled() -> None:
    error = PeerTimeout("all_reduce", step=7, rank=1, peer=2, waited=1.25, detail="its process (5) has ended")
    assert str(error) == "all_reduce, step 7: rank 1 waited 1.2 s for rank 2; its process (5) has ended"
    assert str(PeerTimeout("x", step=-1, rank=0, peer=None, waited=0)) == "x: rank 0 waited 0.0 s for a rank"
    assert "rank 0 came too late" in str(PeerTimeout("x", step=-1, rank=0, peer=0, waited=0.0))
    later = PeerTimeout("x", step=-1, rank=0, peer=1, waited=None, detail="y: its process (5) has ended")
    assert str(later).startswith("x: rank 0 cannot begin it after an earlier failure (y: its process (5) has ended): ")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.op, copy.step, copy.peer) == (str(error), "all_reduce", 7, 2)


@on_ranks(2)
def test_a_rank_with_many_open_files_notices_the_end_of_a_peer() -> None:
    """The peer's descriptor is above 1023, which select(2) refuses."""
    memory = symmetric_memory(dist.group.WORLD, torch.device("cpu"))
    assert isinstance(memory, SharedMemory)
    state = memory.control.states[1 - memory.rank]
    assert state.pidfd is not None
    if 0 < resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 2000:
        return  # a process of this machine may not open as many files
    before, state.pidfd = state.pidfd, fcntl.fcntl(state.pidfd, fcntl.F_DUPFD, 2000)
    try:
        assert not memory.control.has_ended(1 - memory.rank)
    finally:
        os.close(state.pidfd)
        state.pidfd = before
