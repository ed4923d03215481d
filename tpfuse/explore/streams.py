"""Streams, events and graphs of CUDA: `torch.cuda` has these stand-ins while a program is explored.

A call of the host does its work at once, and each stream is a chain of `Clocks`. Only events and waits of the host
order the work of two streams, so a missing event is a race. A wait for what the same rank puts on another stream later
is a deadlock, as it is with CUDA_LAUNCH_BLOCKING=1: CUDA does not promise that two streams run at the same time.

A capture does nothing, but keeps launches, torch operations, signals and waits with the numbers and addresses that the
host has passed. A replay does them with what is in memory then. What CUDA refuses is refused: a wait of the host in a
capture, a wait in it for an event from before it, a wait elsewhere for an event of a capture, and an end of the capture
before its first stream has waited for all others.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Optional, ParamSpec
from unittest import mock

import torch

from tpfuse.explore.memory import CheckedMemory
from tpfuse.explore.scheduler import Task

Work = Callable[[], object]
_Given = ParamSpec("_Given")


class StreamEvent:
    """The stand-in for `torch.cuda.Event`.

    chain: knows what came before the last record; None without one. graph: that has captured the record; after: the
    numbers of the graph's works that came before it.
    """

    def __init__(self, **options: object) -> None:
        self.chain: int | None = None
        self.graph: CUDAGraph | None = None
        self.after = set[int]()

    def record(self, stream: Optional["Stream"] = None) -> None:
        (stream or current_stream()).record_event(self)

    def wait(self, stream: Optional["Stream"] = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        here().host_waits("Event.synchronize", self)


class Stream:
    """The stand-in for `torch.cuda.Stream`.

    number: 0 for the default stream. graph: that captures it; after: the numbers of the graph's works that come before
    its next one.
    """

    def __init__(self, *device: object, **options: object) -> None:
        self.number, self.chain = here().begin(self)
        self.graph: CUDAGraph | None = None
        self.after = set[int]()

    def record_event(self, event: StreamEvent | None = None) -> StreamEvent:
        event = StreamEvent() if event is None else event
        event.graph, event.after = self.graph, set(self.after)
        self._do(lambda: here().record(event))
        return event

    def wait_event(self, event: StreamEvent) -> None:
        if event.graph is None and event.chain is None:
            return  # it was never recorded
        if self.graph is None and event.graph is not None and event.graph.open:
            event.graph.add(self)
        if event.graph is not self.graph:
            where = "outside of a capture for an event that was recorded in it"
            raise RuntimeError(f"wait {where if self.graph is None else 'in a capture for an event from before it'}")
        self.after |= event.after
        self._do(lambda: here().wait(event))

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        here().host_waits("Stream.synchronize", self)

    def _do(self, work: Work) -> None:
        if self.graph is not None:
            self.graph.works.append((self, work))
        else:
            with stream(self):
                work()


class CUDAGraph:
    """The stand-in for `torch.cuda.CUDAGraph`. open: whether it captures; works: what it keeps, with their streams."""

    def __init__(self, **options: object) -> None:
        self.open = False
        self.works: list[tuple[Stream, Work]] = []
        self._captured: list[Stream] = []
        self._own: dict[Stream, Stream] = {}  # of all captured streams but the first: those of its works in a replay
        self._end = StreamEvent()  # of the last replay

    def add(self, stream: Stream) -> None:
        """Capture a stream from here on."""
        stream.graph = self
        self._captured.append(stream)

    @contextlib.contextmanager
    def capture(self, first: Stream) -> Iterator[None]:
        """Capture what is put on the stream, and on those that wait for its events, within the block."""
        self.open, self.works, self._captured = True, [], []
        self.add(first)
        try:
            with stream(first):
                yield
            if any(each.after - first.after for each in self._captured):
                raise RuntimeError("the capture ends before its first stream has waited for all others")
        finally:
            self.open = False
            for each in self._captured:
                each.graph, each.after = None, set()
        self._own = {each: Stream() for each in self._captured[1:]}

    def replay(self) -> None:
        first = current_stream()
        here().check_wait("CUDAGraph.replay")
        first.wait_event(self._end)
        for each, work in self.works:
            with stream(self._own.get(each, first)):
                work()
        first.record_event(self._end)


class RankStreams:
    """The streams of a rank. current: that of its next work."""

    current: Stream

    def __init__(self, memory: CheckedMemory, task: Task) -> None:
        self._memory, self._clocks, self._task = memory, memory.clocks, task
        self._streams, self._events = weakref.WeakSet[Stream](), weakref.WeakSet[StreamEvent]()
        self._count, self._host = 0, memory.clocks.new_chain()  # the latter knows what the host has waited for

    def begin(self, stream: Stream) -> tuple[int, int]:
        """Return the number and the chain of a new stream; the first one has that of the rank."""
        number, self._count = self._count, self._count + 1
        self._streams.add(stream)
        return number, self._fork(self._host) if number else self._task.stream

    def _fork(self, known: int) -> int:
        chain = self._clocks.new_chain()
        self._clocks.fork(known, chain)
        return chain

    def record(self, event: StreamEvent) -> None:
        """Record an event on the current stream."""
        event.chain = self._fork(self._task.stream)
        self._events.add(event)

    def wait(self, event: StreamEvent) -> None:
        """Let the current stream wait for an event."""
        assert event.chain is not None
        self._clocks.join(self._task.stream, [event.chain])

    def use(self, stream: Stream) -> None:
        """Make a stream the current one."""
        self.current, self._task.side = stream, stream.number
        self._task.stream = self._task.chain = stream.chain

    def chains(self) -> list[int]:
        """Return the chains on which the rank goes on, in the order in which they were made."""
        streams = [each.chain for each in self._streams]
        return sorted([*streams, *(each.chain or 0 for each in self._events), *[self._host] * (len(streams) > 1)])

    def keeps(self, work: Work) -> bool:
        """Let the graph that captures the current stream keep a work, with its lines; return whether one does."""
        graph = self.current.graph
        if graph is None:
            return False
        lines = self._memory.lines()

        def with_lines() -> None:
            self._task.lines = lines
            try:
                work()
            finally:
                self._task.lines = ()

        self.current.after.add(len(graph.works))
        graph.works.append((self.current, with_lines))
        return True

    def check_wait(self, what: str) -> None:
        """Raise RuntimeError if the current stream is captured."""
        if self.current.graph is not None:
            raise RuntimeError(f"{what}: the host cannot wait while a graph is captured")

    def host_waits(self, what: str, *of: Stream | StreamEvent) -> None:
        """Let the host wait for streams and events, or for all streams: what it puts on any stream then comes later.

        Raise RuntimeError in a capture.
        """
        self.check_wait(what)
        self._clocks.join(self._host, [each.chain for each in of or self._streams if each.chain is not None])
        for stream in self._streams:
            self._clocks.join(stream.chain, [self._host])


_memory: list[CheckedMemory] = []  # of the run that is being explored
_ranks: dict[int, RankStreams] = {}


def here() -> RankStreams:
    """Return the streams of the current rank."""
    task = _memory[0].scheduler.current
    if task.rank not in _ranks:
        _ranks[task.rank] = RankStreams(_memory[0], task)
        _ranks[task.rank].current = Stream()
    return _ranks[task.rank]


def on_stream(call: Callable[_Given, None]) -> Callable[_Given, None]:
    """Let the graph that captures the current stream keep a call; without one it is made at once."""

    @wraps(call)
    def kept_or_made(*args: _Given.args, **kwargs: _Given.kwargs) -> None:
        if not here().keeps(partial(call, *args, **kwargs)):
            call(*args, **kwargs)

    return kept_or_made


def current_stream(device: object = None) -> Stream:
    return here().current


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    streams = here()
    before = streams.current
    streams.use(stream or before)
    try:
        yield
    finally:
        streams.use(before)


@contextlib.contextmanager
def graph(graph: CUDAGraph, pool: object = None, stream: Stream | None = None, **options: object) -> Iterator[None]:
    synchronize()
    with graph.capture(stream or Stream()):
        yield


def is_current_stream_capturing() -> bool:
    return current_stream().graph is not None


def synchronize(device: object = None) -> None:
    here().host_waits("torch.cuda.synchronize")


_STAND_INS: dict[str, Any] = {
    "Stream": Stream,
    "Event": StreamEvent,
    "CUDAGraph": CUDAGraph,
    "current_stream": current_stream,
    "stream": stream,
    "graph": graph,
    "is_current_stream_capturing": is_current_stream_capturing,
    "synchronize": synchronize,
}


@contextlib.contextmanager
def stood_in(memory: CheckedMemory) -> Iterator[None]:
    """Let `torch.cuda` have the stand-ins of this module within the block, for a run with this memory."""
    _memory[:] = [memory]
    _ranks.clear()
    with mock.patch.multiple(torch.cuda, **_STAND_INS):
        yield
