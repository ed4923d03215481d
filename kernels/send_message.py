"""send_message: copies x into a slot of another rank's memory, once the slot is free, and signals that it is there.

A route of messages goes from one rank, the source, to another one, the target, which has the slots (`tpfuse.comm
.messages`). Message k of a route uses slot k % slots for the (k // slots + 1)-th time, which is its epoch. The programs
of a launch wait until the target has released the slot for the time before, and each copies its tiles of x. Each counts
itself when it has ended; the last one signals. The target waits for that signal by `kernels/signal_wait.py`, and reads
the slot in place.

Who may write what when. A slot is written by the source alone, between the target's release of epoch e - 1 and the
source's signal of epoch e. The target reads it between that signal and its own release of e, which it signals on its
stream after the last operation that reads the slot. Two words order this, which only ever receive later epochs: `full`,
in the target's memory, is written by the source alone, and `free`, in the source's memory, by the target alone. They
belong to one slot, so that slots may be released in any order. A launch that the abort word cuts short, and every
launch after it, signals nothing. The count of the programs may then be wrong: it is zeroed with the signals.

The programs of a launch wait for the target only, never for each other: the last one to end is not waited for.

The epoch and the slot come from the host, although in other kernels epochs are counted on the device so that a CUDA
graph can be replayed. The host of the target must know the slot of a message, since it hands out a tensor at this
address, and a graph that is replayed would always use the same one. A send cannot be captured for that reason
(`tpfuse.comm.messages.fused` refuses it).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_contiguous, check_device
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.endpoint import Endpoint, as_words
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.signals import begin, peer_pointer, signal, wait_signal, wrapped
from tpfuse.kernels.trace import COPYING, now, record


@triton.jit(do_not_specialize=["rank", "target", "slot", "full", "free", "before", "epoch"])
def send_message_kernel(
    x_ptr,  # [n] words, read
    slots_ptr,  # [WORLD] int64, addresses of [slots, slot_bytes] bytes; the target's slot is written
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32, of which the second word counts the programs that have ended
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    n,
    slot_bytes,
    rank,
    target,
    slot,
    full,
    free,
    before,
    epoch,
    WORLD: tl.constexpr,  # traces take it from here
    BLOCK: tl.constexpr,
):
    word: tl.constexpr = x_ptr.dtype.element_ty
    _, running = begin(state_ptr, abort_ptr)
    if running:
        here = peer_pointer(flags_ptr, rank, tl.int32)
        if wait_signal(here + free, before, abort_ptr, None, trace_ptr, target):
            since = now(trace_ptr)
            base = peer_pointer(slots_ptr, target, tl.int8) + tl.cast(slot, tl.int64) * slot_bytes
            slot_ptr = tl.multiple_of(base, 16).to(tl.pointer_type(word))
            for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
                offs = tile * BLOCK + tl.arange(0, BLOCK)
                tl.store(slot_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)
            record(trace_ptr, COPYING, target, since)
            tl.debug_barrier()
            ended = tl.atomic_add(state_ptr + 1, 1, sem="acq_rel", scope="sys") + 1
            if ended == tl.num_programs(0):
                tl.store(state_ptr + 1, 0)
                signal(peer_pointer(flags_ptr, target, tl.int32) + full, epoch)


def send_message(x: Tensor, endpoint: Endpoint, *, target: int, slot: int, full: int, free: int, epoch: int) -> None:
    """Copy x into slot `slot` of rank `target`, once the word `free` of this rank is epoch - 1; in stream order.

    x: contiguous, of any shape and dtype, at most endpoint.slot_bytes bytes. endpoint: slots: the address of each
    rank's [slots, slot_bytes] bytes; no epoch is kept in its state. full: the index of the word among the flags of
    `target` that becomes `epoch`; free: the index of the word among the flags of this rank. Raise ValueError for
    another device or strides, for an x that is too large, and for words that the channel does not have.
    """
    check_device("send_message", "the channel", endpoint.slots, "x", x)
    check_contiguous("send_message", "x", x)
    if not (0 <= full < endpoint.flag_count and 0 <= free < endpoint.flag_count):
        raise ValueError(f"send_message: words {full} and {free}: the channel has {endpoint.flag_count} flags")
    words, _, n = as_words(x, x, x.numel())
    row = choose_configuration("all_gather", x.device, torch.int64)  # which copies rows of words in the same way
    block = row.blocks["BLOCK"] * 8 // words.element_size()
    launch(
        send_message_kernel,
        endpoint.grid("send_message", x.nbytes, cdiv(n, block)),
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        x_ptr=words,
        n=n,
        target=target,
        slot=slot,
        full=full,
        free=free,
        before=wrapped(epoch - 1),
        epoch=wrapped(epoch),
        BLOCK=block,
        **endpoint.arguments(),
    )
