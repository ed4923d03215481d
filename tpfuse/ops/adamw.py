"""adamw_: an update of several flat shards; kernels/adamw.py has the formula.

Where the kernels do not run, torch's own fused update is called, once for all shards. Both have the same state, so that
either can continue from a state that the other has saved.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from tpfuse.kernels import adamw
from tpfuse.switches import use_triton

_GOLDEN = -1640531535  # 0x9E3779B1 as int32
_MIX1 = -2048144789  # 0x85EBCA6B
_MIX2 = -1028477387  # 0xC2B2AE35


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
    given = {"lr": lr, "step": step, "scale": scale, "clip": clip}
    scalars = {name: x if isinstance(x, Tensor) else None for name, x in given.items()}
    for shard in shards:
        adamw.check_shard(*shard, scalars)
    if not shards:
        return
    rates = beta1, beta2, eps, weight_decay
    if not use_triton(masters[0]):
        _by_torch(shards, lr, *rates, step, scale, clip)
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


def _by_torch(
    shards: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]],
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
        (exp_avg, exp_avg_sq, _drawn(master, gradient, exp_avg, exp_avg_sq, step))
        for master, gradient, exp_avg, exp_avg_sq in zip(masters, gradients, exp_avgs, exp_avg_sqs, strict=True)
        if exp_avg.dtype == torch.bfloat16
    ]
    if halves:
        exp_avgs, exp_avg_sqs = ([x.float() for x in moments] for moments in (exp_avgs, exp_avg_sqs))
    torch._fused_adamw_(  # torch.optim.AdamW(fused=True) calls this too, but counts the steps of each shard itself
        masters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step.view(()).float()] * len(masters),
        lr=lr.item() if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    for (exp_avg, exp_avg_sq, random), *new in zip(halves, exp_avgs, exp_avg_sqs, strict=False):
        _keep(exp_avg, new[0], random & 0xFFFF)
        _keep(exp_avg_sq, new[1], (random >> 16).bitwise_and_(0xFFFF))
    for master, parameter in zip(masters, parameters, strict=True):
        if parameter is not None:
            parameter.copy_(master)


def _drawn(master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor) -> Tensor:
    """Return the bits of `tpfuse.kernels.adamw.drawn`, int32. Products and sums wrap around, and shifts bring zeros."""
    random = (_bits(gradient) & ~0xFFFF).bitwise_or_(_bits(exp_avg)).mul_(_GOLDEN)
    random += (_bits(exp_avg_sq) << 16).bitwise_or_((_bits(master) >> 16).bitwise_and_(0xFFFF))
    random ^= step.view(()).int() * _GOLDEN
    random.bitwise_xor_((random >> 16).bitwise_and_(0xFFFF)).mul_(_MIX1)
    random.bitwise_xor_((random >> 13).bitwise_and_(0x7FFFF)).mul_(_MIX2)
    return random.bitwise_xor_((random >> 16).bitwise_and_(0xFFFF))


def _keep(kept: Tensor, new: Tensor, random: Tensor) -> None:
    """Round a new moment, float32, into `kept`, bfloat16, by 16 random bits; a NaN stays one."""
    bits = _bits(new)
    kept.view(torch.int16).copy_(torch.where(new.isnan(), bits, random.add_(bits)).bitwise_right_shift_(16))


def _bits(x: Tensor) -> Tensor:
    """Return the bits of float32 or bfloat16 as int32; the upper half is 0 for bfloat16."""
    return x.view(torch.int32) if x.dtype == torch.float32 else x.view(torch.int16).int().bitwise_and_(0xFFFF)


@custom_op("tpfuse::adamw_", mutates_args=("master", "exp_avg", "exp_avg_sq", "parameter"))
def _update(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    parameter: Tensor | None,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
) -> None:
    adamw.adamw_(
        master, gradient, exp_avg, exp_avg_sq, parameter, lr, beta1, beta2, eps, weight_decay, step, scale, clip
    )
