"""Time the GEMMs that overlap with communication on one GPU: their protocol's cost, and how well they hide a real link.

The cost of the protocol is measured beside the plain gemm kernel (`kernels/gemm.py`) on the same whole matrices, and
nothing waits:

    all_gather_gemm      the other ranks' chunks are in `gathered`, and their words of `ready` say so. On an H100 or
                         H200 both products in Gluon have rows too, where they can compute the result
    gemm_reduce_scatter  the slots of all ranks are on this GPU, and the others have signalled: the tiles are pushed
                         into slots, and this rank's rows are summed over the sources. That sum reads as many bytes as
                         the product has written, as a separate reduce-scatter would; the peer "gemm, then sum" does
                         so. The products in Gluon have rows as for the gather

"from host memory": the other ranks' chunks come over the real link that one GPU has. A copy engine copies each chunk
from pinned memory, and then signals the running product. The peers are the copies alone, the product alone, and one
after the other. The last chunk cannot be multiplied before it is present, and the first one only when the product has
reached it: with `world` chunks, the shortest possible time is max(copy + product / world, product). So the figure is
computed from shapes where one of the two takes much longer than the other (the link's width decides which). The shape
between them, where both take about the same time, has a row too.
"""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import OURS, Bench, BenchCase, Built, TimedMode
from benchmarks.shapes import LLAMA_7B, LLAMA_70B, layers
from benchmarks.timing import Candidate, verdict
from tpfuse.comm.collectives.fused import open_channel
from tpfuse.kernels import reference
from tpfuse.kernels.activations import GATED
from tpfuse.kernels.all_gather_gemm import all_gather_gemm_forward
from tpfuse.kernels.all_gather_gemm_ping_pong import all_gather_gemm_ping_pong, gather_ping_pong_problem
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.gemm_ping_pong import gemm_ping_pong
from tpfuse.kernels.gemm_reduce_scatter import gemm_reduce_scatter_forward
from tpfuse.kernels.gemm_reduce_scatter_ping_pong import gemm_reduce_scatter_ping_pong, scatter_ping_pong_problem
from tpfuse.kernels.launch import multiprocessors
from tpfuse.testing.compare import Expected, unwritten_memory_is_nan
from tpfuse.testing.one_process import OneProcess
from tpfuse.tools.operators.all_gather_gemm import AllGatherGemmShape
from tpfuse.tools.operators.gemm_reduce_scatter import GemmReduceScatterShape

GEMM, SUMMED, COPIES, SEQUENTIAL = "gemm", "gemm, then sum", "copies alone", "copies, then gemm"
GLUON, GLUON_GEMM = "Gluon kernel", "Gluon gemm"
GATHER, SCATTER, LINK = "all_gather_gemm", "gemm_reduce_scatter", "from host memory"
KINDS = ("gather", "scatter", "link")  # the first words of the cases' names
LAYERS = ((LLAMA_7B, 4), (LLAMA_70B, 8))  # models and ranks
TOKENS = (4096, 8192, 16384)
RANK = 1  # the rank whose work this GPU does, if there are several
_COLUMNS = 128  # the number of checked columns, in all rows


