"""block_exchange: copies every rank's block to all ranks of a ring, piece by piece, while they compute.

A block is a contiguous run of int32 words, of one size on every rank, in one or two parts. Each half of a slot has
space for the blocks of all ranks. The first programs of a grid, the copiers, copy the blocks. Copier p stages its share
of this rank's block in this rank's slot and signals that. Then, for rank - 1, rank - 2, …, it waits until its share of
that rank's block is at a peer, copies it into this rank's slot, and says in a word of `ready` that it is there. The
peer is the left neighbour, which had the block one step before (`ring`), so that a block crosses each link between
neighbours once; or it is the block's owner (not `ring`), where all links are alike. The programs after the copiers take
the blocks in the same order. They read this rank's block from where the caller stored it. Before they read any other
block, they wait until each copier has said that its share of it is there. All first parts are copied before any second
part.

No program waits for a later program of its grid: if a copier waits for a share, the same copier of a peer has signalled
that share one step earlier, and so on down to that peer's share of its own block, which waits for nothing; the other
programs wait only for copiers.

Who may write what when. A slot is written by its owner alone. Its half of epoch e is read in that epoch: by the owner's
later programs, by the owner's later launches on the same stream (in the half of the epoch in `state`), and by peers'
copiers. It is written again in e + 2, after a launch of e + 1 that ended because its copiers had the blocks of all
ranks of that epoch. Each of those blocks was staged by its owner after that owner's launch of e had ended, with all its
reads of others' slots, and came from there along releases and acquires, over however many neighbours. So all reads of
the half precede the write, although in a ring a rank receives signals only from its neighbour. Every launch that
advances the epoch must therefore have copied all blocks, also where it has nothing to compute.

Each word has one writer. A flag word w is written by rank w % WORLD alone (see `signals.arrive`): in a ring it belongs
to one part, one distance from the owner and one copier, otherwise to one part and one copier. A word of ready belongs
to one part, one owner and one copier, and is written by this rank alone. All of these words only ever receive later
epochs, so launches with different numbers of copiers and parts share them. Words that an aborted launch leaves set are
zeroed with the signals.

Blocks that travel around a ring while attention is computed: Liu et al., arXiv:2310.01889.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.endpoint import Endpoint, check_ready, slot
from tpfuse.kernels.launch import cdiv
from tpfuse.kernels.signals import arrive, peer_pointer, signal, wait_signal
from tpfuse.kernels.trace import COPYING, now, record

_ALIGNMENT = 16  # words: Triton recognises this multiple, so that 16 bytes are moved at once


def part_starts(parts: Sequence[int]) -> list[int]:
    """Return the words at which the parts of a block and then the next block begin; parts: their lengths in words."""
    return list(accumulate((cdiv(words, _ALIGNMENT) * _ALIGNMENT for words in parts), initial=0))


@dataclass(frozen=True)
class BlockExchange:
    """The channel and the route by which blocks are exchanged.

    endpoint: its slots have space for every rank's block. ready: int32, contiguous, zeroed with the signals, used by
    this rank alone, and with the same number of words on every rank; a launch has no more copiers than there are words
    for each part of each rank's block (8 are enough). ring: blocks go from neighbour to neighbour; otherwise each block
    is read from its owner.
    """

    endpoint: Endpoint
    ready: Tensor
    ring: bool

    def __post_init__(self) -> None:
        """Raise ValueError unless ready has the form that the class requires."""
        check_ready("block_exchange", self.ready, self.endpoint)

    def copiers(self, operator: str, parts: Sequence[int], wanted: int, block: int) -> int:
        """Return how many programs copy blocks of these parts, `block` words at a time: from one to `wanted`.

        Raise ValueError for parts that are not multiples of 16 bytes, and where slots or flags are too few.
        """
        if any(words % 4 for words in parts):
            raise ValueError(f"{operator}: parts of {tuple(parts)} words: expected multiples of 4 (16 bytes)")
        world, end = self.endpoint.world, self.endpoint
        shares = cdiv(max(parts), block)
        most_copiers = len(self.ready) // (len(parts) * world)
        if most_copiers == 0:
            raise ValueError(f"{operator}: ready has {len(self.ready)} words: expected at least {len(parts) * world}")
        copiers = min(wanted, max(shares, 1), most_copiers, max(end.programs - 1, 1))
        steps = max(world - 1, 1) if self.ring else 1
        return int(end.grid(operator, 4 * world * part_starts(parts)[-1], copiers, len(parts) * steps)[0])

    def programs(self, operator: str, copiers: int, tiles: int) -> int:
        """Return the number of all programs of a launch: copiers, and programs that share `tiles` tiles.

        Raise ValueError for a channel of one program, where there is a tile.
        """
        if tiles and self.endpoint.programs == copiers:
            raise ValueError(
                f"{operator}: a channel of 1 program: expected at least 2, one that copies, one that computes"
            )
        return int(copiers + min(tiles, self.endpoint.programs - copiers))

    def arguments(self, parts: Sequence[int]) -> dict[str, Any]:
        """Return the arguments that every kernel takes; block_words: words from one block of a slot to the next."""
        return {
            "ready_ptr": self.ready,
            "block_words": part_starts(parts)[-1],
            "RING": self.ring,
            **self.endpoint.arguments(),
        }


@triton.jit
def _copy_share(source_ptr, target_ptr, words, trace_ptr, owner, COPIERS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy this copier's tiles of a part of owner's block: the same tiles of every block, on every rank."""
    since = now(trace_ptr)
    words = words // 4 * 4  # words is a multiple of 4; this tells Triton, so that 16 bytes are moved at once
    for tile in range(tl.program_id(0), tl.cdiv(words, BLOCK), COPIERS):
        offs = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=offs < words), mask=offs < words)
    record(trace_ptr, COPYING, owner, since)


