"""The compiler's front end alone, which translates a kernel's Python to Triton's first representation (TTIR).

The front end takes about a twentieth of a second, and a whole compilation takes seconds. Tests therefore run the front
end under several versions of Triton. They find code that one version of the language refuses and another one accepts.

The front end executes the branches of a kernel's Python that constants decide. It can distinguish two launches by the
types of the arguments, by which pointers are None, by which integers are the constant 1, and by the values of the
constexpr parameters. All sizes of 2 or more count as equal: sizes are shapes and bounds of loops, and the whole
compilation (`tpfuse.tools.compilation`) checks that shapes fit one another. It also checks everything that depends on
the family of the GPU or on the numbers of warps and stages. The family hardly affects the front end: it decides which
constants a launch has (TMA, for instance), and constants are distinguished.

The front end of Triton 3.6 to 3.9 takes a name for unchanged in a loop if the loop leaves it with the value that it
began with. That is wrong where this value belongs to another name, which the loop changes (`before = stage` ahead of a
loop and again inside it): the name keeps its first value for ever. `lower` refuses such loops.
"""

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triton._C.libtriton import ir
from triton.compiler import CompilationError, make_backend
from triton.compiler.code_generator import CodeGenerator, flatten_values_to_ir
from triton.language.core import base_value

from tpfuse.tools.recorded import Job, target


def lower(job: Job) -> Any:
    """Return the TTIR of a kernel. Raise the exceptions that the front end raises."""
    backend = make_backend(target(job.family))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"num_warps": job.num_warps, "num_stages": job.num_stages})
    implementation = backend.get_codegen_implementation(options)
    with _copies_refused():
        return job.source.make_ir(target(job.family), options, implementation, backend.get_module_map(), context)


@contextmanager
def _copies_refused() -> Iterator[None]:
    """Within the block, the front end raises CompilationError for a loop that does not carry a copied name."""
    find = CodeGenerator._find_carries

    def checked(self: Any, node: Any, before: dict[str, Any], *ignored: Any, **more: Any) -> Any:
        carried, *rest = find(self, node, before, *ignored, **more)
        values = {name: flatten_values_to_ir([x]) for name, x in before.items() if isinstance(x, base_value)}
        stored = {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        for name, other in itertools.product(sorted(stored & values.keys() - {*carried}), carried):
            if values[name] == values[other]:
                why = f"the loop changes {name}, but Triton does not carry it, since it begins as a copy of {other}"
                raise CompilationError(self.jit_fn.src, node, f"{why}: begin with an expression, such as {other} + 0")
        return carried, *rest

    CodeGenerator._find_carries = checked
    try:
        yield
    finally:
        CodeGenerator._find_carries = find


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
