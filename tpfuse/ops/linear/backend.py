"""The choice of an implementation for the tensor-parallel products of a group, and the interface of implementations.

With `auto`, each product is computed by the implementation that was measured to be the fastest for its shapes
(`tpfuse.comm.autotune`), and by the usual one of `tpfuse.comm.choice` if nothing was measured.
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

from tpfuse.choices import Implementation
from tpfuse.comm.autotune import Decision, decide, is_autotuning
from tpfuse.comm.choice import Choice, choose_implementation
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.ops.linear.collective import CollectiveLinear
from tpfuse.ops.linear.direct import DirectLinear
from tpfuse.ops.linear.fused import FusedLinear
from tpfuse.switches import use

_T = TypeVar("_T")


class ParallelLinear(Protocol):
    """The products of one group's ranks. They are not differentiable; all ranks call the same ones in the same order.

    World ranks have shards of n rows (dimension 0) of whole tensors of world * n rows. Weights are [N, K], biases [N],
    of x's dtype. Methods raise ValueError if ranks have unequal numbers of rows, PeerTimeout if a rank does not come.
    """

    def all_gather(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None, keep: bool
    ) -> Sequence[tuple[Tensor, Tensor | None]]:
        """Return (act(all_gather(x) Wᵀ + bias) [world * n, ..., N], its pre-activation or None) for each weight.

        The pre-activation is returned if there is an activation and `keep`. x: [n, ..., K], this rank's shard.
        """

    def all_gather_backward(
        self, lefts: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needs: Sequence[bool], needs_x: bool
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return (dX = Σ left W, this rank's shard of the sum over ranks; dW = leftᵀ all_gather(x) for each weight).

        Gradients that are not needed are None. lefts: for each weight the gradient of its pre-activation,
        [world * n, ..., N].
        """

    def reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """Return reduce_scatter(x Wᵀ) + bias + residual [n, ..., N]; x: [world * n, ..., K], residual: [n, ..., N]."""

    def reduce_scatter_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return (dX, dW, db), None where not needed; db is the same on all ranks, to the bit."""

    def all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """Return all_reduce(x Wᵀ) + bias + residual [..., N]."""


FUSED = {  # candidates, and the options of `FusedLinear.variant` for each
    "fused with copiers": {"engines": False, "other_tiles": False},
    "fused with copiers, other tiles": {"engines": False, "other_tiles": True},
    "fused with copy engines": {"engines": True, "other_tiles": False},
    "fused with copy engines, other tiles": {"engines": True, "other_tiles": True},
}
CANDIDATES: dict[str, tuple[str, ...]] = {"cpu": ("direct", "collective"), "cuda": ("collective", *FUSED)}
"""The candidates that a measurement compares, by type of device; the first word is the implementation's name."""


@dataclass(frozen=True)
class Product:
    """A product for which a group makes a decision.

    operator: its name; direction: "forward" or "backward"; x: the shape of this rank's first operand, which in backward
    of a reduce-scatter is the gradient; weights: the shapes of this rank's shards; details: everything else its time
    depends on.
    """

    operator: str
    direction: str
    x: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a description on one line, the same on every rank."""
        shapes = " and ".join("x".join(map(str, shape)) for shape in (self.x, *self.weights))
        return " ".join([self.operator, self.direction, shapes, *self.details])


class MeasuredLinear:
    """The products of one group's ranks for tensors of one device and dtype (see `ParallelLinear`)."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, usual: Implementation
    ) -> None:
        """usual: the implementation for products without a decision."""
        self._group, self._device, self._dtype, self._usual = group, device, dtype, usual
        self._implementations: dict[str, ParallelLinear] = {}
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
        if decision is None and is_autotuning():
            names = CANDIDATES[self._device.type]
            candidates: dict[str, Callable[[], object]] = {name: partial(self._run_with, name, run) for name in names}
            case = f"{product} {self._dtype} on {self._group.size()} ranks"
            decision = decide(self._group, self._device, case, candidates, self._usual)
            self.decisions[product] = decision
        return self._run_with(self._usual if decision is None else decision.taken, run)

    def _run_with(self, name: str, run: Callable[[ParallelLinear], _T]) -> _T:
        """Return run(the implementation called `name`), in which collectives are of the same implementation."""
        if name == self._usual and name in self._implementations:
            return run(self._implementations[name])
        with use(implementation=cast(Implementation, name.partition(" ")[0])):
            products = self._implementations.get(name)
            if products is None:
                products = _implementation(choose_implementation(self._device, self._dtype, self._group), self._group)
                if isinstance(products, FusedLinear):
                    products = products.variant(**FUSED[name])
                self._implementations[name] = products
            return run(products)


_Kind = type[CollectiveLinear] | type[DirectLinear] | type[FusedLinear]
_implementations: WeakKeyDictionary[dist.ProcessGroup, dict[_Kind, ParallelLinear]] = WeakKeyDictionary()
_measured: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, torch.dtype], MeasuredLinear]] = WeakKeyDictionary()
_warned: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def parallel_linear(x: Tensor, group: dist.ProcessGroup) -> ParallelLinear:
    """Return the implementation for x's device and dtype. Warn once if it is a fallback."""
    choice = choose_implementation(x.device, x.dtype, group)
    if choice.fallback:
        _warn(choice, group)
    if choice.provisional and (group in _measured or is_autotuning()):
        return _measured_linear(x.device, x.dtype, group)
    return _implementation(choice, group)


def measured_products(group: dist.ProcessGroup) -> dict[Product, Decision]:
    """Return the decisions that the group has measured, in the order of the measurements."""
    return {
        product: decision
        for products in _measured.get(group, {}).values()
        for product, decision in products.decisions.items()
    }


def _measured_linear(device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup) -> MeasuredLinear:
    of_group = _measured.setdefault(group, {})
    products = of_group.get((device.type, dtype))
    if products is None:
        usual = choose_implementation(device, dtype, group).implementation
        products = of_group[device.type, dtype] = MeasuredLinear(group, device, dtype, usual)
    return products


def _implementation(choice: Choice, group: dist.ProcessGroup) -> ParallelLinear:
    of_group = _implementations.setdefault(group, {})
    match choice.implementation:
        case "fused":
            return of_group.get(FusedLinear) or of_group.setdefault(FusedLinear, FusedLinear(_memory(choice)))
        case "direct":
            return of_group.get(DirectLinear) or of_group.setdefault(DirectLinear, DirectLinear(_memory(choice)))
    return of_group.get(CollectiveLinear) or of_group.setdefault(CollectiveLinear, CollectiveLinear(group))


def _memory(choice: Choice) -> SymmetricMemory:
    assert choice.memory is not None
    return choice.memory


def _warn(choice: Choice, group: dist.ProcessGroup) -> None:
    warned = _warned.setdefault(group, set())
    text = f"tensor-parallel products are {choice.implementation}: {choice.reason}"
    if text not in warned and group.rank() == 0:
        warnings.warn(text, stacklevel=4)
    warned.add(text)


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tensor.shape for tensor in tensors)


def _given(**operands: Tensor | None) -> tuple[str, ...]:
    """Return the names of the operands that are not None."""
    return tuple(name for name, operand in operands.items() if operand is not None)


def _needed(*gradients: bool) -> tuple[str, ...]:
    """Return the names of the needed gradients, among those of the input, the weight and the bias."""
    return tuple(name for name, needed in zip(("dX", "dW", "db"), gradients, strict=False) if needed)
