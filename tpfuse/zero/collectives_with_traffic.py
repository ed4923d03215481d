"""Collectives for `fully_shard`, which takes custom ones through its hooks. They count the bytes that ranks exchange.

Each belongs to a unit, and ranks compare the units first (`tpfuse.zero.unit_order`).

Between CPU ranks they call `tpfuse.comm.collectives`, which sum in rank order, have a deadline, and name a rank that is
lost. On CUDA they call NCCL and return its work objects, because `fully_shard` orders the streams itself.

NCCL could gather by copy engines, without multiprocessors (enqueue.cc, ncclCeAvailable). Neither of torch's two ways
there is taken. `set_symm_mem_for_comm` chooses NCCL as the process's symmetric memory, whose CUDA backend `CudaMemory`
needs. `ProcessGroupNCCL.register_mem_pool` with symm=True registers each segment that torch's allocator adds later: a
collective call without a deadline, which ranks whose allocators differ would not all make. Besides, NCCL 2.28, which
torch 2.11 brings, signals by stream operations that CUDA drivers from 13.1 on lack (NVIDIA/nccl issue 2052).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import collectives
from tpfuse.comm.collectives.collective import all_gather_single, reduce_scatter_single
from tpfuse.comm.collectives.fused import FusedCollectives
from tpfuse.comm.sum_order import Sum
from tpfuse.comm.traffic import Traffic
from tpfuse.zero.unit_order import Operation


class Counted:
    """The collective `operation` in the form that `fully_shard` takes. begin: is called before each use.

    total: the order of sums; None for that of the backend.
    """

    def __init__(
        self, operation: Operation, traffic: Traffic, begin: Callable[[Operation], None], total: Sum | None = None
    ) -> None:
        self._operation, self._traffic, self._begin, self._total = operation, traffic, begin, total

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write the result to `output_tensor`; on CUDA return NCCL's work object. op: the sum, for a reduction."""
        self._begin(self._operation)
        gathers = self._operation == "all_gather"
        part = input_tensor if gathers else output_tensor
        self._traffic.exchange((group.size() - 1) * part.nbytes)
        if self._total is not None:
            scatter_sum(input_tensor, output_tensor, group, self._total)
            return None
        if input_tensor.device.type == "cpu":
            compute = collectives.all_gather if gathers else collectives.reduce_scatter
            output_tensor.copy_(compute(input_tensor, group))
            return None
        if gathers:
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def scatter_sum(x: Tensor, out: Tensor, group: dist.ProcessGroup, total: Sum) -> None:
    """Make out [n] this rank's part of the sum of x [world * n] over the ranks, in the order of `total`."""
    by = collectives.collectives_of(x, group, kernels=False)
    assert not isinstance(by, FusedCollectives), "it has kernels, whose order is that of ranks"
    by.reduce_scatter(x, out, total=total).wait()
