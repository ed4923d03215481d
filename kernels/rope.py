"""rope: rotary position embedding (arXiv:2104.09864) of queries and keys in one launch, in place or not, and inverse.

    (a, b) -> (a cos - b sin, b cos + a sin)        for each pair of a head's elements, cos and sin of its position

A pair is an element and the element R later (half-split: Llama, GPT-NeoX) or two neighbours (interleaved: GPT-J). A
program holds the cosines and sines of a block of positions in registers, in float32, and applies them to some heads, so
that little besides the heads is read and written. Each element is read and written by one thread, so that the results
may overwrite the inputs. The inverse is the rotation by the negative angles, which is also the backward pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_device, check_floats, check_integers, check_shape
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.tiles import rounded


@triton.jit
def _rotate_pair(a, b, cos, sin):
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _rotate_heads(
    x_ptr,  # pointer to the first rotated element of the block's columns
    out_ptr,
    first,
    stop,
    offs_x,
    offs_out,
    stride_xh,
    stride_oh,
    cos,
    sin,
    mask_m,
    width,
    R,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Rotates `width` pairs (at most BLOCK_R) of a block of positions in the heads from `first` to `stop`."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    offs_x += first.to(tl.int64) * stride_xh
    offs_out += first.to(tl.int64) * stride_oh
    for _ in range(first, stop):
        x_rows, out_rows = x_ptr + offs_x[:, None], out_ptr + offs_out[:, None]
        if INTERLEAVED:
            offs = tl.arange(0, 2 * BLOCK_R)[None, :]
            mask = mask_m[:, None] & (offs < 2 * width)
            x = tl.load(x_rows + offs, mask=mask, other=0.0)
            a, b = tl.split(tl.reshape(x, [BLOCK_M, BLOCK_R, 2]))
            a, b = _rotate_pair(a, b, cos, sin)
            out = tl.reshape(tl.join(a, b), [BLOCK_M, 2 * BLOCK_R])
            tl.store(out_rows + offs, rounded(out, dtype), mask=mask)
        else:
            offs = tl.arange(0, BLOCK_R)[None, :]
            mask = mask_m[:, None] & (offs < width)
            a = tl.load(x_rows + offs, mask=mask, other=0.0)
            b = tl.load(x_rows + R + offs, mask=mask, other=0.0)
            a, b = _rotate_pair(a, b, cos, sin)
            tl.store(out_rows + offs, rounded(a, dtype), mask=mask)
            tl.store(out_rows + R + offs, rounded(b, dtype), mask=mask)
        offs_x += stride_xh
        offs_out += stride_oh


@triton.jit
def rope_kernel(
    q_ptr,  # [B, T, H, D] bf16, read
    k_ptr,  # [B, T, H_k, D] bf16, read
    q_out_ptr,  # [B, T, H, D] bf16, written; may be q_ptr
    k_out_ptr,  # [B, T, H_k, D] bf16, written
    cos_ptr,  # [n_positions, R] float32, read
    sin_ptr,  # [n_positions, R] float32, read
    positions_ptr,  # [B, T] int64, read
    M,  # B T
    T,
    H,
    H_k,
    R,
    n_positions,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_qob,
    stride_qot,
    stride_qoh,
    stride_kob,
    stride_kot,
    stride_koh,
    stride_pb,
    stride_pt,
    sign,  # of the angles
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HEADS: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    batch, time = (offs_m // T).to(tl.int64), (offs_m % T).to(tl.int64)
    position = tl.load(positions_ptr + batch * stride_pb + time * stride_pt, mask=mask_m, other=0)
    first_r = tl.program_id(2) * BLOCK_R
    offs_r = first_r + tl.arange(0, BLOCK_R)
    known = (position >= 0) & (position < n_positions)
    table = position[:, None] * R + offs_r[None, :]
    mask = known[:, None] & (offs_r < R)[None, :]
    cos = tl.load(cos_ptr + table, mask=mask, other=float("nan"))  # NaN where a position is outside the tables
    sin = tl.load(sin_ptr + table, mask=mask, other=float("nan")) * sign

    shift = first_r * 2 if INTERLEAVED else first_r
    first = tl.program_id(1) * HEADS
    behind_q = tl.cdiv(H, HEADS) * HEADS
    if first < behind_q:
        offs_q, offs_qo = batch * stride_qb + time * stride_qt, batch * stride_qob + time * stride_qot
        _rotate_heads(
            q_ptr + shift, q_out_ptr + shift, first, min(first + HEADS, H), offs_q, offs_qo, stride_qh, stride_qoh,
            cos, sin, mask_m, R - first_r, R, INTERLEAVED, BLOCK_M, BLOCK_R,
        )  # fmt: skip
    else:
        first -= behind_q
        offs_k, offs_ko = batch * stride_kb + time * stride_kt, batch * stride_kob + time * stride_kot
        _rotate_heads(
            k_ptr + shift, k_out_ptr + shift, first, min(first + HEADS, H_k), offs_k, offs_ko, stride_kh, stride_koh,
            cos, sin, mask_m, R - first_r, R, INTERLEAVED, BLOCK_M, BLOCK_R,
        )  # fmt: skip


def rope_forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates the first 2 R elements of every head by its position's angles and copies the others.

    q: [B, T, H, D] and k: [B, T, H_k, D], of one dtype of float32, float16, bfloat16; any strides with 1 for D
    (pass a tensor [B, H, T, D] as its transpose(1, 2)); D even. cos, sin: [n_positions, R] float32, contiguous, 2 R <=
    D. positions: [B, T] or [T] int64; one outside the tables makes NaN. inverse: by the negative angles. Returns new
    tensors in the layout of torch.empty_like. Raises ValueError for other shapes, dtypes, strides, devices.
    """
    check_rope("rope_forward", q, k, cos, sin, positions)
    width, q_out, k_out = 2 * cos.shape[1], torch.empty_like(q), torch.empty_like(k)
    for x, out in ((q, q_out), (k, k_out)):
        if width < x.shape[3]:
            out[..., width:] = x[..., width:]
    _launch(q, k, q_out, k_out, cos, sin, positions, interleaved, inverse)
    return q_out, k_out


