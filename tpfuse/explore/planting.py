"""Faults that are planted in the syntax tree of a module, so that comments, line breaks and formatting do not matter.

    Fault("one half", replace(endpoint.slot, "(epoch & 1) * slot_bytes", by="0 * slot_bytes"))
    Fault("an old epoch", replace(shard_sum_kernel, "epoch", by="epoch - 1", call="barrier"))
    Fault("signalled too early", replace(stage, "copy(x)\\nsignal()", by="signal()\\ncopy(x)"))

`ProtocolSuite.faults` takes such faults; `surviving` takes the mutants that `Fault.mutant` returns.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tpfuse.explore.mutants import Mutant, module_of


@dataclass(frozen=True)
class Edit:
    """A change of a function: an expression or statements are replaced; see `replace`."""

    function: Any
    old: str
    by: str
    call: str = ""


def replace(function: Any, old: str, *, by: str, call: str = "") -> Edit:
    """Return an edit that replaces `old` by `by`; `old` must be in `function` exactly once.

    Both are expressions, or both are consecutive statements (`by="pass"` removes them). call: search only in the calls
    of functions with this name. function: a function, a method or a kernel.
    """
    return Edit(function, old, by, call)


class Fault:
    """The edits of one module that plant a fault. Messages show its name."""

    def __init__(self, name: str, *edits: Edit) -> None:
        self.name, self.edits = name, edits

    def mutant(self) -> Mutant:
        """Return the module with all edits, applied one after another.

        Raise ValueError if an expression is not in its function, or is in it more than once.
        """
        (module,) = {module_of(edit.function) for edit in self.edits}
        tree = ast.parse(inspect.getsource(module))
        for edit in self.edits:
            _apply(edit, _definition(tree, _plain(edit.function).__qualname__))
        function = _plain(self.edits[0].function)
        _, line = inspect.getsourcelines(function)
        return Mutant(
            module=module.__name__,
            file=str(module.__file__),
            lines=(line, line),
            text=function.__qualname__,
            change=f"planted: {self.name}",
            source=ast.unparse(ast.fix_missing_locations(tree)) + "\n",
        )


def _plain(function: Any) -> Any:
    """Return the Python function inside a kernel; a function itself."""
    return getattr(function, "fn", function)


def _definition(tree: ast.Module, qualified_name: str) -> ast.AST:
    node: ast.AST = tree
    for name in qualified_name.split("."):
        node = next(
            child
            for child in ast.walk(node)
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name == name and child is not node
        )
    return node


def _apply(edit: Edit, function: ast.AST) -> None:
    places = [function]
    if edit.call:
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        places = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == edit.call]
    old: list[Any]
    new: list[Any]
    try:
        old, new = ([ast.parse(text, mode="eval").body] for text in (edit.old, edit.by))
    except SyntaxError:
        old, new = (ast.parse(text).body for text in (edit.old, edit.by))
    matches = [match for place in places for match in _matches(place, [ast.dump(node) for node in old])]
    if len(matches) != 1:
        inside = f" in calls of {edit.call}" if edit.call else ""
        name = f"{module_of(edit.function).__name__}.{_plain(edit.function).__qualname__}"
        raise ValueError(f"{name} contains {edit.old!r}{inside} {len(matches)} times: expected exactly once")
    siblings, first, last = matches[0]
    if isinstance(siblings, list):
        siblings[first:last] = new
    else:
        setattr(siblings, first, new[0])


def _matches(place: ast.AST, wanted: list[str]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the places of the consecutive nodes: a list and two indices, or a node, the name of its field, and None."""
    for parent in ast.walk(place):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, ast.expr) and [ast.dump(value)] == wanted:
                yield parent, field, None
            elif isinstance(value, list):
                dumps = [ast.dump(item) if isinstance(item, ast.AST) else "" for item in value]
                for first in range(len(dumps) - len(wanted) + 1):
                    if dumps[first : first + len(wanted)] == wanted:
                        yield value, first, first + len(wanted)
