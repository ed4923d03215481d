"""The steps of instructions that work on registers: arithmetic, and what the lanes of a warp do together."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tpfuse.explore.ptx import warps
from tpfuse.explore.ptx.arithmetic import operation
from tpfuse.explore.ptx.faults import Unsupported
from tpfuse.explore.ptx.numbers import TYPES, UNSIGNED, bits_of, halves, joined
from tpfuse.explore.ptx.parser import Immediate, PtxInstruction, Register, Vector
from tpfuse.explore.ptx.program import Program, Step
from tpfuse.explore.ptx.slots import Slots


def arithmetic(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return the step of an instruction that computes each thread's result from its own registers."""
    target, *sources = instruction.operands
    if instruction.parts[0] == "mov" and (isinstance(target, Vector) or isinstance(sources[0], Vector)):
        return _move_halves(slots, instruction)
    if instruction.parts[0] == "setp" and instruction.opcode.endswith("x2"):
        return _compare_halves(slots, instruction)
    function, widths = operation(instruction.opcode)
    if len(sources) != len(widths):
        raise Unsupported(f"{instruction.opcode} has {len(sources)} sources: expected {len(widths)}")
    if any(isinstance(x, Register) and x.bits > width for x, width in zip(sources, widths, strict=True)):
        function = _narrowed(instruction, function, *widths)
    slot = slots.slot(target, 0)
    places = [slots.slot(source, width) for source, width in zip(sources, widths, strict=True)]
    guard = slots.guard(instruction)

    def step(p: Program) -> None:
        registers = p.registers
        p.write(slot, function(*[registers[x] for x in places]), p.guarded(guard))

    return step


def _narrowed(instruction: PtxInstruction, function: Callable[..., Any], width: int) -> Callable[..., Any]:
    """Return cvt of a register that is wider than its type: the lower bits count."""
    if instruction.parts[0] != "cvt":
        raise Unsupported(f"{instruction.opcode} of a wider register is not supported")
    return lambda a: function(a.astype(UNSIGNED[width]))


def _move_halves(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return a mov between a 32-bit register and a vector of its halves."""
    target, source = instruction.operands
    guard = slots.guard(instruction)
    if instruction.opcode != "mov.b32":
        raise Unsupported(f"{instruction.opcode} of a vector is not supported")
    if isinstance(source, Vector):
        whole = slots.slot(target, 32)
        low, high = (slots.slot(x, 16) for x in source.elements)
        return lambda p: p.write(whole, joined(p.registers[low], p.registers[high]), p.guarded(guard))
    whole, parts = slots.slot(source, 32), slots.elements(target, 16)

    def step(p: Program) -> None:
        for slot, half in zip(parts, halves(p.registers[whole]), strict=True):
            if slot is not None:
                p.write(slot, half, p.guarded(guard))

    return step


def _compare_halves(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return a setp of pairs, whose two results are those of the lower and of the upper numbers."""
    low, high, *sources = instruction.operands
    results = slots.slot(low, 1), slots.slot(high, 1)
    a, b = (slots.slot(source, 32) for source in sources)
    compare, guard = operation(instruction.opcode.removesuffix("x2")).function, slots.guard(instruction)

    def step(p: Program) -> None:
        mask = p.guarded(guard)
        for slot, left, right in zip(results, halves(p.registers[a]), halves(p.registers[b]), strict=True):
            p.write(slot, compare(left, right), mask)

    return step


_PRODUCTS = {("m16n8k16", "bf16"), ("m16n8k16", "f16"), ("m16n8k8", "tf32")}


def products(slots: Slots, *instructions: PtxInstruction) -> Step:
    """Return the step of instructions mma.sync of one form, none of which takes a result of another.

    Sums are in float32. A fragment that several of the products have is unpacked once.
    """
    _, *modifiers = instructions[0].parts
    shape, kind = modifiers[2], modifiers[6]
    known = ["sync", "aligned", shape, "row", "col", "f32", kind, kind, "f32"]
    if modifiers != known or (shape, kind) not in _PRODUCTS:
        raise Unsupported(f"{instructions[0].opcode} is not supported")
    given = [np.array([slots.elements(x.operands[n], 32) for x in instructions], np.int64) for n in range(4)]
    if [x.shape[1] for x in given] != [4, 4, 2, 4]:
        raise ValueError
    targets, sums = given[0].ravel().tolist(), given[3]
    (lefts, left), (rights, right) = (np.unique(x, axis=0, return_inverse=True) for x in given[1:3])

    def fragments(p: Program, places: Any) -> Any:
        return np.stack([p.array(slot) for slot in places.ravel().tolist()]).reshape(*places.shape, p.threads)

    def step(p: Program) -> None:
        p.whole_warps(p.mask)
        a = warps.left_matrices(kind, fragments(p, lefts))[left.ravel()]
        b = warps.right_matrices(kind, fragments(p, rights))[right.ravel()]
        results = warps.sum_registers(a @ b + warps.sum_matrices(fragments(p, sums)))
        for slot, column in zip(targets, results.reshape(len(targets), -1), strict=True):
            p.write(slot, column, p.mask)

    return step


def shuffle(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return shfl.sync, which may have a second target: whether the source was in range."""
    _, sync, mode, kind = instruction.parts
    *targets, source, argument, clamp, members = instruction.operands
    if (sync, kind) != ("sync", "b32") or not isinstance(members, Immediate):
        raise ValueError
    value, lane, limit = (slots.slot(x, 32) for x in (source, argument, clamp))
    results, mask = [slots.slot(x, 32) for x in targets], members.value & 0xFFFFFFFF

    def step(p: Program) -> None:
        p.whole_warps(p.mask, mask)
        shuffled = warps.shuffle(mode, p.array(value), p.array(lane), p.array(limit))
        for slot, result in zip(results, shuffled, strict=False):
            p.write(slot, result, p.mask)

    return step


def reduction(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return redux.sync of all lanes."""
    _, sync, name, kind = instruction.parts
    target, *sources = instruction.operands
    if sync != "sync" or bits_of(kind) != 32:
        raise ValueError
    (value, members), slot, dtype = (slots.slot(x, 32) for x in sources), slots.slot(target, 32), TYPES[kind]

    def step(p: Program) -> None:
        p.whole_warps(p.mask)
        if (p.array(members)[p.active()] != 0xFFFFFFFF).any():
            raise Unsupported(f"{instruction.opcode} of some lanes is not supported")
        p.write(slot, warps.reduced(name, p.array(value).view(dtype)).view(np.uint32), p.mask)

    return step


def warp_barrier(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return bar.warp.sync, which orders lanes that are ordered here already."""
    (members,) = instruction.operands
    if instruction.opcode != "bar.warp.sync" or not isinstance(members, Immediate):
        raise ValueError
    mask = members.value & 0xFFFFFFFF
    return lambda p: p.whole_warps(p.mask, mask)
