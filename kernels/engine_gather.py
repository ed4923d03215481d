"""engine_gather: copy engines write every rank's chunk into the memory of all ranks; the launches around these copies.

A copy engine fills a link without a multiprocessor. Nothing is staged: engines read a rank's x in place, and write it
into symmetric memory of its peers. (A copy within one GPU runs on its multiprocessors, according to NCCL's
src/ce_coll.cc, and a product leaves none of them free.) On each rank, P is the stream of the product and C the stream
of the copies:

    C: waits for P
    C: open_copies(endpoint, stamp)          all ranks have come here; the stamp, a word, says which epoch this is
    C: for peer = rank - 1, rank - 2, …
           peer's gathered[rank] = x         by a copy engine
           peer's ready[rank] = stamp        by a copy engine too, of four bytes
    P: all_gather_gemm_forward(…, copied=True)      multiplies chunk by chunk what is ready, and advances the epoch
    P: waits for C, after which x may be freed

Every rank takes the chunks in the order rank, rank + 1, rank + 2, …, so that all links are busy and each chunk comes
when it is needed. Where no product reads the chunks, no word of ready is written, and

    C: close_copies(endpoint)                all ranks have written; advances the epoch

replaces the product: the operations that follow on P have all chunks. `gathered`, `ready` and `stamp` are in symmetric
memory that only these gathers use; the stamp and ready are zeroed with the signals.

Who may write what when. A rank's `gathered` is written by its peers in epoch e, after their open_copies of e. Each of
those has waited for this rank's open_copies, which comes after all that P has done before, and so after all operations
that read the chunks of e - 1. One buffer is enough for that, whichever graphs are replayed. Word s of ready is written
by rank s alone, in each epoch in which it signals its chunk, after the chunk itself, and read by the product of that
epoch. The stamp is written by open_copies of e, and read by copies before the next open_copies on the same stream. The
state is advanced on P or on C, by a launch that ends when all ranks have written, and so after all ranks, including
this one, have come to open_copies of e: this rank's open_copies read the state before that.

A copy of the stamp needs no multiprocessor, as a launch would, nor a number from the host, as cuStreamWriteValue32
would: it is the same operation in each replay of a graph. Copies on a stream run one after another, and NCCL's
collectives by copy engines signal in this way too (ncclPrepUCSync, src/ce_coll.cc).

Abort. An open_copies whose wait was cut short leaves the stamp as it was: peers receive an old epoch, for which no rank
waits. The copies of x cannot be stopped, and may overwrite chunks that a peer still multiplies. That is no more than an
abort does to any operation that is under way: the peer raises at the end of its guard (on streams: of the next guard),
which therefore encloses all reads of the chunks. `SymmetricMemory.reset` waits for all copies of all ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_tensor
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.launch import Launch, launch, planned
from tpfuse.kernels.signals import advance, barrier, begin


@triton.jit(do_not_specialize=["rank"])
def open_copies_kernel(
    stamp_ptr,  # [1] int32, written
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32, read
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    rank,
    WORLD: tl.constexpr,
):
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, trace_ptr=trace_ptr):
            tl.store(stamp_ptr, epoch)


@triton.jit(do_not_specialize=["rank"])
def close_copies_kernel(
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    rank,
    WORLD: tl.constexpr,
):
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, 1, trace_ptr):
            advance(state_ptr, epoch)


def open_copies(endpoint: Endpoint, stamp: Tensor) -> None:
    """Make the current stream wait until every rank has come here, or the abort word is set. One program of one warp.

    stamp: int32 [1], zeroed with the signals: becomes the epoch. Raise ValueError for another stamp, and where the
    channel has too few flags.
    """
    _opening(endpoint, stamp).run(stamp_ptr=stamp)


@planned
def _opening(endpoint: Endpoint, stamp: Tensor) -> Launch:
    check_tensor("open_copies", "stamp", stamp, (1,), (torch.int32,), ("the channel", endpoint.slots))
    endpoint.grid("open_copies", 0, 1, rounds=2)
    return Launch(open_copies_kernel, (1,), endpoint.signals(), num_warps=1, num_stages=1)


def close_copies(endpoint: Endpoint) -> None:
    """Make the current stream wait until every rank has come here after its copies; end the epoch that is open."""
    launch(close_copies_kernel, (1,), num_warps=1, num_stages=1, **endpoint.signals())
