"""The interface of the implementations of tensor-parallel products."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class ParallelLinear(Protocol):
    """The products of one group's ranks. They are not differentiable; all ranks call the same ones in the same order.

    World ranks have shards of n rows (dimension 0) of whole tensors of world * n rows. Weights are [N, K], biases [N],
    of x's dtype. Methods raise Disagreement if ranks communicate other shapes or dtypes, PeerTimeout if a rank does not
    come.
    """

    def all_gather(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activation: str | None,
        keep: bool,
        /,
    ) -> Sequence[tuple[Tensor, Tensor | None]]:
        """Return (act(all_gather(x) Wᵀ + bias) [world * n, ..., N], its pre-activation or None) for each weight.

        The pre-activation is returned if there is an activation and `keep`. x: [n, ..., K], this rank's shard.
        """

    def all_gather_backward(
        self, lefts: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needs: Sequence[bool], needs_x: bool, /
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return (dX = Σ left W, this rank's shard of the sum over ranks; dW = leftᵀ all_gather(x) for each weight).

        Gradients that are not needed are None. lefts: for each weight the gradient of its pre-activation,
        [world * n, ..., N].
        """

    def reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, /) -> Tensor:
        """Return reduce_scatter(x Wᵀ) + bias + residual [n, ..., N]; x: [world * n, ..., K], residual: [n, ..., N]."""

    def reduce_scatter_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool], /
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return (dX, dW, db), None where not needed; db is the same on all ranks, to the bit."""

    def all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, /) -> Tensor:
        """Return all_reduce(x Wᵀ) + bias + residual [..., N]."""


def joined(lefts: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (left [n, N], weight [N, K]) whose product is the sum of the products of lefts and weights."""
    return (torch.cat(tuple(lefts), 1), torch.cat(tuple(weights))) if len(lefts) > 1 else (lefts[0], weights[0])


class ByMethod:
    """A `ParallelLinear` that hands each call to `_run`, with the name of the method."""

    def _run(self, method: str, *call: Any) -> Any:
        raise NotImplementedError

    def all_gather(self, *call: Any) -> Any:
        return self._run("all_gather", *call)

    def all_gather_backward(self, *call: Any) -> Any:
        return self._run("all_gather_backward", *call)

    def reduce_scatter(self, *call: Any) -> Any:
        return self._run("reduce_scatter", *call)

    def reduce_scatter_backward(self, *call: Any) -> Any:
        return self._run("reduce_scatter_backward", *call)

    def all_reduce(self, *call: Any) -> Any:
        return self._run("all_reduce", *call)
