"""The compilation of a kernel to blocks of steps: functions that execute one instruction for all active threads."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tpfuse.explore.ptx import asynchronous_steps, memory_steps, register_steps
from tpfuse.explore.ptx.control_flow import weak_topological_order
from tpfuse.explore.ptx.faults import Unsupported
from tpfuse.explore.ptx.parser import Immediate, Parsed, PtxInstruction
from tpfuse.explore.ptx.program import Step, StepBlock
from tpfuse.explore.ptx.slots import Slots

_ENDS = {"bra": "branch", "ret": "exit", "exit": "exit", "bar": "barrier", "barrier": "barrier"}
_MAKERS: dict[str, Callable[..., Step]] = {
    "ld": memory_steps.load,
    "st": memory_steps.store,
    "atom": memory_steps.atomic,
    "red": memory_steps.atomic,
    "cp": memory_steps.asynchronous,
    "ldmatrix": memory_steps.matrix,
    "stmatrix": memory_steps.matrix,
    "mma": register_steps.products,
    "shfl": register_steps.shuffle,
    "redux": register_steps.reduction,
    "bar": register_steps.warp_barrier,
    "elect": asynchronous_steps.elect,
    "fence": asynchronous_steps.fence,
    "mbarrier": asynchronous_steps.memory_barrier,
    "tensormap": asynchronous_steps.tensor_map,
    "wgmma": asynchronous_steps.matrix_product,
}
_NEVER_GUARDED = ("ldmatrix", "stmatrix", "mma", "shfl", "redux", "bar", "elect", "wgmma")


class Compiled(NamedTuple):
    """A kernel as blocks of steps, with its slots. touched: those that each instruction accesses, if it has wgmma."""

    blocks: tuple[StepBlock, ...]
    slots: Slots
    touched: tuple[frozenset[int], ...]


def compile_kernel(kernel: Parsed) -> Compiled:
    """Compile a kernel. Raise Unsupported, with the line, for an instruction that is not known."""
    code = kernel.instructions
    ends = {index: _ENDS[x.parts[0]] for index, x in enumerate(code) if x.parts[0] in _ENDS and "warp" not in x.parts}
    targets = {kernel.labels[code[index].target] for index, end in ends.items() if end == "branch"}
    # Threads that have diverged meet where a block begins: a barrier is a block of its own.
    starts = {0, *targets, *(index + 1 for index in ends), *(index for index, end in ends.items() if end == "barrier")}
    ordered = sorted(start for start in starts if start < len(code))
    spans = [range(start, after) for start, after in zip(ordered, [*ordered[1:], len(code)], strict=True)]
    number = {span[0]: block for block, span in enumerate(spans)}
    lasts = [(ends.get(span[-1], "next"), code[span[-1]]) for span in spans]
    goals = [number[kernel.labels[last.target]] if end == "branch" else -1 for end, last in lasts]
    if lasts[-1][0] not in ("exit", "branch") or lasts[-1][1].guard is not None:
        raise Unsupported(f"{kernel.name} does not end with ret or a branch")
    following: list[list[int]] = []
    for block, ((end, last), goal) in enumerate(zip(lasts, goals, strict=True)):
        leaves = end in ("exit", "branch") and last.guard is None
        following.append(([] if leaves else [block + 1]) + ([goal] if end == "branch" else []))
    slots, blocks = Slots(kernel), []
    order = weak_topological_order(following)
    for span, (end, last), goal, position in zip(spans, lasts, goals, order, strict=True):
        inside = span if end == "next" else span[:-1]
        steps = tuple((group[0], _step(slots, *[code[index] for index in group])) for group in _groups(code, inside))
        guard = slots.guard(last) if end in ("branch", "exit") else None
        blocks.append(
            StepBlock(steps, end, span[-1], goal, position, guard, _barrier(last) if end == "barrier" else None)
        )
    asynchronous = any(x.parts[0] == "wgmma" for x in code)
    touched = tuple(asynchronous_steps.touched(slots, x) for x in code) if asynchronous else ()
    return Compiled(tuple(blocks), slots, touched)


def _groups(code: Sequence[PtxInstruction], indices: Iterable[int]) -> list[list[int]]:
    """Return the instructions of each step: those of mma.sync that follow one another, unless one needs another."""
    groups: list[list[int]] = []
    targets: set[Any] = set()
    for index in indices:
        x = code[index]
        registers = {y for operand in x.operands for y in getattr(operand, "elements", ())}
        if x.parts[0] == "mma" and groups and code[groups[-1][0]].opcode == x.opcode and targets.isdisjoint(registers):
            groups[-1].append(index)
        else:
            groups.append([index])
            targets = set()
        if x.parts[0] == "mma":
            targets.update(x.operands[0].elements)
    return groups


def _step(slots: Slots, instruction: PtxInstruction, *others: PtxInstruction) -> Step:
    """Return the step of an instruction that does not end a block, and of others like it."""
    name = instruction.parts[0]
    try:
        if name in _NEVER_GUARDED and instruction.guard is not None:
            raise Unsupported(f"{instruction.opcode} under a predicate is not supported")
        return _MAKERS.get(name, register_steps.arithmetic)(slots, instruction, *others)
    except Unsupported as error:
        raise Unsupported(f"{error}\n  {instruction}") from None
    except (KeyError, IndexError, ValueError, TypeError, AttributeError):
        raise Unsupported(f"{instruction.opcode} with these operands is not supported\n  {instruction}") from None


def _barrier(instruction: PtxInstruction) -> int:
    """Return the number of a barrier at which all threads of a program meet."""
    values = [x.value for x in instruction.operands if isinstance(x, Immediate)]
    if instruction.opcode != "bar.sync" or instruction.guard is not None or len(instruction.operands) != 1:
        raise Unsupported(f"{instruction} is not supported")
    return values[0]