def _launch(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    inverse: bool,
) -> None:
    check_floats("rope", q=q, k=k)
    (b, t, heads, _), (n_positions, r) = q.shape, cos.shape
    heads_k = k.shape[2]
    positions = positions.expand(b, t)
    row = choose_configuration("rope", q.device, q.dtype, R=r)
    block_m, block_r, group = (row.blocks[name] for name in ("BLOCK_M", "BLOCK_R", "HEADS"))
    strides = {}
    for name, x in (("q", q), ("k", k), ("qo", q_out), ("ko", k_out)):
        for dimension, letter in enumerate("bth"):
            strides[f"stride_{name}{letter}"] = x.stride(dimension)
    launch(
        rope_kernel,
        (
            cdiv(b * t, block_m),
            cdiv(heads, group) + cdiv(heads_k, group),
            cdiv(r, block_r),
        ),
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        q_ptr=q,
        k_ptr=k,
        q_out_ptr=q_out,
        k_out_ptr=k_out,
        cos_ptr=cos,
        sin_ptr=sin,
        positions_ptr=positions,
        M=b * t,
        T=t,
        H=heads,
        H_k=heads_k,
        R=r,
        n_positions=n_positions,
        **strides,
        stride_pb=positions.stride(0),
        stride_pt=positions.stride(1),
        sign=-1.0 if inverse else 1.0,
        INTERLEAVED=interleaved,
        **row.blocks,
    )


def check_rope(operator: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Raises ValueError unless `rope_forward` takes these tensors; q and k in float64 are accepted too.

    The values of positions are not checked.
    """
    check_floats(operator, cos=cos, sin=sin)
    check_integers(operator, "positions", positions, (torch.int64,))
    if cos.dtype != torch.float32 or cos.ndim != 2 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(
            f"{operator}: cos is {cos.dtype} {tuple(cos.shape)}: expected contiguous float32 tables [n, R]"
        )
    check_shape(operator, "sin", sin, tuple(cos.shape))
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4 or x.shape[3] % 2 or x.shape[3] < 2 * cos.shape[1]:
            expected = f"[B, T, H, D], D even and at least {2 * cos.shape[1]}"
            raise ValueError(f"{operator}: {name} has shape {tuple(x.shape)}: expected {expected}")
        if not x.is_floating_point() or x.dtype != q.dtype:
            raise ValueError(f"{operator}: {name} is {x.dtype}: expected floats of one dtype")
        check_shape(operator, name, x, (*q.shape[:2], x.shape[2], q.shape[3]))
        check_device(operator, "q", q, name, x)
        if x.stride(3) != 1 and x.numel():
            raise ValueError(f"{operator}: {name} has strides {x.stride()}: expected 1 for the last dimension")
    if tuple(positions.shape) not in ((q.shape[1],), tuple(q.shape[:2])):
        raise ValueError(f"{operator}: positions has shape {tuple(positions.shape)}: expected {tuple(q.shape[:2])}")
    for name, x in (("cos", cos), ("positions", positions)):
        check_device(operator, "q", q, name, x)
