"""The harness does not time wrong candidates, and prints the rows and their provenance."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.candidates import Candidates, absent, compiled
from benchmarks.harness import OURS, Bench, Case, Measurement, Row, aligned, measure, new_bench, table, unable
from benchmarks.timing import Ceilings
from tpfuse.testing.inputs import normal


@pytest.fixture
def bench() -> Bench:
    return new_bench(0, interpreted=True, ceilings=Ceilings(1e12, 1e12))


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


class _Scaled(torch.autograd.Function):
    """The identity in forward, with a gradient that is 1.1 times too large."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 1.1


def _wrong_gradient(x: Tensor, weight: Tensor) -> Tensor:
    return _Scaled.apply(_plain(x, weight))  # type: ignore[no-any-return,no-untyped-call]


def _nan(x: Tensor, weight: Tensor) -> Tensor:
    out = _plain(x, weight)
    return torch.where(torch.arange(out.shape[1]) == 1, float("nan"), out)


def _unwritten(x: Tensor, weight: Tensor) -> Tensor:
    """Return the right result wherever memory that was not written holds a number."""
    out = _plain(x, weight)
    hole = torch.empty_like(out)
    return torch.where(hole.isnan(), hole, out)


def _rows(bench: Bench, ours: Callable[..., Tensor], **peers: Callable[..., Tensor]) -> dict[tuple[str, str], Row]:
    def build(_: Bench) -> tuple[Callable[[], dict[str, str]], list[Measurement]]:
        candidates = Candidates(
            inputs={"x": normal(0, 5, 7), "weight": normal(1, 7, 3)},
            grad=normal(2, 5, 3),
            reference=_plain,
            functions={OURS: ours} | peers,
            costs={"inference": (1e6, 1.0), "forward": (1.0, 1e6), "backward": (1.0, 1.0), "both": (1.0, 1.0)},
            memory=("both",),
        )
        return candidates.check, candidates.works()

    rows = list(measure(Case("toy", "5 x 3 x 7", build), bench))
    return {(row["mode"], row["candidate"]): row for row in rows}


def test_what_is_right_is_timed_in_every_mode(bench: Bench) -> None:
    rows = _rows(bench, _plain, compiled=compiled(_plain, bench))
    assert len(rows) == 8
    for row in rows.values():
        assert row["check"] == "within the bound"
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"] and row["rounds"] == 1
        assert row["times_bound"] == row["median_us"] / row["bound_us"]
    assert rows["inference", OURS]["bound_us"] == rows["forward", OURS]["bound_us"] == 1.0
    assert rows["both", OURS]["peak_bytes"] is None, "there is no such figure on the CPU"


@pytest.mark.parametrize("ours", [_wrong_gradient, _nan, _unwritten])
def test_what_is_wrong_is_not_timed(bench: Bench, ours: Callable[..., Tensor]) -> None:
    torch.use_deterministic_algorithms(False)  # the setting of a benchmark's process
    try:
        rows = _rows(bench, ours, peer=_plain)
        assert not torch.are_deterministic_algorithms_enabled(), "timed as it was found"
    finally:
        torch.use_deterministic_algorithms(True)
    for mode in ("inference", "forward", "backward", "both"):
        assert "median_us" not in rows[mode, OURS]
        assert rows[mode, OURS]["error"].startswith("AssertionError")
        assert "median_us" in rows[mode, "peer"]


def test_a_peer_that_is_less_exact_is_timed_and_says_so(bench: Bench) -> None:
    row = _rows(bench, _plain, peer=_wrong_gradient)["forward", "peer"]
    assert "median_us" in row and row["check"].startswith("AssertionError")


def test_a_peer_that_is_not_installed_says_so(bench: Bench) -> None:
    row = _rows(bench, _plain, peer=absent("Liger-Kernel"))["forward", "peer"]
    assert "median_us" not in row and row["error"] == "ModuleNotFoundError: Liger-Kernel is not installed"


def test_candidates_cannot_spoil_each_others_inputs(bench: Bench) -> None:
    def greedy(x: Tensor, weight: Tensor) -> Tensor:
        out = _plain(x, weight)
        with torch.no_grad():
            x.data.zero_()
        return out

    rows = _rows(bench, _plain, greedy=greedy, peer=_plain)
    assert rows["forward", "peer"]["check"] == "within the bound"


def test_a_case_that_cannot_be_built_is_a_row() -> None:
    def build(_: Bench) -> tuple[Callable[[], dict[str, str]], list[Measurement]]:
        raise RuntimeError("out of\nmemory")

    bench = new_bench(0, interpreted=True, ceilings=Ceilings(1.0, 1.0))
    (row,) = measure(Case("toy", "huge", build, asked=True), bench)
    assert row == {
        "operator": "toy",
        "case": "huge",
        "asked": True,
        "mode": "",
        "candidate": OURS,
        "error": "RuntimeError: out of memory",
    }


def test_the_part_that_is_compared_may_be_narrowed() -> None:
    x, grad = normal(0, 64, 8), normal(1, 64, 8)
    broken = {OURS: lambda x: torch.where(torch.arange(64).unsqueeze(1) < 32, x * 2, x * 3)}
    for rows, verdict in ((32, True), (64, False)):
        candidates = Candidates({"x": x}, grad, lambda x: x * 2, broken, {}, narrow=lambda _, t, rows=rows: t[:rows])
        assert (candidates.check() == {OURS: ""}) == verdict


def test_the_table() -> None:
    times = {"median_us": 12.34, "p20_us": 12.0, "p80_us": 13.0, "times_bound": 1.5}
    common: Row = {"operator": "gemm", "case": "7b", "mode": "forward", "candidate": OURS}
    text = table([common | times | {"peak_bytes": 3 * 2**20}, common | {"error": "ValueError: no"}, common])
    assert text.splitlines() == [
        "operator  case  mode     candidate  median us  p20   p80   x bound  peak MiB",
        "gemm      7b    forward  tpfuse     12.3       12.0  13.0  1.50     3",
        "gemm      7b    forward  tpfuse     ValueError: no",
        "gemm      7b    forward  tpfuse     not measured yet",
    ]
    assert aligned([("a", "b"), ("longer", "c")]) == "a       b\nlonger  c"


def test_rows_say_where_and_with_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bench_gemm.py", "--out", "/elsewhere/results"])
    found = harness.kernel_provenance()
    assert {"date", "machine", "python", "torch", "triton", "commit", "sources", "command"} <= found.keys()
    assert found["command"] == "python -m benchmarks.bench_gemm --out results"


def test_why_nothing_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert unable("bench", interpreted=True) is None
    assert "no CUDA GPU" in (unable("bench", interpreted=False) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "TRITON_INTERPRET=1 is set" in (unable("bench", interpreted=False) or "")
