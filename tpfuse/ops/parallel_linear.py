"""Which implementation computes the tensor-parallel products of a group, and what every implementation can do."""

import warnings
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.choice import Choice, choose
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.ops.collective_linear import CollectiveLinear
from tpfuse.ops.direct_linear import DirectLinear
from tpfuse.ops.fused_linear import FusedLinear


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


_Kind = type[CollectiveLinear] | type[DirectLinear] | type[FusedLinear]
_made: WeakKeyDictionary[dist.ProcessGroup, dict[_Kind, ParallelLinear]] = WeakKeyDictionary()
_warned: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def parallel_linear(x: Tensor, group: dist.ProcessGroup) -> ParallelLinear:
    """What serves x's device and dtype. Warns once where that is a fallback."""
    choice = choose(x.device, x.dtype, group)
    if choice.fallback:
        _warn(choice, group)
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
