"""Time rope of queries and keys beside plain torch, eager and compiled, forward and backward.

    python -m benchmarks.bench_rope --quick

One call rotates both. Plain torch multiplies by float32 tables and rounds once, as the operator of tpfuse does.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.candidates import Candidates, compiled, fresh_compiler
from benchmarks.harness import OURS, Bench, BenchCase, Built, Scale, TimedMode, command
from benchmarks.timing import Candidate
from tpfuse.kernels import reference
from tpfuse.ops.rope import rope
from tpfuse.tools.operators.rope import RopeShape

EAGER, COMPILED = "plain torch", "torch.compile"
Pair = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _candidates(pair: Pair, name: str, q: Tensor, k: Tensor, grads: tuple[Tensor, Tensor]) -> list[Candidate]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k)]

    def forward(_: object) -> tuple[Tensor, Tensor]:
        return pair(leaves[0], leaves[1])

    def backward(out: tuple[Tensor, Tensor]) -> object:
        return torch.autograd.grad(out, leaves, grads)

    return [Candidate(name, forward), Candidate(name, backward, prepare=lambda: forward(None))]


def _build(shape: RopeShape, bench: Bench) -> Built:
    cos, sin, positions = shape.tables(bench.device).values()

    def ours(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, k, cos, sin, positions)

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return reference.rope(q, cos, sin, positions), reference.rope(k, cos, sin, positions)

    fresh_compiler()
    pairs: dict[str, Pair] = {OURS: ours, EAGER: plain, COMPILED: compiled(plain, bench)}
    inputs, (grad_q, grad_k) = shape.inputs(bench), shape.inputs(bench).values()
    check = Candidates(
        inputs=inputs,
        grad=torch.cat([grad_q, grad_k], dim=2),
        reference=_joined(plain),
        functions={name: _joined(pair) for name, pair in pairs.items()},
        costs={},
    ).check
    per_pair = [_candidates(pair, name, *inputs.values(), (grad_q, grad_k)) for name, pair in pairs.items()]
    costs, candidates = shape.costs(), zip(*per_pair, strict=True)
    return check, [TimedMode(mode, 0.0, costs[mode].moved, x) for mode, x in zip(costs, candidates, strict=True)]


def _joined(pair: Pair) -> Callable[..., Tensor]:
    """Return a function that concatenates both results in one tensor, for the check."""

    def run(q: Tensor, k: Tensor) -> Tensor:
        return torch.cat(pair(q, k), dim=2)

    return run


def _case(shape: RopeShape) -> BenchCase:
    sizes = f"B {shape.B}, T {shape.T}, H {shape.H}/{shape.Hk}, D {shape.D}"
    return BenchCase("rope", f"{shape.name}, {sizes}", partial(_build, shape))


def cases(scale: Scale) -> list[BenchCase]:
    """Return cases of the models that have rotary embeddings."""
    if scale == "tiny":
        return [BenchCase("rope", "tiny", partial(_build, RopeShape("tiny", 1, 12, 2, 1, 16)), True)]
    if scale == "cpu":
        return [_case(RopeShape("7b tp4", 1, 1024, 8, 8, 128))]
    sizes = {"7b tp1": (32, 32)}
    if scale == "all":
        sizes |= {"7b tp4": (8, 8), "70b tp1": (64, 8), "70b tp8": (8, 1)}
    return [_case(RopeShape(name, 2, 4096, *heads, 128)) for name, heads in sizes.items()]


if __name__ == "__main__":
    sys.exit(command("rope", cases))
