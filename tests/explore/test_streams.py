"""Streams, events and graphs of a rank: the faults that a host can make with them."""

from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tpfuse.explore import PCT, ExploreError, SimulatedMemory, TorchHandle, explore, explore_all
from tpfuse.kernels.signals import wait_signal

N = 4


@triton.jit
def gated_sum_kernel(shards_ptr, flags_ptr, epoch_ptr, abort_ptr, out_ptr, WORLD: tl.constexpr, N: tl.constexpr):
    """Sum the shards of all ranks, each as soon as its flag has the epoch."""
    offs, epoch = tl.arange(0, N), tl.load(epoch_ptr)
    total = tl.zeros((N,), tl.float32)
    for source in range(WORLD):
        if wait_signal(flags_ptr + source, epoch, abort_ptr):
            total += tl.load(shards_ptr + source * N + offs)
    tl.store(out_ptr + offs, total)


class Gather:
    """A gather beside its consumer, after the design record of QuACK's all_gather_gemm: own code, with its streams.

    Two buffers alternate. The current stream stages the shard, and consumes all of them as they come; a second stream
    sends the shard to the peers; a third one waits for all ranks before a buffer is written again two calls later.
    Epochs are in device memory. wrong: what a program does wrong.
    """

    def __init__(self, memory: SimulatedMemory, wrong: str = "") -> None:
        self.memory, self.wrong = memory, wrong
        self.handle = TorchHandle(memory, "buffers", (2, memory.world, N), torch.float32)
        self.buffers, self.flags = self.handle._buffer, memory.signals("flags", memory.world)
        self.epochs = memory.signals("epochs", 3).local  # of the calls in each buffer; of the last call
        self.pushes, self.barriers = torch.cuda.Stream(), torch.cuda.Stream()
        self.reusable, self.captured = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        self.parity = self.count = 0

    def call(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x."""
        memory, rank, wrong = self.memory, self.memory.rank, self.wrong
        here, capturing = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
        self.parity ^= 1
        self.count += 1
        parity, out = self.parity, torch.empty(N)
        epoch, own = self.epochs[parity : parity + 1], self.buffers.local[parity, rank]
        reusable = (self.captured if capturing and "share events" not in wrong else self.reusable)[parity]
        here.wait_event(reusable)
        self.epochs[2:].add_(1)
        epoch.copy_(self.epochs[2:])
        own.copy_(x)
        value: Any = self.count if wrong == "an epoch of the host" else epoch
        memory.signal(self.flags, rank, rank, value)
        staged = here.record_event()
        if wrong != "sent before it is staged":
            self.pushes.wait_event(staged)
        with torch.cuda.stream(self.pushes):
            for step in range(1, memory.world):
                peer = (rank - step) % memory.world
                self.buffers.peers[peer][parity, rank].copy_(own)
                memory.signal(self.flags, peer, rank, value)
        arguments = self.buffers.local[parity], self.flags.local, epoch, memory.abort, out
        gated_sum_kernel[(1,)](*arguments, memory.world, N)
        if wrong != "a barrier before the end":
            self.barriers.wait_event(here.record_event())
        else:
            self.barriers.wait_event(staged)
        with torch.cuda.stream(self.barriers):
            self.handle.barrier(parity)
            reusable.record()
        if capturing:
            here.wait_stream(self.pushes)
            if wrong != "a stream that is not joined":
                here.wait_stream(self.barriers)
        return out

    def capture(self, x: torch.Tensor, calls: int) -> tuple[Any, list[torch.Tensor], int]:
        """Return a graph of calls, what they return, and the buffer of the last one."""
        graph, parity, self.captured = torch.cuda.CUDAGraph(), self.parity, [torch.cuda.Event() for _ in range(2)]
        with torch.cuda.graph(graph):
            outs = [self.call(x) for _ in range(calls)]
        last, self.parity = self.parity, parity
        return graph, outs, last

    def quiesce(self, parity: int) -> None:
        """Let the current stream wait for all ranks between calls and replays. parity: of the last one."""
        here = torch.cuda.current_stream()
        if self.wrong != "no fence":
            for event in self.reusable:
                here.wait_event(event)
            here.wait_stream(self.pushes)
            here.wait_stream(self.barriers)
        self.parity = parity


def alternating(memory: SimulatedMemory, wrong: str = "", calls: int = 1) -> None:
    """Call, capture, replay, call twice, replay twice, and call again. calls: in the graph."""
    rank, world = memory.rank, memory.world
    x, results, expected = torch.zeros(N), [], []

    def put(value: int) -> torch.Tensor:
        expected.append(float(sum(value + peer for peer in range(world))))
        return x.fill_(value + rank)

    def replay(value: int) -> None:
        put(value)
        graph.replay()
        results.extend(out.clone() for out in outs)
        expected.extend(expected[-1:] * (calls - 1))

    gather = Gather(memory, wrong)
    results.append(gather.call(put(10)))
    graph, outs, last = gather.capture(x, calls)
    replay(20)
    gather.quiesce(last)
    results += [gather.call(put(value)) for value in (30, 40)]
    gather.quiesce(gather.parity)
    replay(50)
    replay(60)
    gather.quiesce(1 - last if wrong == "a buffer that the host counts" else last)
    results.append(gather.buffers.local[gather.parity].sum(0))
    expected += expected[-1:]
    results.append(gather.call(put(70)))
    assert [result.tolist() for result in results] == [[value] * N for value in expected]


def test_calls_and_replays_alternate() -> None:
    explore(alternating, 2, schedules=[PCT(0)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("calls", [1, 2])
def test_calls_and_replays_alternate_in_every_execution(calls: int) -> None:
    report = explore_all(partial(alternating, calls=calls), 2, seconds=600)
    print(report)
    assert report.exhausted


WRONG = {  # what a program does wrong -> calls in the graph, and the message
    "an epoch of the host": (1, r"deadlock: [^$]*rank 0, program 0 waits at [^$]*\n    flags\[0\] of rank 0 is 2"),
    "sent before it is staged": (
        1,
        r"race on buffers[^$]*own.copy_\(x\)[^$]*read on stream 1[^$]*, but the second has not waited for that",
    ),
    "a barrier before the end": (
        1,
        r"race on buffers[^$]* called from .*: outs = [^$]*the first signals nothing after it",
    ),
    "no fence": (1, r"race on epochs[^$]* called from .*: outs = "),
    "a buffer that the host counts": (1, r"raised AssertionError[^$]*: assert \[result.tolist"),
    "calls and a capture share events": (1, "wait outside of a capture for an event that was recorded in it"),
    "a capture and calls share events": (2, "wait in a capture for an event from before it"),
    "a stream that is not joined": (1, "the capture ends before its first stream has waited for all others"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_faults_of_the_host_are_found(wrong: str) -> None:
    calls, message = WRONG[wrong]
    with pytest.raises(ExploreError, match=message):
        explore(partial(alternating, wrong=wrong, calls=calls), 2)


def add_on(stream: Any, x: torch.Tensor) -> None:
    with torch.cuda.stream(stream):
        x.add_(1.0)


def two_replays(x: torch.Tensor, other: Any, beside: bool = False) -> None:
    """Replay a graph on two streams. beside: whether the stream that was captured has work that nothing orders."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.wait_stream(torch.cuda.current_stream())
        add_on(other, x)
        torch.cuda.current_stream().wait_stream(other)
        add_on(torch.cuda.current_stream(), x)
    if beside:
        add_on(other, x)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            graph.replay()


def waits_of_the_host(x: torch.Tensor, other: Any) -> None:
    """Use a tensor on two streams, an old one and a new one, after the host has waited for the other one's work."""
    x.add_(1.0)
    torch.cuda.synchronize()
    add_on(other, x)
    other.synchronize()
    add_on(torch.cuda.Stream(), x)


@pytest.mark.parametrize(
    ("run", "race"), [(two_replays, False), (waits_of_the_host, False), (partial(two_replays, beside=True), True)]
)
def test_what_orders_two_streams(run: Any, race: bool) -> None:
    def program(memory: SimulatedMemory) -> None:
        run(memory.buffer("x", (1,), torch.float32).local, torch.cuda.Stream())

    if race:
        with pytest.raises(ExploreError, match="race on x"):
            explore_all(program, 1)
    else:
        assert explore_all(program, 1).exhausted


def gather_by_copies(memory: SimulatedMemory, barrier: bool) -> None:
    """Copy the peers' shards on a stream, which says in words how far it is."""
    world, copies, out = memory.world, torch.cuda.Stream(), torch.zeros(N)
    handle, rows = TorchHandle(memory, "shards", (N,), torch.float32), memory.buffer("rows", (world, N), torch.float32)
    progress, epoch = memory.signals("progress", world).local, torch.ones(1, dtype=torch.int32)
    handle.get_buffer(memory.rank, (N,), torch.float32).fill_(memory.rank + 1)
    if barrier:
        handle.barrier()
    copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        for source in range(world):
            rows.local[source].copy_(handle.get_buffer(source, (N,), torch.float32))
            handle.stream_write_value32(progress, source, 1)
    gated_sum_kernel[(1,)](rows.local, progress, epoch, memory.abort, out, world, N)
    assert out.eq(world * (world + 1) / 2).all()


def test_words_that_a_stream_writes() -> None:
    assert explore_all(partial(gather_by_copies, barrier=True), 2).exhausted
    with pytest.raises(ExploreError, match=r"race on shards[^$]*read on stream 1 by rank \d"):
        explore_all(partial(gather_by_copies, barrier=False), 2)
    with pytest.raises(ExploreError, match=r"ValueError: word 0 of a tensor: .* in symmetric memory only"):
        words = torch.zeros(1, dtype=torch.int32)
        explore(lambda memory: TorchHandle(memory, "a", (1,), words.dtype).stream_write_value32(words, 0, 1), 1)
