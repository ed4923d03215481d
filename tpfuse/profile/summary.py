"""Explain traces: where the time of each rank goes, in which operators, and who waits for whom.

Every nanosecond of a step is counted once: as waiting for another rank, as communication (data of several ranks is
moved or summed), as idle (on CPU: the operating system ran other threads), or else as computing. A wait in a collective
of NCCL or Gloo, which does not say for whom, ends for the rank that came last: the time before that rank came is
waiting for it, and the rest communication. So is the time before a message of NCCL or Gloo was sent.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tpfuse.comm.trace import Span
from tpfuse.profile.trace_files import RankTrace

KINDS = ("computing", "communication", "waiting", "idle")
_WORTH_A_SENTENCE = 0.02  # the least share of a step


@dataclass(frozen=True, order=True)
class Place:
    """Where time is spent. operator: without dtype and shapes; outside of operators, the part of the step."""

    layer: str
    operator: str
    implementation: str

    def __str__(self) -> str:
        """Return the place in words."""
        return f"{self.operator} of {self.layer}" if self.layer else self.operator


@dataclass
class PlaceTimes:
    """Nanoseconds at a place. waits: for each rank. in_flight: the time for which data of other ranks was awaited or
    moved; exposed: the part of it in which this rank did nothing else."""

    calls: int = 0
    computing: int = 0
    communication: int = 0
    idle: int = 0
    waits: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    in_flight: int = 0
    exposed: int = 0

    @property
    def waiting(self) -> int:
        """Return the time of all waits."""
        return sum(self.waits.values())

    @property
    def total(self) -> int:
        """Return the whole time."""
        return self.computing + self.communication + self.waiting + self.idle

    @property
    def own(self) -> int:
        """Return the time in which this rank waited for no other."""
        return self.total - self.waiting

    def add(self, other: "PlaceTimes") -> None:
        """Add the times of another place."""
        for name in ("calls", "computing", "communication", "idle", "in_flight", "exposed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for rank, ns in other.waits.items():
            self.waits[rank] += ns


def times_of(traces: Sequence[RankTrace]) -> list[dict[Place, PlaceTimes]]:
    """Return the times of each rank at each place, over all steps that were recorded."""
    signals = [trace.signals for trace in traces]
    return [_times(trace, signals) for trace in traces]


def _times(trace: RankTrace, signals: Sequence[Mapping[str, int]]) -> dict[Place, PlaceTimes]:
    places: dict[Place, PlaceTimes] = defaultdict(PlaceTimes)
    for step in trace.steps:
        for node, above in step.walk():
            span = node.span
            operator = next((s for s in (span, *reversed(above)) if s.kind == "operator"), None)
            times = places[_place(span, above, operator)]
            times.calls += span is operator
            if span.kind == "wait":
                peer = trace.rank if span.peer is None else span.peer
                times.waits[peer] += node.exclusive
                _count_wait(times, span, operator, signals[peer] if peer < len(signals) else {})
            elif span.kind == "communication":
                waited, last = _wait_for_last(span, signals, trace.rank)
                times.communication += node.exclusive - waited
                times.exposed += node.exclusive
                times.in_flight += max(node.exclusive, _duration_in_background(span, trace.signals))
                if waited:
                    times.waits[last] += waited
            else:
                inside = _count_kernels(times, trace, span, node.exclusive)
                idle = min(span.idle, node.exclusive) * (node.exclusive - inside) // max(node.exclusive, 1)
                times.idle += idle
                times.computing += node.exclusive - inside - idle
    return dict(places)


def _count_kernels(times: PlaceTimes, trace: RankTrace, operator: Span, most: int) -> int:
    """Count the waits and the communication inside an operator's kernels. Return their ns, at most `most`.

    Programs of a GPU run at the same time: there the mean over the programs counts. Interpreted programs run one after
    another.
    """
    counted = 0
    for launch in trace.launches_of(operator):
        share = 1 if trace.device == "cpu" else launch.programs
        for _, kind, peer, begin, end in launch.events:
            ns = min((end - begin) // share, most - counted)
            if kind == "waiting":
                times.waits[peer if peer >= 0 else trace.rank] += ns
            elif kind == "copying":
                times.communication += ns
            else:
                continue
            counted += ns
    times.exposed += counted
    times.in_flight += counted
    return counted


def _place(span: Span, above: tuple[Span, ...], operator: Span | None) -> Place:
    if operator is not None:
        return Place(operator.layer, operator.name.partition(" torch.")[0], operator.implementation)
    part = next((s.name for s in (span, *reversed(above)) if s.kind == "phase"), "rest of the step")
    layer = next((s.name for s in (span, *reversed(above)) if s.kind == "layer"), "")
    return Place(layer, part, "")


def _count_wait(times: PlaceTimes, span: Span, operator: Span | None, signals: Mapping[str, int]) -> None:
    """Count how long the operator has awaited the signal, also while it computed."""
    duration = span.end - span.begin
    signalled = signals.get(span.flow)
    times.exposed += duration
    awaited = 0 if signalled is None or operator is None else signalled - operator.begin
    times.in_flight += max(duration, awaited)


def _wait_for_last(span: Span, signals: Sequence[Mapping[str, int]], rank: int) -> tuple[int, int]:
    """Return (ns of a collective before the last rank had come, or of a message before it was sent, that rank)."""
    names = f"begin {span.flow}", span.flow  # of a collective on every rank, of a message on its source
    begun = {other: of[name] for other, of in enumerate(signals) for name in names if name in of}
    if not begun:
        return 0, rank
    last = max(begun, key=lambda other: begun[other])
    return max(0, min(begun[last], span.end) - span.begin), last


def _duration_in_background(span: Span, signals: Mapping[str, int]) -> int:
    begun, ended = signals.get(f"begin {span.flow}"), signals.get(f"end {span.flow}")
    return 0 if not span.flow or begun is None or ended is None else ended - begun


def summarise(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the summary as a JSON document. Times are seconds of a step, the mean of the steps that were recorded.

    steps: the names of the steps; ranks: for each rank its times, also for each operator; wait_matrix[r][p]: how long
    rank r waits for rank p; hidden_share: the share of communication during which ranks computed, None without
    communication and where traces do not say when it ended (`_ends_known`); clock_error_s: by how much the clocks of
    ranks may differ; sentences: the explanation.
    """
    by_rank = times_of(traces)
    steps = len(traces[0].steps)
    ranks: list[dict[str, Any]] = []
    for trace, places in zip(traces, by_rank, strict=True):
        whole = _sum(places.values())
        operators = [_row(place, times, steps) for place, times in places.items()]
        operators.sort(key=lambda row: -float(row["total_s"]))
        ranks.append(
            {"rank": trace.rank, "host": trace.host.split()[-1] if trace.host else "", "device": trace.device}
            | {"wall_s": sum(step.duration for step in trace.steps) / steps / 1e9}
            | _seconds(whole, steps)
            | {"operators": operators}
        )
    whole = _sum(times for places in by_rank for times in places.values())
    matrix = [[row["waits_s"].get(str(peer), 0.0) for peer in range(len(ranks))] for row in ranks]
    document = {
        "format": 1,
        "steps": [step.span.name for step in traces[0].steps],
        "layout": traces[0].layout,
        "ranks": ranks,
        "wait_matrix": matrix,
        "hidden_share": 1 - whole.exposed / whole.in_flight if whole.in_flight and _ends_known(traces) else None,
        "clock_error_s": max(trace.clock_error for trace in traces) / 1e9,
    }
    return document | {"sentences": [*_sentences(document, by_rank, steps), *_losses(traces)]}


