"""sharded_adamw, alone or after shard_sum: one rank alone, with its signals, for `tpfuse verify`.

The launches have groups of several sizes and gradients of both types, with the sum computed before or not.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.shard_sum import shard_sum
from tpfuse.kernels.sharded_adamw import sharded_adamw_
from tpfuse.testing.inputs import normal
from tpfuse.tools.endpoints import of_one_rank, on_meta
from tpfuse.tools.operator import CallCost, Draw, Given, Operator, Shape, Tensors

RATES: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_LR, _STEPS, _START, _DECAY_END, _CLIP = 0.25, 3, 16, 500, 0.5


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


def _address(x: Tensor) -> Tensor:
    return torch.tensor([x.data_ptr()], device=x.device)


@torch.no_grad()
def _updates(gradients: Tensor, *, summed: bool) -> Tensor:
    """Return the bucket of parameters after some updates of its elements from _START on."""
    device, m = gradients.device, len(gradients) - _START
    values, scalar = normal(2, len(gradients), dtype=gradients.dtype).to(device), torch.zeros((), device=device)
    exp_avg, exp_avg_sq, sums = (torch.zeros(m, device=device) for _ in range(3))
    master = None if values.dtype == torch.float32 else values[_START:].float()
    endpoint, memory = of_one_rank(device, programs=3)
    squares = torch.zeros(endpoint.programs, device=device)
    for step in range(1, _STEPS + 1):
        sent = gradients * step
        taken, addresses = sent, None if summed else _address(sent)
        if summed:
            taken = sums
            shard_sum(sent, _address(sent), sums, squares, _START, endpoint)
        numbers = RATES | {"lr": scalar + _LR, "step": scalar + step, "clip": scalar + _CLIP}
        tensors = values, _address(values), taken, addresses, master, exp_avg, exp_avg_sq
        sharded_adamw_(*tensors, start=_START, decay_end=_DECAY_END, **numbers, endpoint=endpoint)
    del memory  # freed in the order of the stream, or at once if kernels are interpreted
    return values


def _function(gradients: Tensor, *, summed: bool) -> Tensor:
    """Return the parameters after the updates. The operator has no gradient, so its input takes none from it."""
    return _updates(gradients, summed=summed) + 0 * gradients


def _reference(gradients: Tensor) -> Tensor:
    dtype = torch.float64 if gradients.dtype == torch.float64 else torch.float32
    values = normal(2, len(gradients), dtype=gradients.dtype).to(gradients.device)
    parameter = values[_START:].to(dtype)
    moments = [torch.zeros_like(parameter) for _ in range(2)]
    numbers = RATES | {"decay_end": _DECAY_END, "clip": _CLIP, "lr": _LR}
    for step in range(1, _STEPS + 1):
        sent = (gradients * step).detach()[_START:]
        parameter, *moments = reference.sharded_adamw(parameter, [sent.to(dtype)], *moments, step=step, **numbers)
    return torch.cat([values[:_START], parameter.to(values.dtype)]) + 0 * gradients


def _case(name: str, summed: bool) -> Given:
    return Given(
        f"{name}, one rank",
        partial(_function, summed=summed),
        _reference,
        lambda dtype: {"gradients": normal(1, 1003, dtype=dtype)},
    )


CASES = (_case("gradients of all", summed=False), _case("sums known before", summed=True))


def launches(dtype: torch.dtype) -> None:
    """Launch the last rank of groups of several sizes, on meta tensors."""
    for world in (2, 4, 8):
        _launch(dtype, world, torch.bfloat16 if world == 4 else torch.float32, clipped=world == 8)


def _launch(dtype: torch.dtype, world: int, kept: torch.dtype, *, clipped: bool, m: int = 1 << 22) -> None:
    def empty(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(n, dtype=dtype, device="meta")

    table, scalar = empty(world, torch.int64), torch.empty((), device="meta")
    endpoint = on_meta(world, flags=4096, programs=64, slot_bytes=16)
    values, sums, start = empty(world * m, dtype), empty(m), (world - 1) * m
    master = None if dtype == torch.float32 else sums
    numbers = RATES | {"lr": scalar, "step": scalar, "clip": scalar if clipped else None}
    moments = empty(m, kept)
    for sent in {dtype, torch.float32}:
        gradients = empty(world * m, sent)
        shard_sum(gradients, table, sums, empty(64), start, endpoint)
        for taken, addresses in ((gradients, table), (sums, None)):
            tensors = values, table, taken, addresses, master, moments, moments
            sharded_adamw_(*tensors, start=start, decay_end=m // 3, **numbers, endpoint=endpoint)


OPERATOR = Operator("sharded_adamw", launches, CASES)
