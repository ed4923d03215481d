"""Buckets in a rank's own memory, which torch.distributed reduces: NCCL or Gloo, or nothing on a single rank.

There is a reduce-scatter in the backward pass and an all-gather after the update. At stage 2 a bucket's gradients use
memory only from the first write until they are sent. If they are reduced again in the same step, their sum is added to
a float32 one of the shard when the next reduction of the bucket begins.
"""

import warnings
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.agreement import exchange
from tpfuse.comm.collectives import collective
from tpfuse.comm.collectives.collective import DONE, Handle
from tpfuse.comm.dispatch import connected
from tpfuse.comm.errors import Disagreement
from tpfuse.comm.mesh import rank_and_size
from tpfuse.comm.settings import settings
from tpfuse.comm.sum_order import Sum
from tpfuse.kernels.launch import Reservation
from tpfuse.zero.reducer.base import BucketSpec, GradientReducer
from tpfuse.zero.reducer.shard_update import ShardUpdate

_CONCURRENT_REDUCTIONS = 2  # at stage 2, at most this many buckets are reduced at the same time


def reserve(group: dist.ProcessGroup | None) -> Reservation | None:
    """Leave multiprocessors to the sums of a group that runs them beside the backward pass: if it uses NCCL.

    Warn if layers have communicated already, since their channels keep the number of programs.
    """
    if group is None or "nccl" not in dist.get_backend(group):
        return None
    if not Reservation.held and any(memory.has_channels for memory in connected()):
        warnings.warn(
            "layers that have communicated already leave NCCL, which will sum gradients, no multiprocessors: ranks may"
            " wait for each other until the deadline; make the engine or optimizer before the first forward pass",
            stacklevel=2,
        )
    return Reservation()


def reserve_as_with_nccl(device: torch.device) -> None:
    """Leave multiprocessors for good on GPUs, also where no sums need them: products sum by their number."""
    if device.type == "cuda" and not Reservation.held:
        Reservation()


