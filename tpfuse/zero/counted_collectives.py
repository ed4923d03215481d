"""The collectives of `fully_shard` on our own ones, and counted: it takes them by hooks of its own.

Between CPU ranks they are `tpfuse.comm.collectives`, with sums in rank order, a deadline, and the name of a rank that
is lost; on CUDA the streams are `fully_shard`'s to order, and NCCL's work is what it knows.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import collectives
from tpfuse.comm.traffic import Traffic


class _Counted:
    """What `fully_shard` wants of a collective of its own: memory, and the call (in a subclass)."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def count(self, part: Tensor, group: dist.ProcessGroup) -> None:
        """Every rank sends a part to each of the others."""
        self._traffic.exchange((group.size() - 1) * part.nbytes)


# torch 2.13 renamed the two; older releases know only the second name.
_all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class CountedAllGather(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """On CUDA the streams are `fully_shard`'s to order, and NCCL's work is what it knows."""
        self.count(input_tensor, group)
        if input_tensor.device.type != "cpu":
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        output_tensor.copy_(collectives.all_gather(input_tensor, group))
        return None


class CountedReduceScatter(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """`op` is the sum, which was asked for."""
        self.count(output_tensor, group)
        if input_tensor.device.type != "cpu":
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        output_tensor.copy_(collectives.reduce_scatter(input_tensor, group))
        return None
