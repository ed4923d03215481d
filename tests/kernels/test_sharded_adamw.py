"""Values of sharded_adamw, on ranks of a simulated symmetric memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support.cases import refusals
from tests.support.channels import connect, explore_once, unconnected
from tests.support.tiers import exhaustive
from tpfuse.explore import SimulatedMemory
from tpfuse.kernels import reference
from tpfuse.kernels.adamw import adamw_
from tpfuse.kernels.shard_sum import shard_sum
from tpfuse.kernels.sharded_adamw import sharded_adamw_
from tpfuse.testing.inputs import normal

RATES = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CLIP = torch.tensor(0.3)
# m, decay_end, clip, summed
CASES = ((37, 20, None, False), (37, 0, CLIP, True), (64, 64, CLIP, False), (1, 1, None, True))
TAIL = 5  # elements after the last shard, which no rank owns
TILES = {"shard_sum": {"BLOCK": 16}, "sharded_adamw": {"BLOCK": 16}}  # small shards have several programs

pytestmark = pytest.mark.usefixtures("tiny_tiles")


@dataclass
class Bucket:
    """The gradients of all ranks, and the trained shards concatenated: parameters and their masters, moments."""

    master: Tensor  # float32 [world * m + TAIL]
    values: Tensor
    gradients: Sequence[Tensor]
    moments: tuple[Tensor, Tensor]  # float32 or bfloat16 [world * m]

    @classmethod
    def draw(
        cls, seed: int, world: int, m: int, dtype: torch.dtype, sent: torch.dtype, moments: torch.dtype = F32
    ) -> "Bucket":
        n = world * m
        values = normal(seed, n + TAIL, dtype=dtype)
        master = values.float() if dtype == F32 else values.float() * 1.001
        gradients = [normal(seed + 1 + r, n + TAIL, dtype=sent) for r in range(world)]
        exp_avg, exp_avg_sq = normal(seed + 50, n) / 100, normal(seed + 51, n).square() / 10**4
        return cls(master, values, gradients, (exp_avg.to(moments), exp_avg_sq.to(moments)))

    def state(self, shard: slice) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return copies of a shard's master, which is None where the values are the master, and of its moments."""
        moments = tuple(x[shard].clone() for x in self.moments)
        return None if self.values.dtype == F32 else self.master[shard].clone(), *moments

    def after(self, shard: slice, decay_end: int, lr: Tensor, step: Tensor, clip: Tensor | None) -> list[Tensor]:
        """Return a shard's master, moments and values after the kernel's update from both parts of the sum."""
        total = reference.shard_sum([x[shard] for x in self.gradients])
        state = [x[shard].clone() for x in (self.master, *self.moments, self.values)]
        for part, decay in ((slice(decay_end), 0.1), (slice(decay_end, None), 0.0)):
            master, exp_avg, exp_avg_sq, value = (x[part] for x in state)
            rates = RATES | {"weight_decay": decay}
            parameter = None if value.dtype == F32 else value
            adamw_(master, total[part], exp_avg, exp_avg_sq, parameter, lr, step=step, clip=clip, **rates)
        return [*state[:3], state[0] if self.values.dtype == F32 else state[3]]


