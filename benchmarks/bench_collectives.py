"""Time collectives of CPU ranks: through shared memory, by Gloo, and one plain copy of as many bytes, by turns.

    python -m benchmarks.bench_collectives [--ranks 2 4] [--rounds 15]

Sizes are those of the whole tensor: the result of all-gather and all-reduce, the input of reduce-scatter. The outputs
are in memory that exists already on both sides (Gloo's functions require it). Results are checked first, to the bit.
Ranks have one thread each. A round times several calls of one candidate after a barrier, on rank 0; candidates take
turns. The bound is the copy: no collective of these sizes can read and write less than the copy does.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import keep, percentiles
from tpfuse.comm.collectives.direct import DirectCollectives
from tpfuse.comm.connect import connect
from tpfuse.testing.ranks import RankPool

SIZES = (2**12, 2**16, 2**18, 2**22, 2**26)  # bytes
_SECONDS = 0.04  # the approximate duration of a round
Calls = dict[str, Callable[[], object]]


def _calls(op: str, nbytes: int, direct: DirectCollectives) -> tuple[Calls, Tensor, Tensor, Tensor]:
    """Return the calls that take turns, the outputs of tpfuse and Gloo, and the expected result."""
    rank, world = dist.get_rank(), dist.get_world_size()
    n = nbytes // 4 // world
    inputs = torch.randint(-8, 9, (world, world, n), generator=torch.Generator().manual_seed(nbytes)).float()
    mine, source = inputs[rank].clone(), torch.randn(world * n)
    target = torch.empty_like(source)
    if op == "all_gather":
        ours, theirs = torch.empty(world, n), torch.empty(world, n)
        x = mine[0].clone()
        calls: Calls = {
            "tpfuse": lambda: direct.all_gather(x, ours),
            "gloo": lambda: dist.all_gather_into_tensor(theirs.view(-1), x),
        }
        expected = inputs[:, 0]
    elif op == "reduce_scatter":
        ours, theirs = torch.empty(n), torch.empty(n)
        calls = {
            "tpfuse": lambda: direct.reduce_scatter(mine, ours),
            "gloo": lambda: dist.reduce_scatter_tensor(theirs, mine.view(-1)),
        }
        expected = inputs.sum(0)[rank]
    else:  # in place, as in Gloo: the sums would grow, so they are set to zero before they are timed
        ours, theirs = mine.view(-1).clone(), mine.view(-1).clone()
        calls = {"tpfuse": lambda: direct.all_reduce(ours, ours), "gloo": lambda: dist.all_reduce(theirs)}
        expected = inputs.sum(0).view(-1)
    return calls | {"copy": lambda: target.copy_(source)}, ours, theirs, expected


def measure(op: str, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a call in each round, by candidate. Every rank must call it."""
    torch.use_deterministic_algorithms(False)
    direct = _direct()
    calls, ours, theirs, expected = _calls(op, nbytes, direct)
    for name, out in (("tpfuse", ours), ("gloo", theirs)):
        calls[name]()
        assert torch.equal(out, expected), f"{name}: {op} of {nbytes} bytes is wrong"
    if op == "all_reduce":
        ours.zero_()
        theirs.zero_()
    repeats = {}
    for name, call in calls.items():
        started = time.perf_counter()
        for _ in range(3):
            call()
        seconds = torch.tensor((time.perf_counter() - started) / 3)
        dist.broadcast(seconds, 0)
        repeats[name] = max(1, min(500, int(_SECONDS / seconds.item())))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - started) / repeats[name])
    return times


_collectives: list[DirectCollectives] = []


def _direct() -> DirectCollectives:
    if not _collectives:
        group = dist.group.WORLD
        assert group is not None
        _collectives.append(DirectCollectives(connect(group, torch.device("cpu"))))
    return _collectives[0]


def main() -> None:
    """Print a line per operation, size and number of ranks, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks to measure")
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds")
    arguments = parser.parse_args()
    print(f"{'ranks':>5} {'operation':<15} {'bytes':>9} {'tpfuse':>9} {'gloo':>9} {'copy':>9}   times faster than Gloo")
    for world in arguments.ranks:
        ranks = RankPool(world, timeout=600.0)
        for op in ("all_gather", "reduce_scatter", "all_reduce"):
            for nbytes in SIZES:
                times = ranks.run(measure, op, nbytes, arguments.rounds)[0]
                figures = {name: {k: v * 1e6 for k, v in percentiles(times[name]).items()} for name in times}
                median = {name: figures[name]["median"] for name in times}
                ratio = median["gloo"] / median["tpfuse"]
                columns = " ".join(f"{median[name]:>6.0f} µs" for name in ("tpfuse", "gloo", "copy"))
                print(f"{world:>5} {op:<15} {nbytes:>9} {columns}   {ratio:.1f}", flush=True)
                rounded = {f"{name}_us": {k: round(v, 1) for k, v in figures[name].items()} for name in figures}
                keep("collectives", {"op": op, "bytes": nbytes, "ranks": world, "speedup": round(ratio, 2)} | rounded)
        ranks.close()


if __name__ == "__main__":
    main()
