"""The seconds of messages and collectives, and what of them remains beside products that overlap with them.

Sizes are the bytes of the whole tensor, which every rank has before an all-reduce, after an all-gather, and before a
reduce-scatter. A ring takes ranks - 1 steps, each with the link's latency, and an all-reduce twice as many (Thakur,
Rabenseifner and Gropp, 2005). A tree takes log2(ranks) steps twice; NCCL has trees between nodes only.

The fused operators cut a product into one chunk for each rank (docs/layers.md). An all-gather GEMM computes its own
chunk first, while the others arrive one after another; a GEMM reduce-scatter computes its own chunk last, while those
of the others are sent.
"""

from math import ceil, log2

from tpfuse.plan.hardware import Cluster, Link


def all_reduce(size: float, ranks: int, link: Link, *, tree: bool = False) -> float:
    """Return the seconds of an all-reduce. tree: whether a tree may take the place of the ring."""
    if ranks == 1:
        return 0.0
    moved = 2 * size / link.bandwidth
    fastest = 2 * (ranks - 1) * link.latency + moved * (ranks - 1) / ranks
    if tree:
        fastest = min(fastest, 2 * ceil(log2(ranks)) * link.latency + moved)
    return link.start + fastest


def all_gather(size: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-gather, or of a reduce-scatter, which sends as much."""
    if ranks == 1:
        return 0.0
    return link.start + (ranks - 1) * link.latency + size * (ranks - 1) / ranks / link.bandwidth


def all_to_all(sent: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-to-all in which each rank sends `sent` bytes to the others together."""
    return 0.0 if ranks == 1 else link.start + (ranks - 1) * link.latency + sent / link.bandwidth


def send(size: float, link: Link) -> float:
    """Return the seconds of a message."""
    return link.latency + size / link.bandwidth


def grouped(size: float, ranks: int, stride: int, cluster: Cluster, *, reduce: bool) -> float:
    """Return the seconds of an all-gather, or of a reduce-scatter, of ranks that are `stride` apart.

    reduce: of an all-reduce. Over several nodes with equally many of the ranks, those of a node take part among
    themselves, and each of them with its share among the nodes, where that is faster than one ring over all.
    """
    link = cluster.link(ranks, stride)
    inside = 1 if cluster.per_node % stride else cluster.per_node // stride
    flat = all_reduce(size, ranks, link, tree=link is cluster.network) if reduce else all_gather(size, ranks, link)
    if link is cluster.gpu.link or inside == 1 or ranks % inside:
        return flat
    near, apart = all_gather(size, inside, cluster.gpu.link), (size / inside, ranks // inside, cluster.network)
    return min(flat, 2 * near + all_reduce(*apart, tree=True) if reduce else near + all_gather(*apart))


def gather_exposed(compute: float, message: float, ranks: int) -> float:
    """Return the seconds that an all-gather adds to a product of `compute` seconds; each chunk takes `message`."""
    end = arrived = 0.0
    for chunk in range(ranks):
        arrived += message if chunk else 0.0
        end = max(end, arrived) + compute / ranks
    return end - compute


def scatter_exposed(compute: float, message: float, ranks: int) -> float:
    """Return the seconds that a reduce-scatter adds to a product of `compute` seconds; each chunk takes `message`."""
    end = sent = 0.0
    for chunk in range(ranks):
        end += compute / ranks
        if chunk < ranks - 1:
            sent = max(end, sent) + message
    return max(end, sent) - compute


def ring_exposed(compute: float, message: float, ranks: int) -> float:
    """Return the seconds that messages add to ring attention, which computes a chunk while the next one arrives."""
    return (ranks - 1) * max(0.0, message - compute / ranks)


def hidden_rest(communication: float, compute: float, last: float) -> float:
    """Return what remains of communication behind `compute` seconds, of which the last part, `last`, cannot hide."""
    return max(last, communication - compute)
