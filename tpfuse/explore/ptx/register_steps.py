"""The steps of instructions that work on registers: arithmetic, and what the lanes of a warp do together."""

from functools import partial
from typing import Any

import numpy as np

from tpfuse.explore.ptx import warps
from tpfuse.explore.ptx.arithmetic import Operation, operation
from tpfuse.explore.ptx.faults import Unsupported
from tpfuse.explore.ptx.numbers import TYPES, UNSIGNED, bits_of, halves, joined
from tpfuse.explore.ptx.parser import Immediate, PtxInstruction, Register, Vector
from tpfuse.explore.ptx.program import Program, Step
from tpfuse.explore.ptx.slots import Slots


def arithmetic(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return the step of an instruction that computes each thread's result from its own registers.

    A mov between a register and a vector of its halves has two sources or results, and a setp of pairs two results.
    """
    opcode, results, sources, count = instruction.opcode, instruction.operands[:1], instruction.operands[1:], 1
    bits = {"mov.b32": 32, "mov.b64": 64}.get(opcode, 0)
    if bits and isinstance(results[0], Vector):
        (function, widths), results, count = Operation(partial(halves, bits=bits), (bits,)), results[0].elements, 2
    elif bits and isinstance(sources[0], Vector):
        (function, widths), sources = Operation(partial(joined, bits=bits), (bits // 2,) * 2), sources[0].elements
    else:
        function, widths = operation(opcode)
        if opcode.startswith("setp") and opcode.endswith("x2"):
            results, sources, count = instruction.operands[:2], instruction.operands[2:], 2
    if len(results) != count or (count == 1 and None in results):
        raise ValueError
    if len(sources) != len(widths):
        raise Unsupported(f"{opcode} has {len(sources)} sources: expected {len(widths)}")
    if any(isinstance(x, Register) and x.bits > width for x, width in zip(sources, widths, strict=True)):
        if instruction.parts[0] != "cvt" or len(widths) > 1:
            raise Unsupported(f"{opcode} of a wider register is not supported")
        whole, narrow = function, UNSIGNED[widths[0]]
        function = lambda a: whole(a.astype(narrow))  # noqa: E731 (the lower bits count)
    targets, places = [slots.slot(x, 0) if x else None for x in results], list(map(slots.slot, sources, widths))
    guard = slots.guard(instruction)

    def step(p: Program) -> None:
        registers, mask = p.registers, p.guarded(guard)
        computed = function(*[registers[x] for x in places])
        for slot, value in zip(targets, (computed,) if len(targets) == 1 else computed, strict=True):
            if slot is not None:
                p.write(slot, value, mask)

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
