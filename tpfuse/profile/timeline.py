"""Draws one call of an operator as an SVG: what each rank does over time, and which signal ends which wait."""

import math
import re
import textwrap
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpfuse.comm.host import replace_file
from tpfuse.comm.trace import Kind, Span
from tpfuse.profile.appearance import COLOURS, INK, duration
from tpfuse.profile.summary import wait_for_last
from tpfuse.profile.trace_files import Node, RankTrace
from tpfuse.train.errors import UserError

_MOST_RANKS = 16  # with lanes of their own
_MOST_PROGRAMS = 4  # of a rank, with lanes of their own
# Pixels.
_WIDTH, _LEFT, _RIGHT, _MARGIN = 1120, 110, 1096, 20
_LANE, _PROGRAM, _GAP, _PROGRAM_GAP = 30, 16, 26, 4
_TITLE, _TEXT, _SMALL = 17, 12, 11  # sizes of text

Lane = tuple[int, int | None]
"""A rank, and one of its kernel's programs or None."""


@dataclass(frozen=True)
class _Wait:
    """A wait of a lane. signalled: when `peer` has signalled; None if that is not known."""

    lane: Lane
    begin: int
    end: int
    peer: int | None
    signalled: int | None

    @property
    def ended_by_signal(self) -> bool:
        """Whether the signal came during the wait: a wait for one that has come before ends at once."""
        return self.signalled is not None and self.signalled >= self.begin


@dataclass(frozen=True)
class _Block:
    """What a lane does for a time, except where a later block covers it. labels: from the longest to the shortest."""

    lane: Lane
    kind: str
    begin: int
    end: int
    tooltip: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class _Call:
    """A call of an operator by ranks that wait for each other. number: of `calls` equal calls in a step."""

    step: str
    operator: str
    layer: str
    number: int
    calls: int
    nodes: Mapping[int, Node]
    waits: Mapping[int, Sequence[_Wait]]

    @property
    def place(self) -> str:
        """The operator and its layer in words."""
        name = self.operator.partition(" torch.")[0]
        return f"{name} of {self.layer}" if self.layer else name

    @property
    def waited(self) -> int:
        """The ns for which all ranks wait."""
        return sum(waited for rank in self.nodes for waited in self.waited_for(rank).values())

    def waited_for(self, rank: int) -> dict[int | None, int]:
        """Returns the ns for which `rank` waits for each peer. Of a kernel's programs, the longest wait counts."""
        lanes: dict[Lane, Counter[int | None]] = defaultdict(Counter)
        for wait in self.waits[rank]:
            lanes[wait.lane][wait.peer] += wait.end - wait.begin
        longest: Counter[int | None] = Counter()
        for (_, program), waited in lanes.items():
            if program is not None:
                longest |= waited
        return dict(lanes[rank, None] + longest)

    def title(self) -> tuple[str, str]:
        """Returns what the picture shows, and who waits there, which together are a sentence."""
        call = f", call {self.number} of {self.calls}" if self.calls > 1 else ""
        waits = [(ns, rank, peer) for rank in self.nodes for peer, ns in self.waited_for(rank).items()]
        ns, rank, peer = max(waits, key=lambda wait: wait[0], default=(0, 0, None))
        if not ns:
            return f"{self.place}, {self.step}{call}:", "no rank waits"
        whom = "" if peer is None else f" for rank {peer}"
        reason = ""
        if peer is not None and peer in self.nodes:
            begun = self.nodes[peer].span.begin
            late = begun - self.nodes[rank].span.begin
            # A rank may also signal before it begins the operator: then that it begins late is not the reason.
            if late > ns / 2 and begun <= max(wait.end for wait in self.waits[rank] if wait.peer == peer):
                reason = f", which begins {duration(late)} later"
        return f"{self.place}, {self.step}{call}:", f"rank {rank} waits {duration(ns)}{whom}{reason}"


