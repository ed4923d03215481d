"""A rank that is missing from a message is named, in the send as in the receive, and afterwards the ranks can go on.

The ranks are forked, so that a test can end any of them within a second or two.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.forked_ranks import LIMIT, Rank, ranks
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm import handle
from tpfuse.comm.collectives.collective import set_timeout
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.messages import Messages, Route, open_messages
from tpfuse.comm.settings import set_settings
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.switches import use
from tpfuse.testing.patience import patient

CPU = torch.device("cpu")
ROUTES = [Route("x", 0, 1, 2), Route("y", 1, 0, 2), Route("z", 2, 0, 1)]


def opened(name: Implementation, group: dist.ProcessGroup, timeout: float) -> Messages:
    """Return the routes; wait have this deadline after they are open."""
    set_settings(timeout=patient(LIMIT))
    with use(implementation=name):
        messages = open_messages(group, CPU, torch.float32, ROUTES, 40)
    dist.barrier(group)
    set_settings(timeout=timeout)
    set_timeout(group)
    handle.PATIENCE = patient(0.5)
    if name != "collective":
        memory_of(group).timeout = memory_of(group).control.timeout = timeout
    return messages


def memory_of(group: dist.ProcessGroup) -> SharedMemory:
    memory = symmetric_memory(group, CPU)
    assert isinstance(memory, SharedMemory)
    return memory


def send(messages: Messages, count: int) -> None:
    """Send on route x from rank 0."""
    for number in range(count):
        messages.send(0, torch.full((10,), float(number)))


def receive(messages: Messages, count: int) -> None:
    """Receive on route x at rank 1."""
    for number in range(count):
        message = messages.receive(0, (10,), torch.float32)
        assert message.tensor.tolist() == [float(number)] * 10
        messages.release(0, message)


WAITS: dict[str, Callable[[Messages], None]] = {  # what a rank of `_wait_in_vain` does until it waits in vain
    "send": lambda messages: send(messages, 3),
    "receive": lambda messages: receive(messages, 1),
}


def _wait_in_vain(rank: Rank, name: Implementation, what: str, timeout: float) -> PeerTimeout | None:
    """Rank 0 sends, or rank 1 receives, and the other one of them stays away. Rank 0 holds the only slot of route z."""
    waits = 0 if what == "send" else 1
    group = rank.join()
    messages = opened(name, group, timeout)
    held = error = None
    if rank.rank == 2:
        messages.send(2, torch.zeros(1))
    elif rank.rank == 0:
        held = messages.receive(2, (1,), torch.float32)
    rank.tell("here")
    if rank.rank == waits:
        with pytest.raises(PeerTimeout) as caught:
            WAITS[what](messages)
        error = caught.value
        rank.tell(error)
    rank.hear()
    if name != "collective":
        memory = memory_of(group)
        memory.timeout = memory.control.timeout = patient(LIMIT)
        memory.reset()
        if rank.rank == 2:
            messages.send(2, torch.ones(1))
        elif rank.rank == 1:
            receive(messages, 5)
        else:
            send(messages, 5)
            assert held is not None
            with pytest.raises(ValueError, match=r"release of z, message 0: .* or before a reset"):
                messages.release(2, held)
            message = messages.receive(2, (1,), torch.float32)
            assert message.number == 0 and message.tensor.tolist() == [1.0]
            messages.release(2, message)
    return error


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("direct", "send"), ("collective", "receive"),
        *exhaustive(("fused", "send"), ("fused", "receive"), ("collective", "send")),
    ],
)  # fmt: skip
def test_a_rank_that_stays_away_is_named_and_all_can_go_on(name: Implementation, what: str, tmp_path: Path) -> None:
    timeout = patient(0.7)
    waits = 0 if what == "send" else 1
    with ranks(3, tmp_path, _wait_in_vain, name, what, timeout) as running:
        running.wait_for_all()
        error = running.hear(waits)
        assert isinstance(error, PeerTimeout), error
        assert (error.rank, error.peer) == (waits, 1 - waits)
        # Gloo has no slots: the first message has not left when the third one is sent.
        numbers = {"direct": 2, "fused": 2, "collective": 0}
        assert error.op == f"{what} x, message {numbers[name] if what == 'send' else 0}"
        assert error.waited is not None and 0.9 * timeout < error.waited < timeout + patient(3.0)
        running.go()
        for rank in range(3):
            result = running.result(rank)[1]
            assert str(result) == str(error if rank == waits else None)
