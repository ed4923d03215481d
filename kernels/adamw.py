"""adamw: one update of a flat shard in one pass (arXiv:1711.05101), in the order of torch.optim.AdamW(fused=True).

    g = gradient scale clip        p = p - lr decay p        m = m + (1 - β₁) (g - m)        v = β₂ v + (1 - β₂) g²
    p = p - lr / (1 - β₁ᵗ) m / (sqrt(v) / sqrt(1 - β₂ᵗ) + eps)

The kernel reads the learning rate, the number t of the update, the gradient's scale and its clip factor from device
memory, so that the host does not wait for the device and a replayed CUDA graph of the step sees new values. It computes
1 - βᵗ as 1 - exp(t log β), by a series where that is small, so that the value keeps float32's relative accuracy. If βᵗ
were rounded first, three digits of 1 - 0.999 would be left. The same pass writes the parameter in its half type.

Moments may be kept in bfloat16, which has 8 bits. A step changes v by the share 1 - β₂ of g² - v. If that is less than
half of the last bit, as it is for β₂ = 0.999, rounding to the nearest loses it: v never falls. So m and v are rounded
up or down at random, with the probabilities that keep their expectation (stochastic rounding, arXiv:2010.06192). The
random bits are a hash of t and the upper halves of the element's gradient, old parameter and old moments. So they
need no position and no seed: every division of a model into shards and blocks rounds alike, and gradients that differ
in their last bits nearly always do.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_device, check_dtype, check_tensor
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.launch import cdiv, launch, planned
from tpfuse.kernels.tiles import rounded


@triton.jit
def _one_minus_exp(y):
    """Return 1 - exp(y) of y <= 0 with float32's relative accuracy."""
    series = y * 0.0 + 1.0
    for i in tl.static_range(8):  # Σ y^k / (k + 1)! by Horner's scheme; the next term is below 2^-30 at y = -1/2
        series = 1.0 + series * y / (9 - i)
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp(y))


@triton.jit
def updated(
    master, gradient, exp_avg, exp_avg_sq, lr, step, rate1, log_beta1, beta2, rate2, log_beta2, eps, weight_decay
):
    """Return (p, m, v) after update t = step, in float32; weight_decay: a number, or one for each element."""
    master -= lr * weight_decay * master
    exp_avg += rate1 * (gradient - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + rate2 * gradient * gradient
    step_size = lr / _one_minus_exp(step * log_beta1)
    correction = tl.sqrt_rn(_one_minus_exp(step * log_beta2))
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), correction) + eps
    master -= step_size * tl.div_rn(exp_avg, denominator)
    return master, exp_avg, exp_avg_sq


@triton.jit
def _high(x):
    """Return the upper half of the bits of float32 x, which is x in bfloat16, rounded towards 0."""
    return x.to(tl.uint32, bitcast=True) >> 16


@triton.jit
def _mixed(x):
    """Return the finalizer of MurmurHash3 (Appleby, 2011) of x, uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _at_random(x, random):
    """Return float32 x in bfloat16, rounded away from 0 if its lost bits and `random`, of 16 bits, have a carry."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(x == x, bits + random, bits)  # a NaN stays one
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def drawn(master, gradient, exp_avg, exp_avg_sq, step, dtype: tl.constexpr):
    """Return 32 random bits for `kept`, from an element's values before the update, float32, of number `step`."""
    if dtype == tl.float32:
        return gradient  # nothing is rounded
    else:
        number = step.to(tl.int32).to(tl.uint32, bitcast=True) * 0x9E3779B1
        words = ((_high(gradient) << 16) | _high(exp_avg)) * 0x9E3779B1 + ((_high(exp_avg_sq) << 16) | _high(master))
        return _mixed(words ^ number)


@triton.jit
def kept(exp_avg, exp_avg_sq, random, dtype: tl.constexpr):
    """Return new moments, float32, as they are kept in `dtype`, float32 or bfloat16. random: that of `drawn`."""
    if dtype == tl.float32:
        return exp_avg, exp_avg_sq
    else:
        return _at_random(exp_avg, random & 0xFFFF), _at_random(exp_avg_sq, random >> 16)