def timeline(traces: Sequence[RankTrace], path: Path, operator: str = "") -> bool:
    """Draws the call of an operator in which ranks wait longest, and returns whether there is one that communicates.

    operator: a part of the operator and its layer, such as "all_gather of transformer.h.0"; empty for all of them.
    Raises UserError if there is no such operator, and OSError if the file cannot be written.
    """
    calls = list(_calls(traces))
    if operator:
        places = sorted({call.place for call in calls})
        calls = [call for call in calls if operator in call.place]
        if places and not calls:
            raise UserError(f"no operator that communicates is called {operator!r}: there are {', '.join(places)}")
    if not calls:
        return False
    drawn = _draw(max(calls, key=lambda call: call.waited), traces)
    replace_file(path, ET.tostring(drawn, encoding="unicode") + "\n")
    return True


def _calls(traces: Sequence[RankTrace]) -> Iterator[_Call]:
    """Yields the calls of operators that communicate. The k-th call of an operator, in a layer and a step, is one call
    on all ranks that wait for each other."""
    signals = [trace.signals for trace in traces]
    nodes: dict[tuple[str, str, str, int], dict[int, Node]] = defaultdict(dict)
    for trace in traces:
        for step in trace.steps:
            counts: Counter[tuple[str, str, str]] = Counter()
            for node, _ in step.walk():
                span = node.span
                if span.kind == "operator" and any(n.span.kind in ("wait", "communication") for n, _ in node.walk()):
                    place = step.span.name, span.name, span.layer
                    counts[place] += 1
                    nodes[*place, counts[place]][trace.rank] = _with_programs(node, trace)
    totals = Counter(place[:3] for place in nodes)
    for (step_name, name, layer, number), found in nodes.items():
        waits = {rank: list(_waits(node, rank, signals)) for rank, node in found.items()}
        for group in _groups(waits):
            yield _Call(
                step_name, name, layer, number, totals[step_name, name, layer],
                {rank: found[rank] for rank in sorted(group)}, {rank: waits[rank] for rank in sorted(group)},
            )  # fmt: skip


def _with_programs(node: Node, trace: RankTrace) -> Node:
    """Returns an operator with the events of its kernels' programs as spans inside it."""
    kinds: dict[str, Kind] = {"waiting": "wait", "copying": "communication", "computing": "phase"}
    events = [
        Node(Span(kinds[kind], f"program {program}", "", peer if peer >= 0 else None, begin=begin, end=end))
        for launch in trace.launches_of(node.span)
        for program, kind, peer, begin, end in launch.events
    ]
    return Node(node.span, [*node.children, *events])


def _groups(waits: Mapping[int, Sequence[_Wait]]) -> list[set[int]]:
    """Returns the sets of ranks that wait for each other."""
    groups: list[set[int]] = []
    for rank, own in waits.items():
        linked = {rank} | {wait.peer for wait in own if wait.peer in waits and wait.peer is not None}
        linked.update(*(group for group in groups if group & linked))
        groups = [group for group in groups if not group & linked] + [linked]
    return groups


def _waits(node: Node, rank: int, signals: Sequence[Mapping[str, int]]) -> Iterator[_Wait]:
    """Yields the waits within an operator. Those of a collective end when the last rank begins it."""
    for inner, above in node.walk():
        span = inner.span
        lane = rank, _program((*above, span))
        if span.kind == "wait":
            known = span.peer is not None and span.peer < len(signals)
            yield _Wait(
                lane, span.begin, span.end, span.peer, signals[span.peer or 0].get(span.flow) if known else None
            )
        elif span.kind == "communication" and span.flow:
            waited, last = wait_for_last(span, signals, rank)
            if waited:
                yield _Wait(lane, span.begin, span.begin + waited, last, span.begin + waited)


def _program(spans: Iterable[Span]) -> int | None:
    """Returns the program whose span is among `spans`."""
    found = (re.match(r"program (\d+)", span.name) for span in spans)
    return next((int(match[1]) for match in found if match), None)


