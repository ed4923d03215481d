"""The steps epilogues and gather_scatter of `benchmarks.first_contact`: a product hides what follows.

epilogues times act(x Wᵀ + bias) + residual at the shapes of GPT-2 and Llama, and the gradient of the activation's
argument, (grad W) ⊙ act'(argument), from that of the next layer's result. `CANDIDATES` and `GRADIENTS` have a function
for each candidate; a further kernel is a further line there. In the mode "kept" the argument is written too, as
training needs it. "cuBLAS" is the product and its bias alone: what the others would take if their epilogues were free.
Each candidate is first compared with float64 in 256 whole rows, and one that is wrong is not timed. Then all alternate
for 20 rounds.

gather_scatter times the overlapped products beside the plain one while nothing waits (`bench_overlapped_gemm`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

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
from tpfuse.ops.gemm import activated, gemm, preactivation_gradient, product
from tpfuse.testing.compare import check_error, unwritten_memory_is_nan
from tpfuse.tools.operator import CallCost
from tpfuse.tools.operators.gemm import GemmShape

# The result, and the argument of the activation, of a call; None for what a candidate does not compute.
Results = tuple[Tensor | None, Tensor | None]
Call = Callable[[], Results]


class ActivatedProduct(NamedTuple):
    """act(x Wᵀ + bias) + residual."""

    x: Tensor  # [M, K]
    weight: Tensor  # [N, K]
    bias: Tensor  # [N]
    residual: Tensor | None  # like the result
    activation: str | None
    keep: bool  # the argument of the activation


class Gradient(NamedTuple):
    """(grad W) ⊙ act'(argument). The second result is grad W."""

    grad: Tensor  # [M, K]
    weight: Tensor  # [K, N]
    argument: Tensor  # [M, N]
    activation: str


# A function returns the call to time, or None where there is no such candidate. An error that it raises, as where a
# library is missing, is its row.
Maker = Callable[[ActivatedProduct], Call | None]
GradientMaker = Callable[[Gradient], Call | None]

STEP, LIMIT, SEPARATE, ADDMM, CUBLASLT = "epilogues", "cuBLAS", "cuBLAS then gelu", "_addmm_activation", "GELU_AUX_BIAS"
KEPT, DROPPED, PLAIN, GRADIENT = "kept", "not kept", "plain", "gradient"  # modes
ROUNDS, _ROWS = 20, 256
_COMPARED = (torch.bfloat16, torch.float64)
# M, N, K, and the activation, or "residual".
SHAPES = (
    (8192, 3072, 768, "gelu_tanh"),
    (8192, 6400, 1600, "gelu_tanh"),
    (8192, 4096, 4096, "gelu_tanh"),
    (8192, 5504, 4096, "gelu_tanh"),
    (8192, 7168, 8192, "gelu_tanh"),
    (8192, 11008, 4096, "swiglu"),
    (49152, 3072, 768, "gelu_tanh"),
    (49152, 768, 3072, "residual"),
    (49152, 2304, 768, None),
    (16384, 50256, 768, None),  # the head: an epilogue could compute the maxima and sums of its rows
)


def _limit(p: ActivatedProduct) -> Call:
    return lambda: (None, F.linear(p.x, p.weight, p.bias))


def _separate(p: ActivatedProduct) -> Call | None:
    if p.activation is None:
        return None
    return lambda: activated(F.linear(p.x, p.weight, p.bias), p.activation, keep=True)


def _addmm(p: ActivatedProduct) -> Call | None:
    if p.keep or p.activation != "gelu_tanh":
        return None
    return lambda: (torch._addmm_activation(p.bias, p.x, p.weight.T, use_gelu=True), None)


