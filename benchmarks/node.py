"""Time the tensor-parallel products on a node of GPUs: tpfuse, cuBLAS + NCCL by hand, and torch's fused operators.

    torchrun --nproc-per-node 8 -m benchmarks.node [--scale all|quick|tiny] [--minutes 20]

The shapes are the layers of Llama 3 8B and 70B at as many ranks as there are, at 512 to 16384 tokens, bf16: q, k, v and
gate, up after an all-gather; o and down before a reduce-scatter. Activation and bias are left out, since torch's
operators lack them. `tpfuse collective` is tpfuse's product and the library's collective; `tpfuse fused` is one
operator for both, and the names after it are the variants that a measured choice compares. Where there are GPUs, a row
has the most memory that a call of each candidate held. The last lines tell how long the group's symmetric memory took
to start, and how long a product takes beside an all-reduce of another group, as in backward beside a reducer.

Every candidate is checked on every rank first: some columns of its result are compared with float64, and twice the
error of the products by hand is allowed. A wrong candidate of tpfuse is not timed; a less exact peer is timed, and its
row reports it. A round times some calls one after another, started on all ranks at once while their streams are held;
the slowest rank counts, and candidates alternate. Rows are appended to build/results/node.jsonl, or with --keep to
benchmarks/results/node.jsonl.

    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 -m benchmarks.node --scale tiny

runs on CPU ranks, to check that the benchmark works, and keeps nothing.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cpu_ranks import join, leave
from benchmarks.harness import Parser, Row, aligned, may_run, percentiles, write_row
from benchmarks.shapes import LLAMA_3, LLAMA_70B, layers
from benchmarks.timing import Candidate, RankClock, Timing, alternate, peak_bytes, seconds_of, verdict
from tpfuse.choices import Implementation
from tpfuse.comm.comparison import error_bound
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.kernels.interpreter import INTERPRETED
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear.dispatch import FUSED, parallel_linear
from tpfuse.ops.linear.fused import FusedLinear
from tpfuse.switches import use
from tpfuse.testing.compare import check_error

MODELS = (LLAMA_3, LLAMA_70B)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
BY_HAND = "by hand"  # torch's product, and the library's collective before or after it
SYMMETRIC = "torch.ops.symm_mem"
_COLUMNS = 128  # the number of checked columns
Call = Callable[[], Tensor]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name, where it exists
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class NodeProduct:
    """A product and its collective. N and K are one rank's.

    gathers: x [M / world, K] of each rank is gathered, and multiplied with [N, K]; otherwise x [M, K] is multiplied
    with [N, K], and summed over ranks into [M / world, N] of each.
    """

    layer: str
    gathers: bool
    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.layer}, {self.M} x {self.N} x {self.K}"


@dataclass(frozen=True)
class NodeRanks:
    """This rank and its group, which is the world."""

    group: dist.ProcessGroup
    device: torch.device
    rounds: int
    repeats: int

    @property
    def cuda(self) -> bool:
        """Return whether the ranks are GPUs, so that the run is more than a trial."""
        return self.device.type == "cuda"


def products(scale: str, world: int) -> Iterator[NodeProduct]:
    """Yield the products that figures are computed from first: many tokens, the larger model."""
    if scale == "tiny":
        yield NodeProduct("tiny qkv", True, 12 * world, 24, 16)
        yield NodeProduct("tiny o", False, 12 * world, 16, 24)
        return
    for tokens in (8192,) if scale == "quick" else sorted(TOKENS, reverse=True):
        for each in reversed(MODELS):
            for layer, n, k, _ in layers(each, world):
                yield NodeProduct(f"{each.name} tp{world} {layer}", layer in ("qkv", "up"), tokens, n, k)


def _inputs(product: NodeProduct, node: NodeRanks) -> tuple[Tensor, Tensor]:
    """Return this rank's x and weight, bf16."""
    world, rank = node.group.size(), node.group.rank()
    generator = torch.Generator(node.device).manual_seed(product.M + product.N + rank)
    rows = product.M // world if product.gathers else product.M
    x = torch.randn(rows, product.K, generator=generator, device=node.device)
    weight = torch.randn(product.N, product.K, generator=generator, device=node.device)
    return x.bfloat16(), weight.mul_(product.K**-0.5).bfloat16()


def _by_hand(product: NodeProduct, x: Tensor, weight: Tensor, node: NodeRanks) -> Call:
    world = node.group.size()
    if product.gathers:
        gathered = x.new_empty(product.M, product.K)

        def gather() -> Tensor:
            _all_gather(gathered, x, group=node.group)
            return gathered @ weight.T

        return gather
    out = x.new_empty(product.M // world, product.N)

    def scatter() -> Tensor:
        _reduce_scatter(out, x @ weight.T, group=node.group)
        return out

    return scatter


def _symmetric(product: NodeProduct, x: Tensor, weight: Tensor, node: NodeRanks) -> Call:
    from torch.distributed import _symmetric_memory  # noqa: F401 - registers the operators

    name = node.group.group_name
    if product.gathers:
        return lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.T], 0, name, return_A=False)[1][0]
    return partial(torch.ops.symm_mem.fused_matmul_reduce_scatter, x, weight.T, "sum", 0, name)


