"""adamw: one update of a flat shard in one pass (arXiv:1711.05101), in the order of torch.optim.AdamW(fused=True).

    g = gradient scale clip        p = p - lr decay p        m = m + (1 - β₁) (g - m)        v = β₂ v + (1 - β₂) g²
    p = p - lr / (1 - β₁ᵗ) m / (sqrt(v) / sqrt(1 - β₂ᵗ) + eps)

The learning rate, the number t of the update, the gradient's scale and its clip factor are read from device memory:
nothing waits for the device, and a CUDA graph of the step sees new values. 1 - βᵗ is computed as 1 - exp(t log β), by
a series where that is small, so that it keeps float32's relative accuracy; βᵗ rounded first would leave three digits of
1 - 0.999. The parameter in its half type is written in the same pass.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_contiguous, check_device, check_integers, check_shape
from tpfuse.kernels.configurations import choose
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.tiles import rounded


@triton.jit
def _one_minus_exp(y):
    """1 - exp(y) of y <= 0 with float32's relative accuracy."""
    series = y * 0.0 + 1.0
    for i in tl.static_range(8):  # Σ y^k / (k + 1)!, from the inside; the next term is below 2^-30 at y = -1/2
        series = 1.0 + series * y / (9 - i)
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp(y))


@triton.jit
def updated(
    master, gradient, exp_avg, exp_avg_sq, lr, step, rate1, log_beta1, beta2, rate2, log_beta2, eps, weight_decay
):
    """(p, m, v) after update t = step, element by element in float32; weight_decay: of all, or of each element."""
    master -= lr * weight_decay * master
    exp_avg += rate1 * (gradient - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + rate2 * gradient * gradient
    step_size = lr / _one_minus_exp(step * log_beta1)
    correction = tl.sqrt_rn(_one_minus_exp(step * log_beta2))
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), correction) + eps
    master -= step_size * tl.div_rn(exp_avg, denominator)
    return master, exp_avg, exp_avg_sq


@triton.jit
def adamw_kernel(
    master_ptr,  # [n] float32, updated
    gradient_ptr,  # [n] bf16, read
    exp_avg_ptr,  # [n] float32, updated
    exp_avg_sq_ptr,  # [n] float32, updated
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
    exp_avg = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0)

    lr, step = tl.load(lr_ptr), tl.load(step_ptr).to(tl.float32)
    if scale_ptr is not None:
        gradient *= tl.load(scale_ptr)
    if clip_ptr is not None:
        gradient *= tl.load(clip_ptr)
    master, exp_avg, exp_avg_sq = updated(
        master, gradient, exp_avg, exp_avg_sq, lr, step, rate1, log_beta1, beta2, rate2, log_beta2, eps, weight_decay
    )

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
    """Update number `step` (from 1: the caller has advanced it) of master and moments, and of parameter from master.

    master, exp_avg, exp_avg_sq: [n] float32, gradient and parameter: [n] float32, float16 or bfloat16, all contiguous;
    parameter None where master is the parameter. lr, step, scale, clip: one element each on the same device, float32,
    step float32 or int64. The gradient is multiplied by scale and clip; one that is not finite goes into the state as
    it is: whether to skip the update is the caller's to decide. Raises ValueError for other shapes, dtypes, devices.
    """
    scalars = {"lr": lr, "step": step, "scale": scale, "clip": clip}
    check_shard(master, gradient, exp_avg, exp_avg_sq, parameter, scalars)
    if master.dtype != torch.float32:
        raise ValueError(f"adamw: master is {master.dtype}: expected float32")
    row = choose("adamw", master.device, gradient.dtype if parameter is None else parameter.dtype)
    launch(
        adamw_kernel,
        (cdiv(len(master), row.blocks["BLOCK"]),),
        num_warps=row.num_warps,
        num_stages=row.num_stages,
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
        **row.blocks,
    )


def rates(beta1: float, beta2: float, eps: float, weight_decay: float) -> dict[str, Any]:
    """What `updated` takes of them."""
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


def check_shard(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    parameter: Tensor | None,
    scalars: dict[str, Tensor | None],
    operator: str = "adamw",
) -> None:
    """Raises ValueError unless these are what `adamw_` takes, but for a state in float64 too."""
    if master.ndim != 1 or master.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{operator}: master is {master.dtype} {tuple(master.shape)}: expected float32 [n]")
    state, rest = (master.dtype,), (torch.float16, torch.bfloat16, master.dtype)
    for name, x, dtypes in (
        ("master", master, state),
        ("gradient", gradient, rest),
        ("exp_avg", exp_avg, state),
        ("exp_avg_sq", exp_avg_sq, state),
        ("parameter", parameter, rest),
    ):
        if x is not None:
            check_shape(operator, name, x, tuple(master.shape))
            check_device(operator, "master", master, name, x)
            check_integers(operator, name, x, dtypes)
            check_contiguous(operator, name, x)
    for name, x in scalars.items():
        if x is not None:
            check_device(operator, "master", master, name, x)
            check_integers(operator, name, x, (torch.float32, torch.int64) if name == "step" else (torch.float32,))
            if x.numel() != 1:
                raise ValueError(f"{operator}: {name} has shape {tuple(x.shape)}: expected one element")
