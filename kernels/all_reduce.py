"""all_reduce: computes the sum over all ranks, on every rank, in one shot or in two.

One shot is for small tensors: each rank stages x, waits for the others and sums all slots. Two shots are for large
tensors: each rank sums one part of x out of all slots and stores the sum in its own slot; after a second round of
signals all ranks copy each other's parts, so that each rank reads world times less. The part that a rank sums is read
in its own slot by this rank alone until the sum replaces it. Both add rank 0's tensor first and sum half types in
float32 with one rounding: the result is bitwise the same on every rank, in one shot and in two. `kernels/endpoint.py`
describes the protocol.
"""

import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_dtype
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.endpoint import SUMMED, Endpoint, configured, slot, stage, sum_of_slots
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.signals import advance, barrier, begin
from tpfuse.kernels.trace import COMPUTING, COPYING, now, record


@triton.jit(do_not_specialize=["rank"])
def all_reduce_one_shot_kernel(
    x_ptr,  # [n] bf16, read
    out_ptr,  # [n] bf16, written
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes: its own is written, all are read
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    n,
    slot_bytes,
    rank,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        since = now(trace_ptr)
        stage(x_ptr, slot(slots_ptr, rank, epoch, slot_bytes, dtype), 1, n, n, BLOCK)
        record(trace_ptr, COPYING, rank, since)
        if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, trace_ptr=trace_ptr):
            since = now(trace_ptr)
            for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
                offs = tile * BLOCK + tl.arange(0, BLOCK)
                total = sum_of_slots(slots_ptr, epoch, slot_bytes, offs, offs < n, dtype, WORLD)
                tl.store(out_ptr + offs, total, mask=offs < n)
            record(trace_ptr, COMPUTING, rank, since)
            advance(state_ptr, epoch)


@triton.jit
def _sum_part(
    slots_ptr, epoch, slot_bytes, rank, part, n, dtype: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Replace this program's tiles of part `rank` of this rank's slot by the sum over all slots."""
    own_ptr = slot(slots_ptr, rank, epoch, slot_bytes, dtype)
    for tile in range(tl.program_id(0), tl.cdiv(part, BLOCK), tl.num_programs(0)):
        column = tile * BLOCK + tl.arange(0, BLOCK)
        element = part * rank + column
        mask = (column < part) & (element < n)
        total = sum_of_slots(slots_ptr, epoch, slot_bytes, element, mask, dtype, WORLD)
        tl.store(own_ptr + element, total, mask=mask)


@triton.jit(do_not_specialize=["rank"])
def all_reduce_two_shot_kernel(
    x_ptr,  # [n] bf16, read
    out_ptr,  # [n] bf16, written
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes: its own is written, all are read
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    n,
    part,
    slot_bytes,
    rank,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        since = now(trace_ptr)
        stage(x_ptr, slot(slots_ptr, rank, epoch, slot_bytes, dtype), WORLD, part, n, BLOCK)
        record(trace_ptr, COPYING, rank, since)
        if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, ROUND=0, trace_ptr=trace_ptr):
            since = now(trace_ptr)
            _sum_part(slots_ptr, epoch, slot_bytes, rank, part, n, dtype, WORLD, BLOCK)
            record(trace_ptr, COMPUTING, rank, since)
            if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, ROUND=1, trace_ptr=trace_ptr):
                for step in range(WORLD):
                    since = now(trace_ptr)
                    owner = (rank + step) % WORLD
                    sum_ptr = slot(slots_ptr, owner, epoch, slot_bytes, dtype)
                    for tile in range(tl.program_id(0), tl.cdiv(part, BLOCK), tl.num_programs(0)):
                        column = tile * BLOCK + tl.arange(0, BLOCK)
                        element = part * owner + column
                        mask = (column < part) & (element < n)
                        tl.store(out_ptr + element, tl.load(sum_ptr + element, mask=mask), mask=mask)
                    record(trace_ptr, COPYING, owner, since)
                advance(state_ptr, epoch)


def all_reduce_forward(x: Tensor, out: Tensor, endpoint: Endpoint, *, two_shot: bool) -> None:
    """Set out to the sum over all ranks of their x, once all ranks have called this; in stream order.

    x, out: [n], contiguous, of one of SUMMED; they may be the same tensor. All ranks pass the same n, dtype and
    two_shot. The sum is taken in rank order, half types in float32, integers in their own type, in which they wrap
    around. Raise ValueError for other shapes, dtypes or devices, where x is larger than a slot, and where the channel
    has too few flags (two shots need twice as many).
    """
    n = x.numel()
    endpoint.check("all_reduce", x, (n,), out, (n,))
    check_dtype("all_reduce", "x", x, SUMMED)
    row = choose_configuration("all_reduce", x.device, configured(x.dtype))
    # Parts are whole groups of 16 elements, so that each begins at an address where wide accesses can begin.
    part = cdiv(n, endpoint.world * 16) * 16 if two_shot else n
    tiles = cdiv(part, row.blocks["BLOCK"])
    launch(
        all_reduce_two_shot_kernel if two_shot else all_reduce_one_shot_kernel,
        endpoint.grid("all_reduce", x.nbytes, tiles, rounds=2 if two_shot else 1),
        x_ptr=x,
        out_ptr=out,
        n=n,
        **({"part": part} if two_shot else {}),
        **row.options,
        **endpoint.arguments(),
    )