def _ends_known(traces: Sequence[RankTrace]) -> bool:
    """Return whether traces say when communication ended: not on GPUs, nor with messages of torch.distributed."""
    spans = (node.span for trace in traces for step in trace.steps for node, _ in step.walk())
    messages = any(span.kind == "communication" and span.peer is not None for span in spans)
    return not messages and all(trace.device == "cpu" for trace in traces)


def _sum(times: Iterable[PlaceTimes]) -> PlaceTimes:
    total = PlaceTimes()
    for each in times:
        total.add(each)
    return total


def _seconds(times: PlaceTimes, steps: int) -> dict[str, Any]:
    values: dict[str, Any] = {f"{kind}_s": getattr(times, kind) / steps / 1e9 for kind in KINDS}
    values["waits_s"] = {str(rank): ns / steps / 1e9 for rank, ns in sorted(times.waits.items()) if ns}
    return values


def _row(place: Place, times: PlaceTimes, steps: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "layer": place.layer, "operator": place.operator, "implementation": place.implementation,
        "calls": times.calls / steps, "total_s": times.total / steps / 1e9,
    }  # fmt: skip
    return row | _seconds(times, steps)


def _sentences(document: Mapping[str, Any], by_rank: Sequence[Mapping[Place, PlaceTimes]], steps: int) -> list[str]:
    ranks = document["ranks"]
    slowest = max(ranks, key=lambda row: float(row["wall_s"]))
    wall = slowest["wall_s"] or 1e-9
    shares = ", ".join(f"{slowest[f'{kind}_s'] / wall:.0%} {kind}" for kind in KINDS)
    where = f" on rank {slowest['rank']}" if len(ranks) > 1 else ""
    sentences = [f"A step takes {_time(wall)}{where}: {shares}."]
    if document["hidden_share"] is not None and len(ranks) > 1:
        sentences.append(f"{document['hidden_share']:.0%} of the communication is hidden behind computation.")
    elif len(ranks) > 1 and any(row["communication_s"] or row["waiting_s"] for row in ranks):
        sentences.append("It is not known how much of the communication is hidden behind computation.")
    sentences += _slow_ranks(by_rank, steps, wall)
    sentences += _waits(by_rank, steps, wall)
    return sentences