def _ours(name: str, product: NodeProduct, x: Tensor, weight: Tensor, node: NodeRanks) -> Call:
    """Return the product by an implementation or, by a key of FUSED, by a variant of `fused`."""
    implementation: Implementation = "fused" if name in FUSED else name  # type: ignore[assignment]
    with use(implementation=implementation):
        chosen = parallel_linear(x, node.group)
    if isinstance(chosen, FusedLinear) and name in FUSED:
        chosen = chosen.variant(**FUSED[name])
    if product.gathers:
        return lambda: chosen.all_gather(x, [weight], [None], None, False)[0][0]
    return lambda: chosen.reduce_scatter(x, weight, None, None)


def left_out(node: NodeRanks) -> list[str]:
    """Return a line for each candidate that cannot run here."""
    if node.cuda:
        return []
    lines = [f"left out: {SYMMETRIC}: there is no CUDA GPU"]
    if not INTERPRETED:
        lines.append("left out: tpfuse fused: TRITON_INTERPRET=1 is not set, and there is no CUDA GPU")
    return lines


def candidates(product: NodeProduct, node: NodeRanks) -> dict[str, Call]:
    """Return the candidates by name; the names of tpfuse's begin with tpfuse."""
    x, weight = _inputs(product, node)
    calls = {BY_HAND: _by_hand(product, x, weight, node)}
    names = ["collective"]
    names += ["fused", *FUSED] if node.cuda or INTERPRETED else []
    names += [] if node.cuda else ["direct"]
    calls |= {f"tpfuse {name}": _ours(name, product, x, weight, node) for name in names}
    return calls | ({SYMMETRIC: _symmetric(product, x, weight, node)} if node.cuda else {})


def truth_of(product: NodeProduct, node: NodeRanks) -> Tensor:
    """Return the first columns of this rank's result in float64."""
    x, weight = _inputs(product, node)
    narrow = weight[:_COLUMNS].double()
    if product.gathers:
        gathered = x.new_empty(product.M, product.K)
        _all_gather(gathered, x, group=node.group)
        return gathered.double() @ narrow.T
    total = x.double() @ narrow.T
    dist.all_reduce(total, group=node.group)
    return total.chunk(node.group.size())[node.group.rank()]


def check(calls: dict[str, Call], truth: Tensor, node: NodeRanks) -> dict[str, str]:
    """Return the verdict by candidate, the same on all ranks: "" where every rank has the right result."""
    plain = calls[BY_HAND]()[:, :_COLUMNS].clone()
    verdicts = {}
    for name, call in calls.items():
        bound = 0.05 * truth.abs().max().item() if name == BY_HAND else error_bound(plain, truth)
        own = verdict(lambda: check_error("out", call()[:, :_COLUMNS], plain, truth, bound))  # noqa: B023
        verdicts_of_ranks: list[str | None] = [None] * node.group.size()
        dist.all_gather_object(verdicts_of_ranks, own, node.group)
        verdicts[name] = next((f"rank {rank}: {text}" for rank, text in enumerate(verdicts_of_ranks) if text), "")
    return verdicts


def alternated(candidates: list[Candidate], node: NodeRanks, calls: int) -> dict[str, Timing | str]:
    """Return what `alternate` does for rounds of so many calls. Every rank must call it."""
    clock = RankClock(node.group, node.device, duration=float("inf"), most=calls)
    return alternate(candidates, clock, 0.0, least=node.rounds, most=node.rounds)


def microseconds(timing: Timing) -> dict[str, float]:
    """Return the percentiles of a candidate's rounds."""
    return {key: round(x * 1e6, 1) for key, x in percentiles(timing.seconds).items()}


def measure(product: NodeProduct, node: NodeRanks) -> Row:
    """Return a row: microseconds by candidate, and the errors of wrong ones. Every rank must call it."""
    calls = candidates(product, node)
    verdicts = check(calls, truth_of(product, node), node)
    fit = {name: call for name, call in calls.items() if may_run(name, verdicts[name])}
    timed = [Candidate(name, lambda _, call=call: call()) for name, call in fit.items()]  # type: ignore[misc]
    timings = alternated(timed, node, node.repeats)
    verdicts |= {name: x for name, x in timings.items() if isinstance(x, str)}
    row: Row = {"layer": product.layer, "M": product.M, "N": product.N, "K": product.K, "ranks": node.group.size()}
    row["us"] = {name: microseconds(x) for name, x in timings.items() if isinstance(x, Timing)}
    if node.cuda:
        row["peak_bytes"] = {x.name: peak_bytes(x, node.device) for x in timed if x.name in row["us"]}
    return row | {"wrong": {name: verdict for name, verdict in verdicts.items() if verdict}}


