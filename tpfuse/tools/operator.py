"""The description of an operator, which `tpfuse verify`, the compile gate, `tpfuse tune` and the benchmarks read.

Module NAME of `tpfuse.tools.operators` defines OPERATOR, an `Operator`. Its shapes define the inputs, the operator and
its reference, and the cost of a call. `tpfuse verify` uses small shapes; the tuner and the benchmarks use the shapes of
models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpfuse.comm.comparison import error_bound
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.testing.compare import check_error

Tensors = dict[str, Tensor]
Outputs = tuple[Tensor, ...]
Launchers = dict[str, tuple[Callable[..., Outputs], Callable[..., Outputs]]]
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


def seeded_draw(device: torch.device, dtype: torch.dtype, seed: int = 1) -> Draw:
    """Return a Draw whose tensors are the same in every call. Those on the meta device have no numbers."""
    return Draw(device, dtype, None if device == META else torch.Generator(device).manual_seed(seed))


@dataclass(frozen=True)
class CallCost:
    """The least work of a call: `flops` floating-point operations, and `moved` bytes of device memory."""

    flops: float
    moved: float


class Shape:
    """An operator at one shape. Subclasses are frozen dataclasses with a name and the sizes.

    `tpfuse verify` compares `function` with `reference` at `seeded` inputs. The tuner measures the `launchers`, and the
    benchmarks all of these at `inputs`. A subclass has the methods that its users call.
    """

    name: str

    def inputs(self, draw: Draw) -> Tensors:
        """Return the operator's tensors by name."""
        raise NotImplementedError

    def function(self, *inputs: Any, **named: Any) -> Tensor:
        """Return the one result of tpfuse's operator, under `use(kernels="triton")`."""
        raise NotImplementedError

    def reference(self, *inputs: Any, **named: Any) -> Tensor:
        """Return the result of plain torch, which must also accept float64."""
        raise NotImplementedError

    def gradient(self, draw: Draw) -> Tensor:
        """Return a gradient of the result."""
        raise NotImplementedError

    def costs(self) -> dict[str, CallCost]:
        """Return the costs by mode: "inference" (no graph), "forward" (with a graph), "backward" alone, "both"."""
        raise NotImplementedError

    def launchers(self) -> Launchers:
        """Return by mode a launcher, and plain torch in any dtype for the same outputs. Both take all of `drawn`."""
        return {}

    def saved(self, inputs: Tensors) -> Tensors:
        """Return the tensors that the backward launchers read besides the inputs and the result's gradient."""
        return {}

    def drawn(self, device: torch.device, dtype: torch.dtype) -> Tensors:
        """Return the inputs, a gradient of the result as "grad", and the tensors saved for the backward pass.

        They are the same in every call but for the rounding to `dtype`.
        """
        draw = seeded_draw(device, dtype)
        inputs = self.inputs(draw)
        return inputs | {"grad": self.gradient(draw)} | self.saved(inputs)

    def plain_forward(self, **tensors: Tensor) -> Outputs:
        """Return the reference's result for `drawn` tensors."""
        return (self.reference(**self._inputs_of(tensors)),)

    def plain_backward(self, grad: Tensor, **tensors: Tensor) -> Outputs:
        """Return the reference's gradients for `drawn` tensors."""
        return gradients(self.reference, self._inputs_of(tensors), grad)

    def _inputs_of(self, tensors: Tensors) -> Tensors:
        return {name: tensors[name] for name in self.inputs(Draw(META, torch.float32))}

    def seeded(self, dtype: torch.dtype) -> Tensors:
        """Return inputs on the CPU, which are the same in every call but for the rounding to `dtype`."""
        return self.inputs(seeded_draw(CPU, dtype))


@dataclass(frozen=True)
class Given(Shape):
    """A shape for `tpfuse verify` alone, whose methods are given. Inputs of a floating-point type get gradients."""

    name: str
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    seeded: Callable[..., Tensors]  # takes a dtype


@dataclass(frozen=True)
class OneRank:
    """A program of `tpfuse.tools.rank_programs`, which `tpfuse verify` runs in a group of one rank."""

    program: str

    @property
    def name(self) -> str:
        """Return the name in messages."""
        return "one rank"


@dataclass(frozen=True)
class Trial:
    """The launcher of a shape's mode, which the tuner measures."""

    shape: Shape
    mode: str

    @property
    def name(self) -> str:
        """Return the name in messages and in the table."""
        return f"{self.shape.name} {self.mode}" if self.mode.endswith("backward") else self.shape.name

    def run(self, **drawn: Tensor) -> Outputs:
        """Launch the kernel."""
        return self.shape.launchers()[self.mode][0](**drawn)

    def plain(self, **drawn: Tensor) -> Outputs:
        """Return the outputs of plain torch."""
        return self.shape.launchers()[self.mode][1](**drawn)

    def speed(self, seconds: float) -> str:
        """Return the speed of a call in words."""
        cost = self.shape.costs()[self.mode]
        work, unit = (cost.flops, "TFLOP/s") if cost.flops else (cost.moved, "TB/s")
        return f"{work / seconds / 1e12:.4g} {unit} at {self.name}"


@dataclass(frozen=True)
class Operator:
    """The description of an operator."""

    name: str
    # Calls the launchers on meta tensors of a dtype, so that they choose every row of the operator's configurations and
    # reach every variant of its kernels.
    launches: Callable[[torch.dtype], None]
    # Small shapes that `tpfuse verify` compares with the reference, and programs that know their results.
    cases: tuple[Shape | OneRank, ...] = ()
    # The shapes of models, which the tuner measures.
    models: tuple[Shape, ...] = ()
    # Small shapes with the same launchers, for the interpreter.
    tiny: tuple[Shape, ...] = ()


def gradients(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad: Tensor) -> Outputs:
    """Return the gradients of all floating-point inputs, for the gradient `grad` of the function's result."""
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    return torch.autograd.grad(function(**leaves), [x for x in leaves.values() if x.requires_grad], grad)


def check_rounding(name: str, actual: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Raise AssertionError if a result differs from float64 by more than twice the error of `plain`, plus rounding."""
    check_error(name, actual, plain, truth, error_bound(plain, truth))


def on_meta(world: int, flags: int, programs: int, slot_bytes: int = 1 << 30) -> Endpoint:
    """Return the endpoint of the last rank of a group, whose launches are recorded. flags: their number."""
    slot_table, flag_table = (torch.empty(world, dtype=torch.int64, device="meta") for _ in range(2))
    state, abort = (torch.empty(n, dtype=torch.int32, device="meta") for n in (2, 1))
    return Endpoint(world - 1, world, slot_table, slot_bytes, flag_table, flags, state, abort, programs)


def without_gradient(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of q, k and v whose result has gradients of 0: the kernels have none of their own."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            out = function(q, k, v)
        return out + 0 * (q + k.sum() + v.sum())

    return call
