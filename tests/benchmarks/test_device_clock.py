"""The GPU's clock with a replaced torch.cuda: the operations on the stream, their order, and the computed times."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.timing import Candidate, DeviceClock

CPU = torch.device("cpu")


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
    clock = DeviceClock(CPU)
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
