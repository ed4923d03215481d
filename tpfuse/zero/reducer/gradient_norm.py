"""The sum of the squares of a gradient whose shards are on many ranks: the same bits in every layout.

It is the exact sum, rounded once to the 24 bits of a float32. Each rank adds squares in float64, in which those of
float32 and of half types are exact, and bounds the error: if no square passes through more than d additions, in
whatever order, the relative error of the sum is about d * 2^-53, because no square is negative. If both ends of the
interval around the sum of all ranks round to one number, so does the exact sum. Otherwise, once in thousands of steps,
the ranks sum exact integers, by their exponents.

Squares of float64 are not exact. If there are any, the sum is not rounded, and its last bits depend on the layout.

Sources: the rounding test of Ziv (Fast evaluation of elementary mathematical functions with correctly rounded last bit,
ACM TOMS 17(3), 1991), and the accumulators of Neal (arXiv:1505.05571).
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from tpfuse.zero.reducer.shard_update import CPU_BLOCK

_BITS = 24  # of a float32, and of the rounded sum
_ERROR = 1.01 * 2.0**-53  # relative, of an addition; the hundredth is for the rounding of the bounds themselves
_ROWS = 256  # sums of a shard on a GPU
_EXACT_BLOCK = 2**18  # elements of which the exact squares need memory at the same time
_LEAST, _MOST = -148, 128  # exponents of float32 numbers in [1/2, 1)


class Squares(NamedTuple):
    """A sum of squares."""

    parts: Tensor  # float64 [n], which add up to it
    depth: float  # the most additions through which a square has passed; inf if the squares are not exact


def squared(block: Tensor) -> Tensor:
    """Return the sum of the squares of a block [n] on the CPU, float64 []."""
    wide = block.double()
    return torch.dot(wide, wide)


def of_blocks(sums: list[Tensor], dtype: torch.dtype) -> Squares:
    """Return the squares of a shard of which these are the sums of blocks of at most CPU_BLOCK elements."""
    return Squares(torch.stack(sums), _depth(CPU_BLOCK, dtype))


def of_rows(x: Tensor) -> Squares:
    """Return the squares of x, [n] with n > 0, by few launches."""
    whole = len(x) - len(x) % _ROWS
    rows = x[:whole].view(_ROWS, whole // _ROWS), x[whole:].view(1, len(x) - whole)
    norms = [torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) for each in rows if each.numel()]
    # A root counts as one addition, and its square as three: it doubles the relative error and rounds.
    return Squares(torch.cat(norms).square(), _depth(_ROWS + len(x) // _ROWS + 4, x.dtype))


def of_shard(x: Tensor) -> Squares:
    """Return the squares of x, [n] with n > 0."""
    if x.device.type == "cpu":
        return of_blocks([squared(block) for block in torch.split(x, CPU_BLOCK)], x.dtype)
    return of_rows(x)


def _depth(additions: int, dtype: torch.dtype) -> float:
    return math.inf if dtype == torch.float64 else additions


def bounded(shards: Sequence[Squares], device: torch.device) -> Tensor:
    """Return the sum of the squares of a rank's shards and the bound of its error, float64 [2] on `device`.

    The bound is not finite if the squares are not exact or not finite. The sum over ranks is for `rounded`.
    """
    if not shards:
        return torch.zeros(2, dtype=torch.float64, device=device)
    parts = torch.cat([each.parts for each in shards])
    total, depth = parts.sum(), len(parts) + max(each.depth for each in shards)
    return torch.stack([total, total * (_ERROR * depth)]).to(device)


def rounded(total: float, bound: float, ranks: int) -> float | None:
    """Return the exact sum, rounded, if this sum over ranks of what `bounded` returns determines it; otherwise None.

    A sum whose bound is not finite is returned as it is.
    """
    if not math.isfinite(bound):
        return total
    bound += (ranks + 2) * _ERROR * total  # of the sum over ranks, and of the next line
    low, high = _round(total - bound), _round(total + bound)
    return low if low == high else None


def _round(x: float) -> float:
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(fraction, _BITS)), exponent - _BITS)


def exact_parts(shards: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the exact sum of the squares of a rank's finite shards, int64 [2, exponents] on `device`.

    A float32 is an integer of 24 bits times a power of two. By the exponents of these powers, the first row has the
    sums of the higher 24 bits of the squares of the integers, and the second row those of the lower 24 bits. The sum
    over ranks, for `exact_sum`, is exact too, for fewer than 2^39 elements.
    """
    sums = torch.zeros(2, _MOST - _LEAST + 1, dtype=torch.int64, device=device)
    for shard in shards:
        high, low = here = torch.zeros_like(sums, device=shard.device)
        for block in torch.split(shard, _EXACT_BLOCK):
            fractions, exponents = torch.frexp(block.float())
            squares, at = (fractions * 2.0**_BITS).long().square_(), exponents - _LEAST
            high.index_add_(0, at, squares >> _BITS)
            low.index_add_(0, at, squares & (2**_BITS - 1))
        sums += here.to(device)
    return sums


def exact_sum(sums: Tensor) -> float:
    """Return the exact sum, rounded, of the sum over ranks of what `exact_parts` returns."""
    pairs = enumerate(zip(*sums.tolist(), strict=True))
    total = sum(((high << _BITS) + low) << (2 * exponent) for exponent, (high, low) in pairs)
    extra = max(total.bit_length() - _BITS, 0)
    return math.ldexp(round(Fraction(total, 2**extra)), extra + 2 * (_LEAST - _BITS))
