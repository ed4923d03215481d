"""shard_sum: this rank's shard of the sum of all ranks' gradients, and the shard's part of their squared norm.

Every rank has its own flat buffer of gradients in symmetric memory, of one size and dtype, and owns the elements
[start, start + m) of the sum, which no other rank owns (ZeRO, arXiv:1910.02054). It reads these elements in place, each
once, and sums in float32 along a binary tree of the addresses, whose order all ranks share (`tpfuse.comm.sum_order`):
nothing is staged, and the result does not depend on the owner. The sum may overwrite the rank's own gradients: no other
rank reads those. The squares of the sums are added in float64, in which they are exact.

There is one round of signals, at the beginning: program p waits until program p of every rank has started, which
happens after all that the rank's stream did before, and so after its gradients are written. There is no round at the
end. Peers may still be reading this rank's gradients when its launch is over; the gradients may be written again after
this rank's next launch on the channel, of any kernel. That launch ends only when every rank has begun it, which is
after that rank's launch of this kernel, with all its reads. So one more launch between is enough: with two buffers that
are summed in turn, the sum of the other buffer comes between two sums of the same buffer; with one buffer, the update
(`kernels/sharded_adamw.py`) comes between this step's sum and the next step's gradients. All operations that write
gradients must come after that launch on the stream.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import FLOATS, check_tensor
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.signals import advance, barrier, begin
from tpfuse.kernels.trace import COMPUTING, now, record

_MOST = 2**30  # elements of a shard: kernels count them in 32 bits, which takes fewer registers


@triton.jit
def shard_pointer(addresses_ptr, peer, start, dtype: tl.constexpr):
    """Return a pointer to element `start` of `peer`'s flat buffer, whose address is a multiple of 16."""
    base = tl.load(addresses_ptr + peer).to(tl.pointer_type(dtype))
    return tl.multiple_of(base, 16) + start  # on the result of a function call the hint would be lost


@triton.jit
def sum_over_ranks(
    addresses_ptr,
    start,
    offs,
    mask,
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    FIRST: tl.constexpr = 0,
    SIZE: tl.constexpr = 4096,
):
    """Return the sum of elements start + offs of all ranks' flat buffers in float32, along a tree; 0 where masked.

    FIRST, SIZE: the subtree of these addresses; a power of two, of which the tree may lack the last ones.
    """
    if SIZE == 1:
        total = tl.load(shard_pointer(addresses_ptr, FIRST, start, dtype) + offs, mask=mask, other=0.0).to(tl.float32)
    else:
        HALF: tl.constexpr = SIZE // 2
        total = sum_over_ranks(addresses_ptr, start, offs, mask, dtype, WORLD, FIRST, HALF)
        if FIRST + HALF < WORLD:
            total += sum_over_ranks(addresses_ptr, start, offs, mask, dtype, WORLD, FIRST + HALF, HALF)
    return total


@triton.jit(do_not_specialize=["rank"])
def shard_sum_kernel(
    gradients_ptr,  # [size] bf16, this rank's: read through its address
    addresses_ptr,  # [WORLD] int64, addresses of [size] bf16, read
    out_ptr,  # [m] float32, written
    squares_ptr,  # [parts] float64, written
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    m,
    parts,
    start,
    rank,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = gradients_ptr.dtype.element_ty
    pid, programs = tl.program_id(0), tl.num_programs(0)
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, trace_ptr=trace_ptr):
            since = now(trace_ptr)
            squares = tl.zeros((BLOCK,), tl.float64)
            for tile in range(pid, tl.cdiv(m, BLOCK), programs):
                offs = tile * BLOCK + tl.arange(0, BLOCK)
                mask = offs < m
                total = sum_over_ranks(addresses_ptr, start, offs, mask, dtype, WORLD)
                tl.store(out_ptr + offs, total, mask=mask)
                wide = total.to(tl.float64)
                squares += wide * wide
            own = tl.sum(squares, 0)
            for part in range(pid, parts, programs):
                tl.store(squares_ptr + part, tl.where(part == pid, own, 0.0))
            record(trace_ptr, COMPUTING, rank, since)
            advance(state_ptr, epoch)


def shard_sum(
    gradients: Tensor, addresses: Tensor, out: Tensor, squares: Tensor, start: int, endpoint: Endpoint
) -> int:
    """Set out = Σ over ranks of gradients[start : start + m], squares.sum() = Σ out², once all ranks have called this.

    Return the most additions through which the square of an element passes until it is in `squares`.

    gradients: [size] float32, float16 or bfloat16, this rank's; addresses: [world] int64, the address of every rank's
    buffer, multiples of 16. out: [m] float32; it may be gradients[start : start + m]. squares: [parts] float64, at
    least endpoint.programs, overwritten: a part for each program, the rest 0; the same in every run. All ranks pass the
    same size, dtype, m and parts, and shards that do not overlap; a start that is a multiple of 16 permits wide
    accesses. No rank may write its gradients before its next launch on the channel. Raise ValueError for other shapes,
    dtypes or devices, for a shard that is not inside the buffer, and where the channel has too few flags.
    """
    m = out.numel()
    check_flat("shard_sum", "gradients", gradients, addresses, start, m, endpoint)
    beside = "gradients", gradients
    check_tensor("shard_sum", "out", out, (m,), (torch.float32,), beside, contiguous=True)
    check_tensor("shard_sum", "squares", squares, (squares.numel(),), (torch.float64,), beside, contiguous=True)
    if len(squares) < endpoint.programs:
        raise ValueError(f"shard_sum: squares has {len(squares)} elements: expected at least {endpoint.programs}")
    if m == 0:
        squares.zero_()
        return 0
    row = choose_configuration("shard_sum", gradients.device, gradients.dtype)
    block: int = row.blocks["BLOCK"]
    tiles = cdiv(m, block)
    (programs,) = grid = endpoint.grid("shard_sum", 0, tiles)
    launch(
        shard_sum_kernel,
        grid,
        gradients_ptr=gradients,
        addresses_ptr=addresses,
        out_ptr=out,
        squares_ptr=squares,
        m=m,
        parts=len(squares),
        start=start,
        **row.options,
        **endpoint.signals(),
    )
    return cdiv(tiles, programs) + block


def check_flat(operator: str, name: str, x: Tensor, addresses: Tensor, start: int, m: int, endpoint: Endpoint) -> None:
    """Raise ValueError unless x is flat and contains [start, start + m), and `addresses` has one address per rank."""
    channel = "the channel", endpoint.flags
    check_tensor(operator, name, x, (x.numel(),), FLOATS, channel, contiguous=True)
    check_tensor(operator, f"the addresses of {name}", addresses, (endpoint.world,), (endpoint.flags.dtype,), channel)
    if m > _MOST:
        raise ValueError(f"{operator}: a shard of {m} elements: expected at most {_MOST}: pass it in pieces")
    if start < 0 or start + m > len(x):
        raise ValueError(f"{operator}: the shard [{start}, {start + m}) is not inside {name} [{len(x)}]")
