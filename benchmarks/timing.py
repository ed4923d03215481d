"""Time calls: the time on the device, against peers that alternate, and the ceilings of that device.

On a GPU the time is between two events on the stream. Before the first event other memory is read until nothing else is
in the L2 cache. It is read and not written: written data would go to memory during the call. The stream is held long
enough for the host to launch the whole call, so that the figure is the device's time and not that of Python (which is
measured too, `Timing.host`). Candidates alternate within a round, and each round starts with another candidate, so
that changes of clocks and temperature affect all candidates equally.
"""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.tools.search import one_line

_CYCLES = 2e9  # approximate cycles per second of current GPUs' multiprocessors; for holding the stream
_LONGEST_HOLD, _LONGEST_HOLD_OF_RANKS = 5e-3, 20e-3  # seconds


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Candidate:
    """A way to compute something.

    prepare: called before every run, and not timed. run: called with the result of `prepare`.
    """

    name: str
    run: Callable[[Any], object]
    prepare: Callable[[], Any] = _nothing


@dataclass
class Timing:
    """The seconds of every round, and the seconds that the host needs to launch one call on the device."""

    host: float
    seconds: list[float] = field(default_factory=list)


class BenchClock(Protocol):
    """The interface of a clock that times calls; tests have clocks of their own."""

    def warm_up(self, candidate: Candidate) -> float:
        """Run the candidate until everything is compiled and cached; return the host's seconds for a call."""

    def start(self, candidate: Candidate, host: float) -> None:
        """Start one timed call."""

    def collect(self) -> list[float]:
        """Return the seconds of the calls since the last `collect`, in order."""


class DeviceClock:
    """A clock that times calls on a CUDA device by events."""

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._device = device
        self._other = torch.zeros(max(4 * cache, 1 << 28) // 4, device=device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def warm_up(self, candidate: Candidate) -> float:
        """Make three calls; the host's seconds are the smaller of the last two."""
        seconds = []
        for _ in range(3):
            prepared = candidate.prepare()
            torch.cuda.synchronize(self._device)
            before = perf_counter()
            candidate.run(prepared)
            seconds.append(perf_counter() - before)
            torch.cuda.synchronize(self._device)
        return min(seconds[1:])

    def start(self, candidate: Candidate, host: float) -> None:
        """Hold the stream for about twice the host's seconds, fill the cache, and run the call between two events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        prepared = candidate.prepare()
        _hold(min(2 * host + 50e-6, _LONGEST_HOLD))
        self._other.sum()
        begin.record()
        candidate.run(prepared)
        end.record()
        self._events.append((begin, end))

    def collect(self) -> list[float]:
        """Wait for the device, and return the seconds of the calls."""
        torch.cuda.synchronize(self._device)
        seconds = [begin.elapsed_time(end) / 1e3 for begin, end in self._events]
        self._events.clear()
        return seconds


def _hold(seconds: float) -> None:
    """Keep the current stream busy for about this long."""
    torch.cuda._sleep(int(seconds * _CYCLES))  # type: ignore[no-untyped-call]


class RankClock:
    """A clock of calls that all ranks of a group start at once, and of which the slowest rank counts.

    A round makes calls one after another for about `duration` seconds, but 1 to `most` of them. The streams of GPUs are
    held meanwhile, and the time is the device's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, duration: float, most: int) -> None:
        self._group, self._device, self._duration, self._most = group, device, duration, most
        self._calls: dict[str, int] = {}  # of a round, by candidate
        self._seconds: list[float] = []

    def warm_up(self, candidate: Candidate) -> float:
        """Make two calls; the host's seconds are those of the second one."""
        candidate.run(candidate.prepare())
        seconds, host = self._round(candidate, 1, 0.0)
        self._calls[candidate.name] = max(1, int(min(self._most, self._duration / seconds)))
        return host

    def start(self, candidate: Candidate, host: float) -> None:
        """Make the calls of a round, after one `prepare`, and record the seconds of a call."""
        self._seconds.append(self._round(candidate, self._calls[candidate.name], host)[0])

    def _round(self, candidate: Candidate, calls: int, host: float) -> tuple[float, float]:
        """Return the seconds of a call, and those that the host takes for it."""
        cuda = self._device.type == "cuda"
        dist.barrier(self._group)
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self._device)
            _hold(min(2 * host * calls + 1e-4, _LONGEST_HOLD_OF_RANKS))
        prepared = candidate.prepare()
        if cuda:
            begin.record()
        started = perf_counter()
        for _ in range(calls):
            candidate.run(prepared)
        seconds = launched = perf_counter() - started
        if cuda:
            end.record()
            torch.cuda.synchronize(self._device)
            seconds = begin.elapsed_time(end) / 1e3
        slowest = torch.tensor([seconds / calls, launched / calls], device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, self._group)
        return slowest[0].item(), slowest[1].item()

    def collect(self) -> list[float]:
        """Return the seconds that `start` recorded."""
        seconds, self._seconds = self._seconds, []
        return seconds