def _blocks(rank: int, node: Node, waits: Sequence[_Wait]) -> list[_Block]:
    """Returns what a rank does in a call; blocks within others come after them."""
    blocks = []
    awaited = {(wait.lane, wait.begin): wait for wait in waits}
    for inner, above in node.walk():
        span = inner.span
        lane = rank, _program((*above, span))
        wait = awaited.get((lane, span.begin))
        if span.kind != "wait":
            kind = "communication" if span.kind == "communication" else "computing"
            words = _short(span.name) if kind == "communication" and lane[1] is None else kind
            took = duration(span.end - span.begin)
            if lane[1] is None and any(_program([child.span]) is not None for child in inner.children):
                words = "its programs run"
            timed = () if inner.children else (f"{words} {took}",)
            blocks.append(_Block(lane, kind, span.begin, span.end, f"{_short(span.name)}: {took}", (*timed, words)))
        if wait is not None and span.kind in ("wait", "communication"):
            whom = "" if wait.peer is None else f" for rank {wait.peer}"
            words = f"waits {duration(wait.end - wait.begin)}{whom}"
            tooltip = f"{_short(span.name)} {words}"
            labels = (words, f"waits{whom}", whom.strip())
            blocks.append(_Block(lane, "waiting", wait.begin, wait.end, tooltip, labels))
    return blocks


def _short(name: str) -> str:
    return name.partition(" torch.")[0]


def _lanes(call: _Call, blocks: Sequence[_Block]) -> tuple[list[Lane], str]:
    """Returns the lanes from top to bottom, and a note about those that are left out, empty if none is."""
    notes = []
    ranks = set(call.nodes)
    if len(ranks) > _MOST_RANKS:
        ranks = set()
        for rank in sorted(call.nodes, key=lambda rank: -sum(call.waited_for(rank).values())):
            waited = call.waited_for(rank)
            peer = max(waited, key=lambda p: waited[p], default=None)
            pair = {rank} | ({peer} if peer is not None and peer in call.nodes else set())
            if len(ranks | pair) <= _MOST_RANKS:
                ranks |= pair
        notes.append(f"{len(ranks)} of {len(call.nodes)} ranks: those that wait longest, and for whom")
    lanes: list[Lane] = []
    for rank in sorted(ranks):
        waiting: Counter[int] = Counter()
        for block in blocks:
            if block.lane[0] == rank and block.lane[1] is not None:
                waiting[block.lane[1]] += block.end - block.begin if block.kind == "waiting" else 0
        lanes.append((rank, None))
        lanes += [(rank, program) for program in sorted(p for p, _ in waiting.most_common(_MOST_PROGRAMS))]
        if len(waiting) > _MOST_PROGRAMS:
            notes.append(f"of each rank the {_MOST_PROGRAMS} programs that wait longest")
    return lanes, "; ".join(dict.fromkeys(notes))


