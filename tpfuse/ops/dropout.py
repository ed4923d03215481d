"""dropout: a mask that depends on (key, global position) alone, never on the layout.

A generator that is advanced call by call gives other masks for other shardings. Here element `c` of global row `r` is
kept if and only if hash(key, r * width + c) is in the upper part of its range, so that any rank can compute any part of
the mask. The hash is the output function of splitmix64 (Steele, Lea and Flood 2014, variant 13 of Stafford's mixers)
over counter * golden ratio + key: a bijection of the counter whose bits pass BigCrush.

Keys are tensors on the device: a compiled model and a CUDA graph take the keys of the next step as they take its batch.

The products of the hash wrap around at 64 bits. Inductor folds integer expressions into constants without a width, so
the hash is never part of a graph that torch.compile makes: there, a mask is one operator.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from tpfuse.comm.layout import is_traced
from tpfuse.kernels.checks import check_tensor
from tpfuse.kernels.dropout import dropout_forward, threshold
from tpfuse.ops.autograd import registered
from tpfuse.ops.gemm import flat
from tpfuse.switches import use_triton

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def dropout_key(seed: int, step: int, site: int) -> int:
    """Return the 64-bit key (as a signed integer) of one dropout site in one optimizer step."""
    digest = hashlib.blake2b(f"{seed} {step} {site}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@custom_op("tpfuse::dropout_keys", mutates_args=())
def dropout_keys(like: Tensor, seed: int, step: int, sites: int) -> Tensor:
    """Return `dropout_key` of the sites 0, 1, … of one step: [sites] int64 on the device of `like`."""
    keys = torch.tensor([dropout_key(seed, step, site) for site in range(sites)], dtype=torch.int64, device="cpu")
    return keys.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else keys


@dropout_keys.register_fake
def _(like: Tensor, seed: int, step: int, sites: int) -> Tensor:
    return like.new_empty(sites, dtype=torch.int64)


@custom_op("tpfuse::drawn_keys", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def drawn_keys(x: Tensor, count: int) -> Tensor:
    """Return keys drawn from the default generator of x's device: [count] int64.

    In a graph of torch.compile they are those that eager code draws, and x, a tensor to which one of the keys will be
    applied, keeps the draws in their order.
    """
    return torch.randint(-(2**63), 2**63 - 1, (count,), device=x.device)


@drawn_keys.register_fake
def _(x: Tensor, count: int) -> Tensor:
    return x.new_empty(count, dtype=torch.int64)


def keep_mask(rows: Tensor, width: int, p: float, key: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return a mask [..., width], true where an element is kept, for the global row numbers `rows` [...] int64.

    columns: the columns that the mask is for, int64 [columns], by default all of them.
    """
    mask: Tensor = (_keep_mask if is_traced(rows) else _hashed)(rows, width, p, key, columns)
    return mask


def _hashed(rows: Tensor, width: int, p: float, key: Tensor, columns: Tensor | None) -> Tensor:
    columns = torch.arange(width, device=rows.device) if columns is None else columns
    x = (rows.unsqueeze(-1) * width + columns).mul_(_GOLDEN).add_(key)
    x.bitwise_xor_((x >> 30) & ((1 << 34) - 1)).mul_(_MIX1)
    x.bitwise_xor_((x >> 27) & ((1 << 37) - 1)).mul_(_MIX2)
    x.bitwise_xor_((x >> 31) & ((1 << 33) - 1))
    return x >= threshold(p)


@registered("tpfuse::keep_mask")
def _keep_mask(rows: Tensor, width: int, p: float, key: Tensor, columns: Tensor | None) -> Tensor:
    return _hashed(rows, width, p, key, columns)


@_keep_mask.register_fake
def _(rows: Tensor, width: int, p: float, key: Tensor, columns: Tensor | None) -> Tensor:
    return rows.new_empty(*rows.shape, width if columns is None else len(columns), dtype=torch.bool)


def dropout(x: Tensor, p: float, rows: Tensor, key: Tensor) -> Tensor:
    """Return x with each element zeroed with probability p, and the others multiplied by 1 / (1 - p).

    x: [..., C], any float dtype; rows: [...] int64, the number each row of x has in the unsharded tensor of
    the whole batch; key: [] int64, one of `dropout_keys`. Raise ValueError for p outside [0, 1), and for other shapes,
    dtypes or devices of rows and key.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout p = {p}: expected 0 <= p < 1")
    if p == 0.0:
        return x
    check_tensor("dropout", "rows", rows, tuple(x.shape[:-1]), (torch.int64,), ("x", x))
    check_tensor("dropout", "key", key, (), (torch.int64,), ("x", x))
    if use_triton(x):
        out: Tensor = _dropout(flat(x), p, rows.flatten(), key)
        return out.view(x.shape)
    return x * (keep_mask(rows, x.shape[-1], p, key).to(x.dtype) / (1.0 - p))


@registered("tpfuse::dropout")
def _dropout(x: Tensor, p: float, rows: Tensor, key: Tensor) -> Tensor:
    return dropout_forward(x, p, rows, key)


@_dropout.register_fake
def _(x: Tensor, p: float, rows: Tensor, key: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, rows, key = inputs
    ctx.save_for_backward(rows, key)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _dropout(grad, ctx.p, *ctx.saved_tensors), None, None, None


_dropout.register_autograd(_backward, setup_context=_setup_context)
