"""attention_forward_chunks: attention to keys that lie in several places, in one launch.

The same walk as `attention_forward`, with the state (maximum, sum, output) carried from one chunk of keys to the next:
nothing is merged or rounded in between. Chunks are found through a table of addresses on the device, so that they may
lie in other ranks' memory, and a kernel that overlaps a ring with attention waits for a chunk where this one begins
it. It is a kernel of its own because the plain form must not need a table, which the host would have to copy to the
device for each launch; what both do with keys is one function, `attention_online_softmax.attend`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.attention_forward import NOT_SPECIALIZED, strides
from tpfuse.kernels.attention_online_softmax import attend, finish, initial_state, load_rows
from tpfuse.kernels.attention_scores import aligned, dropout_rows, multiple_of_8, score_arguments
from tpfuse.kernels.checks import check_floats, check_shape
from tpfuse.kernels.configurations import choose
from tpfuse.kernels.launch import launch


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_forward_chunks_kernel(
    q_ptr,  # [B, H, Tq, D] bf16, read
    chunks_ptr,  # [3, chunks] int64, read: addresses of k and v [B, Hk, Tk, D], position of the first key
    out_ptr,  # [B, Tq, H, D] bf16, written
    lse_ptr,  # [B, H, Tq] fp32, written
    head_rows_ptr,  # [B, H] int64, read
    dropout_key_ptr,  # [] int64, read
    heads,
    group,
    tq,
    tk,
    chunks,
    tiles_m,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    q_offset,
    ahead,
    behind,
    scale,
    dropout_width,
    dropout_threshold: tl.int64,
    dropout_scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    q_first = (tiles_m - 1 - tl.program_id(0) % tiles_m) * BLOCK_M
    batch_head = tl.program_id(0) // tiles_m
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    q_ptr += multiple_of_8(batch * stride_qb + head * stride_qh)
    q = load_rows(q_ptr, q_first, tl.arange(0, BLOCK_M), tq, stride_qt, HEAD_SIZE, BLOCK_D, True)
    q_pos = q_offset + q_first + tl.arange(0, BLOCK_M)
    q_last = q_offset + min(q_first + BLOCK_M, tq) - 1
    dropout_row = q_pos
    if DROPOUT:
        dropout_row = dropout_rows(tl.load(head_rows_ptr + batch_head), q_pos, dropout_width, tl.load(dropout_key_ptr))
    element: tl.constexpr = tl.pointer_type(q_ptr.dtype.element_ty)
    k_head = multiple_of_8(batch * stride_kb + head // group * stride_kh)
    v_head = multiple_of_8(batch * stride_vb + head // group * stride_vh)

    acc, row_max, row_sum = initial_state(BLOCK_M, BLOCK_D)
    for chunk in range(chunks):
        k_ptr = tl.multiple_of(tl.load(chunks_ptr + chunk).to(element), 16) + k_head
        v_ptr = tl.multiple_of(tl.load(chunks_ptr + chunks + chunk).to(element), 16) + v_head
        k_offset = tl.load(chunks_ptr + 2 * chunks + chunk).to(tl.int32)
        acc, row_max, row_sum = attend(
            (acc, row_max, row_sum),
            q,
            q_offset + q_first,
            q_last,
            (q_ptr, q_first, tq, stride_qt),
            (k_ptr, v_ptr, tk, stride_kt, stride_vt),
            (q_pos, k_offset, ahead, behind),
            (dropout_row, dropout_threshold),
            scale,
            HEAD_SIZE,
            HAS_AHEAD,
            HAS_BEHIND,
            DROPOUT,
            BLOCK_N,
        )
    out_ptr += (batch * tq * heads + head) * HEAD_SIZE
    lse_ptr += (batch * heads + head) * tq
    finish((acc, row_max, row_sum), out_ptr, lse_ptr, heads, q_first, tq, scale, dropout_scale, HEAD_SIZE)


def attention_forward_chunks(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    k_offsets: Sequence[int],
    *,
    causal: bool = True,
    window: int | None = None,
    q_offset: int = 0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: Tensor | None = None,
    head_rows: Tensor | None = None,
    dropout_width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as of `attention_forward`, for keys in chunks whose order does not matter.

    keys, values: at least one [B, Hk, Tk, D] each, of one shape, one dtype, one set of strides, contiguous rows that
    start at multiples of 16 bytes; k_offsets: the position of each chunk's first key. dropout_width: default the number
    of all keys. The rest is `attention_forward`'s. The table of addresses is copied from the host: not for CUDA graphs.
    Raises ValueError that names the argument, what was received and what is accepted.
    """
    name = "attention_forward_chunks"
    check_chunks(name, q, keys, values, k_offsets)
    k, v = keys[0], values[0]
    if dropout_width is None:
        dropout_width = len(keys) * k.shape[2]
    # fmt: off
    arguments = score_arguments(
        name, q, k, v, causal=causal, window=window, q_offset=q_offset, k_offset=0, scale=scale, cu_seqlens_q=None,
        cu_seqlens_k=None, dropout_p=dropout_p, dropout_key=dropout_key, head_rows=head_rows,
        dropout_width=dropout_width,
    )
    # fmt: on
    for unused in ("k_offset", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "VARLEN"):
        del arguments[unused]
    batch, heads, tq, size = q.shape
    q = aligned(q)
    out = torch.empty((batch, tq, heads, size), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, tq), dtype=torch.float32, device=q.device)
    row = choose("attention_chunks", q.device, q.dtype, D=arguments["BLOCK_D"])
    tiles_m = triton.cdiv(tq, row.blocks["BLOCK_M"])
    launch(
        attention_forward_chunks_kernel,
        (batch * heads * tiles_m,),
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        q_ptr=q,
        chunks_ptr=chunk_table(keys, values, k_offsets),
        out_ptr=out,
        lse_ptr=lse,
        chunks=len(keys),
        tiles_m=tiles_m,
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        dropout_scale=1.0 / (1.0 - dropout_p),
        **arguments,
        **row.blocks,
    )
    return out.transpose(1, 2), lse


def chunk_table(keys: Sequence[Tensor], values: Sequence[Tensor], k_offsets: Sequence[int]) -> Tensor:
    """[3, chunks] int64 on the chunks' device: addresses of keys and values, positions of the first keys."""
    addresses = [[x.data_ptr() for x in chunks] for chunks in (keys, values)]
    return torch.tensor([*addresses, list(k_offsets)], dtype=torch.int64, device=keys[0].device)


def check_chunks(
    operator: str, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], k_offsets: Sequence[int]
) -> None:
    """Raises ValueError unless all chunks are alike and can be found by their addresses."""
    if not keys:
        raise ValueError(f"{operator}: keys is empty: expected at least one chunk")
    for name, chunks in (("values", values), ("k_offsets", k_offsets)):
        if len(chunks) != len(keys):
            raise ValueError(f"{operator}: {name} has {len(chunks)} entries: expected {len(keys)}, as keys")
    for name, tensors in (("keys", keys), ("values", values)):
        for index, x in enumerate(tensors):
            label = f"{name}[{index}]"
            check_floats(operator, **{"q": q, label: x})
            check_shape(operator, label, x, tuple(tensors[0].shape))
            if x.stride() != tensors[0].stride():
                raise ValueError(f"{operator}: {label} has strides {x.stride()}: expected {tensors[0].stride()}")
            if aligned(x) is not x:
                raise ValueError(
                    f"{operator}: {label} has strides {x.stride()} and address {x.data_ptr():#x}: expected contiguous"
                    " rows that start at multiples of 16 bytes"
                )
