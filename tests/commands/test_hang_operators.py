"""`tpfuse hang` explains waits of each kind: for a rank that stays away from an operation, or is stopped inside it.

Two ranks serve all tests, one after another. Rank 0 takes a step of the case to its end, the first rank that is missing
makes it raise PeerTimeout, and the test asks `tpfuse hang` while rank 1 is missing.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.forked_ranks import Rank, Ranks, ranks
from tests.support.meshes import mesh_from
from tpfuse.choices import Implementation
from tpfuse.comm import collectives, handle
from tpfuse.comm.agreement import exchange
from tpfuse.comm.collectives import collective
from tpfuse.comm.control_block import ControlBlock
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.messages import Messages, Route, open_messages
from tpfuse.comm.settings import set_settings
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.comm.stacks import offered_stack
from tpfuse.commands.hang import hang
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.switches import chosen_implementation, use
from tpfuse.testing.patience import patient
from tpfuse.zero import shard
from tpfuse.zero.bucket_updater import BucketUpdater

CPU = torch.device("cpu")
LONG = 20.0  # seconds on an idle machine, for the steps in which every rank takes part
SHORT = 0.6  # seconds on an idle machine, for the wait that a test is about

Step = Callable[[], object]


@dataclass(frozen=True)
class Missed:
    """A step in which rank 1 is missing from one operation, whose text begins with `op`.

    mode: whether rank 1 stays away from it, or is stopped in it. name: the implementation. make: does what comes before
    the step, and returns the step. said: how `tpfuse hang` names the operation in which rank 0 waits (default: op).
    """

    mode: Literal["away", "stopped"]
    name: Implementation
    op: str
    make: Callable[[dist.ProcessGroup], Step]
    said: str = ""


def _gather(group: dist.ProcessGroup) -> Tensor:
    weight = torch.ones(3, 4, requires_grad=True)
    return all_gather_linear(torch.ones(2, 4, requires_grad=True), weight, None, group)


def _attention(schedule: Any) -> Callable[[dist.ProcessGroup], Tensor]:
    def attention(group: dist.ProcessGroup) -> Tensor:
        x = torch.ones(1, 2, 4, 16, requires_grad=True)
        return ring_attention(x, x, x, group=group, schedule=schedule)

    return attention


def forward(of: Callable[[dist.ProcessGroup], Tensor]) -> Callable[[dist.ProcessGroup], Step]:
    return lambda group: lambda: of(group)


def backward(of: Callable[[dist.ProcessGroup], Tensor]) -> Callable[[dist.ProcessGroup], Step]:
    def make(group: dist.ProcessGroup) -> Step:
        out = of(group)
        return lambda: torch.autograd.backward(out.sum(), retain_graph=True)

    return make


def on(of: Callable[..., object], *shape: int) -> Callable[[dist.ProcessGroup], Step]:
    return lambda group: lambda: of(torch.ones(shape), group)


def _later(group: dist.ProcessGroup) -> Step:
    x = torch.ones(9 * 2**18)  # two pieces: the first one is sent when the operation begins
    return lambda: collectives.start_all_gather(x, group)[1].wait()


def _zero(group: dist.ProcessGroup) -> Step:
    """Return a step of ZeRO, at stage 2 or fused at stage 1, with several buckets."""
    stage = 1 if chosen_implementation() == "fused" else 2
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    buckets = shard(model, mesh_from(group), stage=stage, bucket_bytes=300)
    optimizer = BucketUpdater(buckets)

    def step() -> None:
        buckets.start(last=True)
        model(torch.ones(2, 8)).sum().backward()
        buckets.finish(sums=stage == 1)
        optimizer.step(1e-2)

    return step


def send(messages: Messages) -> None:
    """Send two messages on a route of one slot: the second one waits until the first one is released."""
    for _ in range(2):
        messages.send(0, torch.ones(2))
    messages.finish()


def receive(messages: Messages) -> None:
    """Receive and release what `send` sends."""
    for _ in range(2):
        messages.release(0, messages.receive(0, (2,), torch.float32))


def message(source: int) -> Callable[[dist.ProcessGroup], Step]:
    """Return what makes a step in which rank `source` sends messages to the other one of two ranks."""

    def make(group: dist.ProcessGroup) -> Step:
        routes = [Route(f"numbers of rank {source}", source, 1 - source, 1)]
        messages = open_messages(group, CPU, torch.float32, routes, 8)
        return partial(send if group.rank() == source else receive, messages)

    return make


def _broadcast(x: Tensor, group: dist.ProcessGroup) -> None:
    collective.broadcast_([x], group)


def _first_exchange(group: dist.ProcessGroup) -> Step:
    return lambda: exchange(1, group, op="first exchange", within=patient(SHORT))


def _buffer(group: dist.ProcessGroup) -> Step:
    numbers = iter(range(9))
    return lambda: symmetric_memory(group, CPU).buffer(f"x{next(numbers)}", (3,), torch.float32)


def _barrier(group: dist.ProcessGroup) -> Step:
    return lambda: symmetric_memory(group, CPU).barrier("end of the epoch")


CASES = [
    Missed("stopped", "direct", "all_gather torch", on(collectives.all_gather, 2), "all_gather"),
    Missed("away", "fused", "all_gather", on(collectives.all_gather, 2)),
    # Gloo waits here, which keeps no record.
    Missed("stopped", "collective", "all_reduce", on(collectives.all_reduce, 2)),
    Missed("away", "collective", "all_gather", backward(_gather)),
    Missed("stopped", "collective", "broadcast", on(_broadcast, 2)),
    Missed("away", "collective", "send numbers of rank 0", message(0)),
    Missed("stopped", "collective", "first exchange", _first_exchange),
    Missed("away", "direct", "all_gather_linear torch", forward(_gather), "all_gather_linear"),
    Missed("stopped", "fused", "all_gather_linear backward", backward(_gather)),
    Missed("away", "direct", "ring_attention ", forward(_attention("ring")), "ring_attention"),
    Missed("stopped", "fused", "ring_attention backward", backward(_attention("all_gather"))),
    Missed("away", "direct", "exchange of heads", forward(_attention("ulysses"))),
    Missed("stopped", "direct", "wait for all_gather", _later, "all_gather"),
    Missed("away", "direct", "sum of bucket 0", _zero, "buffer of bucket 0"),
    Missed("stopped", "fused", "sum of bucket 1", _zero),
    # Rank 1 misses the other end of the message in which rank 0 waits.
    Missed("away", "direct", "receive numbers of rank 0, message 2", message(0), "send numbers of rank 0, message 3"),
    Missed(
        "stopped", "direct", "send numbers of rank 1, message 2", message(1), "receive numbers of rank 1, message 2"
    ),
    Missed("away", "fused", "receive numbers of rank 0, message 2", message(0), "send numbers of rank 0, message 3"),
    Missed("stopped", "direct", "end of the epoch", _barrier),
    Missed("away", "direct", "buffer 'x", _buffer, "buffer x1"),
]
FIRST_TIER = 3  # one case of each implementation


def _stay_away(rank: Rank) -> None:
    rank.pause()


def _stop(rank: Rank) -> None:
    rank.tell("here")
    os.kill(os.getpid(), signal.SIGSTOP)
    rank.hear()


_MISS = {"away": _stay_away, "stopped": _stop}


@contextmanager
def _missing(rank: Rank, case: Missed) -> Iterator[None]:
    """Make this rank stay away from the case's operation, or stop just after it has begun it, within a with block."""
    method = "begin_message" if ", message " in case.op else "begin"
    begin, missed = getattr(ControlBlock, method), list[str]()

    def instead(control: ControlBlock, op: str, **options: bool) -> int:
        chosen = op.startswith(case.op) and not missed
        if chosen:
            missed.append(op)
        if chosen and case.mode == "away":
            _stay_away(rank)
        number: int = begin(control, op, **options)
        if chosen and case.mode == "stopped":
            _stop(rank)
        return number

    with mock.patch.object(ControlBlock, method, instead):
        yield