@triton.jit
def adamw_kernel(
    master_ptr,  # [n] float32, updated
    gradient_ptr,  # [n] bf16, read
    exp_avg_ptr,  # [n] float32 or bf16, updated
    exp_avg_sq_ptr,  # [n] like exp_avg, updated
    parameter_ptr,  # [n] bf16, written; or None
    lr_ptr,  # [1] float32, read
    step_ptr,  # [1] float32 or int64, read
    scale_ptr,  # [1] float32, read; or None
    clip_ptr,  # [1] float32, read; or None
    n,
    rate1,  # 1 - β₁
    log_beta1,
    beta2,
    rate2,  # 1 - β₂
    log_beta2,
    eps,
    weight_decay,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    gradient = tl.load(gradient_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    master = tl.load(master_ptr + offs, mask=mask, other=0.0)
    exp_avg = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0).to(tl.float32)

    lr, step = tl.load(lr_ptr), tl.load(step_ptr).to(tl.float32)
    if scale_ptr is not None:
        gradient *= tl.load(scale_ptr)
    if clip_ptr is not None:
        gradient *= tl.load(clip_ptr)
    random = drawn(master, gradient, exp_avg, exp_avg_sq, step, exp_avg_ptr.dtype.element_ty)
    master, exp_avg, exp_avg_sq = updated(
        master, gradient, exp_avg, exp_avg_sq, lr, step, rate1, log_beta1, beta2, rate2, log_beta2, eps, weight_decay
    )
    exp_avg, exp_avg_sq = kept(exp_avg, exp_avg_sq, random, exp_avg_ptr.dtype.element_ty)

    tl.store(master_ptr + offs, master, mask=mask)
    tl.store(exp_avg_ptr + offs, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + offs, exp_avg_sq, mask=mask)
    if parameter_ptr is not None:
        tl.store(parameter_ptr + offs, rounded(master, parameter_ptr.dtype.element_ty), mask=mask)


def adamw_(
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
    scale: Tensor | None = None,
    clip: Tensor | None = None,
) -> None:
    """Make update number `step` of master and moments, and write parameter from master.

    step counts from 1, and the caller has already increased it. master: [n] float32; exp_avg, exp_avg_sq: [n] float32,
    or both bfloat16; gradient and parameter: [n] float32, float16 or bfloat16, all contiguous; parameter is None where
    master is the parameter. lr,
    step, scale, clip: one element each on the same device; lr, scale and clip float32, step float32 or int64. The
    gradient is multiplied by scale and clip. A gradient that is not finite goes into the state unchanged: the caller
    decides whether to skip the update. Raise ValueError for other shapes, dtypes, devices.
    """
    check_shard("adamw", master, gradient, exp_avg, exp_avg_sq, parameter, lr, step, scale, clip)
    check_dtype("adamw", "master", master, (torch.float32,))
    row = choose_configuration("adamw", master.device, gradient.dtype if parameter is None else parameter.dtype)
    launch(
        adamw_kernel,
        (cdiv(len(master), row.blocks["BLOCK"]),),
        master_ptr=master,
        gradient_ptr=gradient,
        exp_avg_ptr=exp_avg,
        exp_avg_sq_ptr=exp_avg_sq,
        parameter_ptr=parameter,
        lr_ptr=lr,
        step_ptr=step,
        scale_ptr=scale,
        clip_ptr=clip,
        n=len(master),
        **rates(beta1, beta2, eps, weight_decay),
        **row.options,
    )


def rates(beta1: float, beta2: float, eps: float, weight_decay: float) -> dict[str, Any]:
    """Return the keyword arguments of `updated` that follow from these rates."""
    return {
        "rate1": 1.0 - beta1,
        "log_beta1": _log(beta1),
        "beta2": float(beta2),
        "rate2": 1.0 - beta2,
        "log_beta2": _log(beta2),
        "eps": float(eps),
        "weight_decay": float(weight_decay),
    }


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


@planned
def check_shard(
    operator: str,
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    parameter: Tensor | None,
    lr: Tensor | None,
    step: Tensor | None,
    scale: Tensor | None,
    clip: Tensor | None,
) -> bool:
    """Return True. Raise ValueError unless `adamw_` takes these tensors; a state in float64 is accepted too."""
    if master.ndim != 1 or master.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{operator}: master is {master.dtype} {tuple(master.shape)}: expected float32 [n]")
    state, rest = (master.dtype,), (torch.float16, torch.bfloat16, master.dtype)
    moments = state if master.dtype == torch.float64 else (*state, torch.bfloat16)
    for name, x, dtypes in (
        ("master", master, state),
        ("gradient", gradient, rest),
        ("exp_avg", exp_avg, moments),
        ("exp_avg_sq", exp_avg_sq, (exp_avg.dtype,)),
        ("parameter", parameter, rest),
    ):
        check_tensor(operator, name, x, tuple(master.shape), dtypes, ("master", master), contiguous=True)
    for name, x in (("lr", lr), ("step", step), ("scale", scale), ("clip", clip)):
        if x is not None:
            check_device(operator, "master", master, name, x)
            check_dtype(operator, name, x, (torch.float32, torch.int64) if name == "step" else (torch.float32,))
            if x.numel() != 1:
                raise ValueError(f"{operator}: {name} has shape {tuple(x.shape)}: expected one element")
    return True
