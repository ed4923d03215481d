"""The rule that chooses the schedule of ring attention (`tpfuse.ops.ring_attention.ring_attention` has the table)."""

from typing import get_args

import torch

from tpfuse.choices import ContextSchedule, Implementation

SCHEDULES: tuple[ContextSchedule, ...] = get_args(ContextSchedule)
GATHERED_BYTES = 2**30  # `auto` gathers the keys and values of all ranks up to this many bytes: not measured yet


def schedule_for(
    implementation: Implementation, shape: tuple[int, int, int, int], kv_heads: int, dtype: torch.dtype, world: int
) -> tuple[ContextSchedule, str]:
    """Return the schedule that `auto` stands for, and the reason, for q of `shape` [B, H, n, D] on each of world ranks.

    Ulysses moves the fewest bytes if the ranks can divide the heads: in the measurements of prime-rl (pull request
    2418) it costs 8 % at two ranks, where a ring of messages costs 29 %. On CPU ranks it takes 0.85 of the time of
    blocks that are read in place (4 ranks, 4096 tokens, 8 heads of 64, 2026-11-22): attention of many queries at once
    makes better use of caches. The function is pure: `tpfuse memory` calls it without ranks.
    """
    if world == 1:
        return "ring", "one rank"
    if implementation == "fused":
        return "all_gather", "one launch reads the blocks of all owners"
    if divides(world, shape[1], kv_heads) and (implementation == "collective" or kv_heads % world == 0):
        return "ulysses", "the heads can be divided, and it moves the fewest bytes"
    if implementation == "direct":
        return "ring", f"{world} ranks cannot divide the heads; blocks are read in place"
    batch, _, tokens, size = shape
    if 2 * batch * kv_heads * tokens * world * size * dtype.itemsize <= GATHERED_BYTES:
        return "all_gather", f"{world} ranks cannot divide {shape[1]} heads"
    return "ring", f"{world} ranks cannot divide {shape[1]} heads, and keys and values are too large to be gathered"


def divides(ranks: int, heads: int, kv_heads: int) -> bool:
    """Return whether ranks can have equally many heads each; a head of keys may serve several ranks."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % max(kv_heads, 1) == 0)