@triton.jit
def block_in_slot(slots_ptr, epoch, slot_bytes, rank, source, block_words):
    """Return an int32 pointer, 16-byte aligned, to where the block of `source` is, or will be, in `rank`'s slot."""
    half = slot(slots_ptr, rank, epoch, slot_bytes, tl.int32)
    return tl.multiple_of(half + source * (block_words // 16 * 16), 16)


@triton.jit
def copy_blocks(
    own_ptr,  # [words] int32, read: the part of this rank's block, where the caller stored it
    ready_ptr,  # [PARTS, WORLD, COPIERS] int32, written
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes: its own is written, peers' are read
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    start,
    words,
    block_words,
    slot_bytes,
    epoch,
    rank,
    WORLD: tl.constexpr,
    COPIERS: tl.constexpr,
    RING: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do a copier's work for one part of all blocks, which begins at word `start` of a block and has `words` words.

    Return the number of blocks whose share is here: WORLD, unless a wait was cut short, after which it copies no more.
    """
    STEPS: tl.constexpr = WORLD - 1 if RING else 1
    copier = tl.program_id(0)
    left, right = (rank + WORLD - 1) % WORLD, (rank + 1) % WORLD
    here, there = peer_pointer(flags_ptr, rank, tl.int32), peer_pointer(flags_ptr, right, tl.int32)
    first = (PART * STEPS * COPIERS + copier) * WORLD  # the copier's flag word of the first step and of rank 0
    if WORLD > 1:
        staged_ptr = block_in_slot(slots_ptr, epoch, slot_bytes, rank, rank, block_words) + start
        _copy_share(own_ptr, staged_ptr, words, trace_ptr, rank, COPIERS, BLOCK)
        if RING:
            signal(there + first + rank, epoch)
        else:
            arrive(flags_ptr, epoch, rank, first, WORLD)
    blocks = 1
    for step in range(1, WORLD):
        source = (rank + WORLD - step) % WORLD
        sender = left if RING else source
        step_words = (step - 1) * COPIERS * WORLD if RING else 0
        if blocks == step:
            if wait_signal(here + first + step_words + sender, epoch, abort_ptr, None, trace_ptr, sender):
                theirs_ptr = block_in_slot(slots_ptr, epoch, slot_bytes, sender, source, block_words) + start
                ours_ptr = block_in_slot(slots_ptr, epoch, slot_bytes, rank, source, block_words) + start
                _copy_share(theirs_ptr, ours_ptr, words, trace_ptr, source, COPIERS, BLOCK)
                if RING:
                    if step < WORLD - 1:
                        signal(there + first + step * COPIERS * WORLD + rank, epoch)
                signal(ready_ptr + (PART * WORLD + source) * COPIERS + copier, epoch)
                blocks += 1
    return blocks


@triton.jit
def await_block(
    ready_ptr, abort_ptr, trace_ptr, step, epoch, rank, WORLD: tl.constexpr, COPIERS: tl.constexpr, PART: tl.constexpr
):
    """Wait until a part of the block of rank - step is in this rank's slot; return whether it may be read.

    It does not wait for step 0, this rank's block, nor where there are no copiers. It returns False where the abort
    word ended the wait: the block must not be read then. Loops over a block belong inside the `if` of this call: after
    it Triton 3.7 does not prefetch loads in them.
    """
    if COPIERS == 0:
        return True
    else:
        source = (rank + WORLD - step) % WORLD
        copiers = tl.arange(0, triton.next_power_of_2(COPIERS))
        words = ready_ptr + (PART * WORLD + source) * COPIERS + copiers
        mask = copiers < tl.where(step > 0, COPIERS, 0)
        return wait_signal(words, epoch, abort_ptr, mask, trace_ptr, source)
