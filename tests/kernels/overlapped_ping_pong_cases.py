"""Runs the gather and the scatter of Gluon as they are compiled for an H100, on CPU ranks; their tests start it.

It reads a JSON list of works, [name of a function below, arguments …], and prints a line of JSON for each: what is
wrong with it, or "". The first word of a work's list is a kind of `PROBLEMS`. Ranks gather by copies on a second stream
of each rank, as `StreamMemory` has them.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import ping_pong_cases
import torch
from torch import Tensor

from tpfuse.comm.collectives.fused import open_channel
from tpfuse.explore import PCT, ExploreError, RoundRobin, Schedule, Sequential, SimulatedMemory, explore
from tpfuse.explore.fresh_modules import fresh
from tpfuse.explore.suite import StreamMemory, current, without_rank_0
from tpfuse.kernels import (
    all_gather_gemm_ping_pong,
    endpoint,
    gemm_ping_pong,
    gemm_reduce_scatter_ping_pong,
    launch,
    ping_pong,
    ping_pong_epilogue,
    reference,
    signals,
)
from tpfuse.kernels.activations import GATED
from tpfuse.kernels.trace import KernelTrace
from tpfuse.ops.linear.engine_gather import EngineGather
from tpfuse.testing.inputs import normal
from tpfuse.tools.emulated import emulated
from tpfuse.tools.operator import check_rounding

MODULES = (
    signals, endpoint, ping_pong, ping_pong_epilogue, gemm_ping_pong, all_gather_gemm_ping_pong,
    gemm_reduce_scatter_ping_pong,
)  # fmt: skip
Results = list[Tensor]
Run = Callable[[int], Results]  # the launch of an epoch
Work = list[Any]  # a kind of `PROBLEMS`, and the problem's arguments


class Problem:
    """The results of all epochs: in the dtype of the inputs, and exact ones.

    Options of a problem: "bias", a weight whose "columns" have adjacent elements, "one" program.
    """

    kernel: str
    world: int
    programs: int
    plain: list[Results]
    exact: list[Results]

    def program(self, memory: SimulatedMemory) -> None:
        """Run all epochs on a rank."""
        raise NotImplementedError

    def opened(self, memory: SimulatedMemory) -> tuple[Run, Tensor]:
        """Return a rank's launches, and the state in which its channel keeps the epoch."""
        raise NotImplementedError

    def cut_short(self, results: Results) -> None:
        """Raise AssertionError unless an epoch that was aborted has left its results as it may."""

    def check(self, results: Results, epoch: int, rank: int) -> None:
        """Raise AssertionError if an epoch's results are wrong."""
        both = zip(results, self.plain[epoch], self.exact[epoch], strict=True)
        for number, (actual, plain, exact) in enumerate(both):
            rows = slice(rank * len(actual), (rank + 1) * len(actual)) if len(actual) < len(exact) else slice(None)
            check_rounding(f"epoch {epoch + 1}, output {number}", actual, plain[rows], exact[rows])