class Group:
    """The memory of all ranks on one device, where rank `RANK` works and the other ranks are ahead of it."""

    def __init__(self, world: int, slot_bytes: int, device: torch.device) -> None:
        self._ranks, self.rank = OneProcess(world, device, shared=False), min(RANK, world - 1)
        memory, programs = self._ranks.memories[self.rank], multiprocessors(device)
        self._slots, self.endpoint = open_channel(memory, "benchmark", -(-slot_bytes // 16) * 16, programs)
        self.ready = memory.signals("benchmark: ready", world).local

    def next_epoch(self) -> Tensor:
        """Return the epoch of the next launch, on the device: [1]."""
        return self.endpoint.state[:1] + 1

    def signalled(self) -> None:
        """Set this rank's flags as if the other ranks had done the next epoch's work."""
        self._ranks.signal_ahead(self.rank)

    def stored(self, n: int) -> Tensor:
        """Return the values that this rank has pushed to all owners in the last launch, bf16 [world, n]."""
        half, own = int(self.endpoint.state[0]) % 2, slice(self.rank * n, (self.rank + 1) * n)
        return torch.stack([slot[half].view(torch.bfloat16)[own] for slot in self._slots.peers])


def _narrow(x: Tensor, activation: str | None) -> Tensor:
    """Return the part of a weight or a bias that the first columns of the output depend on."""
    return torch.cat([part[:_COLUMNS] for part in x.chunk(2 if activation in GATED else 1)])


def _check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> None:
    """Raise AssertionError where the first columns are not as close to float64 as the tests require."""
    inputs = {"x": x, "weight": _narrow(weight, activation)}
    if bias is not None:
        inputs["bias"] = _narrow(bias, activation)
    columns = min(_COLUMNS, out.shape[1])
    expected = Expected(partial(reference.linear, activation_name=activation), inputs, out.new_ones(len(x), columns))
    expected.check("out", out[:, :columns])


def _measurement(mode: str, shape: AllGatherGemmShape | GemmReduceScatterShape, *candidates: Candidate) -> TimedMode:
    cost = shape.costs()["forward"]
    return TimedMode(mode, cost.flops, cost.moved, candidates)


def _gathering(shape: AllGatherGemmShape, bench: Bench) -> Built:
    inputs = shape.inputs(bench)
    gathered, weight, bias = (inputs[name] for name in ("gathered", "weight", "bias"))
    group = Group(shape.world, gathered[0].nbytes, bench.device)
    whole, x = gathered.flatten(0, 1), gathered[group.rank].clone()

    def present() -> None:
        group.ready[:] = group.next_epoch()

    arguments = x, weight, bias, gathered, group.ready, group.endpoint

    def fused(_: object = None) -> Tensor:
        return all_gather_gemm_forward(*arguments, activation=shape.activation, copied=True)[0]

    def plain(_: object) -> Tensor:
        return gemm_forward(whole, weight, bias, activation=shape.activation)[0]

    gathers: dict[str, Callable[[object], Tensor]] = {OURS: fused}
    products: dict[str, Callable[[object], Tensor]] = {GEMM: plain}
    if not gather_ping_pong_problem(x, weight, bias, gathered, shape.activation):
        gathers[GLUON] = lambda _: all_gather_gemm_ping_pong(*arguments, activation=shape.activation)[0]
        products[GLUON_GEMM] = lambda _: gemm_ping_pong(whole, weight, bias, activation=shape.activation)[0]

    def check() -> dict[str, str]:
        verdicts = {}
        for name, run in gathers.items():
            present()
            with unwritten_memory_is_nan():
                out = run(None)
            verdicts[name] = verdict(partial(_check, out, whole, weight, bias, shape.activation))
        return verdicts

    candidates = [Candidate(name, run, prepare=present) for name, run in gathers.items()]
    candidates += [Candidate(name, run) for name, run in products.items()]
    return check, [_measurement(GATHER, shape, *candidates)]


def _scattering(shape: GemmReduceScatterShape, bench: Bench) -> Built:
    m = shape.M // shape.world
    x, weight = shape.inputs(bench).values()
    group = Group(shape.world, 2 * shape.M * shape.N, bench.device)

    def plain(_: object) -> Tensor:
        return gemm_forward(x, weight)[0]

    def summed(_: object) -> Tensor:
        return plain(None).view(shape.world, m, shape.N).sum(0)

    scatters: dict[str, Callable[[object], Tensor]] = {
        OURS: lambda _: gemm_reduce_scatter_forward(x, weight, group.endpoint)
    }
    products: dict[str, Callable[[object], Tensor]] = {GEMM: plain, SUMMED: summed}
    if not scatter_ping_pong_problem(x, weight, group.endpoint):
        scatters[GLUON] = lambda _: gemm_reduce_scatter_ping_pong(x, weight, group.endpoint)
        products[GLUON_GEMM] = lambda _: gemm_ping_pong(x, weight)[0]
    rows = x.view(shape.world, m, -1)
    others = [owner for owner in range(shape.world) if owner != group.rank]

    def check() -> dict[str, str]:
        """Check the sum, which is this rank's own: the other ranks' partial sums are zeros; and what others receive."""
        verdicts = {}
        for name, run in scatters.items():
            group.signalled()
            with unwritten_memory_is_nan():
                out = run(None)
            verdicts[name] = verdict(partial(_check, out, rows[group.rank], weight))
            if others and not verdicts[name]:
                pushed = group.stored(m * shape.N)[others].view(-1, shape.N)
                verdicts[name] = verdict(partial(_check, pushed, rows[others].flatten(0, 1), weight))
        return verdicts

    candidates = [Candidate(name, run, group.signalled) for name, run in scatters.items()]
    candidates += [Candidate(name, run) for name, run in products.items()]
    return check, [_measurement(SCATTER, shape, *candidates)]


def _over_link(shape: AllGatherGemmShape, bench: Bench) -> Built:
    inputs, on_gpu = shape.inputs(bench), bench.device.type == "cuda"
    source, weight = inputs["gathered"], inputs["weight"]
    chunks, x = torch.empty(source.shape, dtype=source.dtype, pin_memory=on_gpu).copy_(source), source[RANK].clone()
    gathered = torch.zeros_like(source)
    gathered[RANK] = x
    group = Group(shape.world, x.nbytes, bench.device)
    side = torch.cuda.Stream(bench.device) if on_gpu else None
    order = [(RANK + step) % shape.world for step in range(1, shape.world)]

    def start_copies(multiplied: bool) -> None:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(bench.device))
        with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
            stamp = group.next_epoch()
            for i in order:
                gathered[i].copy_(chunks[i], non_blocking=True)
                if multiplied:  # without a product to read the signal, the next product would find it already set
                    group.ready[i : i + 1].copy_(stamp)

    def end_copies() -> None:
        if side is not None:
            torch.cuda.current_stream(bench.device).wait_stream(side)

    def plain(_: object) -> Tensor:
        return gemm_forward(gathered.flatten(0, 1), weight)[0]

    def copies(_: object) -> None:
        start_copies(multiplied=False)
        end_copies()

    def sequential(_: object) -> Tensor:
        copies(None)
        return plain(None)

    def fused(_: object = None) -> Tensor:
        start_copies(multiplied=True)
        out, _ = all_gather_gemm_forward(x, weight, None, gathered, group.ready, group.endpoint, copied=True)
        end_copies()
        return out

    def check() -> dict[str, str]:
        gathered[torch.tensor(order, device=bench.device)] = 0
        with unwritten_memory_is_nan():
            out = fused()
        return {OURS: verdict(lambda: _check(out, source.flatten(0, 1), weight))}

    runs = {OURS: fused, COPIES: copies, GEMM: plain, SEQUENTIAL: sequential}
    candidates = tuple(Candidate(name, run) for name, run in runs.items())
    return check, [_measurement(LINK, shape, *candidates)]


def _case(
    kind: str, name: str, world: int, M: int, N: int, K: int, activation: str | None = None, asked: bool = True
) -> BenchCase:
    """Return a case of `KINDS`: the rows of all ranks [M, K] times the weight [N, K] of one rank."""
    title = f"{kind} {name}, {world} ranks, {M} x {N} x {K}{f', {activation}' if activation else ''}"
    if kind == "scatter":
        build = partial(_scattering, GemmReduceScatterShape(name, world, M, N, K))
    else:
        shape = AllGatherGemmShape(name, world, M // world, N, K, activation, bias=kind == "gather")
        build = partial(_gathering if kind == "gather" else _over_link, shape)
    return BenchCase("overlapped_gemm", title, build, asked)


def simulated(tiny: bool) -> list[BenchCase]:
    """Return products of one size shared by 1, 4 and 8 simulated ranks: the step gather_scatter of `first_contact`."""
    sizes = ((64, 48, 32),) if tiny else ((8192, 4096, 4096), (8192, 4096, 1024))
    worlds = (1, 2) if tiny else (1, 4, 8)
    return [
        _case(kind, "simulated", world, *size) for size in sizes for world in worlds for kind in ("gather", "scatter")
    ]


def cases(tiny: bool) -> list[BenchCase]:
    """Return three widths of a product over the link, then the layers of Llama models by the number of tokens."""
    if tiny:
        chosen_cases = [_case(kind, "tiny", 4, 64, 48, 32) for kind in KINDS]
        chosen_cases.append(_case("scatter", "tiny", 8, 64, 48, 32))
        return [*chosen_cases, _case("gather", "tiny", 2, 32, 64, 32, "swiglu")]
    widths = ((24576, True), (1024, True), (8192, False))
    chosen_cases = [_case("link", f"{n} wide", 8, 8192, n, 8192, asked=asked) for n, asked in widths]
    for tokens in TOKENS:
        for model, world in LAYERS:
            for layer, n, k, activation in layers(model, world):
                kind = "gather" if layer in ("qkv", "up") else "scatter"
                chosen_cases.append(_case(kind, f"{model.name} tp{world} {layer}", world, tokens, n, k, activation))
    return chosen_cases
