"""sharded_adamw under many schedules, with and without shard_sum before it.

There is no false alarm, no unneeded line, and no wait without an end. With β₁ = β₂ = 0 and eps = 1 the update is p = p
- lr decay p - lr g / (|g| + 1), which torch rounds as the kernel does.
"""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.channels import connect
from tpfuse.explore import RaceError, SimulatedMemory, explore
from tpfuse.explore.suite import Fault, ProtocolSuite, current, replace, without_rank_0
from tpfuse.kernels import shard_sum as shard_sums
from tpfuse.kernels import sharded_adamw, signals
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.testing.inputs import integers

LR = 0.5
RATES = {"beta1": 0.0, "beta2": 0.0, "eps": 1.0, "weight_decay": 0.25}

TILES = {"shard_sum": {"BLOCK": 16}, "sharded_adamw": {"BLOCK": 16}}

pytestmark = [
    pytest.mark.usefixtures("tiny_tiles"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning"),  # 0 log 0
]


class Bucket:
    """Parameters and gradients of all ranks, in shards of m elements."""

    def __init__(self, memory: SimulatedMemory, end: Endpoint, m: int, dtype: torch.dtype, lr: float = LR) -> None:
        self.memory, self.end, self.m, self.decay_end, self.lr = memory, end, m, m // 2, lr
        shape = (m * memory.world,)
        self.values = memory.buffer(f"values {m}", shape, dtype)
        self.gradients = memory.buffer(f"gradients {m}", shape, torch.float32)
        self.shard = slice(memory.rank * m, (memory.rank + 1) * m)
        self.masters = integers(m, *shape)
        self.values.local.copy_(self.masters)
        self.master = None if dtype == torch.float32 else self.masters[self.shard].clone()
        self.moments = torch.zeros(m), torch.zeros(m)
        memory.barrier()

    def backward(self, step: int) -> Tensor:
        """Write the ranks' gradients and return their sum."""
        every = [integers(100 * step + rank, *self.gradients.shape) for rank in range(self.memory.world)]
        self.gradients.local.copy_(every[self.memory.rank])
        return torch.stack(every).sum(0)

    def sum(self) -> None:
        """Sums in place."""
        flat = self.gradients
        current(shard_sums).shard_sum(
            flat.local, flat.addresses, flat.local[self.shard], torch.empty(3).double(), self.shard.start, self.end
        )

    def update(self, *, summed: bool) -> None:
        flat, numbers = self.gradients, {"lr": torch.tensor(self.lr), "step": torch.tensor(3.0), "clip": None}
        taken = (flat.local[self.shard], None) if summed else (flat.local, flat.addresses)
        tensors = self.values.local, self.values.addresses, *taken, self.master, *self.moments
        current(sharded_adamw).sharded_adamw_(
            *tensors, start=self.shard.start, decay_end=self.decay_end, **RATES, **numbers, endpoint=self.end
        )

    def expect(self, total: Tensor) -> None:
        """Compute the masters after one more update."""
        decay = torch.arange(len(total)) % self.m < self.decay_end
        self.masters -= self.lr * RATES["weight_decay"] * decay * self.masters
        self.masters -= self.lr * (total / (total.abs() + 1))

    def check(self) -> None:
        """Compare the parameters that a forward pass would read."""
        assert torch.equal(self.values.local, self.masters.to(self.values.dtype))
        assert self.master is None or torch.equal(self.master, self.masters[self.shard])


def zero(memory: SimulatedMemory, steps: int, lr: float = LR) -> Iterator[tuple[int, int]]:
    """Run two buckets: the gradients of one are summed first, as for a norm, those of the other during the update."""
    end = connect(memory)
    buckets = Bucket(memory, end, 40, torch.float32, lr), Bucket(memory, end, 7, torch.bfloat16, lr)
    for step in range(steps):
        for bucket in buckets:
            bucket.check()
        totals = [bucket.backward(step % 2) for bucket in buckets]
        for bucket, total in zip(buckets, totals, strict=True):
            bucket.expect(total)
        summed, other = buckets[step % 2], buckets[1 - step % 2]
        other.update(summed=False)  # the first launch of a step: no launch before it has waited for the other ranks
        summed.sum()
        summed.update(summed=True)
        yield int(end.state[0]), step % 2
    for bucket, total in zip(buckets, totals, strict=True):
        bucket.check()
        assert torch.equal(bucket.moments[0], total[bucket.shard]), "as β₁ is 0"


KERNEL = sharded_adamw.sharded_adamw_kernel
BARRIER = "barrier(flags_ptr, abort_ptr, {}, rank, WORLD, ROUND=0, trace_ptr=trace_ptr)"


class TestShardedAdamW(ProtocolSuite):
    modules = (signals, shard_sums, sharded_adamw)
    needed = (sharded_adamw,)
    worlds = ((2, 2), (2, 1), (3, 2))
    faults = (
        Fault("the first round again", replace(KERNEL, "1", by="0", call="barrier")),
        Fault("the epoch before will do", replace(KERNEL, BARRIER.format("epoch"), by=BARRIER.format("epoch - 1"))),
        Fault("another rank's shard of the gradients", replace(KERNEL, "start", by="0", call="sum_over_ranks")),
        Fault("another rank's shard of the parameters", replace(KERNEL, "start", by="0", call="shard_pointer")),
        Fault("another rank's masters", replace(KERNEL, "values_ptr + start", by="values_ptr")),
        Fault("parameters for this rank alone", replace(KERNEL, "(rank + distance) % WORLD", by="rank")),
        Fault("a rank gets none", replace(KERNEL, "WORLD", by="WORLD - 1", call="static_range")),
        Fault("a shard that is cut short", replace(KERNEL, "offs < m", by="offs < m - 1")),
        Fault("decayed beyond decay_end", replace(KERNEL, "offs < decay_end", by="offs <= decay_end")),
    )

    def program(self, memory: SimulatedMemory) -> None:
        list(zero(memory, steps=2))

    def short_program(self, memory: SimulatedMemory) -> Iterator[tuple[int, int]]:
        return zero(memory, steps=4, lr=0.0)

    def late_program(self, memory: SimulatedMemory) -> None:
        """A launch that ends early changes nothing."""
        bucket = Bucket(memory, connect(memory), 40, torch.bfloat16)
        for step in range(2):
            bucket.check()
            bucket.expect(bucket.backward(step))
            bucket.update(summed=False)
            without_rank_0(memory, "sharded_adamw", bucket.end.state, partial(bucket.update, summed=False))
            bucket.check()


def test_gradients_written_right_after_the_sum_are_a_race() -> None:
    def program(memory: SimulatedMemory) -> None:
        bucket = Bucket(memory, connect(memory), 20, torch.float32)
        bucket.backward(0)
        bucket.sum()
        bucket.backward(1)  # overwrites gradients that peers may still be reading

    with pytest.raises(RaceError, match="race on gradients 20"):
        explore(program, 2, resident=2)
