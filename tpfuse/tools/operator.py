"""The description of an operator, which `tpfuse verify`, the compile gate, `tpfuse tune` and the benchmarks read.

Module NAME of `tpfuse.tools.operators` defines OPERATOR, an `Operator`. Its shapes define the inputs, the operator and
its reference, and the cost of a call. `tpfuse verify` uses small shapes; the tuner and the benchmarks use the shapes of
models.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Outputs = tuple[Tensor, ...]
CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass
class Draw:
    """A source of random tensors. Floating-point tensors have `dtype` unless a call gives another one."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator | None = None

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new tensor of normal numbers times `scale`."""
        x = torch.randn(shape, generator=self.generator, device=self.device)
        return x.mul_(scale).to(dtype or self.dtype)

    def whole(self, high: int, *shape: int) -> Tensor:
        """Return a new tensor of whole numbers from 0 to high - 1, int64."""
        return torch.randint(high, shape, generator=self.generator, device=self.device)


@dataclass(frozen=True)
class Case:
    """A small comparison of an operator with its reference.

    name: the name in the table of `tpfuse verify` ("gelu_tanh, residual"). function: takes the inputs by keyword under
    `kernels("triton")` and returns one tensor. reference: the same function in plain torch. inputs: returns the CPU
    tensors of a dtype, by name; tensors of a floating-point type get gradients.
    """

    name: str
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Callable[[torch.dtype], Tensors]


@dataclass(frozen=True)
class Trial:
    """A measurement of `tpfuse tune`: a launcher at a shape, and plain torch that computes the same outputs.

    inputs: draws the inputs, also on the device "meta". run: the launcher. plain: the reference in any dtype. Both take
    all inputs by keyword. work: FLOP or bytes of one call; `unit` names 1e12 of them per second.
    """

    name: str
    inputs: Callable[[torch.device, torch.dtype], Tensors]
    run: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    work: float
    unit: str


@dataclass(frozen=True)
class Cost:
    """The least work of a call: `flops` floating-point operations, and `moved` bytes of device memory."""

    flops: float
    moved: float


class Shape(ABC):
    """An operator at one shape. Subclasses are frozen dataclasses with a name and the sizes."""

    name: str

    @abstractmethod
    def inputs(self, draw: Draw) -> Tensors:
        """Return the operator's tensors by name."""

    @abstractmethod
    def costs(self) -> dict[str, Cost]:
        """Return the costs by mode: "inference" (no graph), "forward" (with a graph), "backward" alone, "both"."""

    def trials(self) -> list[Trial]:
        """Return the trials that the tuner measures at this shape."""
        return []

    def drawn(self, device: torch.device, dtype: torch.dtype) -> Tensors:
        """Return the inputs of the trials."""
        return self.inputs(Draw(device, dtype))

    def trial(self, mode: str, run: Callable[..., Outputs], plain: Callable[..., Outputs]) -> Trial:
        """Return the trial of the launchers of one mode."""
        cost = self.costs()[mode]
        name = f"{self.name} {mode}" if mode.endswith("backward") else self.name
        work, unit = (cost.flops, "TFLOP/s") if cost.flops else (cost.moved, "TB/s")
        return Trial(name, self.drawn, run, plain, work, unit)


class DifferentiableShape(Shape):
    """A shape of an operator that returns one tensor, with gradients of its floating-point inputs."""

    @abstractmethod
    def function(self, *inputs: Any, **named: Any) -> Tensor:
        """Return the result of tpfuse's operator."""

    @abstractmethod
    def reference(self, *inputs: Any, **named: Any) -> Tensor:
        """Return the result of plain torch, which must also accept float64."""

    @abstractmethod
    def gradient(self, draw: Draw) -> Tensor:
        """Return a gradient of the result."""

    def saved(self, inputs: Tensors) -> Tensors:
        """Return the tensors that the backward launchers read besides the inputs and the result's gradient."""
        return {}

    def drawn(self, device: torch.device, dtype: torch.dtype) -> Tensors:
        """Return the inputs, a gradient of the result as "grad", and the tensors saved for the backward pass."""
        draw = Draw(device, dtype)
        inputs = self.inputs(draw)
        return inputs | {"grad": self.gradient(draw)} | self.saved(inputs)

    def plain_forward(self, **tensors: Tensor) -> Outputs:
        """Return the reference's result for the inputs of a trial."""
        return (self.reference(**self._inputs_of(tensors)),)

    def plain_backward(self, grad: Tensor, **tensors: Tensor) -> Outputs:
        """Return the reference's gradients for the inputs of a trial."""
        return gradients(self.reference, self._inputs_of(tensors), grad)

    def _inputs_of(self, tensors: Tensors) -> Tensors:
        return {name: tensors[name] for name in self.inputs(Draw(META, torch.float32))}

    def seeded(self, dtype: torch.dtype) -> Tensors:
        """Return inputs on the CPU, which are the same in every call but for the rounding to `dtype`."""
        return self.inputs(Draw(CPU, dtype, torch.Generator().manual_seed(1)))

    def case(self) -> Case:
        """Return a case of `tpfuse verify` at this shape."""
        return Case(self.name, self.function, self.reference, self.seeded)


@dataclass(frozen=True)
class Operator:
    """The description of an operator.

    launches: calls the launchers on meta tensors of a dtype, so that they choose every row of the operator's
    configurations and reach every variant of its kernels. cases: the comparisons of `tpfuse verify`. models: the shapes
    of models, which the tuner measures. tiny: small shapes with the same trials, for the interpreter.
    """

    name: str
    launches: Callable[[torch.dtype], None]
    cases: tuple[Case, ...] = ()
    models: tuple[Shape, ...] = ()
    tiny: tuple[Shape, ...] = ()


def gradients(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad: Tensor) -> Outputs:
    """Return the gradients of all floating-point inputs, for the gradient `grad` of the function's result."""
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    return torch.autograd.grad(function(**leaves), [x for x in leaves.values() if x.requires_grad], grad)
