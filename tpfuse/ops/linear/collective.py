"""Tensor-parallel products with whole collectives before or after them, for ranks that share no memory.

Backward of an all-gather overlaps two communications with two products: x is gathered again (only this rank's shard was
kept, arXiv:2205.05198) while dX is computed, and dX is reduce-scattered while dW is computed.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import collectives
from tpfuse.comm.collectives.collective import TorchCollectives
from tpfuse.comm.trace import operator
from tpfuse.ops.gemm import flat, product, weight_gradient


class CollectiveLinear:
    """The products of one group's ranks, on any device (see `ParallelLinear`)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._by = group, TorchCollectives(group)

    def _compare(self, op: str, x: Tensor, width: int) -> None:
        """Compare with the other ranks what is communicated: tensors of x's rows and dtype, and this width."""
        collectives.compare(f"{op} {x.dtype} {[*x.shape[:-1], width]}", x.device, self._group, by=self._by)

    @operator("all_gather_linear", "collective")
    def all_gather(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None, keep: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        self._compare("all_gather_linear", x, x.shape[-1])
        gathered = collectives.all_gather(x, self._group, by=self._by)
        pairs = zip(weights, biases, strict=True)
        return [product(gathered, weight, bias, activation, keep) for weight, bias in pairs]

    @operator("all_gather_linear backward", "collective")
    def all_gather_backward(
        self, lefts: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needs: Sequence[bool], needs_x: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        if any(needs):
            gathered, gathering = collectives.start_all_gather(x, self._group, by=self._by)
        if needs_x:
            partial: Tensor | None = None
            for left, weight in zip(lefts, weights, strict=True):
                term = torch.matmul(left, weight)
                partial = term if partial is None else partial.add_(term)
            assert partial is not None
            grad_x, scattering = collectives.start_reduce_scatter(partial, self._group, by=self._by)
        if any(needs):
            gathering.wait()
        grad_weights = [
            weight_gradient(left, gathered) if needed else None for left, needed in zip(lefts, needs, strict=True)
        ]
        if needs_x:
            scattering.wait()
        return grad_x if needs_x else None, grad_weights

    @operator("linear_reduce_scatter", "collective")
    def reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        self._compare("linear_reduce_scatter", x, len(weight))
        partial, _ = product(x, weight, None, None, keep=False)
        return plus(collectives.reduce_scatter(partial, self._group, by=self._by), bias, residual)

    @operator("linear_reduce_scatter backward", "collective")
    def reduce_scatter_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        needs_x, needs_weight, needs_bias = needs
        gathered = collectives.all_gather(grad, self._group, by=self._by)
        grad_x = torch.matmul(gathered, weight) if needs_x else None
        grad_weight = weight_gradient(gathered, x) if needs_weight else None
        return grad_x, grad_weight, flat(gathered).sum(0) if needs_bias else None

    @operator("linear_all_reduce", "collective")
    def all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        self._compare("linear_all_reduce", x, len(weight))
        partial, _ = product(x, weight, None, None, keep=False)
        return plus(collectives.all_reduce(partial, self._group, by=self._by), bias, residual)


def plus(x: Tensor, *terms: Tensor | None) -> Tensor:
    """Add the terms that are not None to x in place and return it."""
    for term in terms:
        if term is not None:
            x = x.add_(term)
    return x