def _draw(call: _Call, traces: Sequence[RankTrace]) -> ET.Element:
    blocks = [block for rank, node in call.nodes.items() for block in _blocks(rank, node, call.waits[rank])]
    lanes, note = _lanes(call, blocks)
    begin = min(node.span.begin for node in call.nodes.values())
    end = max(max(block.end for block in blocks), begin + 1)
    scale = (_RIGHT - _LEFT) / (end - begin)

    def x(ns: float) -> float:
        return _LEFT + (min(max(ns, begin), end) - begin) * scale

    characters = int((_WIDTH - 2 * _MARGIN) / _text_width("x", _TITLE, bold=True))
    title = [line for part in call.title() for line in textwrap.wrap(part, characters)]
    top = {}
    below = 30 + 24 * len(title) + 30
    for lane in lanes:
        below += _PROGRAM_GAP if lane[1] is not None else _GAP
        top[lane] = below
        below += _height(lane)
    height = below + 60
    root = ET.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", width=str(_WIDTH), height=str(height),
        viewBox=f"0 0 {_WIDTH} {height}", attrib={"font-family": "Helvetica, Arial, sans-serif"},
    )  # fmt: skip
    ET.SubElement(root, "rect", width="100%", height="100%", fill="white")
    for row, line in enumerate(title):
        _write(root, _MARGIN, 32 + 24 * row, line, _TITLE, bold=True)
    _legend(root, 24 * len(title) + 34, note)
    error = max(trace.clock_error for trace in traces)
    _axis(root, (top[lanes[0]] - 8, below + 8), end - begin, scale, error)
    arrows = ET.SubElement(root, "g")  # beneath the blocks, so that no arrow crosses text
    for rank in call.nodes:
        for wait in call.waits[rank]:
            source = (-1 if wait.peer is None else wait.peer), None
            if wait.ended_by_signal and wait.lane in top and source in top:
                _arrow(arrows, x(wait.signalled or 0), source, x(wait.end), wait.lane, top)
    for lane in lanes:
        _lane(root, lane, top[lane], [block for block in blocks if block.lane == lane], x, call.nodes[lane[0]].span)
    return root


def _height(lane: Lane) -> int:
    return _LANE if lane[1] is None else _PROGRAM


def _lane(
    root: ET.Element, lane: Lane, top: int, blocks: Sequence[_Block], x: Callable[[float], float], operator: Span
) -> None:
    """Draws the blocks of a lane with their labels, and to the left what the lane is."""
    rank, program = lane
    height = _height(lane)
    baseline = top + height / 2 + 4
    if program is not None:
        _write(root, _LEFT - 12, baseline, f"program {program}", _SMALL, anchor="end", fill="#444")
    else:
        idle = operator.idle > 0.05 * (operator.end - operator.begin)
        _write(root, _MARGIN, baseline - (6 if idle else 0), f"rank {rank}", _TEXT + 1, bold=True)
        if idle:
            _write(root, _MARGIN, baseline + 9, f"idle {duration(operator.idle)}", _SMALL, fill="#444")
        # What the rank does before it begins the operator is not drawn.
        late = x(operator.begin) - _LEFT
        words = "has not begun"
        if late > 1:
            _rectangle(root, _LEFT, top, late, height, "#F2F2F2")
            if _text_width(words, _SMALL) + 8 <= late:
                _write(root, _LEFT + late / 2, baseline, words, _SMALL, anchor="middle", fill="#555")
    for index, block in enumerate(blocks):
        left, right = x(block.begin), x(block.end)
        drawn = _rectangle(root, left, top, max(right - left, 0.5), height, COLOURS[block.kind])
        drawn.set("class", block.kind)
        ET.SubElement(drawn, "title").text = f"rank {rank}, {block.tooltip}"
        seen, until = _widest_gap(left, right, [(x(b.begin), x(b.end)) for b in blocks[index + 1 :]])
        size = _TEXT if program is None else _SMALL
        fitting = (label for label in block.labels if label and _text_width(label, size) + 8 <= until - seen)
        label = next(fitting, None)
        if label is not None:
            _write(root, (seen + until) / 2, baseline, label, size, anchor="middle", fill=INK[block.kind])


