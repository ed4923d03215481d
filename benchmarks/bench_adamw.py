"""Time a step of adamw beside torch.optim.AdamW(fused=True), and one of sharded_adamw; a step only moves memory.

adamw updates a flat shard, in two forms: float32 throughout, which is the form of torch's step; and bf16 gradients and
parameters with float32 masters, for which torch needs a cast before its step and one after it.

sharded_adamw is reduce-scatter, AdamW and all-gather in a launch without waits, with all ranks' memory on one GPU. One
rank updates its shard of GPT-2 124M's parameters, bf16 with float32 masters. The buffers of the other ranks are on this
GPU too, and their signals are set already. So the benchmark measures how the kernel uses memory, and not links.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_overlapped_gemm import RANK, Group
from benchmarks.harness import OURS, Bench, BenchCase, Built, TimedMode
from benchmarks.timing import Candidate, verdict
from tpfuse.kernels import reference
from tpfuse.kernels.sharded_adamw import sharded_adamw_
from tpfuse.ops.adamw import adamw_
from tpfuse.tools.operator import Tensors, check_rounding
from tpfuse.tools.operators.adamw import LR, NUMBERS, RATES, STEP, AdamWShape, updated
from tpfuse.tools.operators.sharded_adamw import ShardedAdamWShape

PARAMETERS = 124_439_808  # of GPT-2 124M
_COMPARED = 1 << 20  # elements of a shard
_STATE = ("master", "exp_avg", "exp_avg_sq")


def _on_device(numbers: Mapping[str, float], device: torch.device) -> dict[str, Any]:
    return RATES | {name: torch.full((), float(x), device=device) for name, x in numbers.items()}


def _copy(shard: Tensors, elements: int | None = None) -> Tensors:
    """Return the first elements, or all of them, in new memory."""
    return {name: x[:elements].clone() for name, x in shard.items()}


def _ours(shard: Tensors) -> Callable[[], None]:
    lists = [[shard[name]] for name in ("master", "gradient", "exp_avg", "exp_avg_sq")]
    return partial(adamw_, *lists, [shard.get("parameter")], **_on_device(NUMBERS, shard["master"].device))


def _torch(shard: Tensors) -> Callable[[], None]:
    master, gradient, parameter = shard["master"], shard["gradient"], shard.get("parameter")
    rates = {"lr": LR, "eps": RATES["eps"], "weight_decay": RATES["weight_decay"]}
    optimizer = torch.optim.AdamW([master], betas=(RATES["beta1"], RATES["beta2"]), fused=True, **rates)
    step = torch.full((), STEP - 1.0, device=master.device)
    optimizer.state[master] = {"step": step} | {name: shard[name] for name in _STATE[1:]}
    wide = master.grad = gradient if parameter is None else torch.empty_like(master)

    def update() -> None:
        if parameter is not None:
            wide.copy_(gradient)
        optimizer.step()
        if parameter is not None:
            parameter.copy_(master)

    return update


CANDIDATES = {OURS: _ours, "torch.optim.AdamW(fused=True)": _torch}


def _check(make: Callable[[Tensors], Callable[[], None]], shard: Tensors) -> None:
    plain, truth = (updated(shard, dtype) for dtype in (torch.float32, torch.float64))
    after = _copy(shard)
    make(after)()
    for name, exact in truth.items():
        check_rounding(name, after[name], plain[name], exact)
    parameter, rounded = after.get("parameter"), after["master"].to(torch.bfloat16)
    assert parameter is None or torch.equal(parameter, rounded), "the parameter is not the master"


def _flat(shape: AdamWShape, bench: Bench) -> Built:
    shard = shape.inputs(bench)

    def check() -> dict[str, str]:
        compared = _copy(shard, _COMPARED)
        return {name: verdict(partial(_check, make, compared)) for name, make in CANDIDATES.items()}

    def candidate(name: str) -> Candidate:
        step = CANDIDATES[name](_copy(shard))
        return Candidate(name, lambda _: step())

    return check, [TimedMode("step", 0.0, shape.costs()["step"].moved, tuple(map(candidate, CANDIDATES)))]


def adamw(tiny: bool) -> list[BenchCase]:
    """Return all parameters of GPT-2 124M in both forms, and a shard of a larger model."""
    sizes = {"tiny": 1000} if tiny else {"124m": PARAMETERS, "7b, a shard of 16": 421_163_008}
    kinds = {True: "bf16 with float32 master", False: "float32"}
    return [
        BenchCase("adamw", f"{name}, {n}, {kind}", partial(_flat, AdamWShape(name, n, half)), name[:2] != "7b")
        for name, n in sizes.items()
        for half, kind in kinds.items()
    ]


class Ranks:
    """The parameters and gradients of all ranks, and the state of rank `RANK`."""

    def __init__(self, shape: ShardedAdamWShape, bench: Bench) -> None:
        world, m, device = shape.world, shape.m, bench.device
        self.own = slice(RANK * m, (RANK + 1) * m)
        inputs = shape.inputs(bench)
        self.gradients, self.state = inputs["gradients"], [inputs[name] for name in _STATE]
        self.values = torch.zeros(world, world * m, dtype=torch.bfloat16, device=device)
        self._group = Group(world, 16, device)
        self.signalled = self._group.signalled
        both = self.values, self.gradients
        values, sent = (torch.tensor([row.data_ptr() for row in x], device=device) for x in both)
        self._tensors = self.values[RANK], values, self.gradients[RANK], sent, *self.state
        self._decay_end, self._numbers = m // 2, {"lr": 1e-3, "step": 3.0, "clip": 0.5}
        self._options = {"start": self.own.start, "decay_end": m // 2, **_on_device(self._numbers, device)}

    def update(self, _: object = None) -> None:
        """Update this rank's shard."""
        sharded_adamw_(*self._tensors, endpoint=self._group.endpoint, **self._options)

    def _expected(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return master and moments after an update in plain torch."""
        sent = [x[self.own].to(dtype) for x in self.gradients]
        master, *moments = (x.to(dtype) for x in self.state)
        rates = RATES | self._numbers
        return reference.sharded_adamw(master, sent, *moments, decay_end=self._decay_end, **rates)

    def check(self) -> None:
        """Raise AssertionError where state or parameters are wrong after an update."""
        plain, truth = self._expected(torch.float32), self._expected(torch.float64)
        self.signalled()
        self.update()
        for name, *each in zip(_STATE, self.state, plain, truth, strict=True):
            check_rounding(name, *each)
        rounded = self.state[0].to(torch.bfloat16)
        assert all(torch.equal(x[self.own], rounded) for x in self.values), "parameters are not the master"
        self.values[:, self.own] = 0
        assert not self.values.any(), "other shards were written"


def _sharded(shape: ShardedAdamWShape, bench: Bench) -> Built:
    ranks, compared = Ranks(shape, bench), replace(shape, m=min(shape.m, _COMPARED))
    candidate = Candidate(OURS, ranks.update, ranks.signalled)
    works = [TimedMode("step", 0.0, shape.costs()["step"].moved, (candidate,))]
    return lambda: {OURS: verdict(lambda: Ranks(compared, bench).check())}, works


def sharded_adamw(tiny: bool) -> list[BenchCase]:
    """Return cases of eight ranks and of two, with gradients in bf16 and in float32."""
    chosen_cases = []
    for world in (8,) if tiny else (8, 2):
        m = (608 if tiny else PARAMETERS) // (16 * world) * 16
        for sent in (torch.bfloat16, torch.float32):
            name = f"124m, a shard of {world}, gradients {str(sent).removeprefix('torch.')}"
            shape = ShardedAdamWShape(name, world, m, sent)
            chosen_cases.append(BenchCase("sharded_adamw", name, partial(_sharded, shape), True))
    return chosen_cases