def _cublaslt(p: ActivatedProduct) -> Call | None:
    """Return cuBLASLt's product with bias, gelu and the argument kept, by nvmath-python.

    Its matrices are ordered by columns, so that it computes the transposed product W xᵀ.
    """
    if not p.keep or p.activation != "gelu_tanh":
        return None
    from nvmath.linalg.advanced import Matmul, MatmulEpilog

    planned = Matmul(p.weight, p.x.T)
    planned.plan(epilog=MatmulEpilog.GELU_AUX_BIAS, epilog_inputs={"bias": p.bias})

    def call() -> Results:
        out, more = planned.execute()
        return out.T, more["gelu_aux"].T[:, : p.weight.shape[0]]

    return call


def _quack(p: ActivatedProduct) -> Call | None:
    if p.activation != "gelu_tanh":
        return None
    from quack.gemm_interface import gemm_act

    def call() -> Results:
        argument, out = gemm_act(
            p.x, p.weight.T, bias=p.bias, activation="gelu_tanh_approx", store_preact=p.keep, tuned=False
        )  # its search of configurations would take minutes
        return out, argument

    return call


def _tpfuse(p: ActivatedProduct) -> Call:
    if p.residual is not None:
        return lambda: (gemm(p.x, p.weight, p.bias, residual=p.residual), None)
    return lambda: product(p.x, p.weight, p.bias, p.activation, p.keep)


def _triton(p: ActivatedProduct) -> Call:
    kept = {"activation": p.activation, "keep_preactivation": p.keep}
    return lambda: gemm_forward(p.x, p.weight, p.bias, p.residual, **kept)


def _ping_pong(p: ActivatedProduct) -> Call | None:
    if family(p.x.device) != "sm_90":
        return None
    from tpfuse.kernels.gemm_ping_pong import gemm_ping_pong

    kept = {"activation": p.activation, "keep_preactivation": p.keep}
    return lambda: gemm_ping_pong(p.x, p.weight, p.bias, p.residual, **kept)


def _gradient_of_layers(g: Gradient) -> Call:
    return lambda: preactivation_gradient(g.grad @ g.weight, g.argument, g.activation, with_bias=False)


def _gradient_of_ping_pong(g: Gradient) -> Call | None:
    if family(g.grad.device) != "sm_90":
        return None
    from tpfuse.kernels.gemm_ping_pong import gemm_ping_pong_gradient

    return lambda: (gemm_ping_pong_gradient(*g), None)


def _limit_of_gradient(g: Gradient) -> Call:
    return lambda: (None, g.grad @ g.weight)


def _separate_gradient(g: Gradient) -> Call:
    return lambda: (torch.ops.aten.gelu_backward(g.grad @ g.weight, g.argument, approximate="tanh"), None)


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
GRADIENTS: dict[str, GradientMaker] = {
    OURS: _gradient_of_layers,  # what layers run in their backward passes: cuBLAS, then a kernel
    "Gluon kernel": _gradient_of_ping_pong,
    LIMIT: _limit_of_gradient,
    SEPARATE: _separate_gradient,
}


class _Calls:
    """The calls of a case's candidates. failed: by candidate, why it has none, or "".

    expected: a function of the numbers of some rows, which returns these rows of both results in each dtype of
    _COMPARED.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[Any], Call | None]],
        inputs: ActivatedProduct | Gradient,
        expected: Callable[[Tensor], list[tuple[Tensor, ...]]],
    ) -> None:
        self._inputs, self._expected = inputs, expected
        self.calls: dict[str, Call] = {}
        self.failed = {name: verdict(partial(self._make, name, make)) for name, make in makers.items()}

    def _make(self, name: str, make: Callable[[Any], Call | None]) -> None:
        self.calls[name] = lambda: (None, None)  # it stays where `make` raises, so that the row has the error
        call = make(self._inputs)
        if call is None:
            del self.calls[name]
        else:
            self.calls[name] = call

    def check(self) -> dict[str, str]:
        """Return the verdict of each candidate: "" where its results are close enough to float64."""
        first = self._inputs[0]
        chosen = torch.linspace(0, len(first) - 1, min(_ROWS, len(first)), device=first.device).long()
        expected = self._expected(chosen)
        compared = {name: partial(_compare, call, chosen, expected) for name, call in self.calls.items()}
        return {name: self.failed[name] or verdict(compare) for name, compare in compared.items()}

    def timed(self, mode: str, cost: CallCost) -> TimedMode:
        """Return the measurement of all candidates."""
        candidates = tuple(Candidate(name, partial(_run, call)) for name, call in self.calls.items())
        return TimedMode(mode, cost.flops, cost.moved, candidates)


def _compare(call: Call, chosen: Tensor, expected: list[tuple[Tensor, ...]]) -> None:
    """Raise AssertionError where chosen rows of a call's results are not as close to float64 as the tests require."""
    with unwritten_memory_is_nan():
        results = call()
    for name, result, (plain, exact) in zip(("out", "argument"), results, expected, strict=True):
        if result is not None:
            check_error(name, result[chosen], plain, exact, error_bound(plain, exact))


