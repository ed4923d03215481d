"""Candidates alternate, their errors are kept, and the ceilings are computed from the measured times."""

import torch

from benchmarks.timing import Candidate, Ceilings, Timing, alternate, measure_ceilings


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
