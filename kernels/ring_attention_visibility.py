"""ring_attention_visibility: an interval of positions that a token sees, as indices of a run of other tokens.

Tokens are spread in runs (`sequence_runs`), whose positions go up in steps. What a token sees of a run is an interval
of indices, so that a walk over it needs not know where the run lies in the sequence. Both ends of the intervals never
go back from a token to the next, so that the first and the last token of a tile say which blocks the tile sees, and
which of them whole. Queries that see keys and keys that are seen by queries are the same thing here.
"""

import triton
import triton.language as tl


@triton.jit
def first_index(position, start, step):
    """The first index of a run that is at `position` or behind; 0 or more, perhaps behind the run."""
    return (tl.maximum(position - start, 0) + step - 1) // step


@triton.jit
def last_index(position, start, step, size):
    """The last index of a run of `size` that is at `position` or in front of it; -1 if none is."""
    return tl.minimum(tl.maximum(position - start + step, 0) // step, size) - 1


@triton.jit
def index_range(first_ptr, last_ptr, tile_first, tile_last, start, step, size, BLOCK: tl.constexpr):
    """What the tokens tile_first to tile_last see of a run: (start, full_start, full_stop, stop), indices, as of
    `attention_scores.key_range`. first_ptr, last_ptr: int32, the intervals of positions that this rank's tokens see.
    """
    begin = first_index(tl.load(first_ptr + tile_first), start, step) // BLOCK * BLOCK
    full_begin = tl.cdiv(first_index(tl.load(first_ptr + tile_last), start, step), BLOCK) * BLOCK
    full_end = (last_index(tl.load(last_ptr + tile_first), start, step, size) + 1) // BLOCK * BLOCK
    end = last_index(tl.load(last_ptr + tile_last), start, step, size) + 1
    end = tl.maximum(end, begin)
    full_begin = tl.minimum(full_begin, end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end
