"""Differentiable operators as candidates: the three-way check of each, and measurements of its passes.

Every candidate is a function of the same named inputs that returns one tensor. The tolerance is that of the tests
(`tpfuse.testing.compare`): plain torch in float64 is the truth, and plain torch in the inputs' dtype determines how
large an error may be. While the candidate of tpfuse is checked, memory that was not written is NaN.
"""

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import OURS, Bench, Built, TimedMode
from benchmarks.timing import Candidate, verdict
from tpfuse.testing.compare import Expected, unwritten_memory_is_nan
from tpfuse.tools.operator import Shape

Function = Callable[..., Tensor]


def _whole(name: str, x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Candidates:
    """The candidates of a differentiable operator, and their inputs. functions: by name, tpfuse's first.

    costs: mode -> (operations, bytes); a mode without costs is not timed. narrow: (name, tensor) -> the part of an
    input, of "out" or of "grad" that is compared, where float64 would not fit in memory or would take too long; the
    reference of that part must depend on that part alone.
    """

    inputs: Mapping[str, Tensor]
    grad: Tensor
    reference: Function
    functions: Mapping[str, Function]
    costs: Mapping[str, tuple[float, float]]
    narrow: Callable[[str, Tensor], Tensor] = _whole
    memory: tuple[str, ...] = ()
    forward_only: tuple[str, ...] = ()  # functions that torch cannot differentiate: they are timed only without a graph

    def check(self) -> dict[str, str]:
        """Return the verdict by name: "" where the output and every gradient are within the bound of the tests."""
        inputs = {name: self.narrow(name, x) for name, x in self.inputs.items()}
        expected = Expected(self.reference, inputs, self.narrow("grad", self.grad))
        return {name: verdict(partial(self._check, name, f, expected)) for name, f in self.functions.items()}

    def _check(self, name: str, function: Function, expected: Expected) -> None:
        with unwritten_memory_is_nan() if name == OURS else contextlib.nullcontext():
            results = self._out(function) if name in self.forward_only else self._out_and_gradients(function)
        for tensor, x in results.items():
            expected.check(tensor, None if x is None else self.narrow(tensor, x))

    def _out(self, function: Function) -> dict[str, Tensor | None]:
        with torch.no_grad():
            return {"out": function(**_leaves(self.inputs))}

    def _out_and_gradients(self, function: Function) -> dict[str, Tensor | None]:
        leaves = _leaves(self.inputs)
        out = function(**leaves)
        out.backward(self.grad.to(out.dtype))  # type: ignore[no-untyped-call]
        return {"out": out.detach()} | {name: x.grad for name, x in leaves.items() if x.is_floating_point()}

    def works(self) -> list[TimedMode]:
        """Return a measurement of each mode of `costs`: "inference" (no graph), "forward" (with one), "backward",
        "both".
        """
        works = []
        for mode, cost in self.costs.items():
            names = [name for name in self.functions if mode == "inference" or name not in self.forward_only]
            candidates = tuple(self._candidate(mode, name, self.functions[name]) for name in names)
            works.append(TimedMode(mode, *cost, candidates, mode in self.memory))
        return works

    def _candidate(self, mode: str, name: str, function: Function) -> Candidate:
        leaves = _leaves(self.inputs)
        wanted = [x for x in leaves.values() if x.requires_grad]

        def forward(_: object = None) -> Tensor:
            return function(**leaves)

        def backward(out: Tensor) -> object:
            return torch.autograd.grad(out, wanted, self.grad.to(out.dtype))

        if mode == "inference":
            leaves = {name: x.detach() for name, x in leaves.items()}
            return Candidate(name, torch.no_grad()(forward))
        if mode == "backward":
            return Candidate(name, backward, prepare=forward)
        return Candidate(name, forward if mode == "forward" else lambda _: backward(forward()))


def described(
    shape: Shape,
    bench: Bench,
    modes: Sequence[str],
    peers: Mapping[str, Function],
    *,
    on_gpu: Mapping[str, Function] | None = None,
    compiled: Mapping[str, tuple[Function, str | None]] | None = None,
    compared: Shape | None = None,
    **options: Any,
) -> Built:
    """Return the check of an operator at a shape of its description beside peers, and its measurements in these modes.

    on_gpu: peers that no CPU has. compiled: functions and modes of torch.compile, for a bench with the compiler.
    compared: the shape of the check, where it is another one. options: fields of `Candidates`.
    """
    functions = {OURS: shape.function} | peers
    if compiled and bench.compiler:
        torch.compiler.reset()  # after a number of shapes torch.compile would refuse the next one
        functions |= {name: by_compiler(function, bench, mode) for name, (function, mode) in compiled.items()}
    if bench.device.type == "cuda":
        functions |= on_gpu or {}

    def candidates(shape: Shape, *modes: str) -> Candidates:
        costs = {mode: (cost.flops, cost.moved) for mode, cost in shape.costs().items() if mode in modes}
        inputs, grad = shape.inputs(bench), shape.gradient(bench)
        return Candidates(inputs, grad, shape.reference, functions, {mode: costs[mode] for mode in modes}, **options)

    timed = candidates(shape, *modes)
    return (candidates(compared) if compared else timed).check, timed.works()


def _leaves(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies with the same strides: some peers write gradients over their inputs."""
    return {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}


def by_compiler(function: Function, bench: Bench, mode: str | None = None) -> Function:
    """Return torch.compile of the function, for one shape; where kernels are interpreted, it is only traced."""
    if bench.interpreted:
        return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")
    return torch.compile(function, fullgraph=True, dynamic=False, mode=mode)


def liger(name: str, *rest: object, **options: object) -> Function:
    """Return a function of Liger-Kernel; where it is not installed, or is broken, one whose rows contain the error.

    rest, options: its arguments after the inputs, which it takes in their order.
    """
    try:
        found: Function = getattr(importlib.import_module("liger_kernel.transformers.functional"), name)
    except Exception:
        return _absent
    return lambda **inputs: found(*inputs.values(), *rest, **options)


def _absent(**inputs: object) -> Tensor:
    raise ModuleNotFoundError("Liger-Kernel is not installed")
