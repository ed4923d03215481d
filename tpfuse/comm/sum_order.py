"""The orders of sums over ranks and over micro-batches, on the host: every sum has one, which does not depend on time.

Operators sum in rank order, a chain: ((x0 + x1) + x2) + x3. Gradients are summed over data-parallel ranks along a
binary tree: (x0 + x1) + (x2 + x3). A part of a tree that one rank has is a tree itself. So with virtual ranks
(`VirtualRanks`) the sum over a batch has the same bits for every number of data-parallel ranks: a rank adds up the
subtree of its virtual ranks (`TreeSums`), and the ranks do the rest (`sum_in_tree`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.comm.trace import span

HALF = (torch.bfloat16, torch.float16)  # summed in float32

Sum = Callable[[Sequence[Tensor], Tensor], None]
"""Computes out, its second argument, as the sum of the ranks' tensors, which are given in rank order."""


def summed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which floats of `dtype` are computed and summed, and their master copies are kept."""
    return torch.float32 if dtype in HALF else dtype


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Compute out = ((parts[0] + parts[1]) + parts[2]) + …, half types in float32."""
    with span("communication", "sum over ranks"):
        if out.dtype in HALF:
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            out.copy_(total)
        elif len(parts) == 1:
            out.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out += part


def tree_order(ranks: int, dp: int, inner: int) -> list[int]:
    """Return the ranks of a group in the order of a tree's leaves: data-parallel ranks are neighbours.

    They are those that differ in the digit `dp` of their number in the group, below which is the digit `inner`, of the
    ranks with other tokens of the same sequences, or other parts of a gradient.
    """
    blocks = range(0, ranks, dp * inner)
    return [block + rank * inner + part for block in blocks for part in range(inner) for rank in range(dp)]


def sum_in_tree(parts: Sequence[Tensor], out: Tensor) -> None:
    """Compute out = (parts[0] + parts[1]) + (parts[2] + parts[3]) and so on, half types in float32.

    The left part of a tree has the largest power of two of the leaves that leaves some for the right one. out may be
    one of the parts.
    """
    with span("communication", "sum over ranks"):
        if len(parts) > 1 and out.dtype not in HALF:
            left, right = _halves(parts)
            torch.add(_total(left), _total(right), out=out)
        else:
            out.copy_(_total(parts))


def sum_leaves(leaves: Sequence[int], parts: Sequence[Tensor], out: Tensor) -> None:
    """Compute the sum of parts along a tree. leaves: the parts' numbers in the order of `tree_order`."""
    sum_in_tree([parts[rank] for rank in leaves], out)


def _halves(parts: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    cut = 1 << (len(parts) - 1).bit_length() - 1
    return parts[:cut], parts[cut:]


def _total(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum along the tree; of one part the part itself, a half type in float32."""
    if len(parts) == 1:
        return parts[0].to(summed_dtype(parts[0].dtype))
    left, right = map(_total, _halves(parts))
    return torch.add(left, right, out=left if len(parts) > 2 else None)


def max_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Compute out = the largest of parts, element by element; it is NaN if one of them is."""
    out.copy_(parts[0])
    for part in parts[1:]:
        torch.maximum(out, part, out=out)


def rows_of(x: Tensor, world: int) -> Tensor:
    """Return a view of the contiguous x with one row for each rank, [world, elements / world]; x may be empty."""
    return x.view(world, x.numel() // world)


@dataclass(frozen=True)
class VirtualRanks:
    """The virtual data-parallel ranks of a run: each has a fixed part of a batch, whichever real rank computes it.

    number: of all ranks, a power of two; 0 without the feature: then each real rank counts as one. micro_batches: of a
    virtual rank in a step, whose gradients are added one after another. here: the virtual ranks of this rank.
    """

    number: int = 0
    micro_batches: int = 1
    here: int = 1

    @classmethod
    def of(cls, number: int, micro_batches: int, dp: int) -> "VirtualRanks":
        """Return those of `dp` data-parallel ranks. Raise ValueError for numbers that do not fit each other."""
        if not number:
            return cls()
        if number < 0 or number & (number - 1):
            raise ValueError(f"virtual_ranks {number}: expected a power of two, or 0")
        if number % dp:
            raise ValueError(f"virtual_ranks {number}: expected a multiple of the {dp} data-parallel ranks")
        if micro_batches < 1:
            raise ValueError(f"micro_batches {micro_batches}: expected at least 1 for each virtual rank")
        return cls(number, micro_batches, number // dp)

    @property
    def passes(self) -> int:
        """Return the number of this rank's micro-batches in a step."""
        return self.here * self.micro_batches

    def of_micro_batch(self, micro_batch: int) -> int:
        """Return which of this rank's virtual ranks a micro-batch of a step belongs to."""
        return micro_batch // self.micro_batches if self.number else 0


REAL_RANKS = VirtualRanks()  # without the feature


class TreeSums:
    """Sums of gradients over the virtual ranks of a rank, each along a tree whose leaves are chains.

    A sum begins with its first gradient. The gradients of a sum come in the order of the virtual ranks; a virtual rank
    without one counts as zero. views[d][i]: memory of sum i for the subtree that is open at depth d; there is one more
    depth than the logarithm of `leaves`, the number of virtual ranks, which is a power of two. `close` leaves the sum
    in views[0][i].
    """

    def __init__(self, views: Sequence[Sequence[Tensor]], leaves: int) -> None:
        assert len(views) == leaves.bit_length()
        self._views, self._leaves = views, leaves
        self.begin()

    def begin(self) -> None:
        """Begin new sums."""
        count = len(self._views[0])
        self._open = [0] * count  # the leaf that is open
        self._empty = set(range(count))  # the sums whose open leaf has no gradient yet

    def add(self, index: int, gradient: Tensor, leaf: int = 0) -> None:
        """Add a gradient of the leaf to sum `index`."""
        if leaf != self._open[index]:
            self._close(index, leaf)
        total = self._views[leaf.bit_count()][index]
        if index in self._empty:
            self._empty.remove(index)
            total.copy_(gradient)
        else:
            total.add_(gradient)

    def take_all(self) -> None:
        """Treat the gradients of all sums as added: something else has written views[0]."""
        self._empty.clear()

    def close(self) -> None:
        """Complete all sums."""
        for index in range(len(self._open)):
            self._close(index, self._leaves)

    def _close(self, index: int, until: int) -> None:
        """Complete the leaves before `until`, and the subtrees that end with them."""
        for leaf in range(self._open[index], until):
            depth = leaf.bit_count()
            if index in self._empty:
                self._views[depth][index].zero_()
            while leaf & 1:  # it is the right part of a subtree, whose left part is one depth below
                self._views[depth - 1][index].add_(self._views[depth][index])
                depth, leaf = depth - 1, leaf >> 1
            self._empty.add(index)
        self._open[index] = until
