"""The choice of what computes the tensor-parallel products of a group: `products`.

While torch.compile traces, it is operators of torch.library (`tpfuse.ops.linear.traced`), which choose when they run.
With `auto`, each product is computed by the candidate that was measured to be the fastest for its shapes
(`tpfuse.comm.autotune`), and by the default of `tpfuse.comm.dispatch` if nothing was measured. On GPUs torch's own
operators are candidates too (`tpfuse.ops.linear.torch_operators`).
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.choices import Implementation
from tpfuse.comm.autotune import decide, is_autotuning
from tpfuse.comm.decisions import Decision
from tpfuse.comm.dispatch import Choice, Implementations, choose_implementation, symmetric_memory
from tpfuse.comm.layout import is_traced
from tpfuse.comm.sum_order import HALF
from tpfuse.ops.linear import torch_operators
from tpfuse.ops.linear.collective import CollectiveLinear
from tpfuse.ops.linear.direct import DirectLinear
from tpfuse.ops.linear.fused import FusedLinear
from tpfuse.ops.linear.parallel_linear import ByMethod, ParallelLinear
from tpfuse.ops.linear.torch_operators import TorchLinear
from tpfuse.ops.linear.traced import TracedLinear, define_operators

FUSED = {  # candidates, and the options of `FusedLinear.variant` for each
    "fused with copiers": {"engines": False, "other_tiles": False},
    "fused with copiers, other tiles": {"engines": False, "other_tiles": True},
    "fused with copy engines": {"engines": True, "other_tiles": False},
    "fused with copy engines, other tiles": {"engines": True, "other_tiles": True},
}
CANDIDATES: dict[str, tuple[str, ...]] = {
    "cpu": ("direct", "collective"),
    "cuda": ("collective", *FUSED, *torch_operators.CANDIDATES),
}
"""The candidates that a measurement compares, by type of device; the first word is the implementation's name."""


@dataclass(frozen=True)
class MeasuredProduct:
    """A product for which a group makes a decision."""

    # The operator's name.
    operator: str
    # "forward" or "backward".
    direction: str
    # The shape of this rank's first operand, which in backward of a reduce-scatter is the gradient.
    x: tuple[int, ...]
    # The shapes of this rank's shards.
    weights: tuple[tuple[int, ...], ...]
    # Everything else that its time depends on.
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a description on one line, the same on every rank."""
        shapes = " and ".join("x".join(map(str, shape)) for shape in (self.x, *self.weights))
        return " ".join([self.operator, self.direction, shapes, *self.details])


class MeasuredLinear(ByMethod):
    """The products of one group's ranks for tensors of one device and dtype (see `ParallelLinear`)."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, default: Implementation
    ) -> None:
        """default: the implementation of products without a decision."""
        self._group, self._device, self._dtype, self._default = group, device, dtype, default
        self._candidates: dict[str, ParallelLinear] = {}
        self.decisions: dict[MeasuredProduct, Decision] = {}

    def _run(self, method: str, *call: Any) -> Any:
        product = _PRODUCTS[method](*call)
        decision = self.decisions.get(product)
        if decision is None and is_autotuning():
            candidates: dict[str, Callable[[], object]] = {
                name: partial(self._run_with, name, method, *call) for name in self._names(method, *call)
            }
            case = f"{product} {self._dtype} on {self._group.size()} ranks"
            exact = partial(self._exactly, method, *call)
            decision = decide(self._group, self._device, case, candidates, self._default, exact)
            self.decisions[product] = decision
        return self._run_with(self._default if decision is None else decision.taken, method, *call)

    def _names(self, method: str, *call: Any) -> list[str]:
        """Return the names of the candidates for a call."""
        names, of_torch = CANDIDATES[self._device.type], torch_operators.CANDIDATES
        if not of_torch.keys() & set(names):
            return list(names)
        found = torch_operators.obstacles(self._group, self._device, self._dtype)
        served = {name for name in found if not found[name] and torch_operators.serves(name, method, *call)}
        return [name for name in names if name not in of_torch or name in served]

    def _exactly(self, method: str, *call: Any) -> Any:
        """Compute a call by collectives in a wider dtype: float32 for half types, otherwise float64."""
        wide = torch.float32 if self._dtype in HALF else torch.float64
        by_collectives = _IMPLEMENTATIONS.of(Choice("collective", "exact"), self._group)
        return getattr(by_collectives, method)(*_converted(call, wide))

    def _run_with(self, name: str, method: str, *call: Any) -> Any:
        """Call the candidate called `name`."""
        candidate = self._candidates.get(name)
        if candidate is None and name in torch_operators.CANDIDATES:
            memory = symmetric_memory(self._group, self._device)
            candidate = self._candidates[name] = TorchLinear(self._group, memory, name)
        elif candidate is None:
            wanted = cast(Implementation, name.partition(" ")[0])
            choice = choose_implementation(self._device, self._dtype, self._group, wanted)
            candidate = _IMPLEMENTATIONS.of(choice, self._group)
            if isinstance(candidate, FusedLinear):
                candidate = candidate.variant(**FUSED[name])
            self._candidates[name] = candidate
        return getattr(candidate, method)(*call)


