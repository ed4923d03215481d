"""Ranks record what they do, and the summary attributes the time of each rank and a planted delay."""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.meshes import mesh_of, tensor_mesh
from tpfuse.choices import Implementation
from tpfuse.comm import collectives, trace
from tpfuse.comm.collectives import direct
from tpfuse.comm.host_coordinated_memory import HostCoordinatedMemory
from tpfuse.errors import UserError
from tpfuse.kernels.trace import KernelEvent, TracedLaunch
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.ops.linear.collective import CollectiveLinear
from tpfuse.parallel.pipeline.pipeline import Pipeline
from tpfuse.profile.perfetto import write_perfetto
from tpfuse.profile.summary import Place, summarise, times_of
from tpfuse.profile.trace_files import read_traces
from tpfuse.switches import use
from tpfuse.testing.patience import patient
from tpfuse.testing.ranks import pool
from tpfuse.trace.clock import clock_offset
from tpfuse.trace.recording import layer_spans, record

STEPS, DELAY = 3, 0.12  # seconds
PASS, MICRO_BATCHES = 0.05, 4  # seconds of each forward pass of the late stage, or of a part of a slow collective


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options = {"sequence_parallel": True, "device_mesh": tensor_mesh()}
        self.up = ColumnParallelLinear(16, 32, activation="gelu_tanh", **options)  # type: ignore[arg-type]
        self.down = RowParallelLinear(32, 16, **options)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([_MLP(), _MLP()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = x + block(x)
        return x


PLACES = {"direct": (HostCoordinatedMemory, "begin"), "collective": (CollectiveLinear, "_compare")}
LATE = 1  # the rank that is late in linear_reduce_scatter of this layer
LAYER = "h.1.down"


def _delayed(kind: Implementation, busy: bool, took: list[float]) -> Any:
    """Return a patch by which the late rank takes DELAY seconds more, of the processor's time if `busy`.

    took: gets the seconds that each delay has taken; they are more on a machine that is busy.
    """
    owner, name = PLACES[kind]
    original = getattr(owner, name)

    def slow(self: Any, *arguments: Any) -> Any:
        result = original(self, *arguments)
        words = [argument for argument in arguments if isinstance(argument, str)]
        if dist.get_rank() == LATE and words[0].split()[0] == "linear_reduce_scatter" and _is_late(words[0]):
            begun, end = time.perf_counter(), time.thread_time() + DELAY
            while busy and time.thread_time() < end:
                pass
            if not busy:
                time.sleep(DELAY)
            took.append(time.perf_counter() - begun)
        return result

    return mock.patch.object(owner, name, slow)


def _is_late(op: str) -> bool:
    return trace.layer_now() == LAYER and "backward" not in op


def _record(folder: Path, kind: Implementation, busy: bool) -> tuple[list[float], list[float]]:
    """Record steps of a model on this rank, with the delay. Return the seconds of steps and of delays."""
    walls: list[float] = []
    took: list[float] = []
    with use(implementation=kind):
        model = _Model()
        x = torch.randn(4, 16, requires_grad=True)
        model(x).sum().backward()  # the channels are open then
        with record(folder, model, dist.group.WORLD, layout={"tp": 2}) as step, _delayed(kind, busy, took):
            for _ in range(STEPS):
                begun = time.perf_counter()
                with step():
                    with trace.span("phase", "forward"):
                        y = model(x).sum()
                    with trace.span("phase", "backward"):
                        y.backward()
                walls.append(time.perf_counter() - begun)
    return walls, took


@pytest.mark.parametrize(("kind", "busy"), [("direct", True), ("collective", False)])
def test_a_delay_is_attributed_to_its_rank_and_operator(kind: Implementation, busy: bool, tmp_path: Path) -> None:
    def attempt(folder: Path) -> None:
        walls, took = zip(*pool(2).run(_record, folder, kind, busy), strict=True)
        assert len(took[LATE]) == STEPS and not took[1 - LATE]
        _check_attribution(folder, kind, busy, walls, sum(took[LATE]) / STEPS)

    _once_undisturbed(attempt, tmp_path)


def _once_undisturbed(attempt: Callable[[Path], None], folder: Path) -> None:
    """Other programs may delay a rank as well, whenever they run: so one of several recordings must be undisturbed."""
    for number in range(5):
        try:
            return attempt(folder / str(number))
        except AssertionError:
            if number == 4:
                raise
    raise AssertionError


class _Sleeping(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tanh(self.linear(x))


def _record_pipeline(folder: Path, kind: Implementation) -> None:
    model = nn.Sequential(*(_Sleeping(PASS * (rank == 0)) for rank in range(2)))
    ends: dict[str, Any] = {"embed": lambda x: x, "head": lambda x, _: x.sum()}
    stages = mesh_of(1, 1, pp=2)["pp"]
    pipeline = Pipeline(model, blocks=model, device_mesh=stages, micro_batches=MICRO_BATCHES, **ends)
    batches = [(torch.ones(2, 8),)] * MICRO_BATCHES
    with use(implementation=kind):
        pipeline.step(batches)  # the routes are open then
    with record(folder, model, dist.group.WORLD, layout={"pp": 2}) as step:
        for _ in range(2):
            with step():
                pipeline.step(batches)


@pytest.mark.parametrize("kind", ["direct", "collective"])
def test_a_delay_between_stages_is_attributed_to_its_rank(kind: Implementation, tmp_path: Path) -> None:
    def attempt(folder: Path) -> None:
        pool(2).run(_record_pipeline, folder, kind)
        waits = summarise(read_traces(folder))["wait_matrix"]
        assert waits[1][0] == pytest.approx(MICRO_BATCHES * PASS, rel=0.25) and waits[0][1] < PASS / 2

    _once_undisturbed(attempt, tmp_path)


def _check_attribution(
    folder: Path, kind: Implementation, busy: bool, walls: Sequence[list[float]], delay: float
) -> None:
    traces = read_traces(folder)
    by_rank, document = times_of(traces), summarise(traces)
    for rank in range(2):
        row = document["ranks"][rank]
        parts = sum(row[name] for name in ("computing_s", "communication_s", "waiting_s", "idle_s"))
        assert parts == pytest.approx(sum(walls[rank]) / STEPS, rel=0.02)
        assert row["wall_s"] == pytest.approx(parts, rel=1e-6)
    place = Place(LAYER, "linear_reduce_scatter", kind)
    late, other = by_rank[LATE][place], by_rank[1 - LATE][place]
    assert other.waits[LATE] / STEPS / 1e9 == pytest.approx(delay, rel=0.1)
    assert (late.own - other.own) / STEPS / 1e9 == pytest.approx(delay, rel=0.1)
    assert (late.computing if busy else late.idle) / STEPS / 1e9 == pytest.approx(DELAY if busy else delay, rel=0.1)
    assert document["wait_matrix"][1 - LATE][LATE] == pytest.approx(delay, rel=0.25)
    said = "\n".join(document["sentences"])
    assert f"Rank {LATE} works" in said and f"in linear_reduce_scatter of {LAYER}." in said
    assert f"linear_reduce_scatter of {LAYER} waits" in said and f"on rank {1 - LATE} for rank {LATE}" in said


def _layers(folder: Path) -> None:
    model = _Model()
    with record(str(folder), model, dist.group.WORLD) as step:
        for _ in range(2):
            x = torch.randn(4, 16, requires_grad=True)
            with step():
                model(x).sum().backward()


def test_operators_know_their_layer_in_forward_and_backward(tmp_path: Path) -> None:
    pool(2).run(_layers, tmp_path)
    for trace_of_rank in read_traces(tmp_path):
        assert [step.span.name for step in trace_of_rank.steps] == ["step 1", "step 2"]
        moved: set[tuple[str, str]] = set()
        for step in trace_of_rank.steps:
            found = []
            for node, above in step.walk():
                if node.span.kind == "operator":
                    found.append((node.span.name.partition(" torch.")[0], node.span.layer))
                    assert "operator" not in {span.kind for span in above}
                if node.span.kind == "communication":
                    moved.add((above[-1].name.partition(" torch.")[0], node.span.name))
            forward = [(f"h.{i}.{layer}", op) for i in (0, 1) for layer, op in OPERATORS.items()]
            assert found == [(op, layer) for layer, op in forward] + [
                (f"{op} backward", layer) for layer, op in reversed(forward)
            ]

        assert moved == {
            ("all_gather_linear", "stage"),
            ("all_gather_linear backward", "stage"),
            ("all_gather_linear backward", "sum over ranks"),
            ("linear_reduce_scatter", "sum over ranks"),
            ("linear_reduce_scatter backward", "stage"),
        }


def _fused(folder: Path) -> None:
    with use(implementation="fused"):
        down = RowParallelLinear(32, 16, sequence_parallel=True, device_mesh=tensor_mesh())
        x = torch.randn(4, 32 // dist.get_world_size())
        down(x)
        dist.barrier()
        with record(folder, nn.Sequential(down), dist.group.WORLD) as step, step():
            if dist.get_rank() == LATE:
                time.sleep(patient(6 * DELAY))  # the interpreter itself is slow, and slower on a busy machine
            down(x)


def test_a_fused_operator_shows_the_waits_of_its_kernel(tmp_path: Path) -> None:
    pool(2).run(_fused, tmp_path)
    traces = read_traces(tmp_path)
    waits = [places[Place("0", "linear_reduce_scatter", "fused")].waits for places in times_of(traces)]
    assert waits[1 - LATE][LATE] > max(5e9 * DELAY, 2 * waits[LATE][1 - LATE])
    write_perfetto(traces, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "gemm_reduce_scatter_forward_kernel"]
    assert {event["name"] for event in found} >= {"waiting for rank 1", "computing of rank 0", "computing of rank 1"}
    for trace_of_rank in traces:
        (operator,) = [n.span for n, _ in trace_of_rank.steps[0].walk() if n.span.kind == "operator"]
        (launch,) = trace_of_rank.launches_of(operator)
        assert operator.ranks == [0, 1] and not launch.lost
        assert all(operator.begin <= begin <= end <= operator.end for *_, begin, end in launch.events)


def _collective(folder: Path) -> None:
    """Record collectives that take PASS seconds more for each piece that they copy or sum."""
    collectives.all_gather(torch.ones(4), dist.group.WORLD)  # the channel is open then
    cut = direct._cut

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(PASS)
        return cut(*arguments)

    late = mock.patch.object(direct, "_cut", slow)
    with late, record(folder, group=dist.group.WORLD) as step, step():
        collectives.all_gather(torch.ones(4), dist.group.WORLD)
        _, handle = collectives.start_reduce_scatter(torch.ones(4), dist.group.WORLD)
        handle.wait()


def test_a_collective_is_communication(tmp_path: Path) -> None:
    pool(2).run(_collective, tmp_path)
    (step,) = read_traces(tmp_path)[0].steps
    assert [child.span.kind for child in step.children] == ["operator"] * 3
    for places in times_of(read_traces(tmp_path)):
        for name in ("all_gather", "reduce_scatter", "wait for reduce_scatter"):
            times = places[Place("", name, "direct")]
            assert times.communication > times.computing > 0 and times.calls == 1


OPERATORS = {"up": "all_gather_linear", "down": "linear_reduce_scatter"}


def test_a_module_inside_another_keeps_its_part_of_the_backward_pass() -> None:
    """Outside of a module's own parts, the layer is the one around it; the hooks are gone after the block."""

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Probe.apply(x, "inner")  # type: ignore[no-any-return, no-untyped-call]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = Probe.apply(x, "before")  # type: ignore[no-untyped-call]
            return Probe.apply(self.inner(x), "after")  # type: ignore[no-any-return, no-untyped-call]

    seen: list[tuple[str, str]] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
            ctx.name = name
            seen.append((name, trace.layer_now()))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            seen.append((ctx.name, trace.layer_now()))
            return grads[0], None

    model = nn.Module()
    model.outer = Outer()
    x = torch.ones(2, requires_grad=True)
    assert trace.begin("layer", "h") is None and trace.layer_now() == "", "nothing observes"
    with trace.observed(trace.Recorder(torch.device("cpu"))), layer_spans(model):
        y = Probe.apply(model.outer(Probe.apply(x, "first")), "last")  # type: ignore[no-untyped-call]
        y.sum().backward()
    names = ["first", "before", "inner", "after", "last"]
    layers = ["", "outer", "outer.inner", "outer", ""]
    forward = list(zip(names, layers, strict=True))
    assert seen == forward + forward[::-1]
    assert not model.outer._forward_hooks and not model.outer._forward_pre_hooks


def test_idle_time_is_that_of_a_span_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread runs for 6 of the 10 ns of the outer span, and for 1 of the 4 ns of the inner one."""
    now: list[tuple[int, int]] = [(0, 0), (3, 3), (7, 4), (10, 6)]  # (wall, CPU) at each mark
    monkeypatch.setattr(time, "time_ns", lambda: now[0][0])
    monkeypatch.setattr(time, "thread_time_ns", lambda: now.pop(0)[1])
    recorder = trace.Recorder(torch.device("cpu"))
    with trace.observed(recorder), trace.span("phase", "outer"), trace.span("layer", "inner"):
        pass
    assert [(span.name, span.begin, span.end, span.idle) for span in recorder.ended] == [
        ("inner", 3, 7, 3),
        ("outer", 0, 10, 1),
    ]


def test_times_on_a_gpu_are_those_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in's events take place 1 ms after each other, whenever the host records them."""
    count = itertools.count()

    class KernelEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.ms = float(next(count))

        def elapsed_time(self, other: Any) -> float:
            return float(other.ms - self.ms)

    synchronized: list[object] = []
    monkeypatch.setattr(torch.cuda, "Event", KernelEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(time, "time_ns", lambda: 7_000_000)
    recorder = trace.Recorder(torch.device("cuda", 0))
    with trace.observed(recorder), trace.span("phase", "outer"), trace.span("layer", "inner"):
        trace.signal("begin a collective")
    assert not recorder.ended
    recorder.finish()
    assert [(span.name, span.begin, span.end, span.idle) for span in recorder.ended] == [
        ("inner", 9_000_000, 11_000_000, 0),
        ("outer", 8_000_000, 12_000_000, 0),
    ]
    assert recorder.signals == [("begin a collective", 10_000_000)]  # the host may be far ahead of the device
    assert len(synchronized) == 2


def test_a_wait_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "thread_time_ns", lambda: 0)
    recorder = trace.Recorder(torch.device("cpu"))
    with trace.observed(recorder), trace.span("wait", "a"), trace.span("communication", "b"):
        time.sleep(0.001)
    assert [span.idle for span in recorder.ended] == [0, 0]


def _changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Record a step with an operator, and change what the file says."""
    with record(folder) as step, step():
        trace.signal("a")
        trace.end(trace.begin("operator", "sum", "fused"))
    path = folder / "rank0.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def test_times_are_moved_to_one_clock(tmp_path: Path) -> None:
    """The first rank's; the timer of a GPU is none of the hosts' clocks: its events begin with their operator."""
    seen: dict[str, Any] = {}
    events = [[0, "waiting", -1, 70, 80], [0, "waiting", -1, 50, 60]]

    def change(found: dict[str, Any]) -> None:
        seen.update(signal=found["signals"][0][1], begin=found["spans"][0][6])
        found.update(clock_offset_ns=5000, device="cuda", untraced=7, launches=[["kernel", 0, 1, 0, events]])

    _changed(tmp_path, change)
    (moved,) = read_traces(tmp_path)
    operator, begin = moved.steps[0].children[0].span, seen["begin"] + 5000
    assert (operator.begin, moved.signals["a"], moved.untraced) == (begin, seen["signal"] + 5000, 7)
    (launch,) = moved.launches_of(operator)
    assert [event[3:] for event in launch.events] == [(begin + 20, begin + 30), (begin, begin + 10)]


class _Kernels:
    """A stand-in for a KernelTrace: a second launch takes place within the operator."""

    launched = 1

    def read(self) -> list[TracedLaunch]:
        first, second = (KernelEvent(0, "waiting", peer, 1, 2) for peer in (0, 1))
        return [TracedLaunch(f"kernel {n}", 0, 2, 3, [event], n) for n, event in enumerate((first, second))]


def test_launches_belong_to_their_operator_and_name_ranks_of_the_world() -> None:
    """The group's rank 1 is rank 5 of the world."""
    kernels = _Kernels()
    recorder = trace.Recorder(torch.device("cpu"), kernels)  # type: ignore[arg-type]
    with trace.observed(recorder), trace.span("step", "step 1"):
        operator = trace.begin("operator", "sum", "fused", ranks=[2, 5])
        kernels.launched += 1
        trace.end(operator)
    recorder.finish()
    assert recorder.launches == [trace.LaunchMark("kernel 1", 0, 3, 1, [(0, "waiting", 5, 1, 2)])]


def test_a_failing_call_ends_its_spans() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    model = nn.Module()
    model.fails = Fails()
    recorder = trace.Recorder(torch.device("cpu"))
    with trace.observed(recorder), layer_spans(model):
        with pytest.raises(ValueError), trace.span("step", "step 1"):
            model.fails(torch.ones(1))
        assert trace.layer_now() == ""
    assert [(span.kind, span.name, span.level) for span in recorder.ended] == [
        ("layer", "fails", 1),
        ("step", "step 1", 0),
    ]


def _offsets(skew: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return what is measured between two hosts, and on one host, where no clock is read."""
    group, device = dist.group.WORLD, torch.device("cpu")
    with mock.patch("tpfuse.trace.clock.node_identity", lambda: f"host {dist.get_rank()}"):
        now = (lambda: time.time_ns() + skew) if dist.get_rank() == 1 else time.time_ns
        between = clock_offset(group, device, now)
    return between, clock_offset(group, device, lambda: 1 // 0)


def test_clocks_of_hosts_are_measured() -> None:
    skew = 12_345_678_901
    (first, same), (second, equal) = pool(2).run(_offsets, skew)
    assert first == same == equal == (0, 0)
    offset, error = second
    assert abs(offset + skew) <= error + 1000 and 0 < error < 50_000_000


def test_the_merged_trace_is_valid(tmp_path: Path) -> None:
    """Every event has what the format asks for, ranges of a track nest, and each arrow has both ends."""
    pool(2).run(_layers, tmp_path)
    write_perfetto(read_traces(tmp_path), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(names) == 2 and all(name.startswith("rank ") for name in names)
    for rank in (0, 1):
        open_until: list[float] = []
        ranges = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        assert len(ranges) > 30
        for event in sorted(ranges, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 1e-3
            open_until.append(event["ts"] + event["dur"])
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys() and starts
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"] and start["pid"] != ends[number]["pid"]


def test_only_steps_that_every_rank_has_completed_are_compared(tmp_path: Path) -> None:
    """A step that an error ends is none, and a file of an earlier recording does not stand in for a rank that died."""
    with pytest.raises(ZeroDivisionError), record(tmp_path) as step:
        with step():
            pass
        with step():
            1 / 0  # noqa: B018
    (found,) = read_traces(tmp_path)
    assert [step.span.name for step in found.steps] == ["step 1"] and found.roots[1].span.name == "step 2"
    path = tmp_path / "rank0.json"
    document = json.loads(path.read_text()) | {"group": [2, 3]}
    (tmp_path / "rank1.json").write_text(json.dumps(document | {"rank": 1, "spans": document["spans"][1:]}))
    for group, said in (
        ([2, 3], r": rank 1 has not completed step 1: expected the same steps of every rank$"),
        ([0, 1], r" has traces of the groups \[0, 1\] and \[2, 3\]: record each in its own folder$"),
    ):
        path.write_text(json.dumps(document | {"group": group}))
        with pytest.raises(UserError, match=said):
            read_traces(tmp_path)
    with record(tmp_path):
        assert not path.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found.update(format=9), "format 9"),
        (lambda found: found.update(spans=[["step", "step 1"]]), "a span has the fields"),
        (lambda found: found.update(rank="first"), "expected int"),
        (lambda found: found.update(signals=[[1]]), "cannot read"),
        (lambda found: found.update(launches=[["k", 9, 1, 0, []]]), "a launch has the fields"),
        (lambda found: found.update(launches=[["k", 0, 1, 0, [[1, "waiting"]]]]), "the events of a launch of k"),
        (lambda found: found.update(spans=[]), "no complete step"),
        (lambda found: found.update(group=[0, 1, 2]), "of the ranks 0: expected"),
    ],
)
def test_files_that_are_no_traces_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    _changed(tmp_path, change)
    with pytest.raises(UserError, match=said):
        read_traces(tmp_path)
    with pytest.raises(UserError, match="has no traces"):
        read_traces(tmp_path / "elsewhere")
