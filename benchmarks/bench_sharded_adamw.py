"""Time sharded_adamw with all ranks' memory on one GPU: reduce-scatter, AdamW and all-gather in a launch without waits.

    python -m benchmarks.bench_sharded_adamw --quick

One rank updates its shard of GPT-2 124M's parameters, bf16 with float32 masters. The buffers of the other ranks are on
this GPU too, and their signals are set already. So the benchmark measures how the kernel uses memory, and not links.
"""

import sys
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import OURS, Bench, BenchCase, Built, Scale, TimedMode, command
from benchmarks.timing import Candidate, one_line
from tpfuse.kernels import reference
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.launch import multiprocessors
from tpfuse.kernels.sharded_adamw import sharded_adamw_
from tpfuse.testing.compare import check_error
from tpfuse.tools.operators.sharded_adamw import RATES, ShardedAdamWShape

_RANK = 1  # the rank whose work this GPU does
_COMPARED = 1 << 20  # elements of a shard
_LR, _STEP, _CLIP = 1e-3, 3.0, 0.5


class Ranks:
    """The parameters and gradients of all ranks, and the state of rank `_RANK`."""

    def __init__(self, shape: ShardedAdamWShape, bench: Bench) -> None:
        world, m, device = shape.world, shape.m, bench.device
        self.decay_end, self._device = m // 2, device
        self.own = slice(_RANK * m, (_RANK + 1) * m)
        self.gradients, self.master, self.exp_avg, self.exp_avg_sq = shape.inputs(bench).values()
        self.values = torch.zeros(world, world * m, dtype=torch.bfloat16, device=device)
        programs = multiprocessors(device)
        self._flags = torch.zeros(world, 2 * programs * world, dtype=torch.int32, device=device)
        self._state, abort = (torch.zeros(n, dtype=torch.int32, device=device) for n in (2, 1))
        table, count = self._addresses(self._flags), self._flags.shape[1]
        self._endpoint = Endpoint(_RANK, world, table, 16, table, count, self._state, abort, programs=programs)
        self._of_others = torch.arange(count, device=device) % world != _RANK
        self._tables = self._addresses(self.values), self._addresses(self.gradients)
        self._scalars = {name: torch.full((), x, device=device) for name, x in self._numbers().items()}

    def _addresses(self, x: Tensor) -> Tensor:
        return torch.tensor([row.data_ptr() for row in x], device=self._device)

    @staticmethod
    def _numbers() -> dict[str, float]:
        return {"lr": _LR, "step": _STEP, "clip": _CLIP}

    def signalled(self) -> None:
        """Set this rank's flags as if the other ranks had reached both barriers of the next launch."""
        flags = self._flags[_RANK]
        flags.copy_(torch.where(self._of_others, self._state[:1] + 1, flags))

    def update(self, _: object = None) -> None:
        """Update this rank's shard."""
        values, gradients = self.values[_RANK], self.gradients[_RANK]
        sharded_adamw_(
            values,
            self._tables[0],
            gradients,
            self._tables[1],
            self.master,
            self.exp_avg,
            self.exp_avg_sq,
            start=self.own.start,
            decay_end=self.decay_end,
            endpoint=self._endpoint,
            **RATES,
            **self._scalars,
        )

    def _expected(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return master and moments after an update in plain torch."""
        sent = [x[self.own].to(dtype) for x in self.gradients]
        state = (x.to(dtype) for x in (self.exp_avg, self.exp_avg_sq))
        return reference.sharded_adamw(
            self.master.to(dtype), sent, *state, decay_end=self.decay_end, **RATES, **self._numbers()
        )

    def verdict(self) -> str:
        """Return "" where state and parameters are right after an update."""
        plain, truth = self._expected(torch.float32), self._expected(torch.float64)
        try:
            self.signalled()
            self.update()
            for index, actual in enumerate((self.master, self.exp_avg, self.exp_avg_sq)):
                error = (plain[index].double() - truth[index]).abs().max().item()
                bound = 2 * error + torch.finfo(torch.float32).eps * truth[index].abs().max().item()
                check_error(("master", "exp_avg", "exp_avg_sq")[index], actual, plain[index], truth[index], bound)
            rounded = self.master.to(torch.bfloat16)
            assert all(torch.equal(x[self.own], rounded) for x in self.values), "parameters are not the master"
            self.values[:, self.own] = 0
            assert not self.values.any(), "other shards were written"
        except Exception as error:
            return one_line(error)
        return ""


def _build(shape: ShardedAdamWShape, bench: Bench) -> Built:
    ranks, compared = Ranks(shape, bench), replace(shape, m=min(shape.m, _COMPARED))
    candidate = Candidate(OURS, ranks.update, ranks.signalled)
    works = [TimedMode("step", 0.0, shape.costs()["step"].moved, (candidate,))]
    return lambda: {OURS: Ranks(compared, bench).verdict()}, works


def cases(scale: Scale) -> list[BenchCase]:
    """Return cases of eight ranks and of two, with gradients in bf16 and in float32."""
    n = 124_439_808 if scale != "tiny" else 608
    chosen_cases = []
    for world in (8, 2):
        m = n // (16 * world) * 16
        for sent in (torch.bfloat16, torch.float32):
            name = f"124m, a shard of {world}, gradients {str(sent).removeprefix('torch.')}"
            shape = ShardedAdamWShape(name, world, m, sent)
            chosen_cases.append(BenchCase("sharded_adamw", name, partial(_build, shape), True))
    return chosen_cases if scale == "all" else chosen_cases[:2]


if __name__ == "__main__":
    sys.exit(command("sharded_adamw", cases))