def start_up(node: NodeRanks) -> Row:
    """Return the seconds from nothing to symmetric memory, and to the result of the first fused product."""
    started = time.perf_counter()
    symmetric_memory(node.group, node.device)
    seconds = {"memory": time.perf_counter() - started}
    x, weight = (torch.ones(16, 16, dtype=torch.bfloat16, device=node.device) for _ in range(2))
    if node.cuda or INTERPRETED:
        _ours("fused", NodeProduct("", True, 16, 16, 16), x, weight, node)().sum().item()
        seconds["first product"] = time.perf_counter() - started
    return {"layer": "start-up", "ranks": node.group.size(), "seconds": {k: round(v, 3) for k, v in seconds.items()}}


def beside(node: NodeRanks) -> Row:
    """Return the median microseconds of a product alone, and of one that begins while an all-reduce runs."""
    size = 8192 if node.cuda else 64
    x, weight = (torch.ones(size, size, dtype=torch.bfloat16, device=node.device) for _ in range(2))
    summed = torch.ones(2**28 if node.cuda else 2**10, device=node.device)  # its sum takes longer than the product
    other = dist.new_group(dist.get_process_group_ranks(node.group))
    sums: list[dist.Work] = []

    def start() -> None:
        end()
        sums.append(dist.all_reduce(summed, group=other, async_op=True))

    def end() -> None:
        if sums:
            sums.pop().wait()

    calls: dict[str, Call] = {"torch": lambda: x @ weight.T, "tpfuse": lambda: gemm(x, weight)}
    us: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        run = lambda _, call=call: call()  # noqa: E731
        times = seconds_of(alternated([Candidate("alone", run), Candidate("beside", run, prepare=start)], node, 1))
        us[name] = {key: round(percentiles(seconds)["median"] * 1e6, 1) for key, seconds in times.items()}
    end()
    return {"layer": "beside an all-reduce", "M": size, "N": size, "K": size, "ranks": node.group.size(), "us": us}


def table(product: NodeProduct, row: Row) -> str:
    """Return the medians, and the time by hand divided by each."""
    base = row["us"].get(BY_HAND, {}).get("median", float("nan"))
    lines = [(str(product), "us", f"{BY_HAND} / it")]
    lines += [(name, f"{x['median']:.1f}", f"{base / x['median']:.2f}") for name, x in row["us"].items()]
    return aligned([*lines, *((name, "wrong", "") for name in row["wrong"] if name not in row["us"])])


def run(scale: str, minutes: float, node: NodeRanks, keep: bool) -> int:
    """Measure, print and write rows, and return the exit status: 1 where a candidate of tpfuse is wrong.

    Every rank must call it.
    """
    first = node.group.rank() == 0
    for line in left_out(node) if first else []:
        print(line, file=sys.stderr)
    others = [start_up(node)]  # before any other product
    deadline, wrong, skipped = time.monotonic() + 60 * minutes, [], 0
    for product in products(scale, node.group.size()):
        late = torch.tensor(float(time.monotonic() > deadline), device=node.device)
        dist.broadcast(late, 0, node.group)
        if late:
            skipped += 1
            continue
        row = measure(product, node)
        wrong += [f"{product}: {name}: {verdict}" for name, verdict in row["wrong"].items()]
        if first:
            print(table(product, row), end="\n\n", flush=True)
            if scale != "tiny":
                write_row("node", row, keep)
    others.append(beside(node))
    if first:
        for row in others if scale != "tiny" else ():
            write_row("node", row, keep)
        print("start-up, s:", *(f"{name} {seconds}" for name, seconds in others[0]["seconds"].items()))
        print("product beside an all-reduce, us:", *(f"{name} {us}" for name, us in others[1]["us"].items()))
        print("\n".join([*wrong, *([f"no time left for {skipped} products"] if skipped else [])]) or "all are right")
    return int(any(": tpfuse" in line for line in wrong))


def main() -> int:
    """Run under torchrun; end the process."""
    parser = Parser(__doc__, "torchrun --nproc-per-node N -m benchmarks.node")
    parser.add_argument(
        "--scale", choices=["all", "quick", "tiny"], default="all", help="shapes to measure; quick: only 8192 tokens"
    )
    parser.option("--minutes", 20.0, "start no further product after this number of minutes")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ or not (cuda or arguments.scale == "tiny"):
        why = "times of CPU ranks say nothing: --scale tiny" if "RANK" in os.environ else "start it with torchrun"
        print(f"benchmarks.node: error: {why}", file=sys.stderr)
        return 2
    device, group = join(), dist.group.WORLD
    assert group is not None
    rounds, repeats = (15, 10) if cuda else (2, 1)
    return leave(run(arguments.scale, arguments.minutes, NodeRanks(group, device, rounds, repeats), arguments.keep))


if __name__ == "__main__":
    sys.exit(main())
