"""Faults of a source file: small changes of its syntax tree, each in the body of one function."""

import ast
import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The files of each area; the patterns are relative to the root of the checkout.
AREAS = {
    "kernels": ("kernels/*.py",),
    "communication": ("tpfuse/comm/**/*.py",),
    "operators": ("tpfuse/ops/**/*.py", "tpfuse/backend.py"),
    "layers": ("tpfuse/layers/*.py", "models/*.py"),
    "engines": ("tpfuse/parallel/*.py", "tpfuse/zero/**/*.py"),
    "checkpoints": (
        "tpfuse/train/checkpoint.py",
        "tpfuse/train/manifest.py",
        "tpfuse/train/durable.py",
        "tpfuse/train/safetensors_file.py",
        "tpfuse/train/agreement.py",
    ),
}

_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Fault:
    """A change of one expression or statement of one file.

    area: a key of AREAS. file: the path relative to the root. function: the dotted name in the file ("Class.method").
    kind: the kind of change ("comparison"). before, after: the text of the changed part. begin, end: the part's first
    position and the one after its last, as (line, column in bytes).
    """

    area: str
    file: str
    function: str
    kind: str
    before: str
    after: str
    begin: tuple[int, int]
    end: tuple[int, int]

    @property
    def name(self) -> str:
        """Return a description of the fault on one line, which is unique in one version of the sources."""
        before = " ".join(self.before.split())
        return f"{self.file}:{self.begin[0]}:{self.begin[1]} {self.function}: {self.kind}: {before} -> {self.after}"

    def planted(self, source: str) -> str:
        """Return the file's source with the change; all other lines keep their numbers."""
        lines = [line.encode() for line in source.splitlines(keepends=True)]
        first, last = self.begin[0] - 1, self.end[0] - 1
        changed = lines[first][: self.begin[1]] + self.after.encode() + lines[last][self.end[1] :]
        return b"".join([*lines[:first], changed, *[b"\n"] * (last - first), *lines[last + 1 :]]).decode()


@functools.cache
def faults_of(source: str, area: str, file: str) -> tuple[Fault, ...]:
    """Return the faults of a file, in the order of its syntax tree."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    faults = []
    for function, statement in _bodies(ast.parse(source), ""):
        for kind, part, after in _changes(statement):
            assert part.end_lineno is not None and part.end_col_offset is not None
            begin, end = (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)
            text = b"".join(lines[begin[0] - 1 : end[0]])
            text = text[begin[1] : len(text) - len(lines[end[0] - 1]) + end[1]]
            faults.append(Fault(area, file, function, kind, text.decode(), after, begin, end))
    return tuple(faults)


def sample(root: Path, count: int, seed: int) -> list[Fault]:
    """Return `count` faults, as many from each area, and at most one per function while functions are left.

    The sample depends on the sources and the seed alone. Any first part of it is spread over all areas.
    """
    generator = random.Random(seed)
    queues = []
    for area, patterns in AREAS.items():
        files = sorted(path for pattern in patterns for path in root.glob(pattern))
        functions: dict[tuple[str, str], list[Fault]] = {}
        for path in files:
            for fault in faults_of(path.read_text(), area, str(path.relative_to(root))):
                functions.setdefault((fault.file, fault.function), []).append(fault)
        groups = list(functions.values())
        generator.shuffle(groups)
        for group in groups:
            generator.shuffle(group)
        rounds = range(max(map(len, groups), default=0))
        queues.append([group[turn] for turn in rounds for group in groups if turn < len(group)])
    rounds = range(max(map(len, queues), default=0))
    return [queue[turn] for turn in rounds for queue in queues if turn < len(queue)][:count]


def _bodies(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield (dotted name of the innermost function, statement) for all statements of all functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            name = f"{prefix}{child.name}"
            skipped = ast.get_docstring(child, clean=False) is not None
            for statement in child.body[skipped:]:
                yield from _statements(name, statement)
            yield from _bodies(child, f"{name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _bodies(child, f"{prefix}{child.name}.")
        else:
            yield from _bodies(child, prefix)


def _statements(name: str, statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    if isinstance(statement, (*_Function.__args__, ast.ClassDef)):
        return  # `_bodies` yields its statements under its own name
    yield name, statement
    for child in ast.walk(statement):
        if child is not statement and isinstance(child, ast.stmt) and not isinstance(child, _Function | ast.ClassDef):
            yield name, child


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of this statement, but not those of inner statements, annotations, errors and warnings."""
    waiting: list[ast.AST] = [
        child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt | ast.ExceptHandler)
    ]
    if isinstance(statement, ast.AnnAssign):
        waiting.remove(statement.annotation)
    if isinstance(statement, ast.Raise | ast.Assert):
        return
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _called(node) in ("warn", "cast")):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue  # the argument of zip, which has an effect only if lengths differ
        if isinstance(node, ast.expr):
            yield node
        waiting.extend(ast.iter_child_nodes(node))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _changes(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt | ast.expr, str]]:
    """Yield (kind, part, the text that replaces it) for each change of this statement, without inner statements."""
    if isinstance(statement, ast.If | ast.While):
        yield "condition negated", statement.test, f"(not ({ast.unparse(statement.test)}))"
    if isinstance(statement, ast.AugAssign | ast.Raise | ast.Delete) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call | ast.Await)
    ):
        yield "statement deleted", statement, "pass"
    for node in _expressions(statement):
        yield from _changes_of(node)


def _changes_of(node: ast.expr) -> Iterator[tuple[str, ast.expr, str]]:
    text = ast.unparse
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign = _COMPARISONS[type(node.ops[0])]
        yield "comparison", node, f"({text(node.left)} {sign} {text(node.comparators[0])})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
        yield "arithmetic", node, f"(({text(node.left)}) {_ARITHMETIC[type(node.op)]} ({text(node.right)}))"
    elif isinstance(node, ast.BoolOp):
        sign = " or " if isinstance(node.op, ast.And) else " and "
        yield "and, or", node, "(" + sign.join(f"({text(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not dropped", node, f"({text(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield "condition negated", node.test, f"(not ({text(node.test)}))"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", node, str(node.value + 1)
    elif isinstance(node, ast.Call) and node.keywords:
        for keyword in node.keywords:
            if keyword.arg not in (None, "strict"):
                remaining = [other for other in node.keywords if other is not keyword]
                yield f"argument {keyword.arg} dropped", node, text(ast.Call(node.func, node.args, remaining))


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )
