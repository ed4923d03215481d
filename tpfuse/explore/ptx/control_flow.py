"""The order in which threads that have diverged run, so that they meet again where their paths join.

Blocks are in a weak topological order (Bourdoncle, 1993): a block comes before those that follow it, except along the
edges by which loops begin again; and all blocks of a loop come before those that follow the loop. If the threads at the
first block of this order always run, then threads that have gone another way arrive before the others continue.
"""

from collections.abc import Iterable, Sequence


def weak_topological_order(successors: Sequence[Sequence[int]]) -> list[int]:
    """Return the position of each node in the order. Node 0 is the entry; nodes that it does not reach are last."""
    first = _reached(range(len(successors)), successors)[0]
    live = [x for x in range(len(successors)) if first >> x & 1]
    order: list[int] = []

    def arrange(nodes: Iterable[int]) -> None:
        """Append the strongly connected components in topological order, each arranged without edges to its entry."""
        components: dict[int, list[int]] = {}
        for node, reached in _reached(nodes, successors).items():
            components.setdefault(reached, []).append(node)
        for component in sorted(components, key=int.bit_count, reverse=True):  # what is before others reaches more
            inside = components[component]
            entries = (x for y in live if y not in inside for x in successors[y] if x in inside)
            head = 0 if 0 in inside else next(entries)
            order.append(head)
            if len(inside) > 1:
                arrange([x for x in inside if x != head])

    arrange(live)
    order += [x for x in range(len(successors)) if x not in live]
    return [order.index(x) for x in range(len(successors))]


def _reached(nodes: Iterable[int], successors: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return for each node those that it reaches within `nodes`, itself included, as bits."""
    result = {x: 1 << x for x in nodes}
    before: dict[int, int] = {}
    while result != before:
        before = dict(result)
        for x in reversed(result):
            for y in successors[x]:
                result[x] |= result.get(y, 0)
    return result
