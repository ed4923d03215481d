"""The time of collectives: latency and bandwidth of ring, tree and in-network algorithms, of which the fastest counts.

Sizes are the bytes of the whole tensor: what every rank has before an all-reduce and after an all-gather. Formulas:
Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005; trees: Sanders et al., 2009.
"""

from math import ceil, log2

from tpfuse.cost.hardware import Link


def all_reduce(size: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-reduce of `size` bytes."""
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    ring = 2 * (ranks - 1) * link.latency + 2 * share * size / link.bandwidth
    tree = 2 * ceil(log2(ranks)) * link.latency + 2 * size / link.bandwidth
    fastest = min(ring, tree)
    if link.in_network:
        fastest = min(fastest, 2 * link.latency + size / link.bandwidth)
    return link.start + fastest


def all_gather(size: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-gather that gives every rank `size` bytes, and of a reduce-scatter of as many."""
    if ranks == 1:
        return 0.0
    return link.start + (ranks - 1) * link.latency + (ranks - 1) / ranks * size / link.bandwidth


def send(size: float, link: Link) -> float:
    """Return the seconds of a message."""
    return link.latency + size / link.bandwidth
