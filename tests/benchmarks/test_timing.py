"""Candidates alternate, errors are kept, and ceilings follow from times; the GPU's clock has a replaced torch.cuda."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks import timing
from benchmarks.timing import Candidate, Ceilings, DeviceClock, RankClock, Timing, alternate, measure_ceilings


class FakeClock:
    """A clock for which every call takes the seconds in its candidate's name; it keeps the order of calls."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._seconds: list[float] = []

    def warm_up(self, candidate: Candidate) -> float:
        candidate.run(candidate.prepare())
        return 0.5

    def start(self, candidate: Candidate, host: float) -> None:
        assert host == 0.5
        candidate.run(candidate.prepare())
        self.order.append(candidate.name)
        self._seconds.append(float(candidate.name))

    def collect(self) -> list[float]:
        seconds, self._seconds = self._seconds, []
        return seconds


def test_candidates_take_turns_and_each_round_starts_with_another() -> None:
    clock = FakeClock()
    candidates = [Candidate(name, lambda _: None) for name in ("1", "2", "3")]
    results = alternate(candidates, clock, seconds=0.0, least=3, most=9)
    assert "".join(clock.order) == "123231312"
    assert results == {name: Timing(0.5, [float(name)] * 3) for name in ("1", "2", "3")}


def test_a_candidate_that_fails_has_its_error_and_the_others_continue() -> None:
    calls = 0

    def later(_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise RuntimeError("at the second\nround")

    def at_once(_: object) -> None:
        raise ValueError("at once")

    candidates = [Candidate("1", later), Candidate("2", at_once), Candidate("3", lambda _: None)]
    results = alternate(candidates, FakeClock(), seconds=0.0, least=4)
    assert results["1"] == "RuntimeError: at the second round"
    assert results["2"] == "ValueError: at once"
    assert isinstance(results["3"], Timing) and len(results["3"].seconds) == 4


def test_ceilings_are_rates_of_the_timed_calls() -> None:
    class Slow(FakeClock):
        def start(self, candidate: Candidate, host: float) -> None:
            candidate.run(None)
            self._seconds.append(2.0)

    ceilings = measure_ceilings(torch.device("cpu"), Slow(), tiny=True)
    assert ceilings == Ceilings(matrix=2 * 64**3 / 2.0, copy=2 * 4 * 2**16 / 2.0)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torch.cuda, and return the list of the operations that are put on the stream."""
    put: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            put.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return 2.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: put.append(f"hold {cycles / 2e9 * 1e6:.0f} us"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: put.append("wait"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1 << 20))
    return put


def _clock(stream: list[str]) -> DeviceClock:
    clock = DeviceClock(torch.device("cpu"))
    assert clock._other.nbytes == 1 << 28
    clock._other = SimpleNamespace(sum=lambda: stream.append("read other memory"))  # type: ignore[assignment]
    return clock


def test_a_call_is_between_two_events_after_the_cache_is_filled(stream: list[str]) -> None:
    clock = _clock(stream)
    candidate = Candidate("ours", lambda x: stream.append(f"run {x}"), prepare=lambda: stream.append("prepare") or "it")
    clock.start(candidate, host=100e-6)
    assert stream == ["prepare", "hold 250 us", "read other memory", "event", "run it", "event"]
    assert clock.collect() == [2.5e-3] and clock.collect() == []
    assert stream[-2:] == ["wait", "wait"]
    stream.clear()
    clock.start(Candidate("ours", lambda _: None), host=1.0)
    assert stream[0] == "hold 5000 us", "the stream is not held for long"


def test_warm_up_waits_before_and_after_each_call(stream: list[str]) -> None:
    candidate = Candidate("ours", lambda _: stream.append("run"), prepare=lambda: stream.append("prepare"))
    assert 0 <= _clock(stream).warm_up(candidate) < 1
    assert stream == ["prepare", "wait", "run", "wait"] * 3


def test_ranks_start_several_calls_at_once_and_the_slowest_rank_counts(
    stream: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.tensor
    monkeypatch.setattr(timing.torch, "tensor", lambda x, device: tensor(x))
    monkeypatch.setattr(dist, "barrier", lambda group: stream.append("barrier"))
    monkeypatch.setattr(dist, "all_reduce", lambda x, op, group: x.mul_(2.0))
    clock = RankClock(SimpleNamespace(), torch.device("cuda"), duration=12e-3, most=9)  # type: ignore[arg-type]
    candidate = Candidate("ours", lambda x: stream.append(f"run {x}"), prepare=lambda: stream.append("prepare") or "it")
    clock.warm_up(candidate)
    stream.clear()
    clock.start(candidate, host=100e-6)
    calls = ["run it"] * 2  # of 5 ms each
    assert stream == ["barrier", "wait", "hold 500 us", "prepare", "event", *calls, "event", "wait"]
    assert clock.collect() == [pytest.approx(2.5e-3)] and clock.collect() == []
    clock.start(candidate, host=1.0)
    assert "hold 20000 us" in stream, "the streams are not held for long"
