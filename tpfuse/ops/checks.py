"""Checks of operators' arguments: each error names the operator, the argument, what it is and what is expected.

Values of tensors are checked only where reading them costs nothing: on CPUs, and not while torch.compile traces.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from tpfuse.comm.layout import check_local, is_traced
from tpfuse.kernels.attention_scores import check_scores, check_sequences
from tpfuse.kernels.checks import check_device
from tpfuse.ops.activation import GATED, check_activation
from tpfuse.ops.autograd import autocast_dtype


def check_linear(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
    """Raise ValueError unless x is [..., K], weight [N, K] and bias [N], of one float dtype, on one device.

    N must be even for a gated activation. Under torch.autocast dtypes may differ, but for
    float64, which autocast leaves alone.
    """
    check_activation(activation)
    check_local(operator, x=x, weight=weight, bias=bias)
    shape, rows, dtype = x.shape, weight.shape, x.dtype
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
    mixed = autocast_dtype(x) is not None
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None:
            check_device(operator, "x", x, name, other)
        if other is not None and other.dtype != dtype and (not mixed or torch.float64 in (other.dtype, dtype)):
            raise ValueError(f"{operator}: {name} is {other.dtype}, x is {dtype}: expected one dtype")


def check_residual(operator: str, x: Tensor, residual: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the residual has the result's shape and is on x's device; its dtype may differ."""
    if residual is None:
        return
    check_local(operator, residual=residual)
    if residual.shape != shape:
        raise ValueError(f"{operator}: residual has shape {tuple(residual.shape)}: expected {shape}")
    check_device(operator, "x", x, "residual", residual)


def check_attention(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: dict[str, Tensor | None],
    *,
    window: int | None,
    scale: float | None,
    dropout_p: float,
    key: Tensor | None,
    head_rows: Tensor | None,
) -> None:
    """Raise ValueError unless the tensors fit each other, and the options are valid.

    cu_seqlens: the cumulative lengths by the names of their arguments.
    """
    check_local(operator, q=q, k=k, v=v)
    sequences = check_sequences(operator, q, k, v, **cu_seqlens)
    check_scores(operator, q, sequences, window, scale, dropout_p, key, head_rows, key_name="key")


def check_range(x: Tensor, highest: int, message: str, besides: Iterable[int] = ()) -> None:
    """Raise ValueError unless all integers in x are from 0 to `highest`, both included, or in `besides`.

    message: the text of the error, with the fields {low} and {high} for the extremes of the others. Tensors on CUDA are
    not checked, which would stop the stream, nor traced ones, which would break the graph.
    """
    if x.device.type != "cpu" or is_traced(x):
        return
    for value in besides:
        x = x[x != value]
    if not x.numel():
        return
    low, high = int(x.min()), int(x.max())
    if low < 0 or high > highest:
        raise ValueError(message.format(low=low, high=high))


def check_cumulative(operator: str, name: str, x: Tensor, rows: int, longest: int | None = None) -> None:
    """Raise ValueError unless x [S + 1] begins with 0, never decreases and ends at `rows` or before.

    longest: the length of the longest document according to the caller. Only the tensors that `check_range` reads are
    checked.
    """
    if x.device.type != "cpu" or is_traced(x):
        return
    first, last, lengths = int(x[0]), int(x[-1]), x.diff()
    expected = f"expected cumulative lengths from 0 to at most {rows}, the number of rows"
    if first != 0 or last > rows:
        raise ValueError(f"{operator}: {name} goes from {first} to {last}: {expected}")
    if (lengths < 0).any():
        index = int((lengths < 0).nonzero()[0])
        raise ValueError(f"{operator}: {name} decreases from {int(x[index])} to {int(x[index + 1])}: {expected}")
    if longest is not None and len(lengths) and int(lengths.max()) > longest:
        raise ValueError(f"{operator}: {name} has a document of {int(lengths.max())} rows: expected at most {longest}")
