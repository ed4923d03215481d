"""gemm: act(x Wᵀ + bias) + residual, differentiable; and the products that it consists of.

A Triton kernel (`tpfuse.kernels.gemm`) computes forward if there is an activation or a residual, and keeps the
pre-activation; another one (`tpfuse.kernels.activation_backward`) computes the pre-activation's gradient P and its
column sums. Products that nothing follows are torch's on every device, cuBLAS's on GPUs: forward without activation and
residual, dX = P W and dW = Pᵀ x. So are some that Triton would compute more slowly (`_fuses`, `_by_cublaslt`). The
autograd Functions of the tensor-parallel operators call the products one by one: these choose between Triton and torch
as gemm does, but are not differentiable.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpfuse.kernels.activation_backward import activation_backward
from tpfuse.kernels.gemm import gemm_forward, takes_ping_pong
from tpfuse.kernels.launch import family, planned
from tpfuse.ops.activation import ACTIVATIONS, GATED
from tpfuse.ops.activation import activation as apply_activation
from tpfuse.ops.autograd import autocast, autocast_dtype, once_differentiable, registered, wanted_gradients
from tpfuse.ops.checks import check_linear, check_residual
from tpfuse.switches import use_triton


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return act(x Wᵀ + bias) + residual.

    x: [..., K]; weight: [N, K]; bias: [N]; of one float dtype, on one device, any strides. residual: like the result,
    [..., N], or [..., N / 2] for a gated activation, whose weight and bias are [gate | up]. The result has x's dtype;
    under torch.autocast it has autocast's dtype; with a residual of another dtype, the dtype of torch's addition.
    Raise ValueError for shapes, dtypes or devices that do not match and for an unknown activation.
    """
    call = _checked(x, weight, bias, residual, activation)
    if call.mixed:
        x, weight, bias = autocast(x, weight, bias)
    if not call.triton:
        out: Tensor = F.linear(x, weight, bias)
        out = out if activation is None else ACTIVATIONS[activation](out)
        return out if residual is None else out + residual
    keep = activation is not None and torch.is_grad_enabled()
    keep = keep and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
    added = residual if call.adds else None
    out, _ = _forward(flat(x), weight, bias, None if added is None else flat(added), activation, keep)
    out = out if x.ndim == 2 else out.view(call.shape)
    return out if residual is None or call.adds else out + residual


class _Call(NamedTuple):
    """A call of `gemm` whose arguments fit each other.

    mixed: whether autocast is on. triton: whether `_forward` computes the call; otherwise torch does. adds: whether
    `_forward` adds the residual.
    """

    mixed: bool
    shape: tuple[int, ...]
    triton: bool
    adds: bool


@planned
def _checked(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None) -> _Call:
    """Raise ValueError as `gemm` does."""
    check_linear("gemm", x, weight, bias, activation)
    shape = _result_shape(x, weight, activation)
    check_residual("gemm", x, residual, shape)
    dtype = autocast_dtype(x)
    computed = x.dtype if dtype is None or x.dtype is torch.float64 else dtype
    adds = residual is not None and residual.dtype == computed
    triton = use_triton(x) and (activation is not None or adds)
    # This asks as `_fuses` does, but before autocast converts anything. Compiled code asks there, when it runs.
    if triton and activation is None and not torch.compiler.is_compiling() and family(x.device) == "sm_90":
        assert residual is not None
        triton = dtype is None and takes_ping_pong(flat(x), weight, bias, flat(residual), None)
    return _Call(dtype is not None, shape, triton, adds)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (act(x Wᵀ + bias), pre-activation [..., N] if there is an activation and `keep`, otherwise None).

    x: [..., K]; weight: [N, K]; bias: [N]; one dtype. The function is not differentiable, nor are those below.
    """
    if activation is None or not use_triton(x):
        return activated(F.linear(x, weight, bias), activation, keep)
    out, preactivation = _computed(flat(x), weight, bias, None, activation, keep)
    if x.ndim == 2:
        return out, preactivation
    shape = x.shape[:-1]
    out = out.view(*shape, out.shape[1])
    return out, None if preactivation is None else preactivation.view(*shape, preactivation.shape[1])


def activated(preactivation: Tensor, activation: str | None, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Return (act(preactivation), preactivation if there is an activation and `keep`, otherwise None)."""
    if activation is None:
        return preactivation, None
    return ACTIVATIONS[activation](preactivation), preactivation if keep else None