_IMPLEMENTATIONS: Implementations[ParallelLinear] = Implementations(
    CollectiveLinear, direct=DirectLinear, fused=FusedLinear
)
_measured: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, torch.dtype], MeasuredLinear]] = WeakKeyDictionary()
_warned: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def products(x: Tensor, group: dist.ProcessGroup) -> ParallelLinear:
    """Return what computes the products of x's device and dtype. Warn once if it is a fallback."""
    return TracedLinear(_OPERATORS, group) if is_traced(x) else parallel_linear(x, group)


def parallel_linear(x: Tensor, group: dist.ProcessGroup) -> ParallelLinear:
    """Return `products` of a tensor x that is not traced."""
    choice = choose_implementation(x.device, x.dtype, group)
    if choice.state == "fallback":
        _warn(choice, group)
    if choice.state == "default" and (group in _measured or is_autotuning()):
        of_group, key = _measured.setdefault(group, {}), (x.device.type, x.dtype)
        if key not in of_group:
            of_group[key] = MeasuredLinear(group, x.device, x.dtype, choice.implementation)
        return of_group[key]
    return _IMPLEMENTATIONS.of(choice, group)


_OPERATORS = define_operators(parallel_linear)


def measured_products(group: dist.ProcessGroup) -> dict[MeasuredProduct, Decision]:
    """Return the decisions that the group has measured, in the order of the measurements."""
    return {
        product: decision
        for products in _measured.get(group, {}).values()
        for product, decision in products.decisions.items()
    }


def _warn(choice: Choice, group: dist.ProcessGroup) -> None:
    warned = _warned.setdefault(group, set())
    text = f"tensor-parallel products are {choice.implementation}: {choice.reason}"
    if text not in warned and group.rank() == 0:
        warnings.warn(text, stacklevel=4)
    warned.add(text)


def _converted(operand: Any, dtype: torch.dtype) -> Any:
    """Return an operand of a call with its tensors, also those in sequences, in another dtype."""
    if isinstance(operand, tuple | list):
        return [_converted(each, dtype) for each in operand]
    return operand.to(dtype) if isinstance(operand, Tensor) else operand


def _product(operator: str, direction: str, x: Tensor, weights: Sequence[Tensor], *details: str) -> MeasuredProduct:
    return MeasuredProduct(operator, direction, x.shape, tuple(weight.shape for weight in weights), details)


def _given(**operands: Tensor | None) -> tuple[str, ...]:
    """Return the names of the operands that are not None."""
    return tuple(name for name, operand in operands.items() if operand is not None)


def _needed(*gradients: bool) -> tuple[str, ...]:
    """Return the names of the needed gradients, among those of the input, the weight and the bias."""
    return tuple(name for name, needed in zip(("dX", "dW", "db"), gradients, strict=False) if needed)


_PRODUCTS: dict[str, Callable[..., MeasuredProduct]] = {  # what is measured, for each method
    "all_gather": lambda x, weights, biases, activation, keep: _product(
        "all_gather_linear", "forward", x, weights, activation or "no activation", *_given(bias=biases[0])
    ),
    "all_gather_backward": lambda lefts, x, weights, needs, needs_x: _product(
        "all_gather_linear", "backward", x, weights, *_needed(needs_x, any(needs))
    ),
    "reduce_scatter": lambda x, weight, bias, residual: _product(
        "linear_reduce_scatter", "forward", x, [weight], *_given(bias=bias, residual=residual)
    ),
    "reduce_scatter_backward": lambda grad, x, weight, needs: _product(
        "linear_reduce_scatter", "backward", grad, [weight], *_needed(*needs)
    ),
    "all_reduce": lambda x, weight, bias, residual: _product(
        "linear_all_reduce", "forward", x, [weight], *_given(bias=bias, residual=residual)
    ),
}
