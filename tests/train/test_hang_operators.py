"""`tpfuse hang` explains a wait in each operator: for a rank that stays away from it, and for one stopped inside it."""

import ast
import os
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.forked_ranks import Rank, Ranks, ranks
from tests.support.meshes import mesh_from
from tpfuse.choices import Implementation
from tpfuse.comm import collectives
from tpfuse.comm.collectives import collective
from tpfuse.comm.control_block import ControlBlock
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.messages import Messages, Route, open_messages
from tpfuse.comm.rendezvous import exchange
from tpfuse.comm.settings import set_settings
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.comm.stacks import offered_stack
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.switches import use
from tpfuse.testing.patience import patient
from tpfuse.train.hang import hang
from tpfuse.zero import shard
from tpfuse.zero.flat_adamw import FlatAdamW

TPFUSE = Path(__file__).resolve().parents[2] / "tpfuse"
CPU = torch.device("cpu")
LONG = 20.0  # seconds on an idle machine, for the steps in which every rank takes part
SHORT = 0.6  # seconds on an idle machine, for the wait that a test is about

Step = Callable[[], object]


@dataclass(frozen=True)
class Missed:
    """A step in which rank 1 is missing from one operation.

    waits: the function of tpfuse in which rank 0 then waits, as "file:Class.function"; op: how the text of the missed
    operation begins; make: does what comes before the step, and returns the step; said: how `tpfuse hang` names the
    operation in which rank 0 waits (default: op).
    """

    name: Implementation
    waits: str
    op: str
    make: Callable[[dist.ProcessGroup], Step]
    said: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.op}"


def _gather(group: dist.ProcessGroup) -> Tensor:
    weight = torch.ones(3, 4, requires_grad=True)
    return all_gather_linear(torch.ones(2, 4, requires_grad=True), weight, None, group)


def _scatter(group: dist.ProcessGroup) -> Tensor:
    weight = torch.ones(3, 4, requires_grad=True)
    return linear_reduce_scatter(torch.ones(4, 4, requires_grad=True), weight, None, group)


def _reduce(group: dist.ProcessGroup) -> Tensor:
    return linear_all_reduce(torch.ones(4, 4), torch.ones(3, 4), None, group)


def _ring(group: dist.ProcessGroup) -> Tensor:
    return _attention(group, "ring")


def _gathering_ring(group: dist.ProcessGroup) -> Tensor:
    return _attention(group, "all_gather")


def _ulysses(group: dist.ProcessGroup) -> Tensor:
    return _attention(group, "ulysses")


def _attention(group: dist.ProcessGroup, schedule: Any) -> Tensor:
    x = torch.ones(1, 2, 4, 16, requires_grad=True)
    return ring_attention(x, x, x, group=group, schedule=schedule)


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


def zero(stage: int, *, update: bool = True) -> Callable[[dist.ProcessGroup], Step]:
    """Return what makes a step of ZeRO with several buckets. update: whether it updates the parameters."""

    def make(group: dist.ProcessGroup) -> Step:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        buckets = shard(model, mesh_from(group), stage=stage, bucket_bytes=300)
        assert [len(reducer.specs) for reducer in buckets.reducers] == [4]
        optimizer = FlatAdamW(buckets)

        def step() -> None:
            buckets.start(last=True)
            model(torch.ones(2, 8)).sum().backward()
            buckets.finish(sums=stage == 1)
            if update:
                optimizer.step(1e-2)

        return step

    return make


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


def _shift(x: Tensor, group: dist.ProcessGroup) -> None:
    collectives.start_shift(x, group)[1].wait()


def _objects(x: Tensor, group: dist.ProcessGroup) -> None:
    collective.gather_objects(x.tolist(), group, op="gathering of objects")


def _first_exchange(group: dist.ProcessGroup) -> Step:
    return lambda: exchange(group, 1, "first exchange", patient(SHORT))


