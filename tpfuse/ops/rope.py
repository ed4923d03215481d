"""rope: rotary position embedding of queries and keys (arXiv:2104.09864); kernels/rope.py says which pairs rotate.

Backward is the rotation by the negative angles: only the tables and the positions are kept for it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from tpfuse.backend import use_triton
from tpfuse.kernels import reference
from tpfuse.kernels.rope import check_rope, rope_forward
from tpfuse.ops.values import check_range


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return q and k with the first 2 R elements of every head rotated by the angles of their positions.

    q: [B, T, H, D], k: [B, T, H_k, D], any strides (pass a tensor [B, H, T, D] as its transpose(1, 2)), D even. cos,
    sin: [n_positions, R] float32 tables, 2 R <= D, without gradients; positions: [B, T] or [T] int64. interleaved:
    the elements of a pair are neighbours (GPT-J), otherwise R apart (Llama, GPT-NeoX). inverse: rotate by the negative
    angles. Raise ValueError for other shapes, dtypes and devices and, on CPUs, for positions outside the tables; on
    CUDA that check would stop the stream, and the results are NaN.
    """
    q, k = (x if x.ndim == 0 or x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    check_rope("rope", q, k, cos, sin, positions)
    last = len(cos) - 1
    check_range(positions, 0, last, f"rope: positions from {{low}} to {{high}}: expected 0 to {last}")
    if use_triton(q):
        rotated: tuple[Tensor, Tensor] = _forward(q, k, cos, sin, positions, interleaved, inverse)
        return rotated
    cos, sin = cos.detach(), sin.detach()
    q, k = (reference.rope(x, cos, sin, positions, interleaved=interleaved, inverse=inverse) for x in (q, k))
    return q, k


@custom_op("tpfuse::rope_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    return rope_forward(q, k, cos, sin, positions, interleaved=interleaved, inverse=inverse)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, positions, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
    grad_q, grad_k = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_q, grad_k))
    grad_q, grad_k = _forward(grad_q, grad_k, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse)
    return grad_q, grad_k, None, None, None, None, None


_forward.register_autograd(_backward, setup_context=_setup_context)
