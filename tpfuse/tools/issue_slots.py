"""The issue slots of a scheduler that a loop around matrix products takes, counted in the SASS of sm_90.

A multiprocessor has four schedulers, each with its own tensor core, and a scheduler issues one instruction of one of
its warps in a cycle. A wgmma of 64 x N x 16 half-type or 64 x N x 8 tf32 elements keeps the four tensor cores busy for
N / 2 cycles (NVIDIA, H100 white paper: a multiprocessor does 2048 and 1024 multiplications in a cycle). Each warp of
the group issues all instructions of the loop. Therefore, for any number of warps,

    issue slots / tensor cycles = instructions of the loop / Σ N / 2 of its wgmma instructions.

If the quotient is above 1, the tensor cores must wait for instructions, however well everything else overlaps. Special
functions, which take four or eight issue slots of a unit of their own, are counted as one instruction: the real bound
may be higher.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpfuse.tools.sass import BasicBlock, blocks

_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x")


@dataclass(frozen=True)
class ProductLoop:
    """A loop that contains wgmma instructions.

    tile_instructions: the number of instructions of the enclosing loop over tiles that are not in this loop, or 0 if
    no loop encloses it.
    """

    instructions: int
    tensor_cycles: float
    barriers: int
    tile_instructions: int

    @property
    def issue_share(self) -> float:
        """Return the quotient of issue slots and tensor cycles."""
        return self.instructions / self.tensor_cycles


def main_loop(sass: str) -> ProductLoop | None:
    """Return the loop around wgmma with the fewest issue slots for its tensor cycles, or None if there is no loop.

    Attention has other loops, for blocks that the mask hides in part. They run only at the edges of the visible ranges.
    """
    return min(product_loops(sass), key=lambda loop: loop.issue_share, default=None)


def product_loops(sass: str) -> Iterator[ProductLoop]:
    """Yield each innermost loop that has wgmma instructions. sass: a kernel for sm_90, as nvdisasm prints it."""
    program = blocks(sass)
    loops = [loop for loop in _loops(program) if _tensor_cycles(program, loop)]
    for loop in loops:
        if any(other < loop for other in loops):
            continue
        around = min((other for other in loops if loop < other), key=lambda other: _size(program, other), default=loop)
        yield ProductLoop(
            instructions=_size(program, loop),
            tensor_cycles=_tensor_cycles(program, loop),
            barriers=sum(name.startswith("BAR.") for name in _names(program, loop)),
            tile_instructions=_size(program, around) - _size(program, loop),
        )


def _names(program: Sequence[BasicBlock], loop: frozenset[int]) -> Iterator[str]:
    return (instruction.name for number in loop for instruction in program[number].instructions)


def _tensor_cycles(program: Sequence[BasicBlock], loop: frozenset[int]) -> float:
    """Return the number of cycles for which the loop's wgmma instructions keep the tensor cores busy."""
    return sum(int(match[1]) / 2 for name in _names(program, loop) if (match := _PRODUCT.match(name)))


def _size(program: Sequence[BasicBlock], loop: frozenset[int]) -> int:
    return sum(len(program[number].instructions) for number in loop)


def _loops(program: Sequence[BasicBlock]) -> list[frozenset[int]]:
    """Return the natural loops of a program.

    A natural loop consists of a block that dominates the source of a branch back to it, and of all blocks that reach
    this source without passing through the first block. A block is dominated by each block that is on every path from
    the start to it.
    """
    before: list[set[int]] = [set() for _ in program]
    for number, block in enumerate(program):
        for follower in block.after:
            before[follower].add(number)
    everything = set(range(len(program)))
    dominators = [everything if before[number] and number else {number} for number in everything]
    changed = True
    while changed:
        changed = False
        for number in range(1, len(program)):
            if before[number]:
                updated = set.intersection(*(dominators[each] for each in before[number])) | {number}
                changed |= updated != dominators[number]
                dominators[number] = updated
    loops: dict[int, set[int]] = {}
    for number, block in enumerate(program):
        for head in block.after & dominators[number]:
            loop, waiting = loops.setdefault(head, {head}), [number]
            while waiting:
                if (each := waiting.pop()) not in loop:
                    loop.add(each)
                    waiting += before[each]
    return [frozenset(loop) for loop in loops.values()]