def _buffer(group: dist.ProcessGroup) -> Step:
    numbers = iter(range(9))
    return lambda: symmetric_memory(group, CPU).buffer(f"x{next(numbers)}", (3,), torch.float32)


def _barrier(group: dist.ProcessGroup) -> Step:
    return lambda: symmetric_memory(group, CPU).barrier("end of the epoch")


def _products(name: Implementation, file: str, kind: str) -> list[Missed]:
    return [
        Missed(name, f"{file}:{kind}.all_gather", "all_gather_linear torch", forward(_gather), "all_gather_linear"),
        Missed(name, f"{file}:{kind}.all_gather_backward", "all_gather_linear backward", backward(_gather)),
        Missed(name, f"{file}:{kind}.reduce_scatter", "linear_reduce_scatter torch", forward(_scatter),
             "linear_reduce_scatter"),
        Missed(name, f"{file}:{kind}.reduce_scatter_backward", "linear_reduce_scatter backward", backward(_scatter)),
        Missed(name, f"{file}:{kind}.all_reduce", "linear_all_reduce torch", forward(_reduce), "linear_all_reduce"),
    ]  # fmt: skip


def _direct_collectives() -> Iterator[Missed]:
    for of, shape in (
        (collectives.all_gather, (2,)),
        (collectives.reduce_scatter, (2,)),
        (collectives.all_reduce, (2,)),
        (collectives.all_reduce_max, (2,)),
        (collectives.all_to_all, (2, 2)),
    ):
        op = of.__name__
        yield Missed("direct", "comm/collectives/direct.py:DirectCollectives._run", f"{op} torch", on(of, *shape), op)


DIRECT_ZERO, RING = "zero/reducer/direct.py:DirectReducer", "ops/ring_attention"
SHARED = "comm/host_coordinated_memory.py:HostCoordinatedMemory._agree"
GUARDED = [
    *_products("direct", "ops/linear/direct.py", "DirectLinear"),
    *_products("fused", "ops/linear/fused.py", "FusedLinear"),
    Missed("direct", f"{RING}/direct.py:DirectRing.forward", "ring_attention ", forward(_ring), "ring_attention"),
    Missed("direct", f"{RING}/direct.py:DirectRing.backward", "ring_attention backward", backward(_gathering_ring)),
    Missed(
        "fused", f"{RING}/fused.py:FusedRing.forward", "ring_attention ", forward(_gathering_ring), "ring_attention"
    ),
    Missed("fused", f"{RING}/fused.py:FusedRing.backward", "ring_attention backward", backward(_ring)),
    Missed("direct", f"{RING}/ulysses.py:_through_slots", "exchange of heads", forward(_ulysses)),
    Missed("direct", f"{RING}/ulysses.py:_through_slots", "exchange of heads", backward(_ulysses)),
    *_direct_collectives(),
    Missed("direct", "comm/collectives/direct.py:DirectHandle.wait", "wait for all_gather", _later, "all_gather"),
    Missed("fused", "comm/collectives/fused.py:FusedCollectives._run", "all_gather", on(collectives.all_gather, 2)),
    Missed("direct", f"{DIRECT_ZERO}.begin", "begin a step", zero(1, update=False)),
    Missed("direct", f"{DIRECT_ZERO}._wait_until_read", "sum of bucket 0", zero(2), "buffer of bucket 0"),
    Missed("direct", f"{DIRECT_ZERO}._sum_part", "begin a step", zero(1), "sum of bucket 0"),
    Missed("direct", f"{DIRECT_ZERO}._sum_whole_buckets", "sum of bucket 0", zero(0), "sums of bucket 0"),
    Missed("direct", f"{DIRECT_ZERO}.update", "update", zero(1)),
    Missed("fused", "zero/reducer/fused.py:FusedReducer._sum_part", "sum of bucket 1", zero(1)),
]
# Rank 1 misses the other end of the message in which rank 0 waits.
MESSAGES = [
    Missed("direct", "comm/messages/direct.py:DirectMessages.send", "receive numbers of rank 0, message 2", message(0),
         "send numbers of rank 0, message 3"),
    Missed("direct", "comm/messages/symmetric.py:SymmetricMessages.receive", "send numbers of rank 1, message 2",
         message(1), "receive numbers of rank 1, message 2"),
    Missed("fused", "comm/messages/fused.py:FusedMessages.send", "receive numbers of rank 0, message 2", message(0),
         "send numbers of rank 0, message 3"),
]  # fmt: skip
UNGUARDED = [
    Missed("direct", SHARED, "end of the epoch", _barrier),
    Missed("direct", SHARED, "buffer 'x", _buffer, "buffer x1"),
]
# Gloo waits here; no shared memory has a record of these operations.
GLOO = [
    Missed("collective", "", "all_gather", on(collectives.all_gather, 2)),
    Missed("collective", "", "reduce_scatter", on(collectives.reduce_scatter, 2)),
    Missed("collective", "", "all_reduce", on(collectives.all_reduce, 2)),
    Missed("collective", "", "all_to_all", on(collectives.all_to_all, 2, 2)),
    Missed("collective", "", "all_gather", forward(_gather)),
    Missed("collective", "", "all_gather", backward(_gather)),
    Missed("collective", "", "broadcast", on(_broadcast, 2)),
    Missed("collective", "", "shift", on(_shift, 2)),
    Missed("collective", "", "gathering of objects", on(_objects, 2)),
    Missed("collective", "", "send numbers of rank 0", message(0)),
    Missed("collective", "", "receive numbers of rank 1", message(1)),
    Missed("collective", "", "first exchange", _first_exchange),
]
CASES = [*GUARDED, *MESSAGES, *UNGUARDED, *GLOO]


