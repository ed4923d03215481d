"""adamw on a flat shard beside torch.optim.AdamW(fused=True): a step, which moves memory and nothing else.

    python -m benchmarks.bench_adamw --quick

Two cases: float32 throughout, which is what torch's step does; and bf16 gradients and parameters with float32 masters,
for which torch needs a cast before its step and one after it.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import OURS, Case, Scale, Stage, Work, command
from benchmarks.timing import Contender, one_line
from tpfuse.kernels import reference
from tpfuse.ops.adamw import adamw_
from tpfuse.testing.compare import check_error

FUSED = "torch.optim.AdamW(fused=True)"
RATES = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_STEP = 3  # the first one that is taken
_COMPARED = 1 << 20  # elements


@dataclass
class Shard:
    """master, exp_avg, exp_avg_sq: [n] float32; gradient: [n]; parameter: [n] bf16, or None where it is the master."""

    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    parameter: Tensor | None

    def copy(self, elements: int | None = None) -> "Shard":
        """The first elements, or all, in memory of their own."""
        parts = (self.master, self.gradient, self.exp_avg, self.exp_avg_sq, self.parameter)
        return Shard(*(None if x is None else x[:elements].clone() for x in parts))  # type: ignore[arg-type]

    def state(self) -> dict[str, Tensor]:
        """What a step changes."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


def _ours(shard: Shard) -> Callable[[], None]:
    device = shard.master.device
    step, rate = torch.full((), float(_STEP), device=device), torch.full((), RATES["lr"], device=device)
    tensors = [shard.master], [shard.gradient], [shard.exp_avg], [shard.exp_avg_sq], [shard.parameter]
    return partial(adamw_, *tensors, **(RATES | {"lr": rate}), step=step)  # type: ignore[arg-type]


def _torch(shard: Shard) -> Callable[[], None]:
    rates = {"lr": RATES["lr"], "eps": RATES["eps"], "weight_decay": RATES["weight_decay"]}
    optimizer = torch.optim.AdamW([shard.master], betas=(RATES["beta1"], RATES["beta2"]), fused=True, **rates)
    optimizer.state[shard.master] = {
        "step": torch.full((), _STEP - 1.0, device=shard.master.device),
        "exp_avg": shard.exp_avg,
        "exp_avg_sq": shard.exp_avg_sq,
    }
    shard.master.grad = torch.empty_like(shard.master) if shard.parameter is not None else shard.gradient

    def step() -> None:
        if shard.parameter is not None:
            assert shard.master.grad is not None
            shard.master.grad.copy_(shard.gradient)
        optimizer.step()
        if shard.parameter is not None:
            shard.parameter.copy_(shard.master)

    return step


CONTENDERS: Mapping[str, Callable[[Shard], Callable[[], None]]] = {OURS: _ours, FUSED: _torch}


def _expected(shard: Shard, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state after a step in plain torch."""
    parts = (x.to(dtype) for x in (shard.master, shard.gradient, shard.exp_avg, shard.exp_avg_sq))
    return dict(zip(shard.state(), reference.adamw(*parts, **RATES, step=_STEP), strict=True))  # type: ignore[arg-type]


def _verdict(make: Callable[[Shard], Callable[[], None]], shard: Shard) -> str:
    plain, truth = (_expected(shard, dtype) for dtype in (torch.float32, torch.float64))
    after = shard.copy()
    try:
        make(after)()
        for name, actual in after.state().items():
            error = (plain[name].double() - truth[name]).abs().max().item()
            bound = 2 * error + torch.finfo(torch.float32).eps * truth[name].abs().max().item()
            check_error(name, actual, plain[name], truth[name], bound)
        rounded = after.master.to(torch.bfloat16)
        assert after.parameter is None or torch.equal(after.parameter, rounded), "the parameter is not the master"
    except Exception as error:
        return one_line(error)
    return ""


def _build(n: int, half: bool, stage: Stage) -> tuple[Callable[[], dict[str, str]], list[Work]]:
    dtype = torch.bfloat16 if half else torch.float32
    shard = Shard(
        master=stage.normal(n, dtype=torch.float32),
        gradient=stage.normal(n, dtype=dtype),
        exp_avg=stage.normal(n, scale=0.1, dtype=torch.float32),
        exp_avg_sq=stage.normal(n, dtype=torch.float32).square_(),
        parameter=torch.empty(n, dtype=dtype, device=stage.device) if half else None,
    )
    moved = n * (7 * 4 if not half else 6 * 4 + 2 * 2)  # four or three float32 in, three out; bf16 in and out

    def check() -> dict[str, str]:
        return {name: _verdict(make, shard.copy(_COMPARED)) for name, make in CONTENDERS.items()}

    def contender(name: str) -> Contender:
        step = CONTENDERS[name](shard.copy())
        return Contender(name, lambda _: step())

    return check, [Work("step", 0.0, moved, tuple(contender(name) for name in CONTENDERS))]


def cases(scale: Scale) -> list[Case]:
    """All of GPT-2 124M in both forms, and a shard of a larger model."""
    sizes = {"124m": 124_439_808} if scale == "quick" else {"124m": 124_439_808, "7b, a shard of 16": 421_163_008}
    if scale == "tiny":
        sizes = {"tiny": 1000}
    made = []
    for name, n in sizes.items():
        for half in (True, False):
            kind = "bf16 with float32 master" if half else "float32"
            case = Case("adamw", f"{name}, {n}, {kind}", partial(_build, n, half), name != "7b, a shard of 16")
            made.append(case)
    return made


if __name__ == "__main__":
    sys.exit(command("adamw", cases))
