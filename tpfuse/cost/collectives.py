"""The time of collectives by latency and bandwidth; of the algorithms that a link allows the fastest counts.

Sizes are the bytes of the whole tensor, which every rank has before an all-reduce, after an all-gather, and before a
reduce-scatter. A ring takes ranks - 1 steps, each with the link's latency, and an all-reduce twice as
many (Thakur, Rabenseifner and Gropp, 2005). A tree takes log2(ranks) steps twice; NCCL has trees between nodes only.
Switches that reduce take one step up and one down, and each rank sends its bytes once.
"""

from math import ceil, log2

from tpfuse.cost.hardware import Cluster, Link


def all_reduce(size: float, ranks: int, link: Link, *, tree: bool = False) -> float:
    """Return the seconds of an all-reduce. tree: whether a tree may take the place of the ring."""
    if ranks == 1:
        return 0.0
    moved = 2 * size / link.bandwidth
    fastest = 2 * (ranks - 1) * link.latency + moved * (ranks - 1) / ranks
    if tree:
        fastest = min(fastest, 2 * ceil(log2(ranks)) * link.latency + moved)
    if link.in_network:
        fastest = min(fastest, 2 * link.latency + moved / 2)
    return link.start + fastest


def all_gather(size: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-gather."""
    if ranks == 1:
        return 0.0
    return link.start + (ranks - 1) * link.latency + size * (ranks - 1) / ranks / link.bandwidth


def reduce_scatter(size: float, ranks: int, link: Link) -> float:
    """Return the seconds of a reduce-scatter, which sends as much as an all-gather."""
    return all_gather(size, ranks, link)


def send(size: float, link: Link) -> float:
    """Return the seconds of a message."""
    return link.latency + size / link.bandwidth


def grouped_all_reduce(size: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """Return the seconds of an all-reduce of ranks that are `stride` apart.

    Over several nodes the ranks of a node scatter, all-reduce their shares with other nodes, and gather, where that is
    faster than one ring over all.
    """
    link = cluster.link(ranks, stride)
    flat = all_reduce(size, ranks, link, tree=link is cluster.network)
    inside = max(1, cluster.per_node // stride)
    if link is cluster.inside or inside == 1 or ranks % inside:
        return flat
    nodes = ranks // inside
    apart = all_reduce(size / inside, nodes, cluster.network, tree=True)
    return min(flat, 2 * all_gather(size, inside, cluster.inside) + apart)


def grouped_all_gather(size: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """Return the seconds of an all-gather, or of a reduce-scatter, of ranks that are `stride` apart."""
    link = cluster.link(ranks, stride)
    flat = all_gather(size, ranks, link)
    inside = max(1, cluster.per_node // stride)
    if link is cluster.inside or inside == 1 or ranks % inside:
        return flat
    apart = all_gather(size / inside, ranks // inside, cluster.network)
    return min(flat, all_gather(size, inside, cluster.inside) + apart)