def _stay_away(rank: Rank) -> None:
    rank.pause()


def _stop(rank: Rank) -> None:
    rank.tell("here")
    os.kill(os.getpid(), signal.SIGSTOP)
    rank.hear()


@contextmanager
def _missing(rank: Rank, case: Missed, mode: str) -> Iterator[None]:
    """Make this rank stay away from the case's operation, or stop just after it has begun it, within a with block."""
    method = "begin_message" if case in MESSAGES else "begin"
    begin, missed = getattr(ControlBlock, method), list[str]()

    def instead(control: ControlBlock, op: str, **options: bool) -> int:
        chosen = op.startswith(case.op) and not missed
        if chosen:
            missed.append(op)
        if chosen and mode == "away":
            _stay_away(rank)
        number: int = begin(control, op, **options)
        if chosen and mode == "stopped":
            _stop(rank)
        return number

    with mock.patch.object(ControlBlock, method, instead):
        yield


def _functions(error: BaseException) -> list[str]:
    """Return the functions in which an error was raised, as `Missed.waits` names them."""
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return [f"{code.co_filename.removeprefix(f'{TPFUSE}/')}:{code.co_qualname}" for code in codes]


def _set_timeout(seconds: float, group: dist.ProcessGroup, name: Implementation) -> None:
    set_settings(timeout=seconds)
    collective.set_timeout(group)
    if name != "collective":
        memory = symmetric_memory(group, CPU)
        assert isinstance(memory, SharedMemory)
        memory.timeout = memory.control.timeout = seconds


def _serve(rank: Rank) -> None:
    world = rank.join()
    collective.PATIENCE = 0.1
    while True:
        index, mode, folder = rank.hear()
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
                    with pytest.raises(PeerTimeout) as caught:
                        step()
                    rank.tell(_functions(caught.value))
                elif case.name == "collective":
                    (_stay_away if mode == "away" else _stop)(rank)
                else:
                    with _missing(rank, case, mode), pytest.raises(PeerTimeout):
                        step()
                rank.hear()
            if case.name != "collective":
                _set_timeout(patient(LONG), group, case.name)
                symmetric_memory(group, CPU).reset()
                assert collectives.all_reduce(torch.ones(2), group).tolist() == [2.0, 2.0], "the ranks can go on"
            dist.barrier(world)
        rank.tell("ready")


