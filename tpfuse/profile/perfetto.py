"""Write the traces of all ranks as one file for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is Chrome's: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tpfuse.comm.host import replace_file
from tpfuse.comm.trace import Span
from tpfuse.profile.trace_files import RankTrace

_COLORS = {"wait": "terrible", "communication": "thread_state_iowait"}  # names that both viewers know


def write_perfetto(traces: Sequence[RankTrace], path: Path) -> None:
    """Write all spans, one process for each rank, and an arrow from each signal to the wait that it has ended."""
    replace_file(path, json.dumps({"traceEvents": list(_events(traces)), "displayTimeUnit": "ms"}))


def _events(traces: Sequence[RankTrace]) -> Iterator[dict[str, Any]]:
    first = min(root.span.begin for trace in traces for root in trace.roots)

    def microseconds(ns: int) -> float:
        return (ns - first) / 1e3

    arrows = 0
    for trace in traces:
        host = trace.host.split()[-1] if trace.host else ""
        yield _named(trace.rank, "process_name", f"rank {trace.rank} ({host}, {trace.device})")
        yield {"ph": "M", "name": "process_sort_index", "pid": trace.rank, "args": {"sort_index": trace.rank}}
        yield _named(trace.rank, "thread_name", "steps, layers, operators")
        for root in trace.roots:
            for node, _ in root.walk():
                span = node.span
                event = {"ph": "X", "pid": trace.rank, "tid": 0, "name": _name(span), "cat": span.kind}
                event |= {"ts": microseconds(span.begin), "dur": (span.end - span.begin) / 1e3, "args": _details(span)}
                yield event | ({"cname": _COLORS[span.kind]} if span.kind in _COLORS else {})
                yield from _kernels(trace, span, microseconds)
                signalled = _signalled(span, traces)
                if signalled is not None and span.end > span.begin:
                    arrows += 1
                    arrow = {"name": "signal", "cat": "signal", "id": arrows, "tid": 0}
                    yield arrow | {"ph": "s", "pid": span.peer, "ts": microseconds(min(signalled, span.end))}
                    yield arrow | {"ph": "f", "bp": "e", "pid": trace.rank, "ts": microseconds(span.end)}


def _kernels(trace: RankTrace, operator: Span, microseconds: Callable[[int], float]) -> Iterator[dict[str, Any]]:
    """Yield the events of an operator's kernels: a track for each program."""
    for launch in trace.launches_of(operator):
        for program, kind, peer, begin, end in launch.events:
            yield _named(trace.rank, "thread_name", f"program {program}", 1 + program)
            event = {"ph": "X", "pid": trace.rank, "tid": 1 + program, "cat": launch.kernel}
            event |= {"name": f"{kind} for rank {peer}" if kind == "waiting" else f"{kind} of rank {peer}"}
            event |= {"ts": microseconds(begin), "dur": (end - begin) / 1e3, "args": {"kernel": launch.kernel}}
            yield event | ({"cname": _COLORS["wait"]} if kind == "waiting" else {})


def _named(pid: int, what: str, name: str, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _name(span: Span) -> str:
    return f"wait for rank {span.peer}" if span.kind == "wait" else span.name.partition(" torch.")[0]


def _details(span: Span) -> dict[str, Any]:
    details = {"name": span.name, "layer": span.layer, "implementation": span.implementation, "flow": span.flow}
    return {key: value for key, value in details.items() if value} | {"idle_us": span.idle / 1e3}


def _signalled(span: Span, traces: Sequence[RankTrace]) -> int | None:
    """Return when the peer has signalled what a wait waits for; None if that is not known."""
    if span.kind != "wait" or span.peer is None or not span.peer < len(traces):
        return None
    return traces[span.peer].signals.get(span.flow)
