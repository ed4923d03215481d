"""attention_backward_delta: what attention's gradients need of each query, in one pass over out and its gradient.

    log2_sum = lse log2(e)        delta = rowsum(grad_out * out) - grad_lse

log2_sum is +inf for a query that sees no key, so that its probabilities 2^(score - log2_sum) are 0. Both are padded
after each document with queries that see no key: the kernels then read whole tiles without a mask, which saves the
mask's registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.attention_forward import strides
from tpfuse.kernels.attention_scores import document, multiple_of_8
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.tiles import product

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
PADDING: tl.constexpr = tl.constexpr(128)  # rows after each document: the largest BLOCK_M of the kernels that read them


@triton.jit
def load_tile(rows, first_d, HEAD_SIZE: tl.constexpr, SLICE_D: tl.constexpr):
    """Load columns first_d, … of rows first + offs of a matrix [stop, HEAD_SIZE].

    rows: (ptr, first, offs, stop, stride).
    """
    ptr, first, offs, stop, stride = rows
    offs_d = tl.arange(0, SLICE_D)
    stride = multiple_of_8(stride)
    ptrs = ptr + (tl.cast(first, tl.int64) * stride + first_d) + (offs[:, None] * stride + offs_d[None, :])
    mask = (first + offs < stop)[:, None]
    if HEAD_SIZE % SLICE_D != 0:
        mask = mask & (first_d + offs_d < HEAD_SIZE)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def query_row(batch, head, heads, sequence, first_q, tq, documents, VARLEN: tl.constexpr):
    """Return the index of a document's first query in log2_sum and delta, [B, H, Tq + documents * PADDING]."""
    padding = sequence * PADDING if VARLEN else 0
    return (batch * heads + head) * (tq + documents * PADDING) + first_q + padding


@triton.jit(do_not_specialize=["tq", "documents", "tiles"])
def attention_backward_delta_kernel(
    grad_out_ptr,  # [B, H, Tq, D] bf16, read
    out_ptr,  # [B, H, Tq, D] bf16, read
    lse_ptr,  # [B, H, Tq] fp32, read
    grad_lse_ptr,  # [B, H, Tq] fp32, read; None where the log-sum-exp has no gradient
    log2_sum_ptr,  # [B, H, Tq + documents * padding] fp32, written
    delta_ptr,  # [B, H, Tq + documents * padding] fp32, written
    cu_seqlens_q_ptr,  # [S + 1] int32, read
    heads,
    tq,
    documents,
    tiles,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_ob,
    stride_oh,
    stride_ot,
    HAS_GRAD_LSE: tl.constexpr,
    VARLEN: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first_m = tl.program_id(0) % tiles * BLOCK_M
    head = (tl.program_id(0) // tiles % heads).to(tl.int64)
    sequence = tl.program_id(0) // tiles // heads
    batch = tl.full((), 0, tl.int64) if VARLEN else sequence.to(tl.int64)
    first_q, length_q = document(cu_seqlens_q_ptr, sequence, tq, VARLEN)
    if first_m >= length_q + PADDING:
        return
    tile_m = tl.arange(0, BLOCK_M)
    offs_m = first_m + tile_m
    mask = offs_m < length_q
    grad_out_ptr += multiple_of_8(batch * stride_gb + head * stride_gh + first_q * stride_gt)
    out_ptr += multiple_of_8(batch * stride_ob + head * stride_oh + first_q * stride_ot)
    grad_out = load_tile((grad_out_ptr, first_m, tile_m, length_q, stride_gt), 0, HEAD_SIZE, BLOCK_D)
    out = load_tile((out_ptr, first_m, tile_m, length_q, stride_ot), 0, HEAD_SIZE, BLOCK_D)
    delta = tl.sum(product(grad_out, out), axis=1)
    row = (batch * heads + head) * tq + first_q + offs_m
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + row, mask=mask, other=0.0)
    lse = tl.load(lse_ptr + row, mask=mask, other=float("-inf"))
    log2_sum = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
    row = query_row(batch, head, heads, sequence, first_q, tq, documents, VARLEN) + offs_m
    tl.store(log2_sum_ptr + row, log2_sum, mask=offs_m < length_q + PADDING)
    tl.store(delta_ptr + row, delta, mask=offs_m < length_q + PADDING)


def attention_backward_delta(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    sequences: int,
    longest: int,
) -> dict[str, Tensor]:
    """Return log2_sum and delta, [B, H, Tq + documents * PADDING] float32, as the arguments of kernels that read them.

    grad_out, out: [B, H, Tq, D], `aligned`; lse, grad_lse: [B, H, Tq] float32; sequences: the number of documents, or B
    without them; longest: the length of the longest document of queries, or more. `attention_backward` checks them.
    """
    batch, heads, tq, size = out.shape
    documents = 1 if cu_seqlens_q is None else sequences
    shape = (batch, heads, tq + documents * PADDING.value)
    log2_sum, delta = (torch.empty(shape, dtype=torch.float32, device=out.device) for _ in range(2))
    row = choose_configuration("attention_backward_delta", out.device, out.dtype)
    block_d = triton.next_power_of_2(size)
    block_m = row.blocks["TILE"] // block_d
    tiles = cdiv(longest + PADDING.value, block_m)
    launch(
        attention_backward_delta_kernel,
        (sequences * heads * tiles,),
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        grad_out_ptr=grad_out,
        out_ptr=out,
        lse_ptr=lse.contiguous(),
        grad_lse_ptr=None if grad_lse is None else grad_lse.contiguous(),
        log2_sum_ptr=log2_sum,
        delta_ptr=delta,
        cu_seqlens_q_ptr=cu_seqlens_q,
        heads=heads,
        tq=tq,
        documents=documents,
        tiles=tiles,
        **strides("g", grad_out),
        **strides("o", out),
        HAS_GRAD_LSE=grad_lse is not None,
        VARLEN=cu_seqlens_q is not None,
        HEAD_SIZE=size,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
    )
    return {"log2_sum_ptr": log2_sum, "delta_ptr": delta}
