"""Time sharded_adamw with all ranks' memory on one GPU: reduce-scatter, AdamW and all-gather in a launch without waits.

    python -m benchmarks.bench_sharded_adamw --quick

One rank updates its shard of GPT-2 124M's parameters, bf16 with float32 masters. The buffers of the other ranks are on
this GPU too, and their signals are set already. So the benchmark measures how the kernel uses memory, and not links.
The least that it can move: it reads every rank's gradients of the shard, reads and writes the state, and writes the
parameters to every rank.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import OURS, Bench, Case, Measurement, Scale, command
from benchmarks.timing import Candidate, one_line
from tpfuse.kernels import reference
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.launch import multiprocessors
from tpfuse.kernels.sharded_adamw import sharded_adamw_
from tpfuse.testing.compare import check_error

RATES = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_RANK = 1  # the rank whose work this GPU does
_COMPARED = 1 << 20  # elements of a shard
_LR, _STEP, _CLIP = 1e-3, 3.0, 0.5


class Ranks:
    """The parameters and gradients of `world` ranks, whose shards have m elements, and the state of rank `_RANK`."""

    def __init__(self, world: int, m: int, sent: torch.dtype, bench: Bench) -> None:
        device = bench.device
        self.world, self.m, self.decay_end, self._device = world, m, m // 2, device
        self.own = slice(_RANK * m, (_RANK + 1) * m)
        self.gradients = bench.normal(world, world * m, dtype=sent)
        self.values = torch.zeros(world, world * m, dtype=torch.bfloat16, device=device)
        self.master, self.exp_avg = bench.normal(m, dtype=torch.float32), bench.normal(m, dtype=torch.float32)
        self.exp_avg_sq = bench.normal(m, dtype=torch.float32).square_()
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
        own = self._flags[_RANK]
        own.copy_(torch.where(self._of_others, self._state[:1] + 1, own))

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


def _build(
    world: int, m: int, sent: torch.dtype, bench: Bench
) -> tuple[Callable[[], dict[str, str]], list[Measurement]]:
    ranks = Ranks(world, m, sent, bench)
    moved = m * (world * (sent.itemsize + 2) + 6 * 4)
    candidate = Candidate(OURS, ranks.update, ranks.signalled)
    return lambda: {OURS: Ranks(world, min(m, _COMPARED), sent, bench).verdict()}, [
        Measurement("step", 0.0, moved, (candidate,))
    ]


def cases(scale: Scale) -> list[Case]:
    """Return cases of eight ranks and of two, with gradients in bf16 and in float32."""
    n = 124_439_808 if scale != "tiny" else 608
    made = []
    for world in (8, 2):
        m = n // (16 * world) * 16
        for sent in (torch.bfloat16, torch.float32):
            name = f"124m, a shard of {world}, gradients {str(sent).removeprefix('torch.')}"
            made.append(Case("sharded_adamw", name, partial(_build, world, m, sent), True))
    return made if scale == "all" else made[:2]


if __name__ == "__main__":
    sys.exit(command("sharded_adamw", cases))
