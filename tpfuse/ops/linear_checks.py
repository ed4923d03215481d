"""Checks of the tensors of every linear operator."""

from torch import Tensor

from tpfuse.comm.layout import check_local
from tpfuse.ops.activation import GATED, check_activation
from tpfuse.ops.autograd import is_autocast


def check_linear(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
    """Raise ValueError unless x is [..., K], weight [N, K] and bias [N], of one float dtype, on one device.

    N must be even for a gated activation. Under torch.autocast dtypes may differ.
    """
    check_activation(activation)
    check_local(operator, x=x, weight=weight, bias=bias)
    shape, rows, device, dtype = x.shape, weight.shape, x.device, x.dtype
    if not dtype.is_floating_point:
        raise ValueError(f"{operator}: x is {dtype}: expected a float dtype")
    if not shape:
        raise ValueError(f"{operator}: x has shape (): expected [..., K]")
    if len(rows) != 2 or rows[1] != shape[-1]:
        raise ValueError(f"{operator}: weight has shape {tuple(rows)}: expected [N, {shape[-1]}]")
    if activation in GATED and rows[0] % 2:
        raise ValueError(f"{operator}: weight has {rows[0]} rows: {activation} expects an even number, [gate | up]")
    if bias is not None and bias.shape != rows[:1]:
        raise ValueError(f"{operator}: bias has shape {tuple(bias.shape)}: expected {tuple(rows[:1])}")
    mixed = is_autocast(device)
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.device != device:
            raise ValueError(f"{operator}: {name} is on {other.device}, x on {device}: expected one device")
        if other is not None and not mixed and other.dtype != dtype:
            raise ValueError(f"{operator}: {name} is {other.dtype}, x is {dtype}: expected one dtype")


def check_residual(operator: str, x: Tensor, residual: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the residual has the result's shape and is on x's device; its dtype may differ."""
    if residual is None:
        return
    if residual.shape != shape:
        raise ValueError(f"{operator}: residual has shape {tuple(residual.shape)}: expected {shape}")
    if residual.device != x.device:
        raise ValueError(f"{operator}: residual is on {residual.device}, x on {x.device}: expected one device")
