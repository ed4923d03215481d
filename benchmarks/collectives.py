"""Time collectives alternately: through symmetric memory, by NCCL or Gloo, by MPI, and a plain copy of as many bytes.

    python -m benchmarks.collectives [--ranks 2 4] [--rounds 15]     CPU ranks of this machine
    torchrun --nproc-per-node 8 -m benchmarks.collectives            the GPUs of a node; CPU ranks where there is none
    mpirun -n 2 python -m benchmarks.collectives                     CPU ranks, with MPI too (needs mpi4py)

The size S is that of the whole tensor: the result of all-gather and all-reduce, the input of the others. The algorithm
bandwidth is S / time. The bus bandwidth is that times the bytes that each rank must send, in units of S: (n - 1) / n
for all-gather, reduce-scatter and all-to-all, 2 (n - 1) / n for all-reduce, 1 for broadcast and reduce
(github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). tpfuse has no broadcast and no reduce through symmetric memory.

Outputs are in memory that exists already, for all candidates. Results are checked first, to the bit. CPU ranks have one
thread each. A round times several calls of one candidate after a barrier, on rank 0, and candidates alternate. The
bound is the copy: no collective of these sizes can read and write less than the copy does.
"""

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Parser, Row, percentiles, write_row
from tpfuse.comm.collectives.direct import DirectCollectives
from tpfuse.comm.collectives.fused import FusedCollectives
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.testing.ranks import RankPool

SIZES = (2**12, 2**16, 2**18, 2**22, 2**26)  # bytes
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce")
_SECONDS = 0.04  # the approximate duration of a round
_ours: dict[str, DirectCollectives | FusedCollectives] = {}  # by the kind of device


def bus_factor(op: str, ranks: int) -> float:
    """Return the bus bandwidth of a collective in units of its algorithm bandwidth."""
    if op in ("broadcast", "reduce"):
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _symmetric() -> DirectCollectives | FusedCollectives:
    device, group = _device(), dist.group.WORLD
    assert group is not None
    if device.type not in _ours:
        memory = symmetric_memory(group, device)
        _ours[device.type] = FusedCollectives(memory) if device.type == "cuda" else DirectCollectives(memory)
    return _ours[device.type]


class _Case:
    """A collective of one size: its candidates, their outputs, and the expected result.

    expected: None where this rank has no result.
    """

    def __init__(self, op: str, nbytes: int) -> None:
        self.op, self.device = op, _device()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        n = nbytes // 4 // self.world
        generator = torch.Generator().manual_seed(nbytes)
        inputs = torch.randint(-8, 9, (self.world, self.world, n), generator=generator).float().to(self.device)
        self.mine = inputs[self.rank].clone()
        shape: tuple[int, ...] = (self.world, n)
        self.expected: Tensor | None
        if op == "all_gather":
            self.mine, self.expected = self.mine[0].clone(), inputs[:, 0].clone()
        elif op == "reduce_scatter":
            shape, self.expected = (n,), inputs.sum(0)[self.rank]
        elif op == "all_to_all":
            self.expected = inputs[:, self.rank].clone()
        elif op == "broadcast":
            self.expected = inputs[0].clone()
        else:
            self.expected = inputs.sum(0) if op == "all_reduce" or self.rank == 0 else None
        self.outputs: dict[str, Tensor] = {}
        self.calls: dict[str, Callable[[], object]] = {}
        if op not in ("broadcast", "reduce"):
            self._add("tpfuse", shape, self._tpfuse)
        self._add(dist.get_backend(), shape, self._torch)
        if _mpi() is not None and self.device.type == "cpu":
            self._add("mpi", shape, self._by_mpi)
        source = torch.randn(self.world * n, device=self.device)
        target = torch.empty_like(source)
        self.calls["copy"] = lambda: target.copy_(source)

    def _add(self, name: str, shape: tuple[int, ...], candidate: Callable[[Tensor], Callable[[], object]]) -> None:
        out = torch.empty(shape, device=self.device)
        if self.op in ("all_reduce", "broadcast", "reduce"):  # these work in place
            out.copy_(self.mine)
        self.outputs[name], self.calls[name] = out, candidate(out)

    def _tpfuse(self, out: Tensor) -> Callable[[], object]:
        ours, x = _symmetric(), out if self.op == "all_reduce" else self.mine
        function = getattr(ours, self.op)
        return lambda: function(x, out).wait()

    def _torch(self, out: Tensor) -> Callable[[], object]:
        x, flat = self.mine, out.view(-1)
        return {
            "all_gather": lambda: dist.all_gather_into_tensor(flat, x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x.view(-1)),
            "all_reduce": lambda: dist.all_reduce(out),
            "all_to_all": lambda: dist.all_to_all_single(out, x),
            "broadcast": lambda: dist.broadcast(out, 0),
            "reduce": lambda: dist.reduce(out, 0),
        }[self.op]

    def _by_mpi(self, out: Tensor) -> Callable[[], object]:
        mpi: Any = _mpi()
        world, x, result = mpi.COMM_WORLD, self.mine.numpy(), out.numpy()
        kept = result if self.rank == 0 else None
        return {
            "all_gather": lambda: world.Allgather(x, result),
            "reduce_scatter": lambda: world.Reduce_scatter_block(x, result),
            "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE, result),
            "all_to_all": lambda: world.Alltoall(x, result),
            "broadcast": lambda: world.Bcast(result),
            "reduce": lambda: world.Reduce(mpi.IN_PLACE if self.rank == 0 else result, kept),
        }[self.op]

    def check(self) -> None:
        """Call each candidate once. Raise AssertionError if a result is wrong."""
        for name, out in self.outputs.items():
            self.calls[name]()
            right = self.expected is None or torch.equal(out.view(-1), self.expected.reshape(-1))
            assert right, (
                f"{name}: {self.op} of {self.expected.nbytes if self.expected is not None else 0} bytes is wrong"
            )
            if self.op in ("all_reduce", "reduce"):
                out.zero_()  # sums in place would grow from call to call


