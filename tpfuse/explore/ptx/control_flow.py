"""The order in which threads that have diverged run, so that they meet again where their paths join.

Blocks are in a weak topological order (Bourdoncle, 1993): a block comes before those that follow it, except along the
edges by which loops begin again; and all blocks of a loop come before those that follow the loop. If the threads at the
first block of this order always run, then threads that have gone another way arrive before the others continue.
"""

from collections.abc import Iterator, Sequence


def weak_topological_order(successors: Sequence[Sequence[int]]) -> list[int]:
    """Return the position of each node in the order. Node 0 is the entry; nodes that it does not reach are last."""
    order: list[int] = []
    _arrange(set(range(len(successors))), [0], successors, order)
    order += sorted(set(range(len(successors))) - set(order))
    positions = [0] * len(order)
    for position, node in enumerate(order):
        positions[node] = position
    return positions


def _arrange(nodes: set[int], entries: Sequence[int], successors: Sequence[Sequence[int]], order: list[int]) -> None:
    """Append the nodes that `entries` reach within `nodes`: components in topological order, each arranged itself.

    Within a loop, the edges to the node by which it is entered are left out.
    """
    for component in reversed(list(_components(nodes, entries, successors))):
        head = component[-1]
        order.append(head)
        if len(component) > 1:
            inside = set(component) - {head}
            _arrange(inside, [start for start in successors[head] if start in inside], successors, order)


def _components(nodes: set[int], entries: Sequence[int], successors: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield the strongly connected components, successors first; the node by which one was entered is its last.

    This is Tarjan's algorithm, without recursion.
    """
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    for entry in entries:
        path: list[tuple[int, Iterator[int]]] = []
        following: Iterator[int] = iter([entry])
        while True:
            after = next((x for x in following if x in nodes and (x not in number or x in stack)), None)
            if after is not None and after not in number:
                number[after] = lowest[after] = len(number)
                stack.append(after)
                following = iter(successors[after])
                path.append((after, following))
            elif after is not None:
                node = path[-1][0]
                lowest[node] = min(lowest[node], number[after])
            elif not path:
                break
            else:
                node, _ = path.pop()
                if lowest[node] == number[node]:
                    component = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    yield component[::-1]
                following = path[-1][1] if path else iter(())
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
