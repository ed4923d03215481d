"""reduce_scatter: row r of the sum over all ranks, on rank r.

Each rank stages all of its rows, waits for the others and sums its row out of all slots, rank 0 first, half types in
float32 with one rounding. `kernels/endpoint.py` describes the protocol.
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
def reduce_scatter_forward_kernel(
    x_ptr,  # [WORLD, n] bf16, read
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
        stage(x_ptr, slot(slots_ptr, rank, epoch, slot_bytes, dtype), WORLD, n, n * WORLD, BLOCK)
        record(trace_ptr, COPYING, rank, since)
        if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, trace_ptr=trace_ptr):
            since = now(trace_ptr)
            for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
                offs = tile * BLOCK + tl.arange(0, BLOCK)
                mask = offs < n
                total = sum_of_slots(slots_ptr, epoch, slot_bytes, n * rank + offs, mask, dtype, WORLD)
                tl.store(out_ptr + offs, total, mask=mask)
            record(trace_ptr, COMPUTING, rank, since)
            advance(state_ptr, epoch)


def reduce_scatter_forward(x: Tensor, out: Tensor, endpoint: Endpoint) -> None:
    """Set out to the sum over all ranks of their x[rank], once all ranks have called this; in stream order.

    x: [world, n], out: [n], contiguous, of one of SUMMED; out may be x[rank]. The sum is taken in rank order, half
    types in float32, integers in their own type, in which they wrap around. All ranks pass the same n and dtype. Raise
    ValueError for other shapes, dtypes or devices, where x is larger than a slot, and where the channel has too few
    flags.
    """
    n = x.numel() // endpoint.world
    endpoint.check("reduce_scatter", x, (endpoint.world, n), out, (n,))
    check_dtype("reduce_scatter", "x", x, SUMMED)
    row = choose_configuration("reduce_scatter", x.device, configured(x.dtype))
    launch(
        reduce_scatter_forward_kernel,
        endpoint.grid("reduce_scatter", x.nbytes, cdiv(n, row.blocks["BLOCK"])),
        x_ptr=x,
        out_ptr=out,
        n=n,
        **row.options,
        **endpoint.arguments(),
    )
