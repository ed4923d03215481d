"""Time collectives alternately: through symmetric memory, by NCCL or Gloo, and a plain copy of as many bytes.

    python -m benchmarks.collectives [--ranks 2 4] [--rounds 15]     CPU ranks of this machine
    torchrun --nproc-per-node 8 -m benchmarks.collectives            the GPUs of a node; CPU ranks where there is none

The size S is that of the whole tensor: the result of all-gather and all-reduce, the input of the others. The bus
bandwidth is S / time times the bytes that each rank must send, in units of S: (n - 1) / n, and twice that for
all-reduce (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).

Outputs are in memory that exists already, for all candidates. Results are checked first, to the bit. CPU ranks have one
thread each. A round times several calls of one candidate after a barrier, the slowest rank counts, and candidates
alternate. The bound is the copy: no collective of these sizes can read and write less than the copy does.
"""

import os
import warnings
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cpu_ranks import Call, join, leave
from benchmarks.harness import Parser, Row, percentiles, write_row
from benchmarks.timing import Candidate, RankClock, alternate, seconds_of
from tpfuse.comm.collectives.direct import DirectCollectives
from tpfuse.comm.collectives.fused import FusedCollectives
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.testing.ranks import RankPool

SIZES = (2**12, 2**16, 2**18, 2**22, 2**26)  # bytes
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_SECONDS = 0.04  # the approximate duration of a round


def bus_factor(op: str, ranks: int) -> float:
    """Return the bus bandwidth of a collective in units of its algorithm bandwidth."""
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@cache
def _symmetric() -> DirectCollectives | FusedCollectives:
    device, group = _device(), dist.group.WORLD
    assert group is not None
    memory = symmetric_memory(group, device)
    return FusedCollectives(memory) if device.type == "cuda" else DirectCollectives(memory)


def _by_tpfuse(op: str, x: Tensor, out: Tensor) -> Call:
    function, source = getattr(_symmetric(), op), out if op == "all_reduce" else x
    return lambda: function(source, out).wait()


def _by_torch(op: str, x: Tensor, out: Tensor) -> Call:
    flat = out.view(-1)
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(flat, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x.view(-1)),
        "all_reduce": lambda: dist.all_reduce(out),
        "all_to_all": lambda: dist.all_to_all_single(out, x),
    }[op]


def _candidates(op: str, nbytes: int, device: torch.device) -> dict[str, Call]:
    """Return the calls of the candidates, each of which has given the right result. Every rank must call it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    n = nbytes // 4 // world
    generator = torch.Generator().manual_seed(nbytes)
    inputs = torch.randint(-8, 9, (world, world, n), generator=generator).float().to(device)
    x, total = inputs[rank, 0] if op == "all_gather" else inputs[rank], inputs.sum(0)
    expected = {
        "all_gather": inputs[:, 0], "reduce_scatter": total[rank], "all_reduce": total, "all_to_all": inputs[:, rank],
    }[op]  # fmt: skip
    calls: dict[str, Call] = {}
    for name, make in (("tpfuse", _by_tpfuse), (dist.get_backend(), _by_torch)):
        out = torch.empty((n,) if op == "reduce_scatter" else (world, n), device=device)
        if op == "all_reduce":  # in place
            out.copy_(x)
        calls[name] = call = make(op, x.clone(), out)
        call()
        assert torch.equal(out.view(-1), expected.reshape(-1)), f"{name}: {op} of {nbytes} bytes is wrong"
        if op == "all_reduce":
            out.zero_()  # sums in place would grow from call to call
    source = torch.randn(world * n, device=device)
    target = torch.empty_like(source)
    return calls | {"copy": lambda: target.copy_(source)}


def measure(op: str, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a call in each round, by candidate. Every rank must call it."""
    torch.use_deterministic_algorithms(False)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor`")  # torch 2.11 has no other names
    device, group = _device(), dist.group.WORLD
    assert group is not None
    clock = RankClock(group, device, duration=_SECONDS, most=500)
    calls = _candidates(op, nbytes, device).items()
    candidates = [Candidate(name, lambda _, call=call: call()) for name, call in calls]  # type: ignore[misc]
    return seconds_of(alternate(candidates, clock, 0.0, least=rounds, most=rounds))


def _report(world: int, op: str, nbytes: int, times: dict[str, list[float]]) -> Row:
    """Print the line of a collective, and return its row."""
    figures = {name: {k: v * 1e6 for k, v in percentiles(taken).items()} for name, taken in times.items()}
    cells, row = [], {"op": op, "bytes": nbytes, "ranks": world}
    for name, figure in figures.items():
        row[f"{name}_us"] = {k: round(v, 1) for k, v in figure.items()}
        cells.append(f"{name} {figure['median']:8.0f} µs")
        if name != "copy":
            cells[-1] += f" {nbytes / figure['median'] / 1e3 * bus_factor(op, world):6.2f} GB/s"
    peer = next(name for name in figures if name in ("gloo", "nccl"))
    row["speedup"] = round(figures[peer]["median"] / figures["tpfuse"]["median"], 2)
    print(f"{world:>3} ranks {op:<15} {nbytes:>9} bytes   " + "   ".join(cells), flush=True)
    return row


def main() -> None:
    """Print a line per collective, size and number of ranks, and keep it."""
    parser = Parser(__doc__)
    parser.option("--ranks", [2, 4], "numbers of CPU ranks to measure")
    parser.option("--rounds", 15, "number of rounds")
    arguments = parser.parse_args()
    cases = [(op, nbytes) for op in OPERATIONS for nbytes in SIZES]
    if "RANK" in os.environ:  # torchrun has started this rank
        join()
        for op, nbytes in cases:
            times = measure(op, nbytes, arguments.rounds)
            if dist.get_rank() == 0:
                write_row("collectives", _report(dist.get_world_size(), op, nbytes, times), arguments.keep)
        leave(0)
    for world in arguments.ranks:
        ranks = RankPool(world, timeout=600.0)
        for op, nbytes in cases:
            row = _report(world, op, nbytes, ranks.run(measure, op, nbytes, arguments.rounds)[0])
            write_row("collectives", row, arguments.keep)
        ranks.close()


if __name__ == "__main__":
    main()
