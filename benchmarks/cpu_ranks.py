"""CPU ranks, and a single process with several threads, whose calls alternate; ranks that torchrun starts.

Ranks have one thread each. A turn times several calls of one candidate after a barrier, and is as long as its slowest
rank. A process without a turn sleeps in the read of a pipe: no rank waits in a collective, and no thread spins (a turn
begins a moment after the previous turn, when OpenMP's threads have stopped spinning). Each round begins with another
candidate. The share of the cores that other programs took meanwhile (on Linux) is measured: where it is more than a few
per cent, the times are unreliable.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.harness import Row, aligned, percentiles
from tpfuse.testing.ranks import RankPool

ALONE = "one_process"
_SETTLING = 0.02  # seconds before a turn; OpenMP's threads spin for less time
Call = Callable[[], object]

calls: dict[str, Call] = {}  # the calls of this process that alternate


def set_threads(threads: int) -> None:
    """Set the number of threads of this process."""
    torch.set_num_threads(threads)


def processor_seconds() -> float:
    """Return the processor time of this process, over all of its threads, in seconds."""
    return time.process_time()


@contextlib.contextmanager
def pools(ranks: int, threads: int | None = None) -> Iterator[tuple[RankPool, RankPool]]:
    """Start the ranks, and the single process with `threads`, by default as many as there are ranks."""
    several, alone = RankPool(ranks, timeout=600.0), RankPool(1, timeout=600.0)
    try:
        alone.run(set_threads, threads or ranks)
        yield several, alone
    finally:
        several.close()
        alone.close()


def turn(name: str, repeats: int) -> float:
    """Return the seconds of a call, from a barrier to this rank's end. Every rank of the candidate must call it."""
    from benchmarks import cpu_ranks  # a pool loads the file of `turn` apart from the module that benchmarks import

    call = cpu_ranks.calls[name]
    time.sleep(_SETTLING)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats


class OtherPrograms:
    """A count of the share of the cores that other programs take from now on."""

    def __init__(self, *pools: RankPool) -> None:
        self._pools = pools
        self._busy()  # ranks that have not started yet would count as other programs
        self._before, self._started = self._busy(), time.monotonic()

    def share(self) -> float:
        """Return the share; NaN where there is no /proc/stat."""
        return (self._busy() - self._before) / ((time.monotonic() - self._started) * (os.cpu_count() or 1))

    def _busy(self) -> float:
        """Return the seconds of processor time that other programs used since the machine started."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return float("nan")
        user, nice, system, _, _, *interrupts = (int(x) for x in stat.read_text().split("\n", 1)[0].split()[1:9])
        busy = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
        return busy - time.process_time() - sum(sum(pool.run(processor_seconds)) for pool in self._pools)


def alternate(candidates: Mapping[str, RankPool], rounds: int, seconds: float) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of a call in each round, by candidate, and the share of the cores that other programs took.

    candidates: where each is in `calls`. seconds: the approximate duration of a turn.
    """
    repeats = {name: max(1, min(200, int(seconds / max(pool.run(turn, name, 1))))) for name, pool in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    others = OtherPrograms(*dict.fromkeys(candidates.values()))
    for i in range(rounds):
        first = i % len(times)
        for name in [*list(times)[first:], *list(times)[:first]]:
            times[name].append(max(candidates[name].run(turn, name, repeats[name])))
    return times, others.share()


def milliseconds(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the percentiles of each candidate's seconds, in ms."""
    return {name: {key: round(x * 1e3, 4) for key, x in percentiles(taken).items()} for name, taken in times.items()}


def report(title: str, times: Mapping[str, list[float]], others: float, baseline: str) -> Row:
    """Print a table of what `alternate` returned, and return the row to keep, with the ratios to the baseline."""
    figures = milliseconds(times)
    ratios = {name: round(x["median"] / figures[baseline]["median"], 3) for name, x in figures.items()}
    lines = [(title, "median ms", "p20", "p80", f"x {baseline}")]
    lines += [(name, *(f"{x:.1f}" for x in figure.values()), f"{ratios[name]:.3f}") for name, figure in figures.items()]
    print(f"{aligned(lines)}\nother programs took {others:.0%} of the cores\n", flush=True)
    return {"others": round(others, 3), "baseline": baseline, "ratios": ratios, "ms": figures}


def whole(x: Tensor) -> Tensor:
    """Return a tensor of which ranks may have shards."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def join() -> torch.device:
    """Join the ranks that torchrun has started, and return this rank's device: a GPU, or the CPU with one thread."""
    local, options = int(os.environ["LOCAL_RANK"]), dict[str, Any]()
    if torch.cuda.is_available():
        options["device_id"] = torch.device("cuda", local)
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if options else "gloo", **options)
    return torch.device("cpu") if not options else torch.device("cuda", local)


def leave(status: int) -> NoReturn:
    """Leave the ranks that torchrun has started, and end the process."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the C++ libraries must not change the status while they unload