class LentRanks:
    """Two ranks that serve one test after another. After a test that fails, the next test gets new ranks."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory, self._stack, self._ranks = factory, ExitStack(), list[Ranks]()

    @contextmanager
    def lent(self) -> Iterator[Ranks]:
        if not self._ranks:
            self._ranks.append(self._stack.enter_context(ranks(2, self._factory.mktemp("ranks"), _serve)))
        try:
            yield self._ranks[0]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._ranks.clear()
        self._stack.close()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentRanks]:
    made = LentRanks(tmp_path_factory)
    yield made
    made.close()


def _parameters() -> list[Any]:
    """Return (index, mode) for all cases, whose modes alternate. The first tier has one case an implementation."""
    first = {"direct all_gather torch", "fused all_gather", "collective all_reduce"}
    return [
        pytest.param(index, mode, marks=() if str(case) in first else pytest.mark.processes, id=f"{case} {mode}")
        for index, (case, mode) in enumerate(zip(CASES, cycle(("stopped", "away")), strict=False))
    ]


@pytest.mark.parametrize(("index", "mode"), _parameters())
def test_a_missing_rank_is_explained(index: int, mode: str, pool: LentRanks, tmp_path: Path) -> None:
    case = CASES[index]
    with pool.lent() as running:
        for connection in running.connections:
            connection.send((index, mode, tmp_path))
        assert running.hear(1) == "here"
        functions = running.hear(0)
        said, missing = hang(tmp_path), running.processes[1]
        running.send(1, signal.SIGCONT)
        running.connections[1].send("go")
        running.go()
        for rank in range(2):
            assert running.hear(rank) == "ready"

    op = re.escape(case.said or case.op)
    # Interpreted kernels wait for no rank by name; a rank that has begun the operation is then not known to be missing.
    unknown = (case.name, mode) == ("fused", "stopped") and case not in MESSAGES
    whom = ", but no single rank was late" if unknown else " for rank 1"
    assert re.match(rf"In {op}\b.*, rank 0 waited \d+\.\d s{whom}\.\nRank 1 \(process {missing.pid}\) ", said), said
    described, mine, other = re.split(r"\n\nPython stack of rank \d:\n", said)
    assert "in _serve" in mine
    assert hang(tmp_path).startswith(described), "what rank 1 does later changes nothing"
    if mode == "stopped":
        assert "was stopped by a signal, and ha" in described
        assert other == "  unknown: the process did not answer (its state was T (stopped))"
    else:
        assert "in _stay_away" in other
    if case.name == "collective":
        assert described.endswith("has no recorded operation.")
    else:
        assert case.waits in functions
        assert (f"had begun {case.op}" in described) == (mode == "stopped")
        assert described.endswith("s before and had not ended it." if mode == "stopped" else "s before.")


def _functions_with_guards() -> Iterator[str]:
    def visit(node: ast.AST, name: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = f"{name}.{child.name}" if isinstance(child, ast.ClassDef | ast.FunctionDef) else name
            if isinstance(child, ast.Call) and getattr(child.func, "attr", "") == "guard":
                yield name
            yield from visit(child, inner)

    for file in sorted(TPFUSE.rglob("*.py")):
        path, text = file.relative_to(TPFUSE), file.read_text()
        if path.parts[0] not in ("explore", "testing", "tools") and ".guard(" in text:
            for name in visit(ast.parse(text), ""):
                yield f"{path}:{name.removeprefix('.')}"


def test_every_operator_has_a_case() -> None:
    assert set(_functions_with_guards()) == {case.waits for case in [*GUARDED, *MESSAGES]}
