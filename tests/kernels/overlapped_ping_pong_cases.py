"""Runs all_gather_gemm_ping_pong as it is compiled for an H100, on CPU ranks; its test starts it.

It reads a JSON list of works, [name of a function below, arguments …], and prints a line of JSON for each: what is
wrong with it, or "". A work's ranks gather by copies on a second stream of each rank, as `StreamMemory` has them.
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

from tpfuse.explore import PCT, ExploreError, RoundRobin, Schedule, Sequential, SimulatedMemory, explore
from tpfuse.explore.fresh_modules import fresh
from tpfuse.explore.suite import StreamMemory, current, without_rank_0
from tpfuse.kernels import all_gather_gemm_ping_pong, gemm_ping_pong, launch, ping_pong, signals
from tpfuse.kernels.activations import GATED
from tpfuse.kernels.trace import KernelTrace
from tpfuse.ops.linear.engine_gather import EngineGather
from tpfuse.testing.inputs import normal
from tpfuse.tools.emulated import emulated
from tpfuse.tools.operator import check_rounding

MODULES = (signals, ping_pong, gemm_ping_pong, all_gather_gemm_ping_pong)
Results = list[Tensor]
Work = list[Any]  # the arguments of a `Problem`


class Problem:
    """The inputs of all ranks and epochs, and the results: in the dtype of the inputs, and exact ones.

    m: rows of a chunk; n: columns of the result. Options: "bias", "keep" the pre-activation, a weight whose "columns"
    have adjacent elements, "one" program.
    """

    def __init__(
        self, world: int, m: int, n: int, k: int, activation: str | None, dtype: str, *options: str, epochs: int = 2
    ) -> None:
        kind, columns = getattr(torch, dtype), 2 * n if activation in GATED else n
        self.activation, self.options, self.programs = activation, options, 1 if "one" in options else 2
        self.xs = [[normal(10 * epoch + rank, m, k).to(kind) for rank in range(world)] for epoch in range(epochs)]
        weight, bias = normal(1, columns, k) * k**-0.5, normal(2, columns)
        self.weight, self.bias = weight.to(kind), bias.to(kind) if "bias" in options else None
        if "columns" in options:
            self.weight = self.weight.t().contiguous().t()
        self.plain, self.exact = ([self._results(xs, of) for xs in self.xs] for of in (kind, torch.float64))

    def _results(self, xs: Results, dtype: torch.dtype) -> Results:
        inputs = {"x": torch.cat(xs), "weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})
        converted = {name: x.to(dtype) for name, x in inputs.items()}
        return ping_pong_cases._plain(self.activation, [*self.options], **converted)

    def multiply(self, x: Tensor, engines: EngineGather) -> Results:
        """Launch the product of one rank."""
        out, kept = current(all_gather_gemm_ping_pong).all_gather_gemm_ping_pong(
            x, self.weight, self.bias, engines.chunks(x), engines.ready, engines.endpoint,
            activation=self.activation, keep_preactivation="keep" in self.options,
        )  # fmt: skip
        return [out] if kept is None else [out, kept]

    def check(self, results: Results, epoch: int) -> None:
        """Raise AssertionError if an epoch's results are wrong."""
        for number, (actual, *both) in enumerate(zip(results, self.plain[epoch], self.exact[epoch], strict=True)):
            check_rounding(f"epoch {epoch + 1}, output {number}", actual, *both)

    def opened(self, memory: Any) -> tuple[EngineGather, Tensor]:
        """Return a rank's gathers, and the memory from which copies read its rows."""
        launch._gpus[torch.device("cpu")] = "sm_90", self.programs + 1  # a multiprocessor is left to `open_copies`
        x = self.xs[0][0]
        return EngineGather(memory, "engines", x.nbytes), memory.buffer("x", x.shape, x.dtype).local


def _two_streams(problem: Problem, memory: SimulatedMemory) -> None:
    """Run the epochs: half of the ranks are the second streams, which copy, of the others."""
    world = memory.world // 2
    rank, copies = memory.rank % world, memory.rank >= world
    engines, x = problem.opened(StreamMemory(memory, world))
    events = memory.signals("events", 1)
    for epoch, xs in enumerate(problem.xs):
        if copies:
            memory.wait_signal(events, memory.rank, 0, epoch + 1, peer=rank, op="P has come here")
            engines.send(x, multiplied=True, keep=False)
            memory.signal(events, rank, 0, epoch + 1)
        else:
            x.copy_(xs[rank])
            memory.signal(events, rank + world, 0, epoch + 1)
            results = problem.multiply(x, engines)
            memory.wait_signal(events, rank, 0, epoch + 1, peer=rank + world, op="C has copied")
            problem.check(results, epoch)  # after the copies, so that a race is found first


def _late(problem: Problem, memory: SimulatedMemory) -> None:
    """Run an epoch, then one in which rank 0 is missing, and after a reset an epoch again."""
    engines, x = problem.opened(memory)

    def run(epoch: int) -> Results:
        x.copy_(problem.xs[epoch][memory.rank])
        engines.send(x, multiplied=True, keep=False)
        return problem.multiply(x, engines)

    problem.check(run(0), 0)
    memory.barrier()
    without_rank_0(memory, "all_gather_gemm", engines.endpoint.state, lambda: run(1))
    problem.check(run(1), 1)


def _explored(
    program: Callable[[Problem, SimulatedMemory], None],
    ranks: int,
    problem: Problem,
    schedules: Iterable[Schedule],
    seed: int | None = None,
    timeouts: bool = False,
) -> str:
    launches = partial(emulated, "sm_90", str, seed)
    try:
        explore(partial(program, problem), ranks, schedules=schedules, resident=3, timeouts=timeouts, launches=launches)
    except ExploreError as error:
        return str(error)
    return ""


def gather(
    work: Work, epochs: int = 2, schedules: Iterable[Schedule] = (Sequential(),), seed: int | None = None
) -> str:
    """Compare the results with float64. By default chunks arrive after one program has begun to wait for them."""
    return _explored(_two_streams, 2 * work[0], Problem(*work, epochs=epochs), schedules, seed)


def orders(work: Work, seeds: int) -> str:
    """Let chunks arrive in several orders, with warps in several orders."""
    schedules = [RoundRobin(), *map(PCT, range(seeds))]
    found = [gather(work, schedules=[each], seed=seed) for seed, each in enumerate(schedules)]
    return "\n".join(filter(None, found))


def late(work: Work) -> str:
    """Let waits end while a rank is missing."""
    return _explored(_late, work[0], Problem(*work), [RoundRobin()], timeouts=True)


def traced(work: Work) -> str:
    """Compare the peers of a trace's events with the order in which a rank takes the chunks."""
    with KernelTrace() as trace:
        wrong = gather(work, 1)
    launches = [x for x in trace.read() if x.kernel == "all_gather_gemm_ping_pong_kernel"]
    waits = 0
    for rank, launched in enumerate(sorted(launches, key=lambda x: x.rank or 0)):
        order = [(rank + step) % work[0] for step in range(work[0])]
        for program in range(launched.programs):
            events = [(x.kind, x.peer) for x in launched.events if x.program == program]
            both = [(kind, peer) for peer in order for kind in ("waiting", "computing")][1:]
            if [x for x in both if x in events or x[0] == "computing"] != events:
                wrong += f"rank {rank}, program {program}: {events}"
            waits += len(events) - work[0]
    return wrong or f"{len(launches)} launches, {waits} waits" * (len(launches) != work[0] or not waits)


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