def preactivation_gradient(
    grad: Tensor, preactivation: Tensor | None, activation: str | None, with_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (P = grad ⊙ act'(preactivation) [..., N], its sum over rows [N] if `with_bias`, otherwise None).

    grad: [..., N], or [..., N / 2] for a gated activation; preactivation: [..., N], or None without an activation.
    """
    if activation is None:
        return grad, flat(grad).sum(0) if with_bias else None
    assert preactivation is not None
    if not use_triton(grad):
        out = _torch_preactivation_gradient(grad, preactivation, activation)
        return out, flat(out).sum(0) if with_bias else None
    rows, sums = _preactivation_gradient(flat(grad), flat(preactivation), activation, with_bias)
    return rows.reshape(preactivation.shape), sums if with_bias else None


def _fuses(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None, keep: bool
) -> bool:
    """Return whether one kernel computes a product and what follows, rather than cuBLAS and torch one by one.

    Fusion saves passes over the product, but on an H100 cuBLAS's loop is some 12 % faster than Triton's. Measured there
    (benchmarks/results/first_contact_h100.md): a gated pair is faster fused, and an activation whose argument is not
    kept takes 0.95 to 1.04 of the time; an activation whose argument is kept for the backward pass, and a residual
    alone, take up to 1.3. That is Triton's kernel: Gluon's takes its place only where it was measured to be faster than
    both.
    """
    if activation in GATED or (activation is not None and not keep) or family(x.device) != "sm_90":
        return True
    return takes_ping_pong(x, weight, bias, residual, activation)


def _by_cublaslt(x: Tensor, activation: str | None, keep: bool) -> bool:
    """Return whether a product with a bias and gelu_tanh are one kernel of cuBLASLt (`torch._addmm_activation`).

    It does not return gelu's argument. On an H100 in bfloat16 it took 0.92 to 0.95 of the Triton kernel's time at
    widths of 4096 and 8192, and 0.87 at 1600 (benchmarks/results/gpu-nvidia-h100-80gb-hbm3.json). To the product of an
    empty x torch applies no gelu.
    """
    wanted = activation == "gelu_tanh" and not keep and x.itemsize == 2 and x.numel() > 0
    return wanted and family(x.device) == "sm_90"


def _computed(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (act(x Wᵀ + bias) + residual [M, N], pre-activation if `keep`), by what is the fastest for x [M, K]."""
    if bias is not None and _by_cublaslt(x, activation, keep):
        out, preactivation = torch._addmm_activation(bias, x, weight.t(), use_gelu=True), None
    elif _fuses(x, weight, bias, residual, activation, keep):
        return gemm_forward(x, weight, bias, residual, activation=activation, keep_preactivation=keep)
    else:
        out, preactivation = activated(F.linear(x, weight, bias), activation, keep)
    return out if residual is None else out.add_(residual), preactivation


def weight_gradient(left: Tensor, x: Tensor) -> Tensor:
    """Return leftᵀ x, [N, K], for left [..., N] and x [..., K]."""
    return flat(left).t() @ flat(x)


def _torch_preactivation_gradient(grad: Tensor, x: Tensor, name: str) -> Tensor:
    """Return grad ⊙ act'(x), computed by torch."""
    aten = torch.ops.aten
    match name:
        case "gelu":
            return aten.gelu_backward(grad, x)  # type: ignore[no-any-return]
        case "gelu_tanh":
            return aten.gelu_backward(grad, x, approximate="tanh")  # type: ignore[no-any-return]
        case "relu":
            return aten.threshold_backward(grad, x, 0)  # type: ignore[no-any-return]
        case "relu2":
            return aten.threshold_backward(2 * grad * x, x, 0)  # type: ignore[no-any-return]
        case "silu":
            return aten.silu_backward(grad, x)  # type: ignore[no-any-return]
    inner = {"swiglu": "silu", "geglu": "gelu"}[name]
    gate, up = x.chunk(2, dim=-1)
    halves = _torch_preactivation_gradient(grad * up, gate, inner), grad * apply_activation(gate, inner)
    return torch.cat(halves, dim=-1)


def flat(x: Tensor) -> Tensor:
    """Return x [..., K] as [M, K]; a view with -1 would be ambiguous for an empty tensor."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _result_shape(x: Tensor, weight: Tensor, activation: str | None) -> tuple[int, ...]:
    return (*x.shape[:-1], weight.shape[0] // (2 if activation in GATED else 1))


@registered("tpfuse::gemm_forward")
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None, keep: bool
) -> tuple[Tensor, Tensor]:
    out, preactivation = _computed(x, weight, bias, residual, activation, keep)
    return out, x.new_empty(0) if preactivation is None else preactivation


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None, keep: bool
) -> tuple[Tensor, Tensor]:
    shape = _result_shape(x, weight, activation)
    return x.new_empty(shape), x.new_empty(x.shape[0], weight.shape[0]) if keep else x.new_empty(0)


@registered("tpfuse::activation_backward")
def _preactivation_gradient(
    grad: Tensor, preactivation: Tensor, activation: str, with_sums: bool
) -> tuple[Tensor, Tensor]:
    out, sums = activation_backward(grad, preactivation, activation, with_sums=with_sums)
    return out, grad.new_empty(0) if sums is None else sums


@_preactivation_gradient.register_fake
def _(grad: Tensor, preactivation: Tensor, activation: str, with_sums: bool) -> tuple[Tensor, Tensor]:
    shape = preactivation.shape
    return preactivation.new_empty(shape), grad.new_empty(shape[1] if with_sums else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, _, activation, keep = inputs
    ctx.activation = activation
    ctx.save_for_backward(x, weight, output[1] if keep else None)
    ctx.mark_non_differentiable(output[1])


@once_differentiable
def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, preactivation = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_residual, *_none = wanted_gradients(ctx)
    grad_x = grad_weight = grad_bias = None
    if needs_x or needs_weight or needs_bias:
        if ctx.activation is None:
            left, sums = grad, grad.sum(0) if needs_bias else None
        else:
            left, sums = _preactivation_gradient(grad, preactivation, ctx.activation, needs_bias)
        grad_bias = sums if needs_bias else None
        grad_x = left @ weight if needs_x else None
        grad_weight = left.t() @ x if needs_weight else None
    return grad_x, grad_weight, grad_bias, grad if needs_residual else None, None, None


_forward.register_autograd(_backward, setup_context=_setup_context)
