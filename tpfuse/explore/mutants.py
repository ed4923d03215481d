"""Mutants of a protocol, made from its source: each line that orders something is deleted or weakened in turn.

    from tpfuse.explore.mutants import surviving

    def program_of(signals, all_gather):           # fresh modules, one of them mutated
        def program(memory): ...
        return program

    assert surviving(program_of, [signals, all_gather], world=2) == []

The syntax tells which calls synchronise: calls of `atomic_*` and `debug_barrier`; the methods `signal`, `wait_signal`
and `barrier` of an object whose name ends in "memory"; and, by name, calls of functions of these modules that contain
such a call. A new line is therefore covered without further work. Two kinds of changes are no faults, and are excluded
by rule: the scope of a relaxed atomic operation, which orders nothing, is not narrowed; and a narrowed scope counts
as a survivor only if two ranks access the same word at that line of the unchanged program.
"""

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tpfuse.explore.errors import ExploreError
from tpfuse.explore.explorer import Program, Report, brief, explore, explore_all
from tpfuse.explore.fresh_modules import fresh, original_file

_WEAKER = {"acq_rel": ("relaxed", "acquire", "release"), "acquire": ("relaxed",), "release": ("relaxed",)}
_DEFAULT_SEMANTICS = {"atomic_load": "acquire", "atomic_poll": "acquire", "atomic_store": "release"}
_HOST = ("signal", "wait_signal", "barrier")


@dataclass(frozen=True)
class Mutant:
    """A change of one module.

    lines, text: the changed lines and the text of the first. change: a description of the change. source: the source of
    the whole module with the change. code: the changed node as `ast.unparse` writes it, without comments and line
    breaks.
    """

    module: str
    file: str
    lines: tuple[int, int]
    text: str
    change: str
    source: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.lines[0]}: {self.text}: {self.change}"


def mutants_of(*targets: Any, among: Iterable[ModuleType] = ()) -> list[Mutant]:
    """Return the mutants of these modules and functions, in the order of their lines.

    targets: modules, or functions of which alone the mutants are wanted. among: more modules, whose functions the
    targets may call to synchronise. Raise ValueError if the targets have no mutants.
    """
    modules = list(dict.fromkeys(module_of(target) for target in targets))
    trees = {module: ast.parse(inspect.getsource(module)) for module in dict.fromkeys([*modules, *among])}
    synchronising = _synchronising(trees.values())
    mutants = []
    for module in modules:
        whole = any(target is module for target in targets)
        spans = [span_of(target) for target in targets if target is not module and module_of(target) is module]
        for mutant in _Finder(module, trees[module], synchronising).mutants():
            if whole or any(first <= mutant.lines[0] <= last for first, last in spans):
                mutants.append(mutant)
    if not mutants:
        names = ", ".join(getattr(target, "fn", target).__name__ for target in targets)
        raise ValueError(f"{names or 'nothing'} has no line that synchronises")
    return mutants


def surviving(
    program_of: Callable[..., Program],
    targets: Sequence[Any],
    world: int,
    *,
    mutants: Iterable[Mutant] | None = None,
    unchanged: Report | None = None,
    **options: Any,
) -> list[Mutant]:
    """Return the mutants of `targets` (or of `mutants`) with which no execution of the program fails.

    program_of(*modules) makes the program from fresh copies of the targets' modules, in their order. The copies import
    each other, and modules that are imported while the program runs import the copies too. Modules that register
    something when they are imported (torch operators) cannot be targets. unchanged: the report on the unchanged
    program in such copies, which is explored first if that is missing. Raise ExploreError if it fails.
    """
    modules = list(dict.fromkeys(module_of(target) for target in targets))
    run: Callable[..., Report] = explore_all if options.get("schedules") is None else explore
    if run is explore:
        options["schedules"] = list(options["schedules"])
    if unchanged is None:
        # A few executions have the steps and the shared lines, which is all that is needed of it.
        few: dict[str, Any] = {"seconds": 5.0} if run is explore_all else {}
        with fresh(modules) as copies:
            unchanged = run(program_of(*copies), world, **few | options)
    shared = {(original_file(file), line) for file, line in unchanged.shared_lines}
    options = {"max_steps": 20 * max(unchanged.steps) + 1000} | options
    briefly, survivors = copy_context(), []
    briefly.run(brief.set, True)
    for mutant in mutants_of(*targets) if mutants is None else mutants:
        with fresh(modules, {mutant.module: mutant.source}) as copies:
            try:
                briefly.run(run, program_of(*copies), world, **options)
            except ExploreError:
                continue
        first, last = mutant.lines
        if not mutant.change.startswith("scope") or any(
            (mutant.file, line) in shared for line in range(first, last + 1)
        ):
            survivors.append(mutant)
    return survivors


