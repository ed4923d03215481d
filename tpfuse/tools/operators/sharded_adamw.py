"""sharded_adamw, alone or after shard_sum: its launches have groups of several sizes and gradients of both types."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.kernels.shard_sum import shard_sum
from tpfuse.kernels.sharded_adamw import sharded_adamw_
from tpfuse.tools.operator import CallCost, Draw, OneRank, Operator, Shape, Tensors, on_meta
from tpfuse.tools.operators.adamw import RATES


@dataclass(frozen=True)
class ShardedAdamWShape(Shape):
    """An update of one rank's m parameters, bf16 with float32 masters, by the gradients of `world` ranks.

    sent: the dtype of the gradients.
    """

    name: str
    world: int
    m: int
    sent: torch.dtype

    def inputs(self, draw: Draw) -> Tensors:
        """Return the gradients of all ranks for the shards of all ranks, and the state of one shard."""
        return {
            "gradients": draw.normal(self.world, self.world * self.m, dtype=self.sent),
            "master": draw.normal(self.m, dtype=torch.float32),
            "exp_avg": draw.normal(self.m, dtype=torch.float32),
            "exp_avg_sq": draw.normal(self.m, dtype=torch.float32).square_(),
        }

    def costs(self) -> dict[str, CallCost]:
        """Return the cost: each rank's gradients are read, the state is read and written, and each rank's parameters
        are written.
        """
        return {"step": CallCost(0.0, self.m * (self.world * (self.sent.itemsize + 2) + 6 * 4))}


def launches(dtype: torch.dtype) -> None:
    """Launch the last rank of groups of several sizes, on meta tensors."""
    for world in (2, 4, 8):
        _launch(dtype, world, torch.bfloat16 if world == 4 else torch.float32, clipped=world == 8)


def _launch(dtype: torch.dtype, world: int, kept: torch.dtype, *, clipped: bool) -> None:
    def empty(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(n, dtype=dtype, device="meta")

    m = 1 << 22
    table, scalar = empty(world, torch.int64), torch.empty((), device="meta")
    endpoint = on_meta(world, flags=4096, programs=64, slot_bytes=16)
    values, sums, start = empty(world * m, dtype), empty(m), (world - 1) * m
    master = None if dtype == torch.float32 else sums
    numbers = RATES | {"lr": scalar, "step": scalar, "clip": scalar if clipped else None}
    moments = empty(m, kept)
    for sent in {dtype, torch.float32}:
        gradients = empty(world * m, sent)
        shard_sum(gradients, table, sums, empty(64, torch.float64), start, endpoint)
        for taken, addresses in ((gradients, table), (sums, None)):
            tensors = values, table, taken, addresses, master, moments, moments
            sharded_adamw_(*tensors, start=start, decay_end=m // 3, **numbers, endpoint=endpoint)


OPERATOR = Operator("sharded_adamw", launches, (OneRank("sharded_adamw"),))