def _widest_gap(left: float, right: float, covers: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the widest part of a block that no later block of its lane covers."""
    gaps = []
    reached = left
    for begin, end in sorted(cover for cover in covers if left <= cover[0] <= cover[1] <= right):
        gaps.append((reached, begin))
        reached = max(reached, end)
    return max([*gaps, (reached, right)], key=lambda gap: gap[1] - gap[0])


def _legend(root: ET.Element, top: float, note: str) -> None:
    left = float(_MARGIN)
    for kind in ("computing", "communication", "waiting"):
        _rectangle(root, left, top, 12, 12, COLOURS[kind])
        _write(root, left + 17, top + 10, kind, _TEXT)
        left += 17 + _text_width(kind, _TEXT) + 18
    ET.SubElement(root, "path", d=f"M{left:.1f} {top + 6} h20", stroke="#222", attrib={"stroke-width": "1.5"})
    ET.SubElement(root, "path", d=f"M{left + 20:.1f} {top + 2} l8 4 l-8 4 z", fill="#222")
    words = "signal that ends a wait"
    _write(root, left + 33, top + 10, words, _TEXT)
    _write(root, left + 33 + _text_width(words, _TEXT) + 18, top + 10, note, _SMALL, fill="#444")


def _axis(root: ET.Element, vertical: tuple[float, float], ns: float, scale: float, error: int) -> None:
    unit, unit_ns = ("s", 1e9) if ns >= 2e9 else ("ms", 1e6) if ns >= 2e6 else ("µs", 1e3)
    rough = ns / unit_ns / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    top, below = vertical
    for tick in range(int(ns / unit_ns / step) + 1):
        at = _LEFT + tick * step * unit_ns * scale
        ET.SubElement(root, "path", d=f"M{at:.1f} {top:.1f} V{below:.1f}", stroke="#DDD")
        _write(root, at, below + 16, f"{tick * step:g}", _SMALL, anchor="middle", fill="#444")
    clocks = f"; the clocks of the ranks differ by at most {duration(error)}" if error >= 1000 else ""
    words = f"{unit} since the first rank has begun the operator{clocks}"
    _write(root, (_LEFT + _RIGHT) / 2, below + 36, words, _TEXT, anchor="middle", fill="#444")


def _arrow(
    root: ET.Element, signalled: float, source: Lane, ended: float, target: Lane, tops: Mapping[Lane, float]
) -> None:
    """Draws an arrow from the signal in lane `source` to the end of a wait, between the edges that face each other."""
    down = tops[source] < tops[target]
    begin = tops[source] + (_height(source) if down else 0)
    end = tops[target] + (0 if down else _height(target))
    across, along = ended - signalled, end - begin
    length = math.hypot(across, along)
    across, along = across / length, along / length
    arrow = ET.SubElement(root, "g")
    arrow.set("class", "signal")
    neck, neck_y = ended - 8 * across, end - 8 * along
    ET.SubElement(
        arrow, "line", x1=f"{signalled:.2f}", y1=f"{begin:.2f}", x2=f"{neck:.2f}", y2=f"{neck_y:.2f}", stroke="#222",
        attrib={"stroke-width": "1.5"},
    )  # fmt: skip
    head = f"M{ended:.2f} {end:.2f} L{neck - 4 * along:.2f} {neck_y + 4 * across:.2f}"
    ET.SubElement(arrow, "path", d=f"{head} L{neck + 4 * along:.2f} {neck_y - 4 * across:.2f} z", fill="#222")
    ET.SubElement(arrow, "title").text = f"signal of rank {source[0]} that ends a wait of rank {target[0]}"


def _rectangle(root: ET.Element, x: float, y: float, width: float, height: float, fill: str) -> ET.Element:
    return ET.SubElement(
        root, "rect", x=f"{x:.2f}", y=f"{y:.2f}", width=f"{width:.2f}", height=f"{height:.2f}", fill=fill
    )


def _write(
    root: ET.Element, x: float, y: float, text: str, size: int,
    bold: bool = False, anchor: str = "start", fill: str = "black",
) -> None:  # fmt: skip
    drawn = ET.SubElement(root, "text", x=f"{x:.2f}", y=f"{y:.2f}", fill=fill, attrib={"font-size": str(size)})
    if bold:
        drawn.set("font-weight", "bold")
    if anchor != "start":
        drawn.set("text-anchor", anchor)
    drawn.text = text


def _text_width(text: str, size: int, bold: bool = False) -> float:
    """Returns at least the width of a text, in the fonts that browsers use."""
    return (0.66 if bold else 0.6) * size * len(text)