def module_of(target: Any) -> ModuleType:
    """Return the target if it is a module, otherwise the module in which the function or kernel is defined."""
    module = target if isinstance(target, ModuleType) else inspect.getmodule(getattr(target, "fn", target))
    assert module is not None, target
    return module


def span_of(function: Any) -> tuple[int, int]:
    """Return the first and the last line of a function or kernel."""
    lines, first = inspect.getsourcelines(getattr(function, "fn", function))
    return first, first + len(lines) - 1


def _name(call: ast.Call) -> str:
    """Return the last part of the dotted name of the called function; empty if it has no name."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _calls(node: ast.AST) -> list[ast.Call]:
    return [part for part in ast.walk(node) if isinstance(part, ast.Call)]


def _is_atomic(call: ast.Call) -> bool:
    return _name(call).startswith("atomic_")


def _is_host(call: ast.Call) -> bool:
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in _HOST:
        return False
    return ast.unparse(function.value).rpartition(".")[2].lower().endswith("memory")


def _semantics(call: ast.Call) -> str:
    """Return the semantics of an atomic operation ("acquire"); empty if the syntax does not show them."""
    for node in (*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "sem")):
        if isinstance(node, ast.Constant) and node.value in (*_WEAKER, "relaxed"):
            return str(node.value)
    named = any(keyword.arg == "sem" for keyword in call.keywords)
    return "" if named else _DEFAULT_SEMANTICS.get(_name(call), "acq_rel")


def _orders(call: ast.Call) -> bool:
    return (_is_atomic(call) and _semantics(call) != "relaxed") or _name(call) == "debug_barrier" or _is_host(call)


def _synchronising(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of the functions that order something, by themselves or through functions that they call."""
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = {function.name for function in functions if any(_orders(call) for call in _calls(function))}
    while True:
        more = {function.name for function in functions if any(_name(call) in names for call in _calls(function))}
        if more <= names:
            return names
        names |= more


