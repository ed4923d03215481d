"""The cost of Muon in a step: the products of matrices' owners, what ranks exchange, and their buffers.

Muon has buckets and one moment of its own (`tpfuse.plan.states`). All ranks that have the same blocks share the whole
matrices by cost; the rank with the most work counts. Ranks send their parts of the matrices to the owners and get what
is orthogonalised back, while nothing else computes (`tpfuse.zero.muon`).
"""

from collections import Counter
from functools import cache
from heapq import heapreplace
from math import ceil, hypot, prod

from tpfuse.plan.communication import all_to_all
from tpfuse.plan.hardware import Cluster
from tpfuse.plan.sizes import ModelSizes, RankLayout, TrainingProgram
from tpfuse.plan.work import HALF, MatrixProduct, product_seconds
from tpfuse.zero.muon import AT_ONCE, cost

_OPERATORS = 8  # that the host issues for a matrix: copies, update
_OF_A_SHAPE = 4  # and for those of one shape in an exchange, beside the iterations: norm and quotient
_PRODUCTS = 3  # of an iteration


@cache
def owned(sizes: ModelSizes, blocks: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the matrices of the rank with the most work, the most expensive first. blocks: those of the ranks."""
    loads = [(0, rank) for rank in range(ranks)]
    found: list[list[tuple[int, int]]] = [[] for _ in loads]
    for shape in sorted(sizes.block_matrices * blocks, key=lambda shape: -cost(*shape)):
        work, rank = loads[0]
        found[rank].append(shape)
        heapreplace(loads, (work + cost(*shape), rank))
    return tuple(found[max(loads)[1]])


def sent_bytes(sizes: ModelSizes, blocks: int, layout: RankLayout, program: TrainingProgram) -> tuple[float, float]:
    """Return the bytes that a rank sends to others in a step, on the mean: to owners, and as an owner.

    Of ranks with the same part of a matrix one sends it, the owner itself if it is among them; all get it back. The
    parts are taken to be equal, as those of stages 0 and 3 are; a shard of a bucket of small matrices may have some
    whole.
    """
    ranks, part = _shares(layout)
    total = blocks * sizes.block_weights * _size(program)
    return total / ranks * (1 - part), total * part * (1 - 1 / ranks)


def exchange_seconds(
    sizes: ModelSizes, blocks: int, layout: RankLayout, cluster: Cluster, program: TrainingProgram
) -> float:
    """Return the seconds of the exchanges of a step, which nothing hides."""
    ranks, _ = _shares(layout)
    rounds = max(1, ceil(blocks * sizes.block_weights / (ranks * AT_ONCE)))
    both = sent_bytes(sizes, blocks, layout, program)
    return sum(rounds * all_to_all(sent / rounds, ranks, cluster.link(ranks, 1)) for sent in both)


def owner_seconds(
    sizes: ModelSizes, blocks: int, layout: RankLayout, cluster: Cluster, program: TrainingProgram
) -> float:
    """Return the seconds in which the rank with the most work orthogonalises its matrices."""
    matrices, gpu, device = owned(sizes, blocks, _shares(layout)[0]), cluster.gpu, 0.0
    for m, n in map(sorted, matrices):
        products = MatrixProduct(m, m, n), MatrixProduct(m, m, m), MatrixProduct(m, n, m)
        device += program.muon_steps * sum(product_seconds(product, gpu, _size(program)) for product in products)
    exchanges = ceil(sum(map(prod, matrices)) / AT_ONCE)
    together = sum(min(count, exchanges) for count in Counter(matrices).values())
    operators = len(matrices) * _OPERATORS + together * (_PRODUCTS * program.muon_steps + _OF_A_SHAPE)
    return hypot(device, operators * gpu.host_seconds)


def update_bytes(sizes: ModelSizes, blocks: int, layout: RankLayout, program: TrainingProgram) -> float:
    """Return the most bytes that the update of the matrices needs beside the state, on the rank with the most work.

    What is to be orthogonalised exists for all matrices at once. Beside it are two tensors in float32 from which it
    comes; or else the owner's matrices of one exchange, with what an iteration computes from those of one shape, or
    with what it returns and what comes back.
    """
    ranks, part = _shares(layout)
    matrices = owned(sizes, blocks, ranks)
    if not matrices:
        return 0.0
    together, alike = 0, Counter[tuple[int, int]]()
    for shape in matrices:
        together += prod(shape)
        alike[shape] += 1
        if together >= AT_ONCE:
            break
    iterated = max(2 * count * (prod(shape) + min(shape) ** 2) for shape, count in alike.items())
    m, n = matrices[0]
    held = blocks * sizes.block_weights * part
    passed = together * ranks * part
    momentum = 2 * program.state_bytes * m * n * part
    owners = together + max(iterated, 2 * passed)
    return held * _size(program) + max(momentum, owners * _size(program))


def _shares(layout: RankLayout) -> tuple[int, float]:
    """Return the ranks that share the matrices, and the part of each matrix that a rank has in its state."""
    ranks = layout.tp * layout.cp * layout.dp
    same = {0: layout.cp * layout.dp, 3: layout.copies}.get(layout.zero, 1)
    return ranks, same / ranks


def _size(program: TrainingProgram) -> int:
    """Return the bytes of an element in which matrices are exchanged and orthogonalised."""
    return HALF if program.state_bytes == 4 else program.state_bytes
