"""Explanations of a race: which change of one source line would have ordered the two accesses.

Every such change is tried on the log of the run.
"""

from tpfuse.explore.clocks import Atomic, Clocks, Line, Supposition, Word
from tpfuse.explore.sites import text_of

_SUPPOSED = {
    ("debug_barrier",): "a tl.debug_barrier() before the release at {line} would order them",
    ("wait",): "a tl.debug_barrier() after the wait at {line} would order them",
    ("release",): "release semantics at {line} would order them",
    ("acquire",): "acquire semantics at {line} would order them",
    ("release", "debug_barrier"): "release semantics at {line} and a tl.debug_barrier() before it would order them",
    ("acquire", "wait"): "acquire semantics at {line} and a tl.debug_barrier() after it would order them",
}


def explain(clocks: Clocks, earlier: int, time: int, later: int) -> str:
    """Return one sentence that says why chain `later` does not know what component `earlier` did at `time`.

    `earlier` is a component of another chain; see `Clocks`.
    """
    atomics = [arguments[0] for name, arguments in clocks.log if name == "atomic"]
    operations = [operation for operation in atomics if isinstance(operation, Atomic)]
    for supposition in _suppositions(clocks, operations):
        if clocks.suppose(supposition).knows[later, earlier] >= time:
            return _SUPPOSED[supposition.changes].format(line=text_of(supposition.line))
    return _what_is_missing(operations, _released(clocks, earlier, time), earlier & ~1, later)


def _suppositions(clocks: Clocks, operations: list[Atomic]) -> list[Supposition]:
    suppositions: dict[Supposition, None] = {}
    for operation in operations:
        barrier_rule = (clocks.barrier_rule or operation.assembly) and not operation.host
        if operation.releases and barrier_rule:
            suppositions[Supposition(operation.line, ("debug_barrier",))] = None
        if operation.acquires and operation.alone:
            suppositions[Supposition(operation.line, ("wait",))] = None
        if not operation.releases and operation.stores:
            suppositions[Supposition(operation.line, ("release",))] = None
        if not operation.acquires:
            suppositions[Supposition(operation.line, ("acquire",))] = None
    for operation in operations:
        if operation.assembly and not operation.releases and operation.stores:
            suppositions[Supposition(operation.line, ("release", "debug_barrier"))] = None
        if operation.alone and not operation.acquires:
            suppositions[Supposition(operation.line, ("acquire", "wait"))] = None
    return list(suppositions)


def _released(clocks: Clocks, component: int, time: int) -> set[Word]:
    """Return the words that the component's chain released at `time` or later."""
    replayed, words = Clocks(clocks.barrier_rule), set[Word]()
    for method, arguments in clocks.log:
        operation = arguments[0] if arguments else None
        if isinstance(operation, Atomic) and operation.chain == component & ~1:
            late = replayed.time(component) >= time
            words |= {operation.word} if late and operation.releases and operation.stores else set()
        getattr(replayed, method)(*arguments)
    return words


def _what_is_missing(operations: list[Atomic], released: set[Word], earlier: int, later: int) -> str:
    if not released:
        return "the first signals nothing after it that the second could have waited for"
    lines: dict[Line, None] = {
        operation.line: None
        for operation in operations
        if operation.chain == earlier and operation.word in released and operation.releases
    }
    signals = " and ".join(text_of(line) for line in lines)
    if any(operation.chain == later and operation.word in released and operation.acquires for operation in operations):
        return f"the second has waited for an older value of what the first signals at {signals}"
    return f"the first signals at {signals}, but the second has not waited for that"