def _losses(traces: Sequence[RankTrace]) -> Iterator[str]:
    """Yield a sentence if kernels had more launches or events than a trace keeps."""
    untraced = sum(trace.untraced for trace in traces)
    lost = sum(launch.lost for trace in traces for launches in trace.launches.values() for launch in launches)
    if untraced or lost:
        yield (
            f"The trace had no room for {untraced} launches and {lost} further events of fused kernels,"
            " so waits and copies in them count as computing."
        )


def _waits(by_rank: Sequence[Mapping[Place, PlaceTimes]], steps: int, wall: float) -> list[str]:
    """Return a sentence for each of the three operators that wait longest, if that matters."""
    waits = [
        (ns / steps / 1e9, rank, peer, place, times)
        for rank, places in enumerate(by_rank)
        for place, times in places.items()
        for peer, ns in times.waits.items()
    ]
    waits.sort(key=lambda wait: -wait[0])
    return [
        f"{place} waits {seconds * 1e9 * steps / times.total:.0%} of its time on rank {rank} for rank {peer}:"
        f" {_time(seconds)} a step."
        for seconds, rank, peer, place, times in waits[:3]
        if seconds > _WORTH_A_SENTENCE * wall
    ]


def _slow_ranks(by_rank: Sequence[Mapping[Place, PlaceTimes]], steps: int, wall: float) -> list[str]:
    """Return a sentence for each rank that works longer than the others, with the place where it differs most."""
    owns = [sum(times.own for times in places.values()) for places in by_rank]
    sentences = []
    for rank, places in enumerate(by_rank):
        others = [own for other, own in enumerate(owns) if other != rank]
        if not others:
            continue
        excess = (owns[rank] - median(others)) / steps / 1e9
        if excess < 2 * _WORTH_A_SENTENCE * wall:
            continue
        more = {place: _excess(place, rank, by_rank) for place in places}
        place = max(more, key=lambda p: more[p])
        sentences.append(
            f"Rank {rank} works {_time(excess)} a step longer than the others, which wait for it:"
            f" {_time(more[place] / steps / 1e9)} of that in {place}."
        )
    return sentences


def _excess(place: Place, rank: int, by_rank: Sequence[Mapping[Place, PlaceTimes]]) -> float:
    """Return the ns by which a rank's own work at a place exceeds the median of the other ranks."""
    others = [places[place].own if place in places else 0 for other, places in enumerate(by_rank) if other != rank]
    return by_rank[rank][place].own - median(others)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def table(document: Mapping[str, Any], rows: int = 12) -> str:
    """Return the times of all ranks, and of the operators that take longest, as text."""
    columns = [f"{kind:>14}" for kind in KINDS]
    lines = [f"{'':<52}{'total':>10}" + "".join(columns)]
    lines += [_line(f"rank {row['rank']}", row["wall_s"], row) for row in document["ranks"]]
    lines.append("")
    lines += [_line(name, mean["total_s"], mean) for name, mean in list(mean_operators(document).items())[:rows]]
    return "\n".join(lines)


def mean_operators(document: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the times of each operator over all layers, the mean over ranks, the longest first."""
    merged: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for rank in document["ranks"]:
        for row in rank["operators"]:
            merged[kind_of(row)].append(row)
    count = len(document["ranks"])
    means = {
        name: {key: sum(row[key] for row in found) / count for key in ("total_s", *(f"{k}_s" for k in KINDS))}
        for name, found in merged.items()
    }
    return dict(sorted(means.items(), key=lambda item: -item[1]["total_s"]))


def kind_of(row: Mapping[str, Any]) -> str:
    """Return what the rows of equal layers have in common: an operator, or a part of a step in such a layer."""
    if row["implementation"]:
        return f"{row['operator']} ({row['implementation']})"
    layer = re.sub(r"\b\d+\b", "*", row["layer"])
    return f"{row['operator']} in {layer}" if layer else f"{row['operator']}, other"


def _line(name: str, total: float, row: Mapping[str, Any]) -> str:
    cells = "".join(f"{_time(row[f'{kind}_s']):>14}" for kind in KINDS)
    return f"{name[:51]:<52}{_time(total):>10}{cells}"
