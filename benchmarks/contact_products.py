"""The steps epilogues and gather_scatter of `benchmarks.first_contact`: a product hides what follows.

epilogues times act(x Wᵀ + bias) at the shapes of GPT-2 and Llama. `CANDIDATES` has a function for each candidate; a
further kernel is a further line there. In the mode "kept" the argument of the activation is written too, as training
needs it. "cuBLAS" is the product and its bias alone: what the others would take if their epilogues were free. Each
candidate is first compared with float64 in 256 whole rows, and one that is wrong is not timed. Then all alternate for
20 rounds.

gather_scatter times the overlapped products beside the plain one while nothing waits (`bench_overlapped_gemm`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bench_overlapped_gemm
from benchmarks.apart import Row, Rows, read
from benchmarks.contact_steps import Plan, kept_ceilings, time_case
from benchmarks.harness import OURS, Bench, BenchCase, Built, TimedMode, conditions, new_bench
from benchmarks.timing import Candidate, verdict
from tpfuse.comm.comparison import error_bound
from tpfuse.kernels import reference
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.launch import family
from tpfuse.ops.gemm import product
from tpfuse.testing.compare import check_error, unwritten_memory_is_nan
from tpfuse.tools.operators.gemm import GemmShape

# The result, and the argument of the activation, of a call; None for what a candidate does not compute.
Results = tuple[Tensor | None, Tensor | None]
# A function of (x [M, K], weight [N, K], bias [N], activation or None, whether the argument is kept). It returns the
# call to time, or None where there is no such candidate. An error it raises, as where a library is missing, is its row.
Maker = Callable[[Tensor, Tensor, Tensor, str | None, bool], Callable[[], Results] | None]

STEP, LIMIT, SEPARATE, ADDMM, CUBLASLT = "epilogues", "cuBLAS", "cuBLAS then gelu", "_addmm_activation", "GELU_AUX_BIAS"
KEPT, DROPPED, PLAIN = "kept", "not kept", "plain"  # modes
ROUNDS, _ROWS = 20, 256
_COMPARED = (torch.bfloat16, torch.float64)
# M, N, K, and the activation.
SHAPES = (
    (8192, 3072, 768, "gelu_tanh"),
    (8192, 6400, 1600, "gelu_tanh"),
    (8192, 4096, 4096, "gelu_tanh"),
    (8192, 5504, 4096, "gelu_tanh"),
    (8192, 7168, 8192, "gelu_tanh"),
    (49152, 3072, 768, "gelu_tanh"),
    (49152, 768, 3072, None),
    (49152, 2304, 768, None),
    (16384, 50256, 768, None),  # the head: an epilogue could compute the maxima and sums of its rows
)


def _limit(x: Tensor, weight: Tensor, bias: Tensor, activation: str | None, keep: bool) -> Callable[[], Results] | None:
    return lambda: (None, F.linear(x, weight, bias))


def _separate(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str | None, keep: bool
) -> Callable[[], Results] | None:
    def call() -> Results:
        argument = F.linear(x, weight, bias)
        return F.gelu(argument, approximate="tanh"), argument

    return call if activation else None


def _addmm(x: Tensor, weight: Tensor, bias: Tensor, activation: str | None, keep: bool) -> Callable[[], Results] | None:
    if keep or not activation:
        return None
    return lambda: (torch._addmm_activation(bias, x, weight.T, use_gelu=True), None)


def _cublaslt(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str | None, keep: bool
) -> Callable[[], Results] | None:
    """Return cuBLASLt's product with bias, gelu and the argument kept, by nvmath-python.

    Its matrices are ordered by columns, so that it computes the transposed product W xᵀ.
    """
    if not keep:
        return None
    from nvmath.linalg.advanced import Matmul, MatmulEpilog

    planned = Matmul(weight, x.T)
    planned.plan(epilog=MatmulEpilog.GELU_AUX_BIAS, epilog_inputs={"bias": bias})

    def call() -> Results:
        out, more = planned.execute()
        return out.T, more["gelu_aux"].T[:, : weight.shape[0]]

    return call


def _quack(x: Tensor, weight: Tensor, bias: Tensor, activation: str | None, keep: bool) -> Callable[[], Results] | None:
    if not activation:
        return None
    from quack.gemm_interface import gemm_act

    def call() -> Results:
        argument, out = gemm_act(
            x, weight.T, bias=bias, activation="gelu_tanh_approx", store_preact=keep, tuned=False
        )  # its search of configurations would take minutes
        return out, argument

    return call


def _tpfuse(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str | None, keep: bool
) -> Callable[[], Results] | None:
    return lambda: product(x, weight, bias, activation, keep)


def _triton(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str | None, keep: bool
) -> Callable[[], Results] | None:
    return lambda: gemm_forward(x, weight, bias, activation=activation, keep_preactivation=keep)


def _ping_pong(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str | None, keep: bool
) -> Callable[[], Results] | None:
    if family(x.device) != "sm_90":
        return None
    from tpfuse.kernels.gemm_ping_pong import gemm_ping_pong

    return lambda: gemm_ping_pong(x, weight, bias, activation=activation, keep_preactivation=keep)


CANDIDATES: dict[str, Maker] = {
    OURS: _tpfuse,  # what the operator chooses
    "Triton kernel": _triton,
    "Gluon kernel": _ping_pong,
    LIMIT: _limit,
    SEPARATE: _separate,
    ADDMM: _addmm,
    CUBLASLT: _cublaslt,
    "quack": _quack,
}


class _ProductCase:
    """The inputs of a case, and its candidates' calls. failed: by candidate, why it has none, or ""."""

    def __init__(self, shape: GemmShape, keep: bool, bench: Bench) -> None:
        self.shape, self.inputs = shape, tuple(shape.inputs(bench).values())
        self.calls: dict[str, Callable[[], Results]] = {}
        self.failed: dict[str, str] = {}
        for name, make in CANDIDATES.items():
            self.failed[name] = verdict(partial(self._make, name, make, keep))

    def _make(self, name: str, make: Maker, keep: bool) -> None:
        self.calls[name] = lambda: (None, None)  # it stays where `make` raises, so that the row has the error
        call = make(*self.inputs, self.shape.activation, keep)  # type: ignore[call-arg]
        if call is None:
            del self.calls[name]
        else:
            self.calls[name] = call

    def check(self) -> dict[str, str]:
        """Return the verdict of each candidate: "" where its results are close enough to float64."""
        x, *rest = self.inputs
        chosen = torch.linspace(0, len(x) - 1, min(_ROWS, len(x)), device=x.device).long()
        expected = []
        for activation in (self.shape.activation, None):  # of the result, and of its argument
            both = (reference.linear(*(t.to(dtype) for t in (x[chosen], *rest)), activation) for dtype in _COMPARED)
            expected.append(tuple(both))
        compared = {name: partial(_compare, call, chosen, expected) for name, call in self.calls.items()}
        return {name: self.failed[name] or verdict(compare) for name, compare in compared.items()}


