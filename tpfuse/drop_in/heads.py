"""The heads that a rank computes, and their rows in weights that pack several kinds of heads."""

from tpfuse.drop_in.converted import Ranges

# (heads, rows of each), one after another; the heads of a section may be fewer, each used by equally many of the others
Sections = tuple[tuple[int, int], ...]


def section_ranges(sections: Sections, heads: int, ranks: int) -> list[Ranges]:
    """Return the rows [start, stop) of packed sections that each rank uses. heads: those that the ranks divide."""
    return [_of_rank(sections, heads, rank, ranks) for rank in range(ranks)]


def _of_rank(sections: Sections, heads: int, rank: int, ranks: int) -> Ranges:
    rows, start = list[tuple[int, int]](), 0
    for number, size in sections:
        for head in served_heads(heads, number, rank, ranks):
            first = start + head * size
            if rows and rows[-1][1] == first:
                first = rows.pop()[0]
            rows.append((first, start + (head + 1) * size))
        start += number * size
    return tuple(rows)


def served_heads(heads: int, shared: int, rank: int, ranks: int) -> list[int]:
    """Return the key/value heads that a rank needs for its query heads, each used by equally many of them.

    heads, shared: the numbers of all query heads and of all key/value heads; query head h uses key/value head
    h // (heads / shared). If a rank's query heads use theirs unequally often, a key/value head is repeated.
    """
    if shared % ranks == 0:
        return list(range(rank * shared // ranks, (rank + 1) * shared // ranks))
    local = heads // ranks
    used = [head // (heads // shared) for head in range(rank * local, (rank + 1) * local)]
    runs = max(
        run for run in range(1, local + 1)
        if local % run == 0 and all(
            len({owner // (heads // shared) for owner in range(first, first + run)}) == 1
            for start in range(0, heads, local) for first in range(start, start + local, run)
        )
    )  # fmt: skip
    return used[::runs]
