"""layer_norm: (x - mean) / sqrt(var + eps) * weight + bias over the last dimension.

On sequence shards each rank has some of the rows, so the gradients of weight and bias are partial sums; with a group
they are summed over it in backward. rms_norm uses the same operators on Triton's path.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm.layout import check_local
from tpfuse.comm.mesh import check_group
from tpfuse.kernels.checks import check_device, check_shape
from tpfuse.kernels.launch import planned
from tpfuse.kernels.layer_norm import norm_forward
from tpfuse.kernels.layer_norm_backward import norm_backward
from tpfuse.ops.autograd import apply, once_differentiable, registered, wanted_gradients
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
    return norm("layer_norm", x, weight, bias, eps, sum_gradients_over, centered=True)[0]


def layer_norm_and_input(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    sum_gradients_over: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (layer norm of x, x), for a residual path, x + block(layer norm of x).

    Where Triton computes, one pass of backward computes the norm's gradient and adds that of the x returned, and rounds
    the sum once. Autograd would add the two in a pass of its own. Arguments and errors: as in `layer_norm`.
    """
    return norm("layer_norm", x, weight, bias, eps, sum_gradients_over, centered=True, with_input=True)


def norm(
    operator: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    sum_gradients_over: dist.ProcessGroup | None,
    *,
    centered: bool,
    with_input: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (norm of x, x). centered: layer_norm if true, otherwise rms_norm.

    with_input: whether the norm's backward pass adds the gradient of the x returned, as `layer_norm_and_input` says.
    """
    if sum_gradients_over is not None:
        check_group(operator, sum_gradients_over)
    triton = _check(operator, x, weight, bias)
    if sum_gradients_over is not None:
        weight = None if weight is None else replicate(weight, sum_gradients_over)
        bias = None if bias is None else replicate(bias, sum_gradients_over)
    shape = (x.shape[-1],)
    if not triton:
        return F.layer_norm(x, shape, weight, bias, eps) if centered else F.rms_norm(x, shape, weight, eps), x
    weight = x.new_ones(shape) if weight is None else weight
    rows, same = x if x.ndim == 2 else x.reshape(-1, *shape), x
    if with_input and x.requires_grad and torch.is_grad_enabled():
        out, _, _, same = apply(_AndInput, rows, weight, bias, eps, centered)
        same = same if x.ndim == 2 else same.view(x.shape)
    else:
        out = _forward(rows, weight, bias, eps, centered)[0]
    return out if x.ndim == 2 else out.view(x.shape), same


@planned
def _check(operator: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Raise ValueError unless x is [..., C] of floats, and weight and bias are [C]; return whether Triton computes."""
    check_local(operator, x=x, weight=weight, bias=bias)
    if not x.is_floating_point() or not x.ndim or not x.shape[-1]:
        raise ValueError(f"{operator}: x is {x.dtype} {tuple(x.shape)}: expected floats [..., C], C of at least 1")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None:
            check_shape(operator, name, other, tuple(x.shape[-1:]))
            check_device(operator, "x", x, name, other)
            like_name, like = ("x", x) if weight is None else ("weight", weight)
            if other.dtype != like.dtype:
                raise ValueError(f"{operator}: {name} is {other.dtype}: expected {like.dtype}, as {like_name}")
    if weight is not None and not weight.is_floating_point():
        raise ValueError(f"{operator}: weight is {weight.dtype}: expected floats")
    return use_triton(x)


@registered("tpfuse::norm_forward")
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, mean, rstd), with an empty tensor for None: all results of an operator are tensors."""
    out, mean, rstd = norm_forward(x, weight, bias, eps, centered=centered)
    return out, rstd.new_empty(0) if mean is None else mean, rstd


@_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    return x.new_empty(x.shape), torch.empty_like(rstd) if centered else rstd.new_empty(0), rstd


@registered("tpfuse::norm_backward")
def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, added: Tensor | None, centered: bool,
    with_bias: bool, with_x: bool, with_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dx + added, dweight, dbias), with an empty tensor for each gradient that is not wanted."""
    dx, dweight, dbias = norm_backward(
        grad, x, weight, mean if centered else None, rstd, added,
        with_bias=with_bias, with_x=with_x, with_weight=with_weight,
    )  # fmt: skip
    dx = x.new_empty(0) if dx is None else dx
    dweight = weight.new_empty(0) if dweight is None else dweight
    return dx, dweight, weight.new_empty(0) if dbias is None else dbias


@_gradients.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    with_bias, with_x, with_weight = others[-3:]
    dweight, dbias = (
        weight.new_empty(weight.shape if flag else 0) for flag in (with_weight, with_weight and with_bias)
    )
    return x.new_empty(x.shape if with_x else 0), dweight, dbias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, _, ctx.centered = inputs
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.set_materialize_grads(False)  # mean and rstd have none


@once_differentiable
def _backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    added = others[2] if len(others) > 2 else None  # the gradient of the x that `_AndInput` returned
    if grad is None:  # a function that used the result has no gradient for it
        return added, None, None, None, None
    needs_x, needs_weight, needs_bias, *_none = wanted_gradients(ctx)
    dx, dweight, dbias = _gradients(
        grad, *ctx.saved_tensors, added if needs_x else None, ctx.centered,
        needs_bias, needs_x, needs_weight or needs_bias,
    )  # fmt: skip
    return dx if needs_x else None, dweight if needs_weight else None, dbias if needs_bias else None, None, None


_forward.register_autograd(_backward, setup_context=_setup_context)


class _AndInput(Function):
    """Returns the results of `_forward` and x itself."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return *output, inputs[0]

    backward = staticmethod(_backward)
