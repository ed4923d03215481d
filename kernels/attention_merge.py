"""attention_merge: merges the results of attention to two disjoint sets of keys into the result for all keys.

    lse = log(exp lse_a + exp lse_b),    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The kernel computes in float32 and subtracts the larger of both first, so that nothing overflows. A set of which a query
sees no key (lse -inf) has weight 0. Ring attention (arXiv:2310.01889) and flash decoding merge their parts in this way:
out_a may be a float32 sum to which out_b, of a half type, is added in place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.attention_forward import strides
from tpfuse.kernels.checks import check_device, check_floats, check_shape, check_tensor
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.tiles import rounded


@triton.jit
def attention_merge_kernel(
    a_ptr,  # [B, H, T, D] bf16 or fp32, read
    lse_a_ptr,  # [B, H, T] fp32, read
    b_ptr,  # [B, H, T, D] bf16, read
    lse_b_ptr,  # [B, H, T] fp32, read
    out_ptr,  # [B, H, T, D] as a, written; may be a
    lse_ptr,  # [B, H, T] fp32, written; may be lse_a
    heads,
    length,
    tiles_m,
    stride_ab,
    stride_ah,
    stride_at,
    stride_bb,
    stride_bh,
    stride_bt,
    stride_ob,
    stride_oh,
    stride_ot,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    batch_head = (tl.program_id(0) // tiles_m).to(tl.int64)
    batch = batch_head // heads
    head = batch_head % heads
    offs_m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m = offs_m < length
    mask = mask_m[:, None] & (offs_d < HEAD_SIZE)[None, :]
    row = batch_head * length + offs_m
    lse_a = tl.load(lse_a_ptr + row, mask=mask_m, other=0.0)
    lse_b = tl.load(lse_b_ptr + row, mask=mask_m, other=0.0)
    larger = tl.maximum(lse_a, lse_b)
    subtracted = tl.where(larger == float("-inf"), 0.0, larger)
    share_a = tl.exp(lse_a - subtracted)
    share_b = tl.exp(lse_b - subtracted)
    total = share_a + share_b
    total = tl.where(total == 0.0, 1.0, total)

    offs_t = offs_m.to(tl.int64)[:, None]
    a = tl.load(a_ptr + batch * stride_ab + head * stride_ah + offs_t * stride_at + offs_d[None, :], mask=mask, other=0)
    b = tl.load(b_ptr + batch * stride_bb + head * stride_bh + offs_t * stride_bt + offs_d[None, :], mask=mask, other=0)
    out = a.to(tl.float32) * (share_a / total)[:, None] + b.to(tl.float32) * (share_b / total)[:, None]
    out_ptrs = out_ptr + batch * stride_ob + head * stride_oh + offs_t * stride_ot + offs_d[None, :]
    tl.store(out_ptrs, rounded(out, out_ptr.dtype.element_ty), mask=mask)
    # Each warp loads lse_a for the rows of its part of the output, and one of them stores all of lse: in place, it
    # must not overwrite lse_a before the others have read it.
    tl.debug_barrier()
    tl.store(lse_ptr + row, larger + tl.log(total), mask=mask_m)


def attention_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) for two disjoint sets of keys from the results of each; 0 and -inf where a query saw no key.

    out_a, out_b: [B, H, T, D] with contiguous rows, of one dtype, or out_a float32 and out_b a half type; lse_a, lse_b:
    [B, H, T] float32. Return out in out_a's dtype and layout and lse, float32; with in_place they are out_a and lse_a.
    Raise ValueError that names the argument, what was received and what is accepted.
    """
    check_outputs(out_a, lse_a, out_b, lse_b, in_place)
    batch, heads, length, size = out_a.shape
    lse_a, lse_b = lse_a.contiguous(), lse_b.contiguous()
    out, lse = (out_a, lse_a) if in_place else (torch.empty_like(out_a), torch.empty_like(lse_a))
    row = choose_configuration("attention_merge", out_a.device, out_a.dtype)
    tiles_m = cdiv(length, row.blocks["BLOCK_M"])
    launch(
        attention_merge_kernel,
        (batch * heads * tiles_m,),
        a_ptr=out_a,
        lse_a_ptr=lse_a,
        b_ptr=out_b,
        lse_b_ptr=lse_b,
        out_ptr=out,
        lse_ptr=lse,
        heads=heads,
        length=length,
        tiles_m=tiles_m,
        **strides("a", out_a),
        **strides("b", out_b),
        **strides("o", out),
        HEAD_SIZE=size,
        BLOCK_D=triton.next_power_of_2(size),
        **row.options,
    )
    return out, lse


def check_outputs(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, in_place: bool) -> None:
    """Raise ValueError unless these are the results of two attentions of one shape."""
    name = "attention_merge"
    check_floats(name, out_a=out_a)
    check_floats(name, out_b=out_b)
    if out_a.dim() != 4:
        raise ValueError(f"{name}: out_a has shape {tuple(out_a.shape)}: expected [B, H, T, D]")
    if out_b.dtype != out_a.dtype and out_a.dtype != torch.float32:
        raise ValueError(
            f"{name}: out_b is {out_b.dtype}, out_a is {out_a.dtype}: expected one dtype, or out_a float32"
        )
    check_shape(name, "out_b", out_b, tuple(out_a.shape))
    check_device(name, "out_a", out_a, "out_b", out_b)
    for label, x in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, label, x, tuple(out_a.shape[:3]), (torch.float32,), ("out_a", out_a))
    for label, x in (("out_a", out_a), ("out_b", out_b)):
        if x.numel() and x.stride(3) != 1:
            raise ValueError(f"{name}: {label} has strides {x.stride()}: expected contiguous rows")
    if in_place and not lse_a.is_contiguous():
        raise ValueError(f"{name}: lse_a has strides {lse_a.stride()}: expected a contiguous lse_a with in_place")
