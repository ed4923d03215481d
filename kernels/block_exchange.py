"""block_exchange: how the block of every rank of a ring comes to all of them, piece by piece, beside what they compute.

A block is a contiguous run of int32 words, of one size on every rank, in one or two parts. Each half of a slot has room
for the blocks of all ranks. The first programs of a grid, the copiers, bring them: copier p stages its share of the own
block in the own slot, tells of it, and then for rank - 1, rank - 2, … waits until its share of that rank's block is at
a peer, copies it into the own slot, and says in a word of `ready` that it is there. That peer is the left neighbour,
which had the block one step before (`ring`), so that a block crosses each link between neighbours once; or its owner
(not `ring`), where all links are alike. The programs behind the copiers take the blocks in the same order: the own one
from where the caller has it, and before any other they wait until each copier has told of its share of it. All first
parts are brought before any second part.

Nobody waits for a program behind it in its grid: what a copier waits for, the same copier of a peer has told of one
step earlier, down to its own share, which waits for nothing; other programs wait for copiers alone.

Who may write what when. A slot is written by its owner alone. Its half of epoch e is read in that epoch: by the owner's
later programs, by the owner's launches behind this one on its stream (in the half of the epoch in `state`), and by
peers' copiers. It is written again in e + 2, behind a launch of e + 1 that ended because its copiers had the blocks of
all ranks of that epoch. Each of them was staged by its owner after that owner's launch of e had ended, with all its
reads of others' slots, and came from there along releases and acquires, over however many neighbours. So all reads of
the half precede, though in a ring nobody hears of any rank but its neighbour. Every launch that advances the epoch must
therefore have brought all blocks, also where it has nothing to compute.

Each word has one writer. A flag word w is written by rank w % WORLD alone (see `signals.arrive`): in a ring it is of
one part, one distance from the owner and one copier, otherwise of one part and one copier. Words of ready are of one
part, one owner and one copier, and this rank's alone. All of them only ever get later epochs, so launches with
different numbers of copiers and parts share them. What an aborted launch leaves behind is zeroed with the signals.

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

_ALIGNMENT = 16  # words: a multiple that Triton takes note of, so that 16 bytes are moved at once


def part_starts(parts: Sequence[int]) -> list[int]:
    """Where in a block each part begins, and where the next block does, in words; parts: how many words they are."""
    return list(accumulate((cdiv(words, _ALIGNMENT) * _ALIGNMENT for words in parts), initial=0))


@dataclass(frozen=True)
class BlockExchange:
    """By what blocks travel, and on which way.

    endpoint: whose slots have room for every rank's block. ready: int32, contiguous, zeroed with the signals, this
    rank's alone, and as many words on every rank; a launch has no more copiers than there are words for each part of
    each rank's block (8 are enough). ring: from neighbour to neighbour; else each block from its owner.
    """

    endpoint: Endpoint
    ready: Tensor
    ring: bool

    def __post_init__(self) -> None:
        """Raises ValueError for words that cannot be."""
        check_ready("block_exchange", self.ready, self.endpoint)

    def copiers(self, operator: str, parts: Sequence[int], wanted: int, block: int) -> int:
        """How many programs copy blocks of these parts, `block` words at a time: at least one, at most `wanted`.

        Raises ValueError for parts that are no multiples of 16 bytes, and where slots or flags are too few.
        """
        if any(words % 4 for words in parts):
            raise ValueError(f"{operator}: parts of {tuple(parts)} words: expected multiples of 4, 16 bytes")
        world, end = self.endpoint.world, self.endpoint
        shares = cdiv(max(parts), block)
        room = len(self.ready) // (len(parts) * world)
        if room == 0:
            raise ValueError(f"{operator}: ready has {len(self.ready)} words: expected at least {len(parts) * world}")
        copiers = min(wanted, max(shares, 1), room, max(end.programs - 1, 1))
        steps = max(world - 1, 1) if self.ring else 1
        return int(end.grid(operator, 4 * world * part_starts(parts)[-1], copiers, len(parts) * steps)[0])

    def programs(self, operator: str, copiers: int, tiles: int) -> int:
        """All programs of a launch whose other ones share `tiles` tiles.

        Raises ValueError for a channel of one program, where there is a tile.
        """
        if tiles and self.endpoint.programs == copiers:
            raise ValueError(
                f"{operator}: a channel of 1 program: expected at least 2, one that copies, one that computes"
            )
        return int(copiers + min(tiles, self.endpoint.programs - copiers))

    def arguments(self, parts: Sequence[int]) -> dict[str, Any]:
        """What every kernel takes, by keyword; block_words: from one block of a slot to the next."""
        return {
            "ready_ptr": self.ready,
            "block_words": part_starts(parts)[-1],
            "RING": self.ring,
            **self.endpoint.arguments(),
        }


@triton.jit
def _copy_share(source_ptr, target_ptr, words, COPIERS: tl.constexpr, BLOCK: tl.constexpr):
    """This copier's tiles of a part of a block: the same ones of every block, on every rank."""
    words = words // 4 * 4  # they are, and so 16 bytes are moved at once
    for tile in range(tl.program_id(0), tl.cdiv(words, BLOCK), COPIERS):
        offs = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=offs < words), mask=offs < words)


