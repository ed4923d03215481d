"""all_gather: gathers every rank's x, in rank order.

Each rank stages its x, waits for the others and copies all slots. It copies its own slot first and then those of rank +
1, rank + 2, …, so that not all ranks read the same slot at once. `kernels/endpoint.py` describes the protocol.
"""

import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.endpoint import Endpoint, launch_words, slot, stage
from tpfuse.kernels.signals import advance, barrier, begin
from tpfuse.kernels.trace import COPYING, now, record


@triton.jit(do_not_specialize=["rank"])
def all_gather_forward_kernel(
    x_ptr,  # [n] words, read
    out_ptr,  # [WORLD, n] words, written
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
    word: tl.constexpr = x_ptr.dtype.element_ty
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        since = now(trace_ptr)
        stage(x_ptr, slot(slots_ptr, rank, epoch, slot_bytes, word), 1, n, n, BLOCK)
        record(trace_ptr, COPYING, rank, since)
        if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, trace_ptr=trace_ptr):
            for step in range(WORLD):
                since = now(trace_ptr)
                source = (rank + step) % WORLD
                staged_ptr = slot(slots_ptr, source, epoch, slot_bytes, word)
                row_ptr = out_ptr + tl.cast(n, tl.int64) * source
                for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
                    offs = tile * BLOCK + tl.arange(0, BLOCK)
                    tl.store(row_ptr + offs, tl.load(staged_ptr + offs, mask=offs < n), mask=offs < n)
                record(trace_ptr, COPYING, source, since)
            advance(state_ptr, epoch)


def all_gather_forward(x: Tensor, out: Tensor, endpoint: Endpoint) -> None:
    """Set out[r] to rank r's x on every rank, once all ranks have called this; in stream order.

    x: [n], out: [world, n], contiguous, of one dtype, which may be any; x may be out[rank]. All ranks pass the same n
    and dtype. Raise ValueError for other shapes, dtypes or devices, where x is larger than a slot, and where the
    channel has too few flags.
    """
    n = x.numel()
    endpoint.check("all_gather", x, (n,), out, (endpoint.world, n))
    launch_words(all_gather_forward_kernel, "all_gather", x, out, n, endpoint)