@pytest.mark.parametrize(
    ("world", "dtype", "sent", "moments"),
    [
        (2, BF16, F32, F32),
        (3, F32, BF16, BF16),
        *exhaustive((1, F16, F32, F32), (1, F32, F32, F32), (2, F32, F32, F32), (2, F16, F16, F32)),
        *exhaustive((3, BF16, BF16, F32), (2, BF16, BF16, BF16)),
    ],
)
def test_equal_to_the_sum_followed_by_the_update(
    world: int, dtype: torch.dtype, sent: torch.dtype, moments: torch.dtype
) -> None:
    """The bits agree on every rank, for shards of one program and of several; the other elements do not change."""

    def program(memory: SimulatedMemory) -> None:
        endpoint, rank = connect(memory), memory.rank
        lr, squares = torch.tensor([1e-2]), torch.empty(3).double()
        for number, (m, decay_end, clip, summed) in enumerate(CASES, 1):
            bucket, step = Bucket.draw(100 * number, world, m, dtype, sent, moments), torch.tensor(float(number))
            shards = [slice(r * m, (r + 1) * m) for r in range(world)]
            values = memory.buffer(f"values {number}", bucket.values.shape, dtype)
            gradients = memory.buffer(f"gradients {number}", bucket.values.shape, sent)
            values.local.copy_(bucket.values)
            gradients.local.copy_(bucket.gradients[rank])
            taken: tuple[Tensor, Tensor | None] = gradients.local, gradients.addresses
            if summed:
                total = torch.empty(m)
                shard_sum(*taken, total, squares, shards[rank].start, endpoint)
                taken = total, None
            state = bucket.state(shards[rank])
            tensors = values.local, values.addresses, *taken, *state
            numbers = {"lr": lr, "step": step, "clip": clip, "endpoint": endpoint} | RATES
            sharded_adamw_(*tensors, start=shards[rank].start, decay_end=decay_end, **numbers)
            expected = [bucket.after(shard, decay_end, lr, step, clip) for shard in shards]
            for actual, after in zip(state, expected[rank], strict=False):
                assert actual is None or torch.equal(actual, after)
            whole = torch.cat([after[3] for after in expected])
            assert torch.equal(values.local, torch.cat([whole, bucket.values[-TAIL:]])), (m, decay_end, clip, summed)

    explore_once(program, world)


TABLE = torch.zeros(3, dtype=torch.int64)
ALONE = {"values": torch.zeros(24), "value_addresses": TABLE, "gradients": torch.zeros(24), "gradient_addresses": TABLE}
ALONE |= {"master": None, "start": 16, "decay_end": 3, "exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8)} | RATES
ALONE |= {"lr": torch.ones(1), "step": torch.ones(1), "clip": torch.ones(1), "endpoint": unconnected(16, flag_count=12)}

test_bad_input = refusals(
    sharded_adamw_,
    ALONE,
    "sharded_adamw: ",
    ({"values": torch.zeros(3, 8)}, r"values has shape \(3, 8\): expected \(24,\)"),
    ({"values": torch.zeros(24).double()}, "values is torch.float64: expected float32 or float16 or bfloat16"),
    ({"values": torch.zeros(24).half()}, "values are torch.float16, master is None: expected a master of float32"),
    ({"values": torch.zeros(24, device="meta")}, "values is on meta, the channel on cpu"),
    ({"value_addresses": torch.zeros(2).long()}, r"the addresses of values has shape \(2,\): expected \(3,\)"),
    ({"gradient_addresses": torch.zeros(3)}, "the addresses of gradients is torch.float32: expected int64"),
    ({"gradients": torch.zeros(16)}, r"the shard \[16, 24\) is not inside gradients \[16\]"),
    ({"gradient_addresses": None}, r"gradient has shape \(24,\): expected \(8,\)"),
    ({"master": torch.zeros(8).half()}, "master is torch.float16"),
    ({"master": torch.zeros(9)}, r"gradient has shape \(8,\): expected \(9,\)"),
    ({"exp_avg": torch.zeros(8).half()}, "exp_avg is torch.float16: expected float32"),
    ({"exp_avg_sq": torch.zeros(16)[::2]}, r"exp_avg_sq has strides \(2,\): expected contiguous"),
    ({"start": 17}, r"the shard \[17, 25\) is not inside values \[24\]"),
    ({"step": torch.zeros(2)}, r"step has shape \(2,\): expected one element"),
    ({"lr": torch.zeros(1).double()}, "lr is torch.float64: expected float32"),
    ({"clip": torch.zeros(1, device="meta")}, "clip is on meta, master on cpu"),
    ({"endpoint": unconnected(16, flag_count=5)}, "too few flags: one program needs 6"),
)
