"""adamw_: an update of several flat shards; kernels/adamw.py has the formula.

Where the kernels do not run, torch's own fused update is called: on GPUs once for all shards, on CPUs block by block.
Both have the same state, so that either can continue from a state that the other has saved.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from tpfuse.kernels import adamw
from tpfuse.switches import use_triton

_GOLDEN = -1640531535  # 0x9E3779B1 as int32
_MIX1 = -2048144789  # 0x85EBCA6B
_MIX2 = -1028477387  # 0xC2B2AE35
_LANES = 16
_BLOCK = 2**17  # elements that a CPU updates at once: their temporary tensors stay in its caches

_Shard = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def adamw_(
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    scale: Tensor | None = None,
    clip: float | Tensor | None = None,
) -> None:
    """Apply update number `step` (from 1) to every shard in place: update master and moments, then the parameter.

    masters, exp_avgs, exp_avg_sqs: [n] each, float32 (float64 on torch's path); gradients: [n] of that dtype or a half
    one; parameters: [n] of a half type, copied from the master, or None if the master is the parameter. Moments of
    float32 masters may be bfloat16; kernels/adamw.py says how they are rounded. The gradients
    are multiplied by scale and clip. step and scale are tensors of one element, float32 (step also int64), on the
    device; lr and clip may be such tensors, so that a CUDA graph sees their new values. Raise ValueError if the lists
    differ in length or the tensors in shape, dtype or device.
    """
    lists = {"gradients": gradients, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "parameters": parameters}
    for name, tensors in lists.items():
        if len(tensors) != len(masters):
            raise ValueError(f"adamw: {len(tensors)} {name}: expected {len(masters)}, as many as masters")
    shards = list(zip(masters, gradients, exp_avgs, exp_avg_sqs, parameters, strict=True))
    scalars = [x if isinstance(x, Tensor) else None for x in (lr, step, scale, clip)]
    for shard in shards:
        adamw.check_shard("adamw", *shard, *scalars)
    if not shards:
        return
    rates = beta1, beta2, eps, weight_decay
    if not use_triton(masters[0]):
        rate = lr.item() if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr
        for together in _blocks(shards):
            _by_torch(together, rate, *rates, step.view(()).float(), scale, clip)
    else:
        rate, factor = _on_device(lr, step.device), None if clip is None else _on_device(clip, step.device)
        # Without tracing the kernel is called directly: the operator would take as long as the launch.
        update = _update if torch.compiler.is_compiling() else adamw.adamw_
        for shard in shards:
            update(*shard, rate, *rates, step, scale, factor)
    if not torch.compiler.is_compiling():  # neither update tells autograd, which must refuse tensors saved before it
        torch.autograd.graph.increment_version([x for shard in shards for x in (shard[0], shard[4]) if x is not None])


def _on_device(x: float | Tensor, device: torch.device) -> Tensor:
    return x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float32, device=device)


def _blocks(shards: Sequence[_Shard]) -> Iterator[Sequence[_Shard]]:
    """Yield all shards at once; on CPUs blocks of at most _BLOCK elements, which small shards fill together."""
    if shards[0][0].device.type != "cpu":
        yield shards
        return
    together, room = list[_Shard](), _BLOCK
    for shard in shards:
        for start in range(0, len(shard[0]), _BLOCK):
            part = tuple(x if x is None else x[start : start + _BLOCK] for x in shard)
            size = min(len(shard[0]) - start, _BLOCK)
            if size > room:
                yield together
                together, room = [], _BLOCK
            together.append(part)  # type: ignore[arg-type]
            room -= size
    if together:
        yield together


def _by_torch(
    shards: Sequence[_Shard],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    scale: Tensor | None,
    clip: float | Tensor | None,
) -> None:
    masters, gradients, exp_avgs, exp_avg_sqs, parameters = (list(tensors) for tensors in zip(*shards, strict=True))
    gradients = [x.to(master.dtype) for x, master in zip(gradients, masters, strict=True)]
    for factor in (scale, clip):
        if factor is not None:
            gradients = [x * factor for x in gradients]
    halves = [  # the moments that torch does not update in place
        (exp_avg, exp_avg_sq, *_drawn(master, gradient, exp_avg, exp_avg_sq, step))
        for master, gradient, exp_avg, exp_avg_sq in zip(masters, gradients, exp_avgs, exp_avg_sqs, strict=True)
        if exp_avg.dtype == torch.bfloat16
    ]
    if halves:
        exp_avgs, exp_avg_sqs = ([x.float() for x in moments] for moments in (exp_avgs, exp_avg_sqs))
    new_masters, full_gradients, new_exp_avgs, new_exp_avg_sqs = (
        [_filled(x) for x in tensors] for tensors in (masters, gradients, exp_avgs, exp_avg_sqs)
    )
    torch._fused_adamw_(  # torch.optim.AdamW(fused=True) calls this too, but counts the steps of each shard itself
        new_masters, full_gradients, new_exp_avgs, new_exp_avg_sqs, [], [step] * len(masters),
        lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    for old, new in zip(masters + exp_avgs + exp_avg_sqs, new_masters + new_exp_avgs + new_exp_avg_sqs, strict=True):
        if new is not old:
            old.copy_(new[: len(old)])
    for (exp_avg, exp_avg_sq, low, high), *wide in zip(halves, exp_avgs, exp_avg_sqs, strict=False):
        _keep(exp_avg, wide[0], low)
        _keep(exp_avg_sq, wide[1], high)
    for master, parameter in zip(masters, parameters, strict=True):
        if parameter is not None:
            parameter.copy_(master)


def _filled(x: Tensor) -> Tensor:
    """Return x [n], on CPUs as a copy with zeros up to a multiple of 16 elements, unless it has that many.

    Torch computes the last elements of a tensor that fill no vectors by other code, which rounds otherwise: without
    this, the update of an element would depend on where the shards are cut.
    """
    return F.pad(x, (0, -len(x) % _LANES)) if x.device.type == "cpu" and len(x) % _LANES else x


def _drawn(
    master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the lower and upper 16 bits of `tpfuse.kernels.adamw.drawn`, int32.

    Products and sums wrap around, and shifts bring zeros.
    """
    random = exp_avg_sq.float().view(torch.int32)
    random |= (master.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
    upper = (gradient.view(torch.int32) & ~0xFFFF).bitwise_or_(exp_avg.view(torch.uint16).int())
    random.add_(upper, alpha=_GOLDEN).bitwise_xor_(step.view(()).int() * _GOLDEN)
    for places, factor in ((16, _MIX1), (13, _MIX2)):
        random.bitwise_xor_((random >> places).bitwise_and_(2 ** (32 - places) - 1)).mul_(factor)
    upper = (random >> 16).bitwise_and_(0xFFFF)
    return random.bitwise_xor_(upper).bitwise_and_(0xFFFF), upper


def _keep(kept: Tensor, new: Tensor, random: Tensor) -> None:
    """Round a new moment, float32, into `kept`, bfloat16, by 16 random bits; a NaN stays one."""
    bits = new.view(torch.int32)
    random *= (bits & 0x7FFFFFFF).le_(0x7F800000)  # 0 for a NaN; torch.where takes several times as long
    kept.view(torch.int16).copy_(random.add_(bits).bitwise_right_shift_(16))


@custom_op(
    "tpfuse::adamw_",
    mutates_args=("master", "exp_avg", "exp_avg_sq", "parameter"),
    schema="(Tensor(a!) master, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? parameter, "
    "Tensor lr, float beta1, float beta2, float eps, float weight_decay, Tensor step, Tensor? scale, Tensor? clip)"
    " -> ()",
)
def _update(*arguments: Any) -> None:
    adamw.adamw_(*arguments)
