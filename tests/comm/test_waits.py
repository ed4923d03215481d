"""Ranks that wait for each other in a chain all name the rank at its end, also through several groups.

The ranks are forked, so that a test can stop them.
"""

import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.forked_ranks import LIMIT, Rank, ranks
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm import handle
from tpfuse.comm.collectives import collective
from tpfuse.comm.collectives.collective import set_timeout
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.messages import Messages, Route, open_messages
from tpfuse.comm.settings import set_settings
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.switches import use
from tpfuse.testing.patience import patient

CPU = torch.device("cpu")
BOTH_WAYS = [Route(f"{a} to {b}", a, b, 1) for low in range(2) for a, b in ((low, low + 1), (low + 1, low))]


def _memory(group: dist.ProcessGroup, timeout: float) -> SharedMemory:
    memory = symmetric_memory(group, CPU)
    assert isinstance(memory, SharedMemory)
    memory.timeout = memory.control.timeout = timeout
    return memory


def _route(source: int, target: int) -> int:
    return next(index for index, route in enumerate(BOTH_WAYS) if (route.source, route.target) == (source, target))


def _wait_for(messages: Messages, rank: int, peer: int, *, sends: bool) -> None:
    """Wait for a message of `peer` or, if it sends, until `peer` releases the only slot."""
    if sends:
        for _ in range(2):
            messages.send(_route(rank, peer), torch.zeros(1))
    else:
        messages.receive(_route(peer, rank), (1,), torch.float32)


def _chain(rank: Rank, name: Implementation, timeout: float, last_waits: bool) -> None:
    """Every rank waits for the next one, and rank 0 begins first. last_waits: rank 2 waits for rank 1 then.

    The implementation "fused" waits in a kernel when it sends.
    """
    set_settings(timeout=patient(LIMIT))
    group = rank.join()
    with use(implementation=name):
        messages = open_messages(group, CPU, torch.float32, BOTH_WAYS, 4)
    dist.barrier(group)
    set_settings(timeout=timeout)
    if name == "collective":
        set_timeout(group)
        handle.PATIENCE = patient(2.0)
    else:
        _memory(group, timeout)
    time.sleep(rank.rank * timeout / 20)
    rank.tell("here")
    if rank.rank < 2 or last_waits:
        _wait_for(messages, rank.rank, rank.rank + 1 if rank.rank < 2 else 1, sends=name == "fused")
    rank.hear()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("direct", "stopped while it waits"),
        *exhaustive(("direct", "stays away"), ("fused", "stopped while it waits"), ("fused", "killed")),
        *exhaustive(("collective", "stays away"), ("collective", "stopped while it waits")),
    ],
)
def test_all_ranks_of_a_chain_name_its_last_rank(name: Implementation, what: str, tmp_path: Path) -> None:
    timeout = patient(4.0 if name == "collective" else 2.0)
    with ranks(3, tmp_path, _chain, name, timeout, what != "stays away") as running:
        running.wait_for_all()
        if what != "stays away":
            time.sleep(0.2)  # it has begun to wait
            running.send(2, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
        for rank in range(2):
            error = running.result(rank)[1]
            assert isinstance(error, PeerTimeout), error
            assert (error.rank, error.peer) == (rank, 2), error


@pytest.mark.parametrize("name", exhaustive("direct", "collective"))
def test_no_rank_is_named_if_all_wait_for_each_other(name: Implementation, tmp_path: Path) -> None:
    with ranks(3, tmp_path, _chain, name, patient(2.0), True) as running:
        running.wait_for_all()
        error = running.result(2)[1]
        assert isinstance(error, PeerTimeout) and error.peer is None, error


def _between_nodes(rank: Rank, what: str) -> None:
    """Rank 0 waits for rank 1 without symmetric memory, and rank 1 has given up rank 2, with which it shares memory."""
    set_settings(timeout=patient(LIMIT))
    rank.join()
    nodes, within = dist.new_group([0, 1]), dist.new_group([1, 2])
    with use(implementation="collective"):
        messages = open_messages(nodes, CPU, torch.float32, BOTH_WAYS[:2], 4) if rank.rank < 2 else None
    if messages is not None:
        collective.start_all_reduce(torch.ones(1), nodes).wait()
    if rank.rank > 0:
        memory = _memory(within, patient(0.5))
        flags = memory.signals("never", 1)
    set_settings(timeout=patient(1.5))
    handle.PATIENCE = patient(0.5)
    rank.tell("here")
    if rank.rank == 1:
        memory.wait_signal(flags, 0, 0, 1, peer=1, op="wait")
    elif messages is not None:
        set_timeout(nodes)
        if what == "message":
            _wait_for(messages, 0, 1, sends=False)
        else:
            collective.start_all_reduce(torch.ones(1), nodes).wait()
    rank.hear()


@pytest.mark.parametrize("what", ["message", *exhaustive("collective")])
def test_ranks_without_symmetric_memory_name_the_last_rank_of_a_chain_too(what: str, tmp_path: Path) -> None:
    with ranks(3, tmp_path, _between_nodes, what) as running:
        running.wait_for_all()
        for rank in range(2):
            error = running.result(rank)[1]
            assert isinstance(error, PeerTimeout) and error.peer == 2, error


def _two_groups(rank: Rank, first: float, second: float) -> None:
    """Rank 0 waits for rank 1 in one group, rank 1 waits for rank 2 in another one, and rank 2 stays away."""
    set_settings(timeout=patient(LIMIT))
    rank.join()
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    timeouts = first, second
    memories = [
        _memory(group, timeout)
        for group, timeout in zip(groups, timeouts, strict=True)
        if rank.rank in dist.get_process_group_ranks(group)
    ]
    flags = [memory.signals("never", 1) for memory in memories]
    rank.tell("here")
    if rank.rank < 2:
        memories[-1].wait_signal(flags[-1], 0, 0, 1, peer=1, op="wait")
    rank.hear()


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(1.5, LIMIT, id="waits"), pytest.param(3.0, 1.0, id="has given up", marks=pytest.mark.exhaustive)],
)
def test_a_rank_of_another_group_is_named(first: float, second: float, tmp_path: Path) -> None:
    """Rank 1 still waits for rank 2, or has given up, when rank 0 gives up."""
    with ranks(3, tmp_path, _two_groups, patient(first), patient(second)) as running:
        running.wait_for_all()
        error = running.result(0)[1]
        assert isinstance(error, PeerTimeout), error
        assert error.peer == 2 and "; a rank of this group waits for it in another group" in str(error)
