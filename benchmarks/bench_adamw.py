"""Time a step of adamw on a flat shard beside torch.optim.AdamW(fused=True); a step only moves memory.

There are two forms: float32 throughout, which is the form of torch's step; and bf16 gradients and parameters with
float32 masters, for which torch needs a cast before its step and one after it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.harness import OURS, Bench, BenchCase, Built, TimedMode
from benchmarks.timing import Candidate, verdict
from tpfuse.ops.adamw import adamw_
from tpfuse.tools.operator import Tensors, check_rounding
from tpfuse.tools.operators.adamw import LR, NUMBERS, RATES, STEP, AdamWShape, updated

FUSED = "torch.optim.AdamW(fused=True)"
_COMPARED = 1 << 20  # elements


def _copy(shard: Tensors, elements: int | None = None) -> Tensors:
    """Return the first elements, or all of them, in new memory."""
    return {name: x[:elements].clone() for name, x in shard.items()}


def _ours(shard: Tensors) -> Callable[[], None]:
    device = shard["master"].device
    rates: dict[str, Any] = RATES | {name: torch.full((), float(x), device=device) for name, x in NUMBERS.items()}
    lists = [[shard[name]] for name in ("master", "gradient", "exp_avg", "exp_avg_sq")]
    return partial(adamw_, *lists, [shard.get("parameter")], **rates)


def _torch(shard: Tensors) -> Callable[[], None]:
    master, gradient, parameter = shard["master"], shard["gradient"], shard.get("parameter")
    rates = {"lr": LR, "eps": RATES["eps"], "weight_decay": RATES["weight_decay"]}
    optimizer = torch.optim.AdamW([master], betas=(RATES["beta1"], RATES["beta2"]), fused=True, **rates)
    optimizer.state[master] = {
        "step": torch.full((), STEP - 1.0, device=master.device),
        "exp_avg": shard["exp_avg"],
        "exp_avg_sq": shard["exp_avg_sq"],
    }
    wide = master.grad = gradient if parameter is None else torch.empty_like(master)

    def step() -> None:
        if parameter is not None:
            wide.copy_(gradient)
        optimizer.step()
        if parameter is not None:
            parameter.copy_(master)

    return step


CANDIDATES: Mapping[str, Callable[[Tensors], Callable[[], None]]] = {OURS: _ours, FUSED: _torch}


def _check(make: Callable[[Tensors], Callable[[], None]], shard: Tensors) -> None:
    plain, truth = (updated(shard, dtype) for dtype in (torch.float32, torch.float64))
    after = _copy(shard)
    make(after)()
    for name, exact in truth.items():
        check_rounding(name, after[name], plain[name], exact)
    parameter, rounded = after.get("parameter"), after["master"].to(torch.bfloat16)
    assert parameter is None or torch.equal(parameter, rounded), "the parameter is not the master"


def _build(shape: AdamWShape, bench: Bench) -> Built:
    shard = shape.inputs(bench)

    def check() -> dict[str, str]:
        compared = _copy(shard, _COMPARED)
        return {name: verdict(partial(_check, make, compared)) for name, make in CANDIDATES.items()}

    def candidate(name: str) -> Candidate:
        step = CANDIDATES[name](_copy(shard))
        return Candidate(name, lambda _: step())

    moved = shape.costs()["step"].moved
    return check, [TimedMode("step", 0.0, moved, tuple(candidate(name) for name in CANDIDATES))]


def cases(tiny: bool) -> list[BenchCase]:
    """Return all parameters of GPT-2 124M in both forms, and a shard of a larger model."""
    sizes = {"tiny": 1000} if tiny else {"124m": 124_439_808, "7b, a shard of 16": 421_163_008}
    kinds = {True: "bf16 with float32 master", False: "float32"}
    return [
        BenchCase("adamw", f"{name}, {n}, {kind}", partial(_build, AdamWShape(name, n, half)), name[:2] != "7b")
        for name, n in sizes.items()
        for half, kind in kinds.items()
    ]