class HostClock:
    """A clock that times calls on the CPU, where a call has ended when it returns."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def warm_up(self, candidate: Candidate) -> float:
        """Make one call."""
        candidate.run(candidate.prepare())
        return 0.0

    def start(self, candidate: Candidate, host: float) -> None:
        """Make the call, and record its seconds."""
        prepared = candidate.prepare()
        before = perf_counter()
        candidate.run(prepared)
        self._seconds.append(perf_counter() - before)

    def collect(self) -> list[float]:
        """Return the seconds that `start` measured."""
        seconds, self._seconds = self._seconds, []
        return seconds


def verdict(check: Callable[[], object]) -> str:
    """Return "" where the check passes, or its error on one line."""
    try:
        check()
    except Exception as error:
        return one_line(error)
    return ""


def alternate(
    candidates: Sequence[Candidate], clock: BenchClock, seconds: float, *, least: int = 7, most: int = 50
) -> dict[str, Timing | str]:
    """Time all candidates alternately, for about `seconds` (without warm-up) but `least` to `most` rounds.

    A candidate that raises has the error in place of its timing; the other candidates continue.
    """
    results = {candidate.name: _warmed_up(candidate, clock) for candidate in candidates}
    deadline = monotonic() + seconds
    for turn in range(most):
        if turn >= least and monotonic() > deadline:
            break
        first = turn % len(candidates)
        for candidate in (*candidates[first:], *candidates[:first]):
            results[candidate.name] = _timed(candidate, clock, results[candidate.name])
    return results


def seconds_of(results: Mapping[str, Timing | str]) -> dict[str, list[float]]:
    """Return the seconds of every round by candidate. Raise RuntimeError where a candidate raised."""
    if errors := [f"{name}: {x}" for name, x in results.items() if isinstance(x, str)]:
        raise RuntimeError("; ".join(errors))
    return {name: x.seconds for name, x in results.items() if isinstance(x, Timing)}


def _warmed_up(candidate: Candidate, clock: BenchClock) -> Timing | str:
    try:
        return Timing(clock.warm_up(candidate))
    except Exception as error:
        return one_line(error)


def _timed(candidate: Candidate, clock: BenchClock, timing: Timing | str) -> Timing | str:
    if isinstance(timing, str):
        return timing
    try:
        clock.start(candidate, timing.host)
        timing.seconds += clock.collect()
        return timing
    except Exception as error:
        return one_line(error)


def peak_bytes(candidate: Candidate, device: torch.device) -> int | None:
    """Return the most memory that one call held in addition to its inputs; None on the CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    candidate.run(candidate.prepare())
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@dataclass(frozen=True)
class Ceilings:
    """The highest rates that this device reaches, measured on it: no operator takes less than `bound`."""

    matrix: float  # FLOP/s of bf16 products
    copy: float  # bytes/s, read plus written

    def bound(self, flops: float, moved: float) -> float:
        """Return the seconds for these operations and bytes of device memory: the longer of both times."""
        return max(flops / self.matrix, moved / self.copy)


def measure_ceilings(device: torch.device, clock: BenchClock, *, tiny: bool = False) -> Ceilings:
    """Return the best rate of some large bf16 products by torch (cuBLAS), and that of a copy of 2 GiB.

    Both are medians, with random data.
    """
    sizes = [(64, 64, 64)] if tiny else [(8192, 8192, 8192), (16384, 8192, 8192), (8192, 16384, 4096)]
    rate = max(_matrix_rate(m, n, k, device, clock) for m, n, k in sizes)
    source = torch.randn((1 << 16) if tiny else (1 << 29), device=device)
    target = torch.empty_like(source)
    return Ceilings(rate, 2 * source.nbytes / _median(lambda: target.copy_(source), clock))


def _matrix_rate(m: int, n: int, k: int, device: torch.device, clock: BenchClock) -> float:
    a, b = (torch.randn(rows, k, device=device).to(torch.bfloat16) for rows in (m, n))
    return 2 * m * n * k / _median(lambda: a @ b.T, clock)


def _median(call: Callable[[], Tensor], clock: BenchClock) -> float:
    ceiling = Candidate("ceiling of this device", lambda _: call())
    return statistics.median(seconds_of(alternate([ceiling], clock, 1.0, least=7, most=20))[ceiling.name])
