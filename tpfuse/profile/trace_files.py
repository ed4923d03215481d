"""Read the files in which ranks have written their traces, with all times on one clock."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tpfuse.checkpoint.untrusted import Unreadable, read_json
from tpfuse.comm.trace import FORMAT, LaunchMark, Span
from tpfuse.errors import UserError

_SCHEMA = {
    "format": int, "rank": int, "group": [int], "host": str, "device": str, "layout": dict, "clock_offset_ns": int,
    "clock_error_ns": int, "spans": [list], "signals": [list], "launches": [list], "untraced": int,
}  # fmt: skip
_TYPES = (str, str, str, int | None, str, str, int, int, int, int, list)  # of the fields of a span
_EVENT = (int, str, int, int, int)  # the types of the fields of a kernel's event


@dataclass
class SpanNode:
    """A span and those inside of it. inside: ns of the spans inside."""

    span: Span
    children: list["SpanNode"] = field(default_factory=list)

    @property
    def duration(self) -> int:
        """Return the ns from the span's beginning to its end."""
        return self.span.end - self.span.begin

    @property
    def exclusive(self) -> int:
        """Return the ns that are in no span inside."""
        return self.duration - sum(child.duration for child in self.children)

    def walk(self, *above: Span) -> Iterator[tuple["SpanNode", tuple[Span, ...]]]:
        """Yield this node and all nodes inside, each with the spans around it, outermost first."""
        yield self, above
        for child in self.children:
            yield from child.walk(*above, self.span)


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank. Times are ns of the first rank's clock, as far as the ranks could measure it.

    roots: the spans that are in no other span, in the order of time. signals: the time of each flow. launches: the
    kernels of each fused operator, by the id of its span. untraced: the number of launches that are not among them.
    """

    rank: int
    group: list[int]  # the numbers of all its ranks in the default group
    host: str
    device: str
    layout: dict[str, Any]
    clock_error: int
    roots: list[SpanNode]
    signals: dict[str, int]
    launches: dict[int, list[LaunchMark]] = field(default_factory=dict)
    untraced: int = 0

    def launches_of(self, span: Span) -> list[LaunchMark]:
        """Return the launches of an operator."""
        return self.launches.get(id(span), [])

    @property
    def world(self) -> int:
        """Return the number of ranks that were recorded."""
        return len(self.group)

    @property
    def steps(self) -> list[SpanNode]:
        """Return the spans of the steps."""
        return [root for root in self.roots if root.span.kind == "step"]


def read_traces(folder: Path) -> list[RankTrace]:
    """Return the traces of all ranks, in rank order. Raise UserError if one is missing, unreadable or lacks a step."""
    traces = [_read(path) for path in folder.glob("rank*.json")]
    if not traces:
        raise UserError(f"{folder} has no traces: expected the files rank0.json, rank1.json, …")
    traces.sort(key=lambda trace: trace.rank)
    group, world = traces[0].group, traces[0].world
    for trace in traces:
        if trace.group != group:
            raise UserError(
                f"{folder} has traces of the groups {group} and {trace.group}: record each in its own folder"
            )
    if [trace.rank for trace in traces] != list(range(world)):
        found = ", ".join(str(trace.rank) for trace in traces)
        raise UserError(f"{folder} has traces of the ranks {found}: expected one of each of {world} ranks")
    complete = [{step.span.name for step in trace.steps} for trace in traces]
    if not any(complete):
        raise UserError(f"{folder} has no complete step: the run ended before the steps that it was to record")
    for step in sorted(complete[0].union(*complete) - complete[0].intersection(*complete)):
        rank = next(rank for rank, steps in enumerate(complete) if step not in steps)
        raise UserError(f"{folder}: rank {rank} has not completed {step}: expected the same steps of every rank")
    return traces


def _read(path: Path) -> RankTrace:
    try:
        found = read_json(path, _SCHEMA)
        if found["format"] != FORMAT:
            raise Unreadable(f"format {found['format']}: this tpfuse reads format {FORMAT}")
        offset = found["clock_offset_ns"]
        spans = [_span(values, offset) for values in found["spans"]]
        signals = {str(flow): int(when) + offset for flow, when in found["signals"]}
        launches: dict[int, list[LaunchMark]] = {}
        for values in found["launches"]:
            launch = _launch(values, spans, offset, found["device"])
            launches.setdefault(id(spans[launch.operator]), []).append(launch)
    except (OSError, Unreadable, ValueError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return RankTrace(
        found["rank"], found["group"], found["host"], found["device"], found["layout"], found["clock_error_ns"],
        _nested(spans), signals, launches, found["untraced"],
    )  # fmt: skip


def _span(values: list[Any], offset: int) -> Span:
    if len(values) != len(_TYPES) or not all(isinstance(v, kind) for v, kind in zip(values, _TYPES, strict=True)):
        raise Unreadable(f"a span has the fields {[item.name for item in fields(Span)]}, found {values}")
    span = Span(*values)
    span.begin, span.end = span.begin + offset, span.end + offset
    return span


def _launch(values: list[Any], spans: list[Span], offset: int, device: str) -> LaunchMark:
    launch = LaunchMark(*values)
    if not (isinstance(launch.operator, int) and 0 <= launch.operator < len(spans) and launch.programs > 0):
        raise Unreadable(f"a launch has the fields {LaunchMark._fields}, found {values[:4]}")
    if any(
        len(event) != len(_EVENT) or not all(isinstance(v, kind) for v, kind in zip(event, _EVENT, strict=True))
        for event in launch.events
    ):
        raise Unreadable(f"the events of a launch of {launch.kernel} are not (program, kind, peer, begin, end)")
    if device != "cpu" and launch.events:
        # The kernel's clock is not the host's: the first event belongs to the beginning of the operator.
        offset = spans[launch.operator].begin - min(event[3] for event in launch.events)
    return launch._replace(events=[(*event[:3], event[3] + offset, event[4] + offset) for event in launch.events])


def _nested(spans: list[Span]) -> list[SpanNode]:
    """Return the spans that are in no other one. spans: in the order of their ends, so that outer ones come last."""
    waiting: list[SpanNode] = []  # nodes whose outer span has not come yet
    for span in spans:
        node = SpanNode(span)
        while waiting and waiting[-1].span.level > span.level and waiting[-1].span.begin >= span.begin:
            node.children.insert(0, waiting.pop())
        waiting.append(node)
    return waiting
