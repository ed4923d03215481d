"""Traces of communicating kernels: whom programs wait for and when, what they copy and compute, and what they cost."""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from tests.support.channels import connect
from tests.support.compilations import OTHER_TRITONS, compiling
from tests.support.tiers import exhaustive
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.explore import RoundRobin, Sequential, SimulatedMemory, explore
from tpfuse.kernels.all_gather import all_gather_forward
from tpfuse.kernels.all_gather_gemm import all_gather_gemm_forward
from tpfuse.kernels.all_reduce import all_reduce_forward
from tpfuse.kernels.block_exchange import BlockExchange
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.gemm_reduce_scatter import gemm_reduce_scatter_forward
from tpfuse.kernels.launch import Launch, launch, recording
from tpfuse.kernels.ring_attention_backward import ring_attention_backward
from tpfuse.kernels.ring_attention_forward import ring_attention_forward
from tpfuse.kernels.sequence_runs import SequenceRuns
from tpfuse.kernels.signal_wait import signal_wait
from tpfuse.kernels.signals import wait_signal
from tpfuse.kernels.trace import COMPUTING, EVENTS, KernelEvent, KernelTrace, TracedLaunch, now, record
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.patience import Deadline, patient
from tpfuse.testing.ranks import pool
from tpfuse.tools import operators

TILES = {
    "all_gather_gemm": {
        "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 1, "EPILOGUE_PARTS": 1, "COPIERS": 2, "BLOCK_COPY": 16,
    },
    "gemm_reduce_scatter": {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "EPILOGUE_PARTS": 1},
    "ring_attention_forward": {"BLOCK_M": 16, "BLOCK_N": 16, "COPIERS": 1},
    "ring_attention_dq": {"BLOCK_M": 16, "BLOCK_N": 16, "COPIERS": 1},
    "all_gather": {"BLOCK": 16},
    "all_reduce": {"BLOCK": 16},
}  # fmt: skip
BLOCKS = ("ring", "direct", "backward")  # operations that exchange blocks
COPIERS, PROGRAMS = 2, 4
LATE = 0.1  # seconds
Operation = Callable[[], Tensor]


def _all_gather_gemm(memory: SymmetricMemory, end: Endpoint) -> Operation:
    x, weight = integers(memory.rank, 20, 24), integers(5, 40, 24)
    gathered, ready = torch.empty(memory.world, 20, 24), memory.signals("ready", COPIERS * memory.world).local
    return lambda: all_gather_gemm_forward(x, weight, None, gathered, ready, end, keep_own=True)[0]


def _gemm_reduce_scatter(memory: SymmetricMemory, end: Endpoint) -> Operation:
    x, weight = integers(memory.rank, 20 * memory.world, 24), integers(5, 40, 24)
    return lambda: gemm_reduce_scatter_forward(x, weight, end)


def _ring_attention(memory: SymmetricMemory, end: Endpoint, ring: bool) -> Operation:
    world, tokens = memory.world, 24
    runs = SequenceRuns(tokens * world, world, count=1, size=tokens, unit=tokens, step=1)
    ready = memory.signals("ready", COPIERS * world).local
    exchange = BlockExchange(end, ready, ring)
    q, block = normal(memory.rank, 1, 2, tokens, 16), normal(9 + memory.rank, 2, 1, 2, tokens, 16)
    everything = torch.zeros(tokens, dtype=torch.int32), torch.full((tokens,), tokens * world - 1, dtype=torch.int32)
    return lambda: ring_attention_forward(q, block, runs, memory.rank, everything, exchange=exchange)[0]


def _ring(memory: SymmetricMemory, end: Endpoint) -> Operation:
    return _ring_attention(memory, end, True)


def _direct(memory: SymmetricMemory, end: Endpoint) -> Operation:
    return _ring_attention(memory, end, False)


def _backward(memory: SymmetricMemory, end: Endpoint) -> Operation:
    world, tokens = memory.world, 24
    runs = SequenceRuns(tokens * world, world, count=1, size=tokens, unit=tokens, step=1)
    exchange = BlockExchange(end, memory.signals("ready", COPIERS * world).local, True)
    tensors = [normal(10 * seed + memory.rank, 1, 2, tokens, 16) for seed in range(5)]
    lse, visible = normal(9, 1, 2, tokens), (torch.zeros(tokens).int(), torch.full((tokens,), tokens * world - 1).int())

    def run() -> Tensor:
        where = runs, memory.rank, visible, visible
        return torch.cat([x.flatten() for x in ring_attention_backward(*tensors, lse, *where, exchange=exchange)])

    return run


