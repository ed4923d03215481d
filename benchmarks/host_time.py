"""Measure the host's time for a call of the operators that are fused with communication, beside torch's own dispatch.

    python -m benchmarks.host_time --markdown

It is measured on a CPU: the driver is a stand-in (`driver_stand_in`), and so are the other ranks (`lone_rank`).
Everything else is the path of a call on a GPU: operator, guard, launcher, Triton. The work that torch itself does in
such a call is measured alone and subtracted: results are allocated, copies are made, and an operator of torch.library
that does nothing else is called. Torch's streams and events of CUDA are in neither.

A call's time is the 20th percentile of a round of calls, and the lowest of several rounds, which alternate with those
of the other cases: other processes can only add to it. A loop of Python is measured beside them, to compare machines.
"""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from torch.library import custom_op

from benchmarks.driver_stand_in import DriverStandIn
from benchmarks.harness import Parser, aligned, machine
from benchmarks.lone_rank import LoneRank
from tpfuse.ops.gemm import gemm, product
from tpfuse.ops.linear.fused import FusedLinear
from tpfuse.switches import use

WORLD = 8
ROWS, COLUMNS, K = 8, 1024, 512  # sizes of one rank: they are small, because the copies are real


@dataclass
class HostCase:
    """A case. call: of the operator. torch: torch's own part of it. budget: µs over that; None where there is none."""

    name: str
    call: Callable[[], object]
    torch: Callable[[], object]
    budget: float | None
    launches: int = 0
    times: list[float] = field(default_factory=list)  # µs of each round
    torch_times: list[float] = field(default_factory=list)

    @property
    def over(self) -> float:
        """Return the µs over torch's own dispatch."""
        return min(self.times) - min(self.torch_times)


def cases(rank: LoneRank) -> list[HostCase]:
    """Return the forward operators, without and with autograd where it is a part of them."""
    dtype = torch.bfloat16
    x, tall = torch.empty(ROWS, K, dtype=dtype), torch.empty(WORLD * ROWS, K, dtype=dtype)
    weight, bias = torch.empty(COLUMNS, K, dtype=dtype), torch.empty(COLUMNS, dtype=dtype)
    trained = weight.clone().requires_grad_()
    copiers = FusedLinear(rank.memory)
    engines = copiers.variant(engines=True, other_tiles=False)
    chunks = torch.empty(WORLD, ROWS, K, dtype=dtype)
    sums = list(torch.empty(WORLD, ROWS, COLUMNS, dtype=dtype))
    parts, words = list(chunks), list(torch.empty(WORLD, dtype=torch.int32))

    def empties(*shapes: tuple[int, ...]) -> None:
        for shape in shapes:
            torch.empty(shape, dtype=dtype, device=x.device)

    def copied() -> None:
        empties((WORLD * ROWS, COLUMNS))
        for part, word in zip(parts[1:], words[1:], strict=True):
            part.copy_(x)
            word.copy_(words[0])

    def scattered() -> None:
        empties((ROWS, COLUMNS))
        for part, word in zip(sums[1:], words[1:], strict=True):
            part.copy_(sums[0])
            word.copy_(words[0])

    return [
        HostCase(
            "gemm_forward", lambda: product(tall, weight, bias, "gelu_tanh", False),
            lambda: empties((WORLD * ROWS, COLUMNS)), 15,
        ),
        HostCase(
            "gemm as an operator", lambda: gemm(tall, weight, bias, activation="gelu_tanh"),
            lambda: _registered(tall, weight, bias, None, "gelu_tanh", False), None,
        ),
        HostCase(
            "gemm as an operator, with autograd", lambda: gemm(tall, trained, bias, activation="swiglu"),
            lambda: _registered(tall, trained, bias, None, "swiglu", True), None,
        ),
        HostCase(
            f"all_gather_gemm, {WORLD} ranks, copiers",
            lambda: copiers.all_gather(x, [weight], [bias], "gelu_tanh", False),
            lambda: empties((WORLD, ROWS, K), (WORLD * ROWS, COLUMNS)), 100,
        ),
        HostCase(
            f"all_gather_gemm, {WORLD} ranks, copy engines",
            lambda: engines.all_gather(x, [weight], [bias], "gelu_tanh", False),
            copied, 100,
        ),
        HostCase(
            f"gemm_reduce_scatter, {WORLD} ranks",
            lambda: copiers.reduce_scatter(tall, weight, bias, None),
            lambda: empties((ROWS, COLUMNS)), 40,
        ),
        HostCase(
            f"gemm_reduce_scatter, {WORLD} ranks, copy engines",
            lambda: engines.reduce_scatter(tall, weight, bias, None),
            scattered, None,
        ),
    ]  # fmt: skip


@custom_op("tpfuse_host_time::gemm", mutates_args=())
def _registered(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """Allocate the results of gemm, which is torch's own part of a call."""
    shape = x.shape[0], weight.shape[0]
    return x.new_empty(shape), x.new_empty(shape if keep else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    raise AssertionError("only forward is measured")


_registered.register_autograd(_backward, setup_context=_setup_context)


def _python() -> None:
    """Run a loop to compare machines by."""
    total = 0
    for i in range(1000):
        total += i * i


def _low(call: Callable[[], object], calls: int, between: Callable[[], object]) -> float:
    """Return the µs of a call: the 20th percentile of `calls` calls."""
    times = []
    for _ in range(calls):
        between()
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return float(np.percentile(times, 20)) / 1000


def measure(rank: LoneRank, driver: DriverStandIn, rounds: int, calls: int) -> tuple[list[HostCase], float]:
    """Return all cases, and the µs of the loop of Python."""
    measured_cases = cases(rank)
    for case in measured_cases:  # this compiles, and meets the other ranks where memory is new
        case.call()
        case.torch()
    rank.stop_following()
    loops = []
    for case in measured_cases:
        before = driver.launches
        rank.follow()
        case.call()
        case.launches = driver.launches - before
    for _ in range(rounds):
        loops.append(_low(_python, calls, rank.follow))
        for case in measured_cases:
            case.times.append(_low(case.call, calls, rank.follow))
            case.torch_times.append(_low(case.torch, calls, rank.follow))
    return measured_cases, min(loops)


def table(measured_cases: Sequence[HostCase]) -> list[tuple[str, ...]]:
    """Return lines of cells, of which the first has the headings."""
    lines: list[tuple[str, ...]] = [("operator", "launches", "µs", "torch's own", "over it", "budget", "met")]
    for case in measured_cases:
        figures = min(case.times), min(case.torch_times), case.over
        met = "" if case.budget is None else "yes" if case.over <= case.budget else "no"
        budget = "" if case.budget is None else f"{case.budget:g}"
        lines.append((case.name, str(case.launches), *(f"{x:.1f}" for x in figures), budget, met))
    return lines


def main() -> None:
    parser = Parser(__doc__, "python -m benchmarks.host_time", keep=False)
    parser.option("--rounds", 30, "number of rounds")
    parser.option("--calls", 100, "number of calls of each case in a round")
    parser.option("--markdown", False, "print the table of benchmarks/results/host_time.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    use(kernels="triton")
    driver = DriverStandIn()
    rank = LoneRank(WORLD)
    measured_cases, loop = measure(rank, driver, options.rounds, options.calls)
    lines = table(measured_cases)
    if options.markdown:
        rule = tuple("---" for _ in lines[0])
        print("\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:])))
    else:
        print(aligned(lines))
    place = f"{machine()}; Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(f"\n{place}; load {os.getloadavg()[0]:.1f}; the loop of Python {loop:.1f} µs.")


if __name__ == "__main__":
    main()
