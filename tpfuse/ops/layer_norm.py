"""layer_norm: (x - mean) / sqrt(var + eps) * weight + bias over the last dimension; also of x + residual in one pass.

On sequence shards each rank has some of the rows, so the gradients of weight and bias are partial sums; with a group
they are summed over it in backward. rms_norm uses the same operators on Triton's path.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfuse.comm.layout import check_local
from tpfuse.kernels.checks import check_device, check_shape
from tpfuse.kernels.layer_norm import norm_forward
from tpfuse.kernels.layer_norm_backward import norm_backward
from tpfuse.ops.autograd import once_differentiable, registered, wanted_gradients
from tpfuse.ops.collectives import replicate
from tpfuse.switches import use_triton


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    sum_gradients_over: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the layer norm of x, in x's shape and dtype. x: [..., C]; weight, bias: [C], None for 1 and 0.

    sum_gradients_over: the group over which the rows are sharded, so that weight and bias receive the gradient of all
    rows; None if this rank has all rows or the caller sums the gradients. Raise ValueError for other shapes, integers,
    or tensors on several devices.
    """
    return norm("layer_norm", x, None, weight, bias, eps, sum_gradients_over, centered=True)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    sum_gradients_over: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(summed), summed) with summed = x + residual, in one pass, also in backward.

    residual: of x's shape and dtype; the other arguments: as in `layer_norm`.
    """
    return norm("add_layer_norm", x, residual, weight, bias, eps, sum_gradients_over, centered=True)


def norm(
    operator: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    sum_gradients_over: dist.ProcessGroup | None,
    *,
    centered: bool,
) -> tuple[Tensor, Tensor]:
    """Return (the norm of summed, summed = x + residual). centered: layer_norm if true, otherwise rms_norm."""
    _check(operator, x, weight, bias, residual)
    weight = None if weight is None else replicate(weight, sum_gradients_over)
    bias = None if bias is None else replicate(bias, sum_gradients_over)
    if not use_triton(x):
        summed, shape = x if residual is None else x + residual, (x.shape[-1],)
        plain = F.layer_norm(summed, shape, weight, bias, eps) if centered else F.rms_norm(summed, shape, weight, eps)
        return plain, summed
    rows = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(rows.shape)
    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    out, summed, _, _ = _forward(rows, added, weight, bias, eps, centered)
    return out.view(x.shape), x if residual is None else summed.view(x.shape)


def _check(operator: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    """Raise ValueError unless x is [..., C] of floats, residual like x, and weight and bias are [C]."""
    check_local(operator, x=x, weight=weight, bias=bias, residual=residual)
    if not x.is_floating_point() or not x.ndim or not x.shape[-1]:
        raise ValueError(f"{operator}: x is {x.dtype} {tuple(x.shape)}: expected floats [..., C], C of at least 1")
    for name, other in (("weight", weight), ("bias", bias), ("residual", residual)):
        if other is not None:
            check_shape(operator, name, other, tuple(x.shape if name == "residual" else x.shape[-1:]))
            check_device(operator, "x", x, name, other)
            like_name, like = ("x", x) if name == "residual" or weight is None else ("weight", weight)
            if other.dtype != like.dtype:
                raise ValueError(f"{operator}: {name} is {other.dtype}: expected {like.dtype}, as {like_name}")
    if weight is not None and not weight.is_floating_point():
        raise ValueError(f"{operator}: weight is {weight.dtype}: expected floats")


@registered("tpfuse::norm_forward")
def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, summed, mean, rstd), with an empty tensor for None: all results of an operator are tensors."""
    out, summed, mean, rstd = norm_forward(x, weight, bias, eps, residual, centered=centered)
    return out, _or_empty(summed, x), _or_empty(mean, rstd), rstd


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


@_forward.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    summed = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), summed, torch.empty_like(rstd) if centered else rstd.new_empty(0), rstd


@registered("tpfuse::norm_backward")
def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, grad_summed: Tensor | None, centered: bool,
    with_bias: bool, with_x: bool, with_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dx, dweight, dbias), with an empty tensor for each gradient that is not wanted."""
    dx, dweight, dbias = norm_backward(
        grad, x, weight, mean if centered else None, rstd, grad_summed=grad_summed if with_x else None,
        with_bias=with_bias, with_x=with_x, with_weight=with_weight,
    )  # fmt: skip
    return _or_empty(dx, x), _or_empty(dweight, weight), _or_empty(dbias, weight)


@_gradients.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    with_bias, with_x, with_weight = others[-3:]
    dweight, dbias = (
        weight.new_empty(weight.shape if flag else 0) for flag in (with_weight, with_weight and with_bias)
    )
    return x.new_empty(x.shape if with_x else 0), dweight, dbias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, _, _, ctx.centered = inputs
    _, summed, mean, rstd = output
    ctx.with_residual = residual is not None
    ctx.save_for_backward(summed if ctx.with_residual else x, weight, mean, rstd)
    ctx.set_materialize_grads(False)  # mean and rstd have none


@once_differentiable
def _backward(ctx: Any, grad: Tensor | None, grad_summed: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    grad_summed = grad_summed if ctx.with_residual else None
    if grad is None:  # only summed was used
        return grad_summed, grad_summed, None, None, None, None
    needs_x, needs_residual, needs_weight, needs_bias, *_none = wanted_gradients(ctx)
    flags = needs_bias, needs_x or needs_residual, needs_weight or needs_bias
    dx, dweight, dbias = _gradients(grad, *ctx.saved_tensors, grad_summed, ctx.centered, *flags)
    pairs = zip((dx, dx, dweight, dbias), (needs_x, needs_residual, needs_weight, needs_bias), strict=True)
    return *(gradient if needed else None for gradient, needed in pairs), None, None


_forward.register_autograd(_backward, setup_context=_setup_context)