def _all_gather(memory: SymmetricMemory, end: Endpoint) -> Operation:
    def run() -> Tensor:
        x = integers(memory.rank, 100)
        out = torch.empty(memory.world, 100)
        all_gather_forward(x, out, end)
        return out

    return run


def _two_shot(memory: SymmetricMemory, end: Endpoint) -> Operation:
    def run() -> Tensor:
        x = integers(memory.rank, 200)
        out = torch.empty_like(x)
        all_reduce_forward(x, out, end, two_shot=True)
        return out

    return run


OPERATIONS: dict[str, Callable[[SymmetricMemory, Endpoint], Operation]] = {
    "all_gather_gemm": _all_gather_gemm,
    "gemm_reduce_scatter": _gemm_reduce_scatter,
    "ring": _ring,
    "direct": _direct,
    "backward": _backward,
    "all_gather": _all_gather,
    "two_shot": _two_shot,
}


def _prepared(name: str, memory: SymmetricMemory) -> tuple[Operation, Endpoint]:
    end = connect(memory, slot_bytes=2**16, flag_count=64, programs=PROGRAMS)
    return OPERATIONS[name](memory, end), end


def _side_by_side(name: str, world: int, schedule: Any) -> dict[int, tuple[Tensor, int, int]]:
    """Return (result, when the launch began, when it ended) of every simulated rank; their programs interleave."""
    found = {}

    def program(memory: SimulatedMemory) -> None:
        operation, _ = _prepared(name, memory)
        begin = time.time_ns()
        out = operation()
        found[memory.rank] = out, begin, time.time_ns()

    explore(program, world, schedules=[schedule], resident=PROGRAMS)
    return found


def _of_program(events: list[KernelEvent], program: int, kind: str | None = None) -> list[KernelEvent]:
    return [event for event in events if event.program == program and kind in (None, event.kind)]


def _peers(events: list[KernelEvent], program: int, kind: str) -> list[int]:
    return [event.peer for event in _of_program(events, program, kind)]


def _expected(name: str, rank: int, world: int, program: int) -> dict[str, list[int]]:
    """Return the peers of the events of a program, by kind, in order; wait may be fewer, but are no others."""
    following, preceding = ([(rank + sign * step) % world for step in range(1, world)] for sign in (1, -1))
    if name == "all_gather_gemm":
        if program < COPIERS:
            return {"waiting": following, "copying": [rank, *following, rank], "computing": []}
        return {"waiting": following, "copying": [], "computing": [rank, *following]}
    if name == "gemm_reduce_scatter":
        return {"waiting": following, "copying": [], "computing": [*following, rank, rank]}
    if name in BLOCKS:
        if program < 1:
            parts = 2 if name == "backward" else 1
            waits = preceding if name == "direct" else preceding[:1] * (world - 1) * parts
            return {"waiting": waits, "copying": [rank, *preceding] * parts, "computing": []}
        return {"waiting": preceding, "copying": [], "computing": [rank, *preceding]}
    if name == "all_gather":
        return {"waiting": following, "copying": [rank, rank, *following], "computing": []}
    assert name == "two_shot"
    return {"waiting": 2 * following, "copying": [rank, rank, *following], "computing": [rank]}


def _check(name: str, traced: TracedLaunch, begin: int, end: int) -> set[int]:
    """Check the events of a launch; return the programs that waited."""
    rank, world, events = traced.rank, traced.world, traced.events
    assert rank is not None and world is not None and traced.lost == 0
    assert {event.program for event in events} == set(range(PROGRAMS))
    for program in range(PROGRAMS):
        own = _of_program(events, program)
        times = [begin, *itertools.chain(*((event.begin_ns, event.end_ns) for event in own)), end]
        assert times == sorted(times), "events are in order, do not overlap, and are within the launch"
        expected = _expected(name, rank, world, program)
        tiles = 1
        if name in BLOCKS and program:  # every tile of queries is computed from all blocks
            tiles = len(_peers(events, program, "computing")) // world
            assert tiles > 0
        for kind in ("copying", "computing"):
            assert _peers(events, program, kind) == expected[kind] * tiles, (program, kind)
        waits = [event.peer for event in own if event.kind == "waiting"]
        assert all(waits.count(peer) <= expected["waiting"].count(peer) for peer in waits), (program, waits)
        for wait, after in itertools.pairwise(own):
            if wait.kind == "waiting" and name in ("all_gather_gemm", "direct"):
                assert after.peer == wait.peer, "what a program has waited for it takes next"
    return {event.program for event in events if event.kind == "waiting"}


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize(
    "name",
    ["ring", *exhaustive(*(name for name in OPERATIONS if name != "ring"))],
)
def test_events_name_the_peers_and_results_are_the_same(name: str) -> None:
    world = 3
    untraced = _side_by_side(name, world, Sequential())
    for schedule in (Sequential(), RoundRobin()):
        with KernelTrace() as trace:
            found = _side_by_side(name, world, schedule)
        launches, waited = trace.read(), set()
        assert sorted(launched.rank for launched in launches) == list(range(world)) and trace.untraced == 0  # type: ignore[type-var]
        for launched in launches:
            assert launched.rank is not None
            out, begin, end = found[launched.rank]
            assert torch.equal(out, untraced[launched.rank][0])
            waited |= _check(name, launched, begin, end)
        if schedule == Sequential():  # each rank runs until it has to wait
            assert waited == set(range(PROGRAMS))


