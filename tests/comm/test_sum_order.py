"""The orders of sums: along a tree, whoever has which part of it."""

from itertools import accumulate
from random import Random

import pytest
import torch
from torch import Tensor

from tpfuse.comm.sum_order import TreeSums, VirtualRanks, sum_in_tree, tree_order
from tpfuse.testing.inputs import normal


def along_tree(parts: list[Tensor]) -> Tensor:
    """Return the sum of a power of two of parts, neighbours first, level by level."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_that_of_its_parts_in_order(dtype: torch.dtype) -> None:
    parts = [normal(seed, 50).to(dtype) for seed in range(8)]
    wide, out = [part.clone().float() for part in parts], torch.empty(50, dtype=dtype)
    for count in (1, 2, 4, 8):
        sum_in_tree(parts[:count], out)
        assert torch.equal(out, along_tree(wide[:count]).to(dtype))
    sum_in_tree(parts[:6], out)
    assert torch.equal(out, (along_tree(wide[:4]) + along_tree(wide[4:6])).to(dtype))
    sum_in_tree(parts, parts[5])
    assert torch.equal(parts[5], along_tree(wide).to(dtype)), "the result may replace a part"
    chain = [*accumulate(wide, torch.add)][-1]
    assert dtype is torch.bfloat16 or not torch.equal(along_tree(wide), chain), "the parts tell orders apart"


def test_data_parallel_ranks_are_neighbours_in_a_tree() -> None:
    """Ranks of a pipeline's ends, of data parallelism and of a context, numbered in this order."""
    assert tree_order(8, dp=2, inner=2) == [0, 2, 1, 3, 4, 6, 5, 7]
    assert tree_order(4, dp=4, inner=1) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_give_parts_of_one_tree(seed: int) -> None:
    """Some virtual ranks, or their first ones, have no gradient of the second sum; they count as zero."""
    random, leaves, chain = Random(seed), 8, 3
    present = [[random.random() < 0.5 for _ in range(chain)] for _ in range(leaves)]
    gradients = [[normal(10 * leaf + i, 40) for i in range(chain)] for leaf in range(leaves)]
    totals = []
    for ranks in (1, 2, 4, 8):
        virtual, parts = VirtualRanks.of(leaves, chain, ranks), list[list[Tensor]]()
        for rank in range(ranks):
            views = [[torch.full((40,), torch.nan) for _ in range(2)] for _ in range(virtual.here.bit_length())]
            sums = TreeSums(views, virtual.here)
            for _ in range(2):  # the second step has memory that the first one has used
                sums.begin()
                for micro_batch in range(virtual.passes):
                    leaf = virtual.of_micro_batch(micro_batch)
                    at, i = rank * virtual.here + leaf, micro_batch % chain
                    sums.add(0, gradients[at][i], leaf)
                    if present[at][i]:
                        sums.add(1, gradients[at][i], leaf)
                sums.close()
            parts.append(views[0])
        for each in zip(*parts, strict=True):
            totals.append(torch.empty(40))
            sum_in_tree(each, totals[-1])
    chains = [[*accumulate(row, torch.add)][-1] for row in gradients]
    assert all(torch.equal(total, along_tree(chains)) for total in totals[::2])
    assert all(torch.equal(total, totals[1]) for total in totals[1::2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((6, 1, 2), "virtual_ranks 6: expected a power of two, or 0"),
        ((4, 1, 8), "virtual_ranks 4: expected a multiple of the 8 data-parallel ranks"),
        ((4, 0, 2), "micro_batches 0: expected at least 1 for each virtual rank"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(given: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VirtualRanks.of(*given)
