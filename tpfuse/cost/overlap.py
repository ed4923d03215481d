"""The time that communication adds to products that overlap with it, as a timeline of chunks.

The fused operators cut a product into one chunk for each rank (docs/layers.md). An all-gather GEMM computes its own
chunk first, while the others arrive one after another; a GEMM reduce-scatter computes its own chunk last, while those
of the others are sent.
"""


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
