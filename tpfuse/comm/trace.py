"""Nested spans of what a rank does over time: steps, layers, operators, communication and waits for other ranks.

The library marks its spans here. Nothing is recorded, and a mark costs a fraction of a microsecond, unless an observer
watches: `Recorder` keeps the spans with their times, and `tpfuse.train.nvtx` shows them to Nsight Systems.

    with observed(recorder):
        with span("step", "step 7"):
            ...

A span ends before the span around it ends, and one thread at a time marks spans: CUDA's backward pass runs in a thread
of its own, while the thread that has called it waits.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import torch

    from tpfuse.kernels.trace import KernelTrace

Kind = Literal["step", "micro_batch", "phase", "layer", "operator", "communication", "wait"]
"""The kinds of spans. An operator communicates and may also compute; a communication moves or sums data of several
ranks; a wait ends when another rank has done something."""

FORMAT = 3  # of the files in which ranks write their traces

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(slots=True, eq=False)
class Span:
    """A span. name: for an operator its name, dtype and shapes, the same on every rank.

    implementation: that of an operator, such as "direct"; else empty. peer: the rank of the world for which a wait
    waits; None if that is not known, as in a collective of NCCL or Gloo. flow: a text that is equal in a wait and in
    the signal for which it waits, or in all ranks' spans of one collective; else empty. layer: the innermost layer at
    the beginning. begin, end: ns, of `Recorder`'s clock. idle: the ns in which the thread did not run, without those of
    the spans inside; 0 in waits and communication. level: the number of spans around it. ranks: for an operator in
    symmetric memory, the numbers in the world of its group's ranks; else empty.
    """

    kind: Kind
    name: str
    implementation: str = ""
    peer: int | None = None
    flow: str = ""
    layer: str = ""
    begin: int = 0
    end: int = 0
    idle: int = 0
    level: int = 0
    ranks: tuple[int, ...] = ()


class LaunchMark(NamedTuple):
    """A launch of a kernel by a fused operator.

    operator: the index of the operator's span among those that have ended. programs: the size of the grid. lost: the
    number of events that were not kept. events: (program, kind, peer, begin, end), see `tpfuse.kernels.trace`; peer is
    a rank of the world, or -1 if it is not known.
    """

    kernel: str
    operator: int
    programs: int
    lost: int
    events: list[tuple[int, str, int, int, int]]


class Observer(Protocol):
    """An object that is told what this process does."""

    def begin(self, span: Span) -> None:
        """Note that a span begins."""

    def end(self, span: Span) -> None:
        """Note that the span that began last, of those that have not ended, ends."""

    def signal(self, flow: str) -> None:
        """Note that this rank signals what waits with the same flow wait for."""


_observers: list[Observer] = []
_open: list[Span] = []


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell `observer` of the spans and signals within the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
        if not _observers:
            _open.clear()


def is_observed() -> bool:
    """Return whether any observer watches."""
    return bool(_observers)


def layer_now() -> str:
    """Return the name of the innermost layer that has begun and not ended; empty outside of layers."""
    return next((span.name for span in reversed(_open) if span.kind == "layer"), "")


def begin(
    kind: Kind, name: str, implementation: str = "", peer: int | None = None, flow: str = "", ranks: Sequence[int] = ()
) -> Span | None:
    """Mark that a span begins, and return it for `end`; None if no observer watches."""
    if not _observers:
        return None
    begun = Span(kind, name, implementation, peer, flow, layer_now(), level=len(_open), ranks=tuple(ranks))
    _open.append(begun)
    for observer in _observers:
        observer.begin(begun)
    return begun


def end(begun: Span | None) -> None:
    """Mark that a span ends, and with it those inside of it that have not ended. None is ignored."""
    while begun is not None and begun in _open:
        ended = _open.pop()
        for observer in reversed(_observers):
            observer.end(ended)


def signal(flow: str) -> None:
    """Mark that this rank signals. Call it only if `is_observed`."""
    for observer in _observers:
        observer.signal(flow)


@contextlib.contextmanager
def _marked(*arguments: Any) -> Iterator[None]:
    begun = begin(*arguments)
    try:
        yield
    finally:
        end(begun)


_NOTHING = contextlib.nullcontext()


def span(
    kind: Kind, name: str, implementation: str = "", peer: int | None = None, flow: str = ""
) -> AbstractContextManager[None]:
    """Return a context manager that marks a span if an observer watches. See `Span` for the arguments."""
    return _marked(kind, name, implementation, peer, flow) if _observers else _NOTHING


def operator(name: str, implementation: str) -> Callable[[_Method], _Method]:
    """Return a decorator that marks each call of a method as a span of kind operator."""

    def decorated(method: _Method) -> _Method:
        @functools.wraps(method)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with span("operator", name, implementation):
                return method(*args, **kwargs)

        return cast(_Method, marked)

    return decorated


class _CudaMarks:
    """Marks on CUDA's current stream. `nanoseconds` is for after a synchronisation."""

    def __init__(self, device: "torch.device") -> None:
        import torch

        self._torch, self._device = torch, device
        torch.cuda.synchronize(device)
        self._first, self._first_ns = self.mark(), time.time_ns()

    def mark(self) -> "torch.cuda.Event":
        event = self._torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self._device)

    def nanoseconds(self, mark: "torch.cuda.Event") -> int:
        milliseconds: float = self._first.elapsed_time(mark)
        return self._first_ns + round(milliseconds * 1e6)


