"""How much of a scheduler's time a loop around matrix products takes, counted in the SASS of sm_90.

A multiprocessor has four schedulers, each with a tensor core beside it, and a scheduler issues one instruction of one
of its warps in a cycle. A wgmma of 64 x N x 16 half-type or 64 x N x 8 tf32 elements keeps the four tensor cores busy
for N / 2 cycles (NVIDIA, H100 white paper: 2048 and 1024 multiplications of a multiprocessor in a cycle). Each warp of
the group issues all instructions of the loop, so that for any number of warps

    issue slots / tensor cycles = instructions of the loop / Σ N / 2 of its wgmma instructions.

Above 1 the tensor cores must wait for instructions, however well all else overlaps. Special functions, which take four
or eight issue slots of a unit of their own, are counted as one instruction: the real bound may be higher.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\{?\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w\S*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x")


@dataclass(frozen=True)
class ProductLoop:
    """A loop around wgmma. tile_instructions: those of the loop of tiles around it that are not its own, 0 without."""

    instructions: int
    tensor_cycles: float
    barriers: int
    tile_instructions: int

    @property
    def issue_share(self) -> float:
        """Issue slots over tensor cycles."""
        return self.instructions / self.tensor_cycles


def slowest_loop(sass: str) -> ProductLoop | None:
    """The loop around wgmma whose tensor cycles need the most issue slots; None without one.

    sass: a kernel for sm_90, as nvdisasm prints it.
    """
    return max(product_loops(sass), key=lambda loop: loop.issue_share, default=None)


def product_loops(sass: str) -> Iterator[ProductLoop]:
    """Each innermost loop that has wgmma instructions."""
    names, labels, branches = _parsed(sass)
    cycles = [int(match[1]) / 2 if (match := _PRODUCT.match(name)) else 0.0 for name in names]
    loops = _nested((labels[target], end) for end, target in branches if labels.get(target, end + 1) <= end)
    busy = [(start, end) for start, end in loops if sum(cycles[start : end + 1])]
    for index, (start, end) in enumerate(busy):
        if any(start <= first and last <= end for first, last in busy[:index]):
            continue
        size = end + 1 - start
        around = (last + 1 - first for first, last in busy[index + 1 :] if first <= start and end <= last)
        barriers = sum(name.startswith("BAR.") for name in names[start : end + 1])
        yield ProductLoop(size, sum(cycles[start : end + 1]), barriers, next(around, size) - size)


def _nested(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The loops among what lies between labels and branches back to them, the shortest first.

    A wait that the compiler has put behind everything else jumps back into the middle of its loop. What lies between
    cuts through that loop, and is none.
    """
    loops: list[tuple[int, int]] = []
    for start, end in sorted(spans, key=lambda span: span[1] - span[0]):
        if not any(start <= last and first <= end and not (start <= first and last <= end) for first, last in loops):
            loops.append((start, end))
    return loops


def _parsed(sass: str) -> tuple[list[str], dict[str, int], list[tuple[int, str]]]:
    """The names of all instructions, label -> the instruction behind it, (instruction, label) of each branch."""
    names: list[str] = []
    labels: dict[str, int] = {}
    branches = []
    for line in sass.splitlines():
        if match := _LABEL.match(line):
            labels[match[1]] = len(names)
        elif match := _INSTRUCTION.match(line):
            if match[1].startswith("BRA") and (target := _TARGET.search(match[2])):
                branches.append((len(names), target[1]))
            names.append(match[1])
    return names, labels, branches