@triton.jit
def block_in_slot(slots_ptr, epoch, slot_bytes, rank, source, block_words):
    """An int32 pointer to the block of `source` in the own slot, or to where it will be; a multiple of 16 bytes."""
    half = slot(slots_ptr, rank, epoch, slot_bytes, tl.int32)
    return tl.multiple_of(half + source * (block_words // 16 * 16), 16)


@triton.jit
def copy_blocks(
    own_ptr,  # [words] int32, read: the part of the own block, where the caller has it
    ready_ptr,  # [PARTS, WORLD, COPIERS] int32, written
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes: its own is written, peers' are read
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    abort_ptr,  # [1] int32, read
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
    """What a copier does for one part of all blocks, which begins at word `start` of a block and has `words` words.

    Returns of how many blocks it has its share: WORLD, unless a wait was cut short, behind which it does no more.
    """
    STEPS: tl.constexpr = WORLD - 1 if RING else 1
    copier = tl.program_id(0)
    left, right = (rank + WORLD - 1) % WORLD, (rank + 1) % WORLD
    here, there = peer_pointer(flags_ptr, rank, tl.int32), peer_pointer(flags_ptr, right, tl.int32)
    first = (PART * STEPS * COPIERS + copier) * WORLD  # the copier's flag word of the first step and of rank 0
    if WORLD > 1:
        staged_ptr = block_in_slot(slots_ptr, epoch, slot_bytes, rank, rank, block_words) + start
        _copy_share(own_ptr, staged_ptr, words, COPIERS, BLOCK)
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
            if wait_signal(here + first + step_words + sender, epoch, abort_ptr):
                theirs_ptr = block_in_slot(slots_ptr, epoch, slot_bytes, sender, source, block_words) + start
                ours_ptr = block_in_slot(slots_ptr, epoch, slot_bytes, rank, source, block_words) + start
                _copy_share(theirs_ptr, ours_ptr, words, COPIERS, BLOCK)
                if RING:
                    if step < WORLD - 1:
                        signal(there + first + step * COPIERS * WORLD + rank, epoch)
                signal(ready_ptr + (PART * WORLD + source) * COPIERS + copier, epoch)
                blocks += 1
    return blocks


@triton.jit
def await_block(
    ready_ptr, abort_ptr, step, epoch, rank, WORLD: tl.constexpr, COPIERS: tl.constexpr, PART: tl.constexpr
):
    """Until a part of the block of rank - step is in the own slot; not at all for step 0, the own block, nor where
    nobody copies. False where the abort word ended the wait: what is there must not be read then.

    Loops over a block belong inside the `if` of this: behind it Triton 3.7 does not load ahead in them.
    """
    if COPIERS == 0:
        return True
    else:
        source = (rank + WORLD - step) % WORLD
        copiers = tl.arange(0, triton.next_power_of_2(COPIERS))
        words = ready_ptr + (PART * WORLD + source) * COPIERS + copiers
        return wait_signal(words, epoch, abort_ptr, copiers < tl.where(step > 0, COPIERS, 0))
