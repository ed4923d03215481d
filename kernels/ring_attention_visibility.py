"""ring_attention_visibility: an interval of positions that a token sees, as indices of a run of other tokens.

Tokens are spread in runs (`sequence_runs`), whose positions increase in steps. The tokens of a run that a token sees
are an interval of indices, so that a loop over it need not know the run's position in the sequence. Both ends of the
intervals never decrease from a token to the next, so that the first and the last token of a tile say which blocks the
tile sees, and which of them completely. The functions serve queries that see keys and keys that are seen by queries.
"""

import triton
import triton.language as tl


@triton.jit
def first_index(position, start, step):
    """Return the first index of a run that is at `position` or after it; 0 or more, perhaps after the run's end."""
    return (tl.maximum(position - start, 0) + step - 1) // step


@triton.jit
def last_index(position, start, step, size):
    """Return the last index of a run of `size` that is at `position` or before it; -1 if there is none."""
    return tl.minimum(tl.maximum(position - start + step, 0) // step, size) - 1


@triton.jit
def index_range(first_ptr, last_ptr, tile_first, tile_last, start, step, size, BLOCK: tl.constexpr):
    """Return indices (start, full_start, full_stop, stop) of a run that the tokens tile_first to tile_last see.

    The indices mean the same as in `attention_scores.key_range`. first_ptr, last_ptr: int32, the intervals of positions
    that this rank's tokens see.
    """
    begin = first_index(tl.load(first_ptr + tile_first), start, step) // BLOCK * BLOCK
    full_begin = tl.cdiv(first_index(tl.load(first_ptr + tile_last), start, step), BLOCK) * BLOCK
    full_end = (last_index(tl.load(last_ptr + tile_first), start, step, size) + 1) // BLOCK * BLOCK
    end = last_index(tl.load(last_ptr + tile_last), start, step, size) + 1
    end = tl.maximum(end, begin)
    full_begin = tl.minimum(full_begin, end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end
