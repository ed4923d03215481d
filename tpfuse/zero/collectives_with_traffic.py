"""Collectives for `fully_shard`, which takes custom ones through its hooks. They count the bytes that ranks exchange.

Each belongs to a unit, and ranks compare the units first (`tpfuse.zero.unit_order`).

Between CPU ranks they call `tpfuse.comm.collectives`, which sum in rank order, have a deadline, and name a rank that is
lost. On CUDA they call NCCL and return its work objects, because `fully_shard` orders the streams itself.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import collectives
from tpfuse.comm.traffic import Traffic


class _Counted:
    """The interface that `fully_shard` expects of a collective: `allocate` here, `__call__` in the subclasses.

    begin: is called before each use, with the collective's name.
    """

    def __init__(self, traffic: Traffic, begin: Callable[[str], None]) -> None:
        self._traffic, self._begin = traffic, begin

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def count(self, part: Tensor, group: dist.ProcessGroup) -> None:
        """Count that every rank of the group sends `part` to each of the others."""
        self._traffic.exchange((group.size() - 1) * part.nbytes)


# torch 2.13 renamed both; older releases have only the second name.
_all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class CountedAllGather(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` of all ranks into `output_tensor`; on CUDA return NCCL's work object."""
        self._begin("all_gather")
        self.count(input_tensor, group)
        if input_tensor.device.type != "cpu":
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        output_tensor.copy_(collectives.all_gather(input_tensor, group))
        return None


class CountedReduceScatter(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Write this rank's shard of the sum to `output_tensor`. `op` is the sum, as `FullySharded` requires."""
        self._begin("reduce_scatter")
        self.count(output_tensor, group)
        if input_tensor.device.type != "cpu":
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        output_tensor.copy_(collectives.reduce_scatter(input_tensor, group))
        return None
