"""adamw: the update of a shard. Its launches have every combination of dtypes that training uses."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpfuse.comm.sum_order import summed_dtype
from tpfuse.kernels import adamw, reference
from tpfuse.ops.adamw import adamw_
from tpfuse.testing.inputs import normal
from tpfuse.tools.operator import CallCost, Draw, Given, Launchers, Operator, Outputs, Shape, Tensors, seeded_draw

RATES: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_OPTIONS = RATES | {"lr": 1e-2}
_STEPS = 3
LR, STEP = 1e-3, 3
NUMBERS = {"lr": LR, "step": STEP}  # scalars on the device in training


@dataclass(frozen=True)
class AdamWShape(Shape):
    """Update STEP of a shard [n] with state in float32.

    half: gradient and parameter have a half type. Otherwise the gradient is float32 and the master is the parameter.
    """

    name: str
    n: int
    half: bool = True

    def inputs(self, draw: Draw) -> Tensors:
        wide = torch.float32
        state = {
            "master": draw.normal(self.n, dtype=wide),
            "exp_avg": draw.normal(self.n, scale=0.1, dtype=wide),
            "exp_avg_sq": draw.normal(self.n, dtype=wide).square_(),
            "gradient": draw.normal(self.n, dtype=None if self.half else wide),
        }
        return state | ({"parameter": torch.empty_like(state["gradient"])} if self.half else {})

    def costs(self) -> dict[str, CallCost]:
        """Return the cost: 28 bytes are moved for each element.

        In float32, four numbers are read and three are written. With a half type, three float32 numbers are read and
        three are written, and a gradient is read and a parameter is written in the half type.
        """
        return {"step": CallCost(0.0, 28 * self.n)}

    def drawn(self, device: torch.device, dtype: torch.dtype) -> Tensors:
        numbers = {name: torch.full((), float(x), device=device) for name, x in NUMBERS.items()}
        return self.inputs(seeded_draw(device, dtype)) | numbers

    def launch(self, **inputs: Any) -> Outputs:
        adamw.adamw_(**inputs, **RATES)
        return inputs["master"], inputs["exp_avg"], inputs["exp_avg_sq"], inputs["parameter"]

    def plain(self, parameter: Tensor, **shard: Tensor) -> Outputs:
        after = updated(shard, shard["master"].dtype)
        return *after.values(), after["master"].to(parameter.dtype)

    def launchers(self) -> Launchers:
        return {"step": (self.launch, self.plain)}


def updated(shard: Tensors, dtype: torch.dtype) -> Tensors:
    """Return the state after update STEP in plain torch, computed in `dtype`."""
    names = ("master", "gradient", "exp_avg", "exp_avg_sq")
    rates: dict[str, Any] = RATES | NUMBERS
    after = reference.adamw(*(shard[name].to(dtype) for name in names), **rates)
    return dict(zip(("master", "exp_avg", "exp_avg_sq"), after, strict=True))


def _function(gradient: Tensor) -> Tensor:
    """Return the parameter after some updates. The operator has no gradient, so its input takes none from it."""
    master, parameter = normal(2, len(gradient)).to(gradient.device), torch.empty_like(gradient, requires_grad=False)
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    with torch.no_grad():
        for step in range(1, _STEPS + 1):
            update = [master], [gradient * step], [exp_avg], [exp_avg_sq], [parameter]
            adamw_(*update, step=torch.tensor(float(step), device=master.device), **_OPTIONS)
    return parameter + 0 * gradient


def _reference(gradient: Tensor) -> Tensor:
    dtype = summed_dtype(gradient.dtype)
    parameter = normal(2, len(gradient)).to(gradient.device, dtype)
    moments = [torch.zeros_like(parameter) for _ in range(2)]
    for step in range(1, _STEPS + 1):
        update = (gradient * step).detach().to(dtype)
        parameter, *moments = reference.adamw(parameter, update, *moments, step=step, **_OPTIONS)
    return parameter.to(gradient.dtype) + 0 * gradient


CASES = (Given("three updates", _function, _reference, lambda dtype: {"gradient": normal(1, 1000, dtype=dtype)}),)


def launches(dtype: torch.dtype) -> None:
    """Launch updates of a half parameter by float32 and half gradients, and updates in float32 alone.

    Moments have either dtype.
    """
    master = torch.empty(1 << 22, device="meta")
    scalar = torch.empty((), device="meta")
    parameter = None if dtype == torch.float32 else torch.empty(1 << 22, dtype=dtype, device="meta")
    for gradient_dtype in {dtype, torch.float32}:
        gradient = torch.empty(1 << 22, dtype=gradient_dtype, device="meta")
        for factor, moments in ((None, torch.float32), (scalar, torch.float32), (scalar, torch.bfloat16)):
            exp_avg, exp_avg_sq = (torch.empty(1 << 22, dtype=moments, device="meta") for _ in range(2))
            rates = _OPTIONS | {"lr": scalar, "step": scalar, "scale": factor, "clip": factor}
            adamw.adamw_(master, gradient, exp_avg, exp_avg_sq, parameter, **rates)


OPERATOR = Operator(
    name="adamw",
    launches=launches,
    cases=CASES,
    models=(AdamWShape("124m adamw", 124_439_808),),
    tiny=(AdamWShape("tiny", 100),),
)