def _on_rank(name: str) -> tuple[list[TracedLaunch], int, int, bool]:
    """Run an operation of which rank 1 is late.

    Return the traced launches, when the launch began and ended, and whether the results are those without a trace.
    """
    group = dist.group.WORLD
    assert group is not None
    memory = symmetric_memory(group, torch.device("cpu"))
    memory.reset()
    operation, _ = _prepared(name, memory)
    flags = memory.signals("flags", 64).local
    with memory.guard(name):
        untraced = operation()
    seen = int(flags.max())
    memory.barrier()
    with KernelTrace() as trace:
        if memory.rank == 1:  # rank 0 signals before it waits
            deadline = Deadline(30.0)
            while int(flags.max()) == seen:
                assert deadline.left(), "rank 0 has not come"
                time.sleep(0.001)
            time.sleep(LATE)
        begin = time.time_ns()
        with memory.guard(name):
            out = operation()
        end = time.time_ns()
    memory.barrier()
    for key in ("ready", "flags", "state", "slots"):
        if key in memory._buffers:
            memory.free(key)
    return trace.read(), begin, end, torch.equal(out, untraced)


@pytest.mark.parametrize("name", ["all_gather_gemm", *exhaustive("gemm_reduce_scatter", "ring")])
def test_the_wait_for_a_late_rank_is_as_long_as_it_was_late(name: str) -> None:
    (waiting, *_), (late, begin, _, _) = results = pool(2).run(_on_rank, name)
    assert [same for *_, same in results] == [True, True]
    (wait,) = _of_program(waiting[0].events, 0, "waiting")
    assert wait.peer == 1
    assert wait.end_ns > begin, "it did not end before rank 1 began"
    assert (wait.end_ns - wait.begin_ns) / 1e9 > 0.7 * LATE
    assert not _of_program(late[0].events, 0, "waiting"), "rank 0's signals were there when rank 1 began"


@triton.jit
def _recording_kernel(abort_ptr, trace_ptr, events):
    for _ in range(events):
        since = now(trace_ptr)
        record(trace_ptr, COMPUTING, tl.program_id(0), since)


def _record(events: int, programs: int = 2) -> None:
    launch(
        _recording_kernel, (programs,), num_warps=1, num_stages=1,
        abort_ptr=torch.zeros(1, dtype=torch.int32), trace_ptr=None, events=events,
    )  # fmt: skip


@triton.jit
def _waiting_kernel(flags_ptr, abort_ptr, trace_ptr):
    ranks = tl.arange(0, 4)
    wait_signal(flags_ptr + ranks, 1, abort_ptr, ranks < 3, trace_ptr, ranks)


def test_a_wait_names_the_rank_whose_signal_came_last() -> None:
    """Rank 3 is masked: nobody waits for it."""

    def program(memory: SimulatedMemory) -> None:
        flags = memory.signals("flags", 4)
        if memory.rank == 0:
            launch(
                _waiting_kernel, (1,), num_warps=1, num_stages=1,
                flags_ptr=flags.local, abort_ptr=memory.abort, trace_ptr=None,
            )  # fmt: skip
        else:
            for rank in (2, 1, 0):
                memory.signal(flags, 0, rank, 1)

    with KernelTrace() as trace:
        explore(program, 2, schedules=[RoundRobin()])
    (launched,) = trace.read()
    assert [(event.kind, event.peer) for event in launched.events] == [("waiting", 0)]


@pytest.mark.parametrize("more", [0, 3])
def test_events_that_do_not_fit_are_counted(more: int) -> None:
    """They overwrite neither the events that fit nor the row of the next program."""
    count = EVENTS.value + more
    with KernelTrace() as trace:
        _record(count)
    (launched,) = trace.read()
    assert launched.lost == 2 * more
    for program in range(2):
        own = _of_program(launched.events, program)
        assert len(own) == EVENTS.value and {event.peer for event in own} == {program}
        times = [time for event in own for time in (event.begin_ns, event.end_ns)]
        assert times == sorted(times)