def _product(shape: GemmShape, keep: bool, bench: Bench) -> Built:
    tensors = shape.inputs(bench)
    p = ActivatedProduct(
        tensors["x"], tensors["weight"], tensors["bias"], tensors.get("residual"), shape.activation, keep
    )

    def linear(chosen: Tensor, activation: str | None, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        added = None if residual is None else residual[chosen].to(dtype)
        return reference.linear(p.x[chosen].to(dtype), p.weight.to(dtype), p.bias.to(dtype), activation, added)

    def expected(chosen: Tensor) -> list[tuple[Tensor, ...]]:
        results = (p.activation, p.residual), (None, None)
        return [tuple(linear(chosen, *which, dtype) for dtype in _COMPARED) for which in results]

    calls = _Calls(CANDIDATES, p, expected)
    mode = PLAIN if not shape.activation else KEPT if keep else DROPPED
    return calls.check, [calls.timed(mode, shape.costs()["forward" if keep else "inference"])]


def _gradient(shape: GemmShape, bench: Bench) -> Built:
    """Build the gradient of the argument of the shape's activation; the next layer's result is as wide as x."""
    m, n, k = shape.M, shape.N, shape.K
    assert shape.activation is not None
    g = Gradient(bench.normal(m, k), bench.normal(k, n, scale=k**-0.5), bench.normal(m, n), shape.activation)

    def expected(chosen: Tensor) -> list[tuple[Tensor, ...]]:
        both = []
        for dtype in _COMPARED:
            into, argument = g.grad[chosen].to(dtype) @ g.weight.to(dtype), g.argument[chosen].to(dtype)
            out = reference.activation(argument.requires_grad_(), g.activation)
            both.append((*torch.autograd.grad(out, argument, into), into))
        return list(zip(*both, strict=True))

    calls = _Calls(GRADIENTS, g, expected)
    return calls.check, [calls.timed(GRADIENT, CallCost(2 * m * n * k, 2 * (m * k + k * n + 2 * m * n)))]


def _run(call: Call, _: object) -> Results:
    return call()


def cases(tiny: bool) -> list[BenchCase]:
    """Return a case for each shape and each of its modes; gradients come last, if time is left for them."""
    found, gradients = [], []
    tiny_shapes = (48, 64, 32, "gelu_tanh"), (48, 32, 64, None), (48, 32, 64, "residual")
    for m, n, k, following in tiny_shapes if tiny else SHAPES:
        adds = following == "residual"
        activation = None if adds else following
        shape = GemmShape(f"{m} x {n}, K {k}", m, n, k, activation, ("bias", "residual") if adds else ("bias",))
        name = f"{shape.name}, {following}" if following else shape.name
        for keep in (True, False) if activation else (False,):
            title = f"{name}, {KEPT if keep else DROPPED}" if activation else name
            found.append(BenchCase(STEP, title, partial(_product, shape, keep), True))
        if activation == "gelu_tanh":
            gradients.append(BenchCase(STEP, f"{name}, {GRADIENT}", partial(_gradient, shape), True))
    return found + gradients


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