class CollectiveReducer(GradientReducer):
    """The reducer of ranks that share no memory. group: None for a single rank, which works as stage 0 does.

    total: the order of sums; None for that of the backend.

    Each buffer is allocated when it is first requested: parameters move into their buckets one after another, so the
    memory that they leave is free for the next buckets.
    """

    def __init__(
        self,
        specs: Sequence[BucketSpec],
        stage: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        total: Sum | None = None,
    ) -> None:
        super().__init__(specs, 0 if group is None else stage, *rank_and_size(group))
        self._group, self._device, self._total = group, device, total
        self.reservation = reserve(group)
        self._values: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._reductions: list[tuple[Tensor, Handle, Tensor] | None] = [None] * len(self.specs)
        self._sums: dict[int, Tensor] = {}  # of earlier reductions of a bucket in this step
        self._under_way: deque[int] = deque()  # the buckets with gradients that are being sent, at stage 2
        self._order: list[int] = []  # the buckets of this step's reductions

    def _buffer(self, buffers: dict[int, Tensor], index: int, dtype: torch.dtype) -> Tensor:
        if index not in buffers:
            buffers[index] = torch.zeros(self.specs[index].size, dtype=dtype, device=self._device)
        return buffers[index]

    def values(self, index: int) -> Tensor:
        return self._buffer(self._values, index, self.specs[index].dtype)

    def gradient_buffer(self, index: int) -> Tensor:
        return self._buffer(self._gradients, index, self.specs[index].sent)

    def begin(self) -> None:
        self._reductions = [None] * len(self.specs)
        self._sums.clear()
        self._under_way.clear()
        self._order.clear()

    def start_reduce(self, index: int, *, more: bool = False) -> None:
        gradients = self.gradient_buffer(index)
        if self.stage and self._reductions[index] is not None:
            self._sums[index] = self.reduced_shard(index).to(self.specs[index].state_dtype)
        self._order.append(index)
        self._reductions[index] = self._start(gradients)
        self.traffic.exchange((1 if self.stage else 2) * (self.world - 1) * (gradients.nbytes // self.world))
        if self.stage == 2:
            self._gradients.pop(index, None)
            self._under_way.append(index)
            if len(self._under_way) > _CONCURRENT_REDUCTIONS:
                self._wait(self._under_way[0])

    def _start(self, gradients: Tensor) -> tuple[Tensor, Handle, Tensor]:
        """Begin to reduce whole gradients; return (the result, its handle, what must stay alive until it is sent)."""
        if self._group is None:
            return gradients, DONE, gradients
        if self.stage == 0 and self._total is None:
            return gradients, collective.start_all_reduce(gradients, self._group), gradients
        rows = gradients.view(self.world, -1)
        out = rows.new_empty(rows.shape[1])
        return out, collective.start_reduce_scatter(rows, out, self._group, self._total), gradients

    def end_backward(self) -> None:
        pass

    def reduced_shard(self, index: int) -> Tensor:
        out = self._wait(index)
        if index in self._sums:
            out = self._sums.pop(index).add_(out)
            self._reductions[index] = out, DONE, out
        return out

    def _wait(self, index: int) -> Tensor:
        """Return the result of the last reduction of a bucket, and free the gradients that were sent."""
        reduced = self._reductions[index]
        assert reduced is not None
        out, handle, sent = reduced
        handle.wait()
        if self.stage == 0 and out is not sent:
            assert self._group is not None
            collective.start_all_gather(out, sent.view(self.world, -1), self._group).wait()
            out = sent
        self._reductions[index] = out, DONE, out
        if index in self._under_way:
            self._under_way.remove(index)
        return out

    def update(self, updates: Sequence[ShardUpdate | None]) -> None:
        gathered = []
        for index, update in enumerate(updates):
            sums, shard = self.reduced_shard(index), self.shard(index)
            if update is not None:
                update.apply(sums, self.values(index)[shard.start : shard.stop])
            self._reductions[index] = None
            gathered += self._gather(index)
        for handle in gathered:
            handle.wait()

    def publish(self) -> None:
        for handle in [handle for index in range(len(self.specs)) for handle in self._gather(index)]:
            handle.wait()

    def abandon(self, *, begun: bool, unsent: Sequence[int]) -> None:
        """Send NaN for each bucket that this rank has not sent, since others may wait for it; no rank uses the sums.

        Then the ranks agree on what the one that has come furthest has sent, and the others send NaN for that too.
        Before that no rank waits for a sum, which may be of a pass that another rank has not begun.
        """
        if not begun or self._group is None:
            self.begin()
        if self._group is None:
            return
        order = [*self._order, *unsent]
        sent = [self._send_nan(index) for index in unsent]
        orders = exchange(order, self._group, op="abandon a step", within=settings().timeout)
        longest: list[int] = max(orders, key=len)
        if longest[: len(order)] != order:
            raise Disagreement("abandon(): ranks have reduced buckets in different orders: continue from a checkpoint")
        sent += [self._send_nan(index) for index in longest[len(order) :]]
        for index, reduced in enumerate(self._reductions):
            if reduced is not None:
                self._wait(index)
        for _, handle, _ in sent:
            handle.wait()
        if self.stage == 2:
            self._gradients.clear()
        self.begin()

    def _send_nan(self, index: int) -> tuple[Tensor, Handle, Tensor]:
        spec = self.specs[index]
        return self._start(torch.full((spec.size,), torch.nan, dtype=spec.sent, device=self._device))

    def _gather(self, index: int) -> list[Handle]:
        if self.stage == 0:
            return []
        assert self._group is not None
        shard, values = self.shard(index), self.values(index)
        own = values[shard.start : shard.stop].clone()
        self.traffic.exchange((self.world - 1) * own.nbytes)
        return [collective.start_all_gather(own, values.view(self.world, -1), self._group)]