def test_a_wait_that_is_cut_short_is_an_event() -> None:
    flag, abort = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with KernelTrace() as trace:
        signal_wait(flag, 1, abort)
        signal_wait(flag, 0, abort)  # the signal is there
    cut, there = trace.read()
    assert cut.kernel == "signal_wait_kernel" and (cut.rank, cut.world) == (None, None)
    assert [(event.kind, event.peer) for event in cut.events] == [("waiting", -1)] and there.events == []


def test_a_launch_that_may_wait_gets_rows_during_a_trace() -> None:
    """It holds for every kernel of every operator: one that has an abort word has a row for each program."""

    def launches() -> list[Launch]:
        with recording("sm_90") as recorded:
            for operator in operators.names():
                operators.load(operator).launches(torch.bfloat16)
        return recorded.launches

    before = launches()
    with KernelTrace(most_bytes=2**50) as trace:
        traced = launches()
    waiting = 0
    for without, with_rows, after in zip(before, traced, launches(), strict=True):
        assert without.arguments.get("trace_ptr") is None and after.arguments.get("trace_ptr") is None
        rows = with_rows.arguments.get("trace_ptr")
        if with_rows.arguments.get("abort_ptr") is None:
            assert rows is None
        else:
            waiting += 1
            assert rows is not None and rows.dtype == torch.int64
            assert rows.shape == (with_rows.grid[0], 1 + 4 * EVENTS.value)
    assert waiting > 50 and trace.untraced == 0


def test_one_trace_at_a_time() -> None:
    with KernelTrace() as trace:
        with pytest.raises(RuntimeError, match="a trace of kernels is being taken already"), KernelTrace():
            pass
        _record(1)
    _record(1)
    with KernelTrace() as after:
        _record(1)
    assert len(trace.read()) == len(after.read()) == 1


def test_launches_beyond_the_memory_of_a_trace_are_not_traced() -> None:
    with KernelTrace(most_bytes=2 * 8 * (1 + 4 * EVENTS.value)) as trace:
        _record(5)
        _record(7)
        _record(5, programs=1)
    (launched,) = trace.read()
    assert len(launched.events) == 10 and trace.untraced == 2


def test_launches_that_a_graph_captures_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    trace = KernelTrace()
    arguments = {"abort_ptr": SimpleNamespace(device=torch.device("cuda"))}
    assert trace._rows(_recording_kernel, (2,), arguments) is None
    assert trace.untraced == 1 and trace.read() == []


SCRIPT = """
import json, sys
import torch
from tpfuse.kernels import launch
from tpfuse.kernels.trace import KernelTrace
from tpfuse.tools import front_end, operators
from tpfuse.tools.recorded import Job, source_of

with launch.recording("sm_90") as recording, KernelTrace(most_bytes=2**50):
    for operator in operators.names():
        operators.load(operator).launches(torch.bfloat16)
jobs = {}
for x in recording.launches:
    if x.arguments.get("trace_ptr") is not None:
        # Launches with and without copiers, and by either route of the blocks, have different code.
        key = x.kernel.__name__, x.arguments.get("COPIERS") == 0, x.arguments.get("RING")
        jobs[key] = Job("", "sm_90", "", source_of(x, "sm_90"), x.num_warps, x.num_stages)
found = {job.source.name: "globaltimer" in str(front_end.lower(job)) for job in jobs.values()}
json.dump(found, sys.stdout)
"""
KERNELS = {
    "all_gather_forward_kernel", "all_to_all_forward_kernel", "reduce_scatter_forward_kernel",
    "all_reduce_one_shot_kernel", "all_reduce_two_shot_kernel", "gemm_reduce_scatter_forward_kernel",
    "await_part_kernel", "send_message_kernel", "sum_parts_kernel", "all_gather_gemm_forward_kernel",
    "open_copies_kernel", "close_copies_kernel", "ring_attention_forward_kernel", "ring_attention_dq_kernel",
    "shard_sum_kernel", "sharded_adamw_kernel", "all_gather_gemm_ping_pong_kernel",
    "gemm_reduce_scatter_ping_pong_kernel",
}  # fmt: skip


@pytest.mark.parametrize("version", exhaustive(*OTHER_TRITONS))
def test_other_front_ends_accept_traced_kernels(version: str) -> None:
    """The installed one compiles them for test_signal_ptx.py."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=compiling(version), capture_output=True, text=True, timeout=patient(250))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(KERNELS, True)