def _compare(call: Callable[[], Results], chosen: Tensor, expected: list[tuple[Tensor, ...]]) -> None:
    """Raise AssertionError where chosen rows of a call's results are not as close to float64 as the tests require."""
    with unwritten_memory_is_nan():
        results = call()
    for name, result, (plain, exact) in zip(("out", "argument"), results, expected, strict=True):
        if result is not None:
            check_error(name, result[chosen], plain, exact, error_bound(plain, exact))


def _built(shape: GemmShape, keep: bool, bench: Bench) -> Built:
    product = _ProductCase(shape, keep, bench)
    mode = PLAIN if not shape.activation else KEPT if keep else DROPPED
    cost = shape.costs()["forward" if keep else "inference"]
    candidates = tuple(Candidate(name, partial(_run, call)) for name, call in product.calls.items())
    return product.check, [TimedMode(mode, cost.flops, cost.moved, candidates)]


def _run(call: Callable[[], Results], _: object) -> Results:
    return call()


def cases(tiny: bool) -> list[BenchCase]:
    """Return a case for each shape and each of its modes."""
    found = []
    for m, n, k, activation in ((48, 64, 32, "gelu_tanh"), (48, 32, 64, None)) if tiny else SHAPES:
        for keep in (True, False) if activation else (False,):
            shape = GemmShape(f"{m} x {n}, K {k}", m, n, k, activation)
            name = f"{shape.name}, {activation}" if activation else shape.name
            title = f"{name}, {KEPT if keep else DROPPED}" if activation else name
            found.append(BenchCase(STEP, title, partial(_built, shape, keep), True))
    return found


def _timed(case: BenchCase, bench: Bench) -> Row:
    """Return the row of a case, in whose measurements are the GPU's power and clocks at their end."""
    row, now = time_case(case, bench), conditions()
    return row | {"measurements": [each | now for each in row["measurements"]]}


def _bench(plan: Plan) -> Bench:
    return new_bench(plan.seed, interpreted=plan.rehearse, ceilings=kept_ceilings(read(plan.out)))


def epilogues(plan: Plan, rows: Rows) -> None:
    """Make a row for each shape and mode."""
    bench = _bench(plan)
    if not plan.rehearse:
        bench = replace(bench, rounds=(ROUNDS, ROUNDS))
    for case in cases(plan.rehearse):
        rows.each(case.name, partial(_timed, case, bench))


def gather_scatter(plan: Plan, rows: Rows) -> None:
    """Make a row for each size and number of simulated ranks, beside the plain product of the same kernel."""
    bench = _bench(plan)
    for case in bench_overlapped_gemm.simulated(plan.rehearse):
        rows.each(case.name, partial(_timed, case, bench))