def measure(op: str, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a call in each round, by candidate. Every rank must call it."""
    torch.use_deterministic_algorithms(False)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor`")  # torch 2.11 has no other names
    case = _Case(op, nbytes)
    case.check()
    repeats = {}
    for name, call in case.calls.items():
        seconds = torch.tensor(_timed(call, 3, case.device), device=case.device)
        dist.broadcast(seconds, 0)
        repeats[name] = max(1, min(500, int(_SECONDS / seconds.item())))
    times: dict[str, list[float]] = {name: [] for name in case.calls}
    for _ in range(rounds):
        for name, call in case.calls.items():
            dist.barrier()
            times[name].append(_timed(call, repeats[name], case.device))
    return times


def _timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the mean seconds of a call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def _mpi() -> Any:
    """Return the module of mpi4py if mpirun has started the ranks of this process's group, else None."""
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    size = MPI.COMM_WORLD.Get_size()
    return MPI if size > 1 and dist.is_initialized() and size == dist.get_world_size() else None


def _join() -> bool:
    """Join the ranks that torchrun or mpirun has started. Return whether there are any."""
    if "RANK" not in os.environ:
        try:
            from mpi4py import MPI
        except ImportError:
            return False
        world = MPI.COMM_WORLD
        if world.Get_size() == 1:
            return False
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = world.bcast(free.getsockname()[1], root=0)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(world.Get_rank()), "WORLD_SIZE": str(world.Get_size())}
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
    options: dict[str, Any] = {}
    if torch.cuda.is_available() and torch.cuda.device_count() > int(os.environ["LOCAL_RANK"]):
        options["device_id"] = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(options["device_id"])
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if options else "gloo", **options)
    return True


def _report(world: int, op: str, nbytes: int, times: dict[str, list[float]]) -> Row:
    """Print the line of a collective, and return its row."""
    figures = {name: {k: v * 1e6 for k, v in percentiles(taken).items()} for name, taken in times.items()}
    cells, row = [], {"op": op, "bytes": nbytes, "ranks": world}
    for name, figure in figures.items():
        row[f"{name}_us"] = {k: round(v, 1) for k, v in figure.items()}
        cells.append(f"{name} {figure['median']:8.0f} µs")
        if name != "copy":
            algorithm = nbytes / figure["median"] / 1e3
            bus = algorithm * bus_factor(op, world)
            row[f"{name}_gb_s"] = [round(algorithm, 5), round(bus, 5)]
            cells[-1] += f" {algorithm:6.2f} {bus:6.2f} GB/s"
    peer = next(name for name in figures if name in ("gloo", "nccl"))
    if "tpfuse" in figures:
        row["speedup"] = round(figures[peer]["median"] / figures["tpfuse"]["median"], 2)
        cells.append(f"{row['speedup']} times faster than {peer}")
    print(f"{world:>3} ranks {op:<15} {nbytes:>9} bytes   " + "   ".join(cells), flush=True)
    return row


def main() -> None:
    """Print a line per collective, size and number of ranks, and keep it."""
    parser = Parser(__doc__)
    parser.option("--ranks", [2, 4], "numbers of CPU ranks to measure")
    parser.option("--rounds", 15, "number of rounds")
    arguments = parser.parse_args()
    cases = [(op, nbytes) for op in OPERATIONS for nbytes in SIZES]
    head = "The columns of each candidate are its time, its algorithm bandwidth and its bus bandwidth."
    if _join():
        for index, (op, nbytes) in enumerate(cases):
            times = measure(op, nbytes, arguments.rounds)
            if dist.get_rank() == 0:
                print(head if index == 0 else "", end="\n" if index == 0 else "")
                write_row("collectives", _report(dist.get_world_size(), op, nbytes, times), arguments.keep)
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # Gloo's threads must not change the status while the libraries unload
    print(head)
    for world in arguments.ranks:
        ranks = RankPool(world, timeout=600.0)
        for op, nbytes in cases:
            row = _report(world, op, nbytes, ranks.run(measure, op, nbytes, arguments.rounds)[0])
            write_row("collectives", row, arguments.keep)
        ranks.close()


if __name__ == "__main__":
    main()
