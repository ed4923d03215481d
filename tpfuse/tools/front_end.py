"""The compiler's front end alone, which translates a kernel's Python to Triton's first representation (TTIR).

The front end takes about a twentieth of a second, and a whole compilation takes seconds. Tests therefore run the front
end under several versions of Triton. They find code that one version of the language refuses and another one accepts.

The front end executes the branches of a kernel's Python that constants decide. It can distinguish two launches by the
types of the arguments, by which pointers are None, by which integers are the constant 1, and by the values of the
constexpr parameters. All sizes of 2 or more count as equal: sizes are shapes and bounds of loops, and the whole
compilation (`tpfuse.tools.compilation`) checks that shapes fit one another. It also checks everything that depends on
the family of the GPU or on the numbers of warps and stages. The family hardly affects the front end: it decides which
constants a launch has (TMA, for instance), and constants are distinguished.
"""

import ast
import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from triton._C.libtriton import ir
from triton.compiler import make_backend

from tpfuse.tools.recorded import Job, target


def lower(job: Job) -> Any:
    """Return the TTIR of a kernel, of Gluon's its TTGIR.

    Raise the exceptions that the front end raises, and ValueError where it would lose a copy (`lost_copies`).
    """
    module = inspect.getmodule(job.source.fn.fn)
    if module is not None and (lost := _lost_in(module)):
        raise ValueError(lost[0])
    backend = make_backend(target(job.family))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"num_warps": job.num_warps, "num_stages": job.num_stages})
    implementation = backend.get_codegen_implementation(options)
    return job.source.make_ir(target(job.family), options, implementation, backend.get_module_map(), context)


@cache
def _lost_in(module: ModuleType) -> tuple[str, ...]:
    return tuple(f"{inspect.getsourcefile(module)}:{text}" for text in lost_copies(inspect.getsource(module)))


def lost_copies(source: str) -> Iterator[str]:
    """Yield the line and a description of each copy that a loop would not carry.

    Where `before = stage` precedes a loop and is also in it, and the loop changes `stage`, Triton 3.6 to 3.9 take both
    for one value: in the loop `before` stays what it was at first, without an error. Another first value is carried.
    """
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        copies = [(_copy(node), node) for node in ast.walk(function) if _copy(node)]
        for loop in ast.walk(function):
            if isinstance(loop, ast.For | ast.While):
                stored = {x.id for x in ast.walk(loop) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
                inside = {id(node) for node in ast.walk(loop)}
                ahead = {copy for copy, node in copies if id(node) not in inside and node.lineno < loop.lineno}
                for copy, node in copies:
                    if id(node) in inside and copy in ahead and copy[1] in stored:
                        yield f"{node.lineno}: {copy[0]} = {copy[1]} is also ahead of the loop: it would not be carried"


def _copy(node: ast.AST) -> tuple[str, ...]:
    """Return the two names of `a = b`, or ()."""
    match node:
        case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name(id=source)):
            return target, source
    return ()


def features(job: Job) -> list[tuple[str, object]]:
    """Return pairs of a launch's parameter and of what the front end distinguishes in it, and the set of all types."""
    source = job.source
    names = source.fn.arg_names
    declared = {parameter.name for parameter in source.fn.params if parameter.is_constexpr}
    parts: list[tuple[str, object]] = []
    ones = []
    for path, value in sorted(source.constants.items()):
        name = names[path[0]]
        if name not in declared and value is not None:
            ones.append(name)
        elif isinstance(value, int) and not isinstance(value, bool):
            parts.append((name, min(value, 2)))
        else:
            parts.append((name, str(value)))
    types = {re.sub(r"\[.*\]", "", text) for text in source.signature.values()}
    return [*parts, ("integers that are 1", tuple(ones)), ("types", tuple(sorted(types)))]


def representatives(jobs: Sequence[Job], together: int = 2) -> list[Job]:
    """Return jobs that have, for each kernel, every combination of features that occurs in one of all jobs.

    together: the number of features in a combination. With 1, each feature occurs, and so every branch. An error may
    depend on two: on a constant that selects a branch, and on a type or None in it. The jobs are chosen greedily: the
    job that adds the most combinations is chosen first.
    """
    pairs = {
        index: {(job.source.name, *pair) for pair in itertools.combinations(features(job), together)}
        for index, job in enumerate(jobs)
    }
    chosen = []
    while pairs:
        best = max(pairs, key=lambda index: (len(pairs[index]), -index))
        covered = pairs.pop(best)
        if not covered:
            break
        chosen.append(best)
        same = jobs[best].source.name
        for index in pairs:
            if jobs[index].source.name == same:
                pairs[index] = pairs[index] - covered
    return [jobs[index] for index in sorted(chosen)]
