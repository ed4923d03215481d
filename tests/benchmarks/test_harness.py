"""The harness does not time wrong candidates, and prints the rows and their provenance."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import first_contact, harness, node, offload_step
from benchmarks.candidates import Candidates, by_compiler, liger
from benchmarks.harness import OURS, Bench, BenchCase, Row, TimedMode, measure, new_bench, unable
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
    def build(_: Bench) -> tuple[Callable[[], dict[str, str]], list[TimedMode]]:
        candidates = Candidates(
            inputs={"x": normal(0, 5, 7), "weight": normal(1, 7, 3)},
            grad=normal(2, 5, 3),
            reference=_plain,
            functions={OURS: ours} | peers,
            costs={"inference": (1e6, 1.0), "forward": (1.0, 1e6), "backward": (1.0, 1.0), "both": (1.0, 1.0)},
            memory=("both",),
        )
        return candidates.check, candidates.works()

    rows = list(measure(BenchCase("toy", "5 x 3 x 7", build), bench))
    return {(row["mode"], row["candidate"]): row for row in rows}


def test_a_right_candidate_is_timed_in_every_mode(bench: Bench) -> None:
    rows = _rows(bench, _plain, compiled=by_compiler(_plain, bench))
    assert len(rows) == 8
    for row in rows.values():
        assert row["check"] == "within the bound"
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"] and row["rounds"] == 1
        assert row["times_bound"] == row["median_us"] / row["bound_us"]
    assert rows["inference", OURS]["bound_us"] == rows["forward", OURS]["bound_us"] == 1.0
    assert rows["both", OURS]["peak_bytes"] is None, "there is no such figure on the CPU"


@pytest.mark.parametrize("ours", [_wrong_gradient, _nan, _unwritten])
def test_a_wrong_candidate_is_not_timed(bench: Bench, ours: Callable[..., Tensor]) -> None:
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


@pytest.mark.parametrize(
    ("peer", "timed", "key", "message"),
    [
        (_wrong_gradient, True, "check", "AssertionError"),
        (liger("nothing"), False, "error", "ModuleNotFoundError: Liger-Kernel is not installed"),
    ],
    ids=["less exact", "not installed"],
)
def test_the_row_of_a_peer_reports_its_fault(
    bench: Bench, peer: Callable[..., Tensor], timed: bool, key: str, message: str
) -> None:
    row = _rows(bench, _plain, peer=peer)["forward", "peer"]
    assert ("median_us" in row) == timed and row[key].startswith(message)


def test_candidates_cannot_change_inputs_of_others(bench: Bench) -> None:
    def greedy(x: Tensor, weight: Tensor) -> Tensor:
        out = _plain(x, weight)
        with torch.no_grad():
            x.data.zero_()
        return out

    rows = _rows(bench, _plain, greedy=greedy, peer=_plain)
    assert rows["forward", "peer"]["check"] == "within the bound"


def test_a_case_that_cannot_be_built_has_a_row() -> None:
    def build(_: Bench) -> tuple[Callable[[], dict[str, str]], list[TimedMode]]:
        raise RuntimeError("out of\nmemory")

    bench = new_bench(0, interpreted=True, ceilings=Ceilings(1.0, 1.0))
    (row,) = measure(BenchCase("toy", "huge", build, asked=True), bench)
    assert (row["operator"], row["case"], row["mode"], row["candidate"]) == ("toy", "huge", "", OURS)
    assert row["asked"] is True and row["error"] == "RuntimeError: out of memory"


def test_a_part_of_the_result_may_be_compared() -> None:
    x, grad = normal(0, 64, 8), normal(1, 64, 8)
    broken = {OURS: lambda x: torch.where(torch.arange(64).unsqueeze(1) < 32, x * 2, x * 3)}
    for rows, verdict in ((32, True), (64, False)):
        candidates = Candidates({"x": x}, grad, lambda x: x * 2, broken, {}, narrow=lambda _, t, rows=rows: t[:rows])
        assert (candidates.check() == {OURS: ""}) == verdict


@pytest.mark.parametrize(
    ("main", "flags", "message"),
    [
        (first_contact.main, ["--out", "/nowhere"], "benchmarks.first_contact: error: there is no CUDA GPU here"),
        (node.main, [], "benchmarks.node: error: times of CPU ranks say nothing: --scale tiny"),
        (offload_step.main, ["--folder", "/nowhere"], "benchmarks.offload_step: error: offload /nowhere is not a"),
    ],
)
def test_a_refusal_is_one_line_and_status_2(
    main: Callable[[], int],
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(offload_step, "keep_freed_memory", lambda: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["program.py", *flags])
    assert main() == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(message) and error.count("\n") == 1


def test_kernels_are_not_timed_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "TRITON_INTERPRET=1 is set" in (unable("bench") or "")


def test_rows_name_the_gpu_and_its_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(harness, "ptxas", lambda: SimpleNamespace(version="12.8.93"))
    row = harness.provenance()
    assert (row["machine"], row["ptxas"]) == ("H100", "12.8.93")