def _set_timeout(seconds: float, group: dist.ProcessGroup, name: Implementation) -> None:
    set_settings(timeout=seconds)
    collective.set_timeout(group)
    if name != "collective":
        memory = symmetric_memory(group, CPU)
        assert isinstance(memory, SharedMemory)
        memory.timeout = memory.control.timeout = seconds


def _serve(rank: Rank) -> None:
    world = rank.join()
    handle.PATIENCE = 0.1
    while True:
        index, folder = rank.hear()
        case = CASES[index]
        set_settings(flight_folder=None)
        group = world
        if case.name == "collective":  # Gloo's groups cannot be used after an error
            group = dist.new_group()
        with use(implementation=case.name):
            _set_timeout(patient(LONG), group, case.name)
            step = case.make(group)
            step()
            dist.barrier(world)
            set_settings(flight_folder=folder)
            _set_timeout(patient(LONG) if rank.rank else patient(SHORT), group, case.name)
            with offered_stack(folder):
                if rank.rank == 0:
                    with pytest.raises(PeerTimeout):
                        step()
                    rank.tell("waited")
                elif case.name == "collective":
                    _MISS[case.mode](rank)
                else:
                    with _missing(rank, case), pytest.raises(PeerTimeout):
                        step()
                rank.hear()
            if case.name != "collective":
                _set_timeout(patient(LONG), group, case.name)
                symmetric_memory(group, CPU).reset()
                assert collectives.all_reduce(torch.ones(2), group).tolist() == [2.0, 2.0], "the ranks can go on"
            dist.barrier(world)
        rank.tell("ready")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Start two ranks that serve one test after another."""
    with ranks(2, tmp_path_factory.mktemp("ranks"), _serve) as started:
        yield started


def _rows(mode: str) -> list[Any]:
    return [
        pytest.param(index, marks=() if index < FIRST_TIER else pytest.mark.processes, id=f"{case.name} {case.op}")
        for index, case in enumerate(CASES)
        if case.mode == mode
    ]


def _explained(index: int, running: Ranks, folder: Path, whom: str) -> tuple[str, str]:
    """Return what `tpfuse hang` says of the wait of rank 0, and of the stack of rank 1, which is missing.

    whom: for whom rank 0 waits. What rank 1 does later must change nothing.
    """
    case, missing = CASES[index], running.processes[1]
    for connection in running.connections:
        connection.send((index, folder))
    assert running.hear(1) == "here"
    assert running.hear(0) == "waited"
    said = hang(folder)
    running.send(1, signal.SIGCONT)
    running.connections[1].send("go")
    running.go()
    assert [running.hear(rank) for rank in range(2)] == ["ready", "ready"]
    op = re.escape(case.said or case.op)
    begins = rf"In {op}\b.*, rank 0 waited \d+\.\d s{whom}\.\nRank 1 \(process {missing.pid}\) "
    assert re.match(begins, said), said
    described, mine, other = re.split(r"\n\nPython stack of rank \d:\n", said)
    assert "in _serve" in mine
    assert hang(folder).startswith(described)
    return described, other


@pytest.mark.parametrize("index", _rows("away"))
def test_a_rank_that_stays_away_is_explained(index: int, running: Ranks, tmp_path: Path) -> None:
    case = CASES[index]
    described, stack = _explained(index, running, tmp_path, " for rank 1")
    assert "in _stay_away" in stack
    assert f"had begun {case.op}" not in described
    assert described.endswith("has no recorded operation." if case.name == "collective" else "s before.")


@pytest.mark.parametrize("index", _rows("stopped"))
def test_a_rank_that_is_stopped_is_explained(index: int, running: Ranks, tmp_path: Path) -> None:
    """Interpreted kernels wait for no rank by name: a rank that has begun the operation is not known to be missing."""
    case = CASES[index]
    whom = ", but no single rank was late" if case.name == "fused" else " for rank 1"
    described, stack = _explained(index, running, tmp_path, whom)
    assert stack == "  unknown: the process did not answer (its state was T (stopped))"
    assert "was stopped by a signal, and ha" in described
    if case.name == "collective":
        assert described.endswith("has no recorded operation.")
    else:
        assert f"had begun {case.op}" in described and described.endswith("s before and had not ended it.")