class _Finder:
    """The mutants of one module."""

    def __init__(self, module: ModuleType, tree: ast.Module, synchronising: set[str]) -> None:
        self._tree, self._synchronising = tree, synchronising
        self._name = module.__name__
        self._file = str(inspect.getsourcefile(module))
        self._source = inspect.getsource(module)
        self._lines = [line.encode() for line in self._source.splitlines(keepends=True)]  # columns count bytes

    def mutants(self) -> list[Mutant]:
        """Return the mutants of the module in the order of their lines."""
        mutants = [mutant for node in ast.walk(self._tree) for mutant in self._of(node)]
        return sorted(mutants, key=lambda mutant: mutant.lines)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef):
            yield from self._stores(node)
            yield from self._defaults(node)
        elif isinstance(node, ast.While) and self._spins(node):
            yield self._mutant(node, "pass", "deleted")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if self._synchronises(node.value):
                yield self._mutant(node, "pass", "deleted")
        elif isinstance(node, ast.If | ast.Return | ast.While | ast.Assign):
            yield from self._values(node)
        elif isinstance(node, ast.AugAssign) and "epoch" in ast.unparse(node.target).lower():
            yield self._mutant(node, "pass", "deleted")
        if isinstance(node, ast.Call):
            yield from self._weaker(node)

    def _synchronises(self, call: ast.Call) -> bool:
        return _is_atomic(call) or _orders(call) or _name(call) in self._synchronising

    def _spins(self, loop: ast.While) -> bool:
        """Return whether the loop reads words until they change, and does nothing else."""
        body = [call for statement in loop.body for call in _calls(statement)]
        looks = any(_is_atomic(call) for call in body) or any(self._synchronises(call) for call in _calls(loop.test))
        looks = looks or any(keyword.arg == "volatile" for call in _calls(loop) for keyword in call.keywords)
        return looks and not any(_name(call) == "store" or _name(call) in self._synchronising for call in body)

    def _values(self, node: ast.If | ast.Return | ast.While | ast.Assign) -> Iterator[Mutant]:
        """Change synchronising calls whose value is used: a wait succeeds at once, or a counter is not increased."""
        value = node.test if isinstance(node, ast.If | ast.While) else node.value
        if value is None or (isinstance(node, ast.While) and self._spins(node)):
            return
        if isinstance(node, ast.Assign) and "epoch" in ast.unparse(node.targets[0]).lower():
            yield from self._counts(value)
        for call in _calls(value):
            if _is_atomic(call) and _semantics(call) in ("release", "acq_rel") and _name(call) == "atomic_add":
                if len(call.args) > 1 and ast.unparse(call.args[1]) != "0":
                    yield self._mutant(call.args[1], "0", "adds nothing", call)
            elif _name(call) in self._synchronising and not isinstance(node, ast.Assign):
                yield self._mutant(call, "True", "deleted (True)")

    def _counts(self, value: ast.expr) -> Iterator[Mutant]:
        for part in ast.walk(value):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add) and ast.unparse(part.right) == "1":
                yield self._mutant(part.right, "0", "epoch not advanced")

    def _stores(self, function: ast.FunctionDef) -> Iterator[Mutant]:
        """Delete plain stores to words that the function also accesses by atomic operations: counters and epochs."""
        words = {_root(call.args[0]) for call in _calls(function) if _is_atomic(call) and call.args} - {""}
        for node in ast.walk(function):
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and _name(call) == "store" and _root(call.args[0]) in words:
                yield self._mutant(call, "pass", "deleted")

    def _defaults(self, function: ast.FunctionDef) -> Iterator[Mutant]:
        """Weaken semantics and scopes that are default values of parameters."""
        arguments = function.args
        positional = (*arguments.posonlyargs, *arguments.args)
        pairs = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
        pairs += [pair for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if pair[1] is not None]  # type: ignore[misc]
        for argument, default in pairs:
            if argument.arg.lower() in ("sem", "scope"):
                yield from self._constant(default, default)

    def _weaker(self, call: ast.Call) -> Iterator[Mutant]:
        given = [keyword.value for keyword in call.keywords if (keyword.arg or "").lower() in ("sem", "scope")]
        if _is_atomic(call):
            given += call.args[1:]
        relaxed = _is_atomic(call) and _semantics(call) == "relaxed"
        for node in given:
            if not (relaxed and isinstance(node, ast.Constant) and node.value == "sys"):
                yield from self._constant(node, call)
        explicit = any(isinstance(node, ast.Constant) and node.value in (*_WEAKER, "relaxed") for node in given)
        if _is_atomic(call) and not explicit and (default := _semantics(call)):
            text = ast.get_source_segment(self._source, call) or ""
            comma = "" if text.removesuffix(")").rstrip().endswith(",") else ", "
            for weaker in _WEAKER[default]:
                yield self._mutant(call, f'{comma}sem="{weaker}")', f"{default} (default) -> {weaker}", last=1)

    def _constant(self, node: ast.expr, shown_node: ast.expr) -> Iterator[Mutant]:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            return
        for weaker in _WEAKER.get(node.value, ()):
            yield self._mutant(node, f'"{weaker}"', f"{node.value} -> {weaker}", shown_node)
        if node.value == "sys":
            yield self._mutant(node, '"gpu"', "scope sys -> gpu", shown_node)

    def _mutant(
        self,
        node: ast.stmt | ast.expr,
        text: str,
        change: str,
        shown_node: ast.stmt | ast.expr | None = None,
        *,
        last: int | None = None,
    ) -> Mutant:
        """Return the mutant in which `text` replaces a node, or its `last` characters; later lines keep their numbers.

        shown_node: the node that the mutant's lines and text show, by default the replaced one.
        """
        shown_node = shown_node or node
        assert node.end_lineno is not None and node.end_col_offset is not None and shown_node.end_lineno is not None
        begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        if last is not None:
            begin = (end[0], end[1] - last)
        before = self._lines[begin[0] - 1][: begin[1]].decode()
        after = self._lines[end[0] - 1][end[1] :].decode().rstrip("\n")
        middle = before + text + after + "\n" * (1 + end[0] - begin[0])
        above, below = b"".join(self._lines[: begin[0] - 1]), b"".join(self._lines[end[0] :])
        text_shown = self._lines[shown_node.lineno - 1].decode().strip()
        source = above.decode() + middle + below.decode()
        lines = shown_node.lineno, shown_node.end_lineno
        return Mutant(self._name, self._file, lines, text_shown, change, source, ast.unparse(shown_node))


def _root(node: ast.expr) -> str:
    """Return the variable from which a pointer is made, such as state_ptr for state_ptr + 1."""
    names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    return names[0] if names else ""
