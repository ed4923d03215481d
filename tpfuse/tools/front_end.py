"""The compiler's front end alone: from a kernel's Python to Triton's first representation (TTIR), without ptxas.

This takes about a twentieth of a second where a whole compilation takes seconds, so that the tests try it under several
versions of Triton. It finds what one version of the language refuses and another takes.

The front end runs the branches of a kernel's Python that constants decide. What it can tell apart of two launches is:
the types of the arguments, which pointers are None, which integers are the constant 1, and the values of the constexpr
parameters, where a size of 2 or more is as good as another: sizes are shapes and bounds of loops, and that shapes fit
one another is up to the whole compilation (`tpfuse.tools.compilation`), as is everything that depends on the family
of the GPU or on the numbers of warps and stages. The family hardly reaches the front end: it decides which constants a
launch has (TMA, for instance), and these are told apart.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

from triton._C.libtriton import ir
from triton.compiler import make_backend

from tpfuse.tools.recorded import Job, target


def lower(job: Job) -> Any:
    """The TTIR of a kernel. Raises what the front end raises."""
    backend = make_backend(target(job.family))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"num_warps": job.num_warps, "num_stages": job.num_stages})
    implementation = backend.get_codegen_implementation(options)
    return job.source.make_ir(target(job.family), options, implementation, backend.get_module_map(), context)


def features(job: Job) -> list[tuple[str, object]]:
    """(parameter, what the front end can tell apart of it) of a launch, and the types of its arguments as a set."""
    source = job.source
    names = source.fn.arg_names
    declared = {parameter.name for parameter in source.fn.params if parameter.is_constexpr}
    found: list[tuple[str, object]] = []
    ones = []
    for path, value in sorted(source.constants.items()):
        name = names[path[0]]
        if name not in declared and value is not None:
            ones.append(name)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append((name, min(value, 2)))
        else:
            found.append((name, str(value)))
    types = {re.sub(r"\[.*\]", "", text) for text in source.signature.values()}
    return [*found, ("integers that are 1", tuple(ones)), ("types", tuple(sorted(types)))]


def representatives(jobs: Sequence[Job]) -> list[Job]:
    """Jobs that have, kernel by kernel, each pair of features that one of all jobs has.

    What goes wrong in a front end hangs on one feature, or on two: a branch that one constant opens and the type or
    None that it meets there. The jobs are chosen greedily, those that add most pairs first.
    """
    pairs = {
        index: {(job.source.name, *pair) for pair in itertools.combinations(features(job), 2)}
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