@dataclass
class Recorder:
    """Keeps the spans and signals of this process with their times in ns of the host's clock, `time.time_ns`.

    On a GPU, times are those at which the device comes to the mark on the current stream, also times of signals.
    kernels: records the programs of fused operators, which wait inside of a kernel; None to leave them out. ended: the
    spans, in the order of their ends. signals: (flow, ns). launches: the kernels of fused operators, in the order of
    their launch.
    """

    device: "torch.device"
    kernels: "KernelTrace | None" = None
    ended: list[Span] = field(default_factory=list)
    signals: list[tuple[str, Any]] = field(default_factory=list)
    launches: list[LaunchMark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cuda = _CudaMarks(self.device) if self.device.type == "cuda" else None
        # For each open span: the mark of its beginning, the thread's CPU time then, and wall and CPU ns of the spans
        # inside that have ended.
        self._stack: list[list[Any]] = []
        self._marks: list[tuple[Span, Any, Any]] = []
        self._operators: list[tuple[Span, int, int]] = []  # fused ones, with the numbers of their launches

    def begin(self, span: Span) -> None:
        """Note the time at which a span begins."""
        if span.implementation == "fused" and self.kernels is not None:
            self._operators.append((span, self.kernels.launched, 0))
        if self._cuda is not None:
            self._stack.append([self._cuda.mark()])
            return
        self._stack.append([time.time_ns(), time.thread_time_ns(), 0, 0])

    def end(self, span: Span) -> None:
        """Note the time at which the innermost span ends."""
        if not self._stack:  # it began before this recorder watched
            return
        if self._operators and self._operators[-1][0] is span and self.kernels is not None:
            self._operators[-1] = span, self._operators[-1][1], self.kernels.launched
        if self._cuda is not None:
            self._marks.append((span, self._stack.pop()[0], self._cuda.mark()))
            return
        now, cpu = time.time_ns(), time.thread_time_ns()
        begun, cpu_begun, inner_wall, inner_cpu = self._stack.pop()
        wall, used = now - begun, cpu - cpu_begun
        span.begin, span.end = begun, now
        if span.kind not in ("wait", "communication"):
            span.idle = max(0, (wall - inner_wall) - (used - inner_cpu))
        if self._stack:
            self._stack[-1][2] += wall
            self._stack[-1][3] += used
        self.ended.append(span)

    def signal(self, flow: str) -> None:
        """Note the time of a signal."""
        self.signals.append((flow, time.time_ns() if self._cuda is None else self._cuda.mark()))

    def finish(self) -> None:
        """Fill in the times of spans on a GPU and the events of kernels, after the last span."""
        if self._cuda is not None:
            self._cuda.synchronize()
            for span, begun, ended in self._marks:
                span.begin, span.end = self._cuda.nanoseconds(begun), self._cuda.nanoseconds(ended)
                self.ended.append(span)
            self._marks.clear()
            self.signals = [(flow, self._cuda.nanoseconds(mark)) for flow, mark in self.signals]
        places = {id(span): index for index, span in enumerate(self.ended)}
        traced = [] if self.kernels is None else self.kernels.read()
        for span, first, stop in self._operators:
            for launch in traced[first:stop] if id(span) in places else ():
                peers = dict(enumerate(span.ranks if launch.world == len(span.ranks) else ()))
                events = [
                    (event.program, event.kind, peers.get(event.peer, -1), event.begin_ns, event.end_ns)
                    for event in launch.events
                ]
                self.launches.append(LaunchMark(launch.kernel, places[id(span)], launch.programs, launch.lost, events))
        self._operators.clear()
