"""What is asked of every compiled kernel, and the table of what they take.

A kernel that spills, does without tensor cores or loads few bytes at a time is right, and slow: no other test shows it.
"""

import re
from collections.abc import Iterator, Sequence

from tpfuse.profile.resources import LIMITS, Compilation

# The newest matrix instruction of each family.
NEWEST = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}

# (kernel, a constant) -> why its tiles cannot use the newest instruction; mma.sync must be there.
EXCEPTIONS: dict[tuple[str, str], str] = {}

# Rows of sm_80 serve the GPUs that have less shared memory than an A100 too.
SHARED = {family: limits.shared_per_program for family, limits in LIMITS.items()} | {"sm_80": 99 * 1024}


def complaints(result: Compilation) -> Iterator[str]:
    """One line for each thing that is wrong."""
    if result.error:
        yield f"{named(result)}: {result.error}"
        return
    for complaint in _complaints(result):
        yield f"{named(result)}: {complaint}"


def _complaints(result: Compilation) -> Iterator[str]:
    if result.spilled:
        yield f"{result.spilled} bytes of registers are spilled"
    if result.shared > SHARED[result.family]:
        yield f"{result.shared} bytes of shared memory, {SHARED[result.family]} are allowed"
    if result.dot:
        newest = NEWEST[result.family]
        if newest not in result.tensor_cores and not (exception(result) and "mma.sync" in result.tensor_cores):
            yield f"no {newest} instruction for its dot, {'+'.join(result.tensor_cores) or 'no tensor core'} instead"
    else:
        for name, widths in (("loaded", result.loads), ("stored", result.stores)):
            if widths and narrow(widths) > 0.5:
                yield f"most is {name} in accesses of less than 16 bytes: {widths}"
    if result.serialized:
        yield "its wgmma instructions wait for one another: ptxas serializes them"
    if result.constants.get("WARP_SPECIALIZE") and not result.specialized:
        yield "its warps have no roles of their own, as WARP_SPECIALIZE asks for"


def exception(result: Compilation) -> tuple[str, str] | None:
    """The entry of EXCEPTIONS that a result falls under."""
    constants = [f"{name}={value}" for name, value in result.constants.items()]
    return next((key for key in EXCEPTIONS if key[0] == result.kernel and key[1] in constants), None)


def narrow(widths: dict[int, int]) -> float:
    """The share of the bytes that are moved by instructions of less than 16 bytes a thread."""
    narrow = sum(width * count for width, count in widths.items() if width < 16)
    return narrow / sum(width * count for width, count in widths.items())


def named(result: Compilation) -> str:
    """Operator, family and configuration on one line."""
    place = f"{result.operator} {result.family} {result.dtype}"
    if not result.kernel:  # a launcher raised
        return place
    return f"{place} {result.kernel} {_constants(result)} num_warps={result.num_warps} num_stages={result.num_stages}"


def _constants(result: Compilation) -> str:
    return " ".join(f"{name}={value}" for name, value in result.constants.items() if value != "None")


def describe(result: Compilation) -> str:
    """Two lines for people."""
    if result.error:
        return f"{named(result)}\n    {result.error}"
    features = "".join(f"  {text}" for text in _features(result))
    return (
        f"{named(result)}\n    registers {result.registers}  spilled {result.spilled}  shared {result.shared}"
        f"  programs {result.programs}{features}  loads {result.loads}  stores {result.stores}"
    )


def _features(result: Compilation) -> list[str]:
    return [*result.tensor_cores, *["TMA"] * result.bulk, *["specialized"] * result.specialized]


HEADER = """\
# What the kernels take

Compiled by Triton {version} without a GPU; `make compiled` writes this file and a test compares it. Registers are those
of a thread, shared memory is a program's, in bytes; programs: how many fit on a multiprocessor at once.
"""

COLUMNS = ("kernel", "constants", "dtype", "warps", "stages", "registers", "shared", "programs", "instructions")


def table(results: Sequence[Compilation], version: str) -> str:
    """Markdown, a section for each operator and family."""
    lines = [HEADER.format(version=version)]
    sections: dict[tuple[str, str], list[Compilation]] = {}
    for result in results:
        sections.setdefault((result.operator, result.family), []).append(result)
    for (operator, family), entries in sections.items():
        lines += [f"## {operator}, {family}", "", _row(COLUMNS), _row(["---"] * len(COLUMNS))]
        lines += sorted(_row(_cells(entry)) for entry in entries)
        lines.append("")
    return "\n".join(lines)


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _cells(result: Compilation) -> list[object]:
    return [
        result.kernel.removesuffix("_kernel"),
        _constants(result),
        result.dtype,
        result.num_warps,
        result.num_stages,
        result.error or f"{result.registers}{' (spills)' * bool(result.spilled)}",
        result.shared,
        result.programs,
        " ".join(_features(result)),
    ]


def version_of(table: str) -> str:
    """The version of Triton that a table was made with."""
    found = re.search(r"Triton (\S+)", table)
    return found[1] if found else ""