class Gather(Problem):
    """m: rows of a chunk; n: columns of the result. More options: "keep" the pre-activation."""

    kernel = "all_gather_gemm_ping_pong_kernel"

    def __init__(
        self, world: int, m: int, n: int, k: int, activation: str | None, dtype: str, *options: str, epochs: int = 2
    ) -> None:
        kind, columns = getattr(torch, dtype), 2 * n if activation in GATED else n
        self.world, self.activation, self.options = world, activation, options
        self.programs = 1 if "one" in options else 2
        self.xs = [[normal(10 * epoch + rank, m, k).to(kind) for rank in range(world)] for epoch in range(epochs)]
        weight, bias = normal(1, columns, k) * k**-0.5, normal(2, columns)
        self.weight, self.bias = weight.to(kind), bias.to(kind) if "bias" in options else None
        if "columns" in options:
            self.weight = self.weight.t().contiguous().t()
        self.plain, self.exact = ([self._results(xs, of) for xs in self.xs] for of in (kind, torch.float64))

    def _results(self, xs: Results, dtype: torch.dtype) -> Results:
        inputs = {"x": torch.cat(xs), "weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})
        converted = {name: x.to(dtype) for name, x in inputs.items()}
        return ping_pong_cases.plain(self.activation, [*self.options], **converted)

    def multiply(self, x: Tensor, engines: EngineGather) -> Results:
        """Launch the product of one rank."""
        out, kept = current(all_gather_gemm_ping_pong).all_gather_gemm_ping_pong(
            x, self.weight, self.bias, engines.chunks(x), engines.ready, engines.endpoint,
            activation=self.activation, keep_preactivation="keep" in self.options,
        )  # fmt: skip
        return [out] if kept is None else [out, kept]

    def _engines(self, memory: Any) -> tuple[EngineGather, Tensor]:
        """Return a rank's gathers, and the memory from which copies read its rows."""
        launch._gpus[torch.device("cpu")] = "sm_90", self.programs + 1  # a multiprocessor is left to `open_copies`
        x = self.xs[0][0]
        return EngineGather(memory, "engines", x.nbytes), memory.buffer("x", x.shape, x.dtype).local

    def program(self, memory: SimulatedMemory) -> None:
        """Run all epochs: half of the ranks are the second streams, which copy, of the others."""
        rank, copies = memory.rank % self.world, memory.rank >= self.world
        engines, x = self._engines(StreamMemory(memory, self.world))
        events = memory.signals("events", 1)
        for epoch, xs in enumerate(self.xs):
            if copies:
                memory.wait_signal(events, memory.rank, 0, epoch + 1, peer=rank, op="P has come here")
                engines.send(x, multiplied=True, keep=False)
                memory.signal(events, rank, 0, epoch + 1)
            else:
                x.copy_(xs[rank])
                memory.signal(events, rank + self.world, 0, epoch + 1)
                results = self.multiply(x, engines)
                memory.wait_signal(events, rank, 0, epoch + 1, peer=rank + self.world, op="C has copied")
                self.check(results, epoch, rank)  # after the copies, so that a race is found first

    def opened(self, memory: SimulatedMemory) -> tuple[Run, Tensor]:
        """Return a rank's launches, whose copies end before they begin."""
        engines, x = self._engines(memory)

        def run(epoch: int) -> Results:
            x.copy_(self.xs[epoch][memory.rank])
            engines.send(x, multiplied=True, keep=False)
            return self.multiply(x, engines)

        return run, engines.endpoint.state


class Scatter(Problem):
    """m: rows of an owner. More options: "residual"; "odd": rank 1 has one more k than the others; "ordered" sums."""

    kernel = "gemm_reduce_scatter_ping_pong_kernel"

    def __init__(self, world: int, m: int, n: int, k: int, dtype: str, *options: str, epochs: int = 2) -> None:
        kind, rows = getattr(torch, dtype), world * m
        self.world, self.m, self.programs = world, m, 1 if "one" in options else 2
        ks = [k + (rank == 1 and "odd" in options) for rank in range(world)]
        self.xs = [[normal(10 * e + r, rows, k).to(kind) for r, k in enumerate(ks)] for e in range(epochs)]
        self.weights = [(normal(20 + r, n, k) * k**-0.5).to(kind) for r, k in enumerate(ks)]
        if "ordered" in options:  # rank 0 first: 1 is lost beside 2^24; after it, 1 would be left
            for xs in self.xs:
                for x, weight, value in zip(xs, self.weights, (1, 2**24, -(2**24)), strict=True):
                    x.zero_()
                    weight.zero_()
                    x[:, 0], weight[:, 0] = value, 1
        if "columns" in options:
            self.weights = [weight.t().contiguous().t() for weight in self.weights]
        self.bias = normal(2, n).to(kind) if "bias" in options else None
        self.residual = normal(3, rows, n).to(kind) if "residual" in options else None
        self.plain, self.exact = ([self._results(xs, of) for xs in self.xs] for of in (kind, torch.float64))
        if "ordered" in options:
            self.plain, self.exact = ([[x.zero_() for x in each] for each in of] for of in (self.plain, self.exact))

    def _results(self, xs: Results, dtype: torch.dtype) -> Results:
        each = [reference.linear(x.to(dtype), weight.to(dtype)) for x, weight in zip(xs, self.weights, strict=True)]
        total = torch.stack(each).sum(0)
        for more in (self.bias, self.residual):
            total = total if more is None else total + more.to(dtype)
        return [total]

    def program(self, memory: SimulatedMemory) -> None:
        """Run all epochs."""
        run, _ = self.opened(memory)
        for epoch in range(len(self.xs)):
            self.check(run(epoch), epoch, memory.rank)

    def opened(self, memory: SimulatedMemory) -> tuple[Run, Tensor]:
        """Return a rank's launches; rank 0 alone adds bias and residual to its rows, if there are any."""
        launch._gpus[torch.device("cpu")] = "sm_90", self.programs
        rank, rows = memory.rank, slice(memory.rank * self.m, (memory.rank + 1) * self.m)
        _, end = open_channel(memory, "scatter", self.exact[0][0].numel() * 2, self.programs)
        residual = None if self.residual is None else self.residual[rows]

        def run(epoch: int) -> Results:
            scatter = current(gemm_reduce_scatter_ping_pong).gemm_reduce_scatter_ping_pong
            return [scatter(self.xs[epoch][rank], self.weights[rank], end, bias=self.bias, residual=residual)]

        return run, end.state

    def cut_short(self, results: Results) -> None:
        """Nothing is added: what was not written is NaN."""
        assert results[0].isnan().all(), "parts are missing"


PROBLEMS: dict[str, type[Gather | Scatter]] = {"gather": Gather, "scatter": Scatter}


def _problem(kind: str, *arguments: Any, epochs: int = 2) -> Problem:
    return PROBLEMS[kind](*arguments, epochs=epochs)


def _late(problem: Problem, memory: SimulatedMemory) -> None:
    """Run an epoch, then one in which rank 0 is missing, and after a reset an epoch again."""
    run, state = problem.opened(memory)
    problem.check(run(0), 0, memory.rank)
    memory.barrier()
    without_rank_0(memory, problem.kernel, state, lambda: problem.cut_short(run(1)))
    problem.check(run(1), 1, memory.rank)


def _explored(
    program: Callable[[SimulatedMemory], None],
    ranks: int,
    schedules: Iterable[Schedule],
    seed: int | None = None,
    timeouts: bool = False,
) -> str:
    launches = partial(emulated, "sm_90", str, seed)
    try:
        explore(program, ranks, schedules=schedules, resident=3, timeouts=timeouts, launches=launches)
    except ExploreError as error:
        return str(error)
    return ""


def values(
    work: Work, epochs: int = 2, schedules: Iterable[Schedule] = (Sequential(),), seed: int | None = None
) -> str:
    """Compare the results with float64. By default chunks arrive after one program has begun to wait for them."""
    problem = _problem(*work, epochs=epochs)
    return _explored(problem.program, problem.world * (2 if work[0] == "gather" else 1), schedules, seed)


def orders(work: Work, seeds: int) -> str:
    """Let chunks arrive in several orders, with warps in several orders."""
    schedules = [RoundRobin(), *map(PCT, range(seeds))]
    found = [values(work, schedules=[each], seed=seed) for seed, each in enumerate(schedules)]
    return "\n".join(filter(None, found))


def late(work: Work) -> str:
    """Let waits end while a rank is missing."""
    problem = _problem(*work)
    return _explored(partial(_late, problem), problem.world, [RoundRobin()], timeouts=True)


def traced(work: Work) -> str:
    """Compare the peers of a trace's events with the order in which a rank computes and waits."""
    world, gathers = work[1], work[0] == "gather"
    with KernelTrace() as trace:
        wrong = values(work, 1)
    launches = [x for x in trace.read() if x.kernel == PROBLEMS[work[0]].kernel]
    waits = 0
    for rank, launched in enumerate(sorted(launches, key=lambda x: x.rank or 0)):
        if gathers:
            order = [(kind, (rank + step) % world) for step in range(world) for kind in ("waiting", "computing")][1:]
        else:
            order = [("computing", (rank + step) % world) for step in range(1, world)]
            order += [("waiting", (rank - step) % world) for step in range(1, world)] + [("computing", rank)]
        for program in range(launched.programs):
            events = [(x.kind, x.peer) for x in launched.events if x.program == program]
            if [x for x in order if x in events or x[0] == "computing"] != events:
                wrong += f"rank {rank}, program {program}: {events}"
            waits += len(events) - world
    return wrong or f"{len(launches)} launches, {waits} waits" * (len(launches) != world or not waits)


def planted(run: str, changes: dict[str, str], work: Work) -> str:
    """Run a work with copies of the modules, in which texts are replaced that they have once."""
    sources = {module.__name__: inspect.getsource(module) for module in MODULES}
    for old, new in changes.items():
        names = [name for name, source in sources.items() if old in source]
        if len(names) != 1 or sources[names[0]].count(old) != 1:
            return f"{old!r} is not in the source once"
        sources[names[0]] = sources[names[0]].replace(old, new)
    with fresh(MODULES, sources):
        found: str = globals()[run](work)
    return found


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for function, *arguments in json.load(sys.stdin):
        print(json.dumps(globals()[function](*arguments)), flush=True)
