"""Which implementation computes the tensor-parallel products of a group, and what every implementation can do.

Where `auto` is chosen, each product is computed by the implementation that was measured to be the fastest for its
shapes (`tpfuse.comm.measurement`), and by the usual one of `tpfuse.comm.choice` where nothing was measured.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.backend import Implementation, implementation
from tpfuse.comm.choice import Choice, choose_implementation
from tpfuse.comm.decisions import Decision
from tpfuse.comm.measurement import decide, is_measuring
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.ops.linear.collective import CollectiveLinear
from tpfuse.ops.linear.direct import DirectLinear
from tpfuse.ops.linear.fused import FusedLinear

_T = TypeVar("_T")


class ParallelLinear(Protocol):
    """The products of one group's ranks. Not differentiable; all ranks call the same ones in the same order.

    World ranks have shards of n rows (dimension 0) of whole tensors of world * n rows. Weights are [N, K], biases [N],
    of x's dtype. Raise ValueError where ranks have unequal numbers of rows, PeerTimeout where one does not come.
    """

    def all_gather(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None, keep: bool
    ) -> Sequence[tuple[Tensor, Tensor | None]]:
        """(act(all_gather(x) Wᵀ + bias) [world * n, ..., N], its pre-activation if there is one and `keep`) for each.

        x: [n, ..., K], this rank's shard.
        """

    def all_gather_backward(
        self, lefts: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needs: Sequence[bool], needs_x: bool
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """(dX = Σ left W, this rank's shard of the sum over ranks; dW = leftᵀ all_gather(x) where needed).

        lefts: for each weight the gradient of its pre-activation, [world * n, ..., N].
        """

    def reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """reduce_scatter(x Wᵀ) + bias + residual [n, ..., N]; x: [world * n, ..., K], residual like the result."""

    def reduce_scatter_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dX, dW, db); db is the same on all ranks, to the bit."""

    def all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """all_reduce(x Wᵀ) + bias + residual [..., N]."""


FUSED = {  # for which `FusedLinear.variant` has these options
    "fused with copiers": {"engines": False, "other_tiles": False},
    "fused with copiers, other tiles": {"engines": False, "other_tiles": True},
    "fused with copy engines": {"engines": True, "other_tiles": False},
    "fused with copy engines, other tiles": {"engines": True, "other_tiles": True},
}
CANDIDATES: dict[str, tuple[str, ...]] = {"cpu": ("direct", "collective"), "cuda": ("collective", *FUSED)}
"""By type of device, what a measurement compares; the first word is the implementation's name."""


@dataclass(frozen=True)
class Product:
    """A product of which there is a decision.

    operator: by its name; direction: "forward" or "backward"; x: the shape of this rank's first operand, in backward of
    a reduce-scatter of the gradient; weights: the shapes of this rank's shards; details: what else its time depends on.
    """

    operator: str
    direction: str
    x: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        """On one line, the same on every rank."""
        shapes = " and ".join("x".join(map(str, shape)) for shape in (self.x, *self.weights))
        return " ".join([self.operator, self.direction, shapes, *self.details])


class MeasuredLinear:
    """The products of one group's ranks for tensors of one device and dtype (see `ParallelLinear`)."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, usual: Implementation
    ) -> None:
        """usual: the implementation where there is no decision."""
        self._group, self._device, self._dtype, self._usual = group, device, dtype, usual
        self._made: dict[str, ParallelLinear] = {}
        self.decisions: dict[Product, Decision] = {}

    def all_gather(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None, keep: bool
    ) -> Sequence[tuple[Tensor, Tensor | None]]:
        """See `ParallelLinear`."""
        details = (activation or "no activation", *_given(bias=biases[0]))
        product = Product("all_gather_linear", "forward", x.shape, _shapes(weights), details)
        return self._best(product, lambda products: products.all_gather(x, weights, biases, activation, keep))

    def all_gather_backward(
        self, lefts: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needs: Sequence[bool], needs_x: bool
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """See `ParallelLinear`."""
        product = Product("all_gather_linear", "backward", x.shape, _shapes(weights), _needed(needs_x, any(needs)))
        return self._best(product, lambda products: products.all_gather_backward(lefts, x, weights, needs, needs_x))

    def reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """See `ParallelLinear`."""
        details = _given(bias=bias, residual=residual)
        product = Product("linear_reduce_scatter", "forward", x.shape, _shapes([weight]), details)
        return self._best(product, lambda products: products.reduce_scatter(x, weight, bias, residual))

    def reduce_scatter_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """See `ParallelLinear`."""
        product = Product("linear_reduce_scatter", "backward", grad.shape, _shapes([weight]), _needed(*needs))
        return self._best(product, lambda products: products.reduce_scatter_backward(grad, x, weight, needs))

    def all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """See `ParallelLinear`."""
        details = _given(bias=bias, residual=residual)
        product = Product("linear_all_reduce", "forward", x.shape, _shapes([weight]), details)
        return self._best(product, lambda products: products.all_reduce(x, weight, bias, residual))

    def _best(self, product: Product, run: Callable[[ParallelLinear], _T]) -> _T:
        decision = self.decisions.get(product)
        if decision is None and is_measuring():
            names = CANDIDATES[self._device.type]
            candidates: dict[str, Callable[[], object]] = {name: partial(self._by, name, run) for name in names}
            case = f"{product} {self._dtype} on {self._group.size()} ranks"
            decision = decide(self._group, self._device, case, candidates, self._usual)
            self.decisions[product] = decision
        return self._by(self._usual if decision is None else decision.taken, run)

    def _by(self, name: str, run: Callable[[ParallelLinear], _T]) -> _T:
        """What one implementation computes, whose collectives are its own too."""
        if name == self._usual and name in self._made:
            return run(self._made[name])
        with implementation(cast(Implementation, name.partition(" ")[0])):
            products = self._made.get(name)
            if products is None:
                products = _implementation(choose_implementation(self._device, self._dtype, self._group), self._group)
                if isinstance(products, FusedLinear):
                    products = products.variant(**FUSED[name])
                self._made[name] = products
            return run(products)


_Kind = type[CollectiveLinear] | type[DirectLinear] | type[FusedLinear]
_made: WeakKeyDictionary[dist.ProcessGroup, dict[_Kind, ParallelLinear]] = WeakKeyDictionary()
_measured: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, torch.dtype], MeasuredLinear]] = WeakKeyDictionary()
_warned: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def parallel_linear(x: Tensor, group: dist.ProcessGroup) -> ParallelLinear:
    """What serves x's device and dtype. Warns once where that is a fallback."""
    choice = choose_implementation(x.device, x.dtype, group)
    if choice.fallback:
        _warn(choice, group)
    if choice.provisional and (group in _measured or is_measuring()):
        return _measured_linear(x.device, x.dtype, group)
    return _implementation(choice, group)


def measured_products(group: dist.ProcessGroup) -> dict[Product, Decision]:
    """What the group has decided by measurement, in the order of the measurements."""
    return {
        product: decision for made in _measured.get(group, {}).values() for product, decision in made.decisions.items()
    }


def _measured_linear(device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup) -> MeasuredLinear:
    made = _measured.setdefault(group, {})
    found = made.get((device.type, dtype))
    if found is None:
        usual = choose_implementation(device, dtype, group).implementation
        found = made[device.type, dtype] = MeasuredLinear(group, device, dtype, usual)
    return found


def _implementation(choice: Choice, group: dist.ProcessGroup) -> ParallelLinear:
    made = _made.setdefault(group, {})
    match choice.implementation:
        case "fused":
            return made.get(FusedLinear) or made.setdefault(FusedLinear, FusedLinear(_memory(choice)))
        case "direct":
            return made.get(DirectLinear) or made.setdefault(DirectLinear, DirectLinear(_memory(choice)))
    return made.get(CollectiveLinear) or made.setdefault(CollectiveLinear, CollectiveLinear(group))


def _memory(choice: Choice) -> SymmetricMemory:
    assert choice.memory is not None
    return choice.memory


def _warn(choice: Choice, group: dist.ProcessGroup) -> None:
    said = _warned.setdefault(group, set())
    text = f"tensor-parallel products are {choice.implementation}: {choice.reason}"
    if text not in said and group.rank() == 0:
        warnings.warn(text, stacklevel=4)
    said.add(text)


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tensor.shape for tensor in tensors)


def _given(**operands: Tensor | None) -> tuple[str, ...]:
    """The names of the operands that are there."""
    return tuple(name for name, operand in operands.items() if operand is not None)


def _needed(*gradients: bool) -> tuple[str, ...]:
    """The names of the gradients that are needed, of the input, the weight and the bias."""
    return tuple(name for name, needed in zip(("dX", "dW", "db"), gradients, strict=False) if needed)
