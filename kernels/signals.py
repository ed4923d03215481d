"""Signals between the ranks of a group: device functions that order one rank's writes before another rank's reads.

A flag is an int32 word in symmetric memory that says "what belongs to epoch e is here". Each word has one writer, whose
values only grow and wrap around; the epoch is kept in device memory, so that a replayed CUDA graph continues to count.

    epoch, running = begin(state, abort)       # this launch's epoch; whether anything may be done at all
    ... write what peers will read ...
    if barrier(flags, abort, epoch, rank):     # every rank's program p has come here in its launch of this epoch
        ... read what peers have written ...
        advance(state, epoch)                  # the last program of the grid publishes the epoch

This is enough by NVIDIA's PTX ISA, chapter "Memory Consistency Model", whose terms follow. `signal` is a release
pattern and `wait_signal` an acquire pattern on one word; both are atomics of scope .sys, so morally strong between GPUs
(and processes). The acquire that observes the release synchronises with it, and base causality order then puts what the
writing thread did before its release ahead of what the waiting thread does after its acquire. A program is many
threads, and one of them signals: the barrier of the program before the release (`tl.debug_barrier`, which Triton 3.8
and older do not insert by themselves, triton PR 10816) orders the others' reads and writes before it; the value that a
wait returns reaches the other threads through shared memory and a barrier of the program. Nothing here orders the
asynchronous proxy: data that is signalled must not have been stored by TMA, because Triton 3.7 and older wait only for
the reads of TMA stores (triton PR 10415), and must be read by ordinary loads, or by TMA behind a fence between the
proxies, as in `all_gather_gemm_ping_pong`.

A program waits for programs of peers, or for earlier ones of its own grid, never for a later one of its grid, so that
the only requirement is that all programs of a grid run at once. A launch whose wait is cut short by the abort word
sends no more signals and leaves the epoch as it is.
"""

import triton
import triton.language as tl

from tpfuse.kernels.trace import last_late, nobody, now, record_wait

# How far a peer may be ahead of a wait. A word that small grids have not written for 2^31 launches is in the other half
# of the numbers, where the sign of the difference is wrong; this bound tells it from a peer that is one epoch ahead.
_AHEAD: tl.constexpr = tl.constexpr(1 << 16)


def wrapped(value: int) -> int:
    """Return `value` as an int32, on the host: signals may wrap around, and so may their differences."""
    return (value + 2**31) % 2**32 - 2**31


@triton.jit
def peer_pointer(addresses_ptr, peer, dtype: tl.constexpr):
    """Return a pointer to `peer`'s part of a symmetric buffer.

    addresses_ptr: [world] int64, `SymmetricBuffer.addresses`.
    """
    return tl.load(addresses_ptr + peer).to(tl.pointer_type(dtype))


@triton.jit
def signal(flag_ptrs, epoch, mask=None):
    """Set words of peers' flags to `epoch`, after everything that this program has read and written (release).

    flag_ptrs: one pointer, or a block of them, which neighbouring threads signal at once: one fence for all instead of
    one for each.
    """
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptrs, epoch, mask=mask, sem="release", scope="sys")


@triton.jit
def wait_signal(flag_ptrs, epoch, abort_ptr, mask=None, trace_ptr=None, peer=-1):
    """Wait until words of this rank's flags are all `epoch` or later (acquire); return False after an abort.

    flag_ptrs: as for `signal`. Everything that the writers had done before is then visible to all threads of the
    program. The abort word, which ends the wait too, orders nothing. trace_ptr: the kernel's; peer: the rank that a
    trace shall name, or a block of them, one for each flag.
    """
    since, last = now(trace_ptr), nobody()
    late, aborted = 1, 0
    while (late != 0) & (aborted == 0):
        ahead = tl.atomic_add(flag_ptrs, 0, mask=mask, sem="acquire", scope="sys") - epoch
        behind = (ahead < 0) | (ahead >= _AHEAD)
        if mask is not None:
            behind = behind & mask
        if trace_ptr is not None:
            last = last_late(behind, peer, last)
        late = behind.to(tl.int32)
        if len(late.shape) == 1:
            late = tl.max(late, 0)
        if late != 0:
            aborted = tl.atomic_add(abort_ptr, 0, sem="relaxed", scope="sys")
    record_wait(trace_ptr, last, since)
    return late == 0


@triton.jit
def arrive(flags_ptr, epoch, rank, first, WORLD: tl.constexpr):
    """Tell every rank, this one too, that the program has come here: word first + rank of its flags.

    flags_ptr: [WORLD] int64, addresses of int32; first: a multiple of WORLD, so that word w is written by rank w %
    WORLD alone, whatever the size of the grid: two writers of one word could overtake each other, since a rank that has
    finished an epoch signals the next one while other ranks have yet to be signalled.
    """
    ranks = tl.arange(0, triton.next_power_of_2(WORLD))
    there = tl.load(flags_ptr + ranks, mask=ranks < WORLD, other=0).to(tl.pointer_type(tl.int32))
    signal(there + first + rank, epoch, ranks < WORLD)


@triton.jit
def barrier(flags_ptr, abort_ptr, epoch, rank, WORLD: tl.constexpr, ROUND: tl.constexpr = 0, trace_ptr=None):
    """Wait until program p of every rank has come here in this epoch; return False if the abort word ended the wait.

    Data that those programs wrote before may be read afterwards, and data that they read may be overwritten. flags_ptr:
    [WORLD] int64, addresses of int32 [rounds * programs * WORLD], rounds: how many barriers a launch has, each with its
    ROUND. A rank signals itself as well: the program's writes are then visible to its own other threads too. trace_ptr:
    as for `wait_signal`.
    """
    ranks = tl.arange(0, triton.next_power_of_2(WORLD))
    first = (ROUND * tl.num_programs(0) + tl.program_id(0)) * WORLD
    arrive(flags_ptr, epoch, rank, first, WORLD)
    here = peer_pointer(flags_ptr, rank, tl.int32)
    return wait_signal(here + first + ranks, epoch, abort_ptr, ranks < WORLD, trace_ptr, ranks)


@triton.jit
def begin(state_ptr, abort_ptr):
    """Return (the epoch of this launch, whether it may run).

    state_ptr: [epoch of the launch before, programs that ended]. Only the launches of one rank access its state, one
    after another on one stream. A launch after one that was aborted does nothing: it would write data that peers may
    still be reading.
    """
    aborted = tl.atomic_add(abort_ptr, 0, sem="relaxed", scope="sys")
    epoch = tl.load(state_ptr) + 1
    return epoch, aborted == 0


@triton.jit
def advance(state_ptr, epoch):
    """Count a program that ends without an abort; the last one of the grid publishes the epoch.

    By then all have read the previous epoch: each releases its reads with its count, and the last one's count acquires
    them. The next launch sees the new epoch by the order of the stream.
    """
    tl.debug_barrier()
    ended = tl.atomic_add(state_ptr + 1, 1, sem="acq_rel", scope="sys") + 1
    if ended == tl.num_programs(0):
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, epoch)
