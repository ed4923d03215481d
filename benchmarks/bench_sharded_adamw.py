"""Time sharded_adamw with all ranks' memory on one GPU: reduce-scatter, AdamW and all-gather in a launch without waits.

One rank updates its shard of GPT-2 124M's parameters, bf16 with float32 masters. The buffers of the other ranks are on
this GPU too, and their signals are set already. So the benchmark measures how the kernel uses memory, and not links.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.bench_overlapped_gemm import RANK, Group
from benchmarks.harness import OURS, Bench, BenchCase, Built, TimedMode
from benchmarks.timing import Candidate, verdict
from tpfuse.kernels import reference
from tpfuse.kernels.sharded_adamw import sharded_adamw_
from tpfuse.tools.operator import check_rounding
from tpfuse.tools.operators.sharded_adamw import RATES, ShardedAdamWShape

_COMPARED = 1 << 20  # elements of a shard
_NUMBERS = {"lr": 1e-3, "step": 3.0, "clip": 0.5}


class Ranks:
    """The parameters and gradients of all ranks, and the state of rank `RANK`."""

    def __init__(self, shape: ShardedAdamWShape, bench: Bench) -> None:
        world, m, device = shape.world, shape.m, bench.device
        self.decay_end = m // 2
        self.own = slice(RANK * m, (RANK + 1) * m)
        self.gradients, self.master, self.exp_avg, self.exp_avg_sq = shape.inputs(bench).values()
        self.values = torch.zeros(world, world * m, dtype=torch.bfloat16, device=device)
        self._group = Group(world, 16, device)
        self.signalled = self._group.signalled
        both = self.values, self.gradients
        self._tables = [torch.tensor([row.data_ptr() for row in x], device=device) for x in both]
        self._scalars = {name: torch.full((), x, device=device) for name, x in _NUMBERS.items()}

    def update(self, _: object = None) -> None:
        """Update this rank's shard."""
        values, gradients = self.values[RANK], self.gradients[RANK]
        tensors = values, self._tables[0], gradients, self._tables[1], self.master, self.exp_avg, self.exp_avg_sq
        options = RATES | self._scalars | {"start": self.own.start, "decay_end": self.decay_end}
        sharded_adamw_(*tensors, endpoint=self._group.endpoint, **options)

    def _expected(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return master and moments after an update in plain torch."""
        sent = [x[self.own].to(dtype) for x in self.gradients]
        state = (x.to(dtype) for x in (self.exp_avg, self.exp_avg_sq))
        return reference.sharded_adamw(
            self.master.to(dtype), sent, *state, decay_end=self.decay_end, **RATES, **_NUMBERS
        )

    def check(self) -> None:
        """Raise AssertionError where state or parameters are wrong after an update."""
        plain, truth = self._expected(torch.float32), self._expected(torch.float64)
        self.signalled()
        self.update()
        for name, each, exact in zip(("master", "exp_avg", "exp_avg_sq"), plain, truth, strict=True):
            check_rounding(name, getattr(self, name), each, exact)
        rounded = self.master.to(torch.bfloat16)
        assert all(torch.equal(x[self.own], rounded) for x in self.values), "parameters are not the master"
        self.values[:, self.own] = 0
        assert not self.values.any(), "other shards were written"


def _build(shape: ShardedAdamWShape, bench: Bench) -> Built:
    ranks, compared = Ranks(shape, bench), replace(shape, m=min(shape.m, _COMPARED))
    candidate = Candidate(OURS, ranks.update, ranks.signalled)
    works = [TimedMode("step", 0.0, shape.costs()["step"].moved, (candidate,))]
    return lambda: {OURS: verdict(lambda: Ranks(compared, bench).check())}, works


def cases(tiny: bool) -> list[BenchCase]:
    """Return cases of eight ranks and of two, with gradients in bf16 and in float32."""
    n = 608 if tiny else 124_439_808
    chosen_cases = []
    for world in (8, 2):
        m = n // (16 * world) * 16
        for sent in (torch.bfloat16, torch.float32):
            name = f"124m, a shard of {world}, gradients {str(sent).removeprefix('torch.')}"
            shape = ShardedAdamWShape(name, world, m, sent)
            chosen_cases.append(BenchCase("sharded_adamw", name, partial(_build, shape), True))
    return chosen_cases[:2] if tiny else chosen_cases
