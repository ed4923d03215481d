"""The steps of instructions that access memory: global, shared, and the kernel's parameters."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tpfuse.explore.ptx import asynchronous_steps, warps
from tpfuse.explore.ptx.arithmetic import operation
from tpfuse.explore.ptx.faults import MemoryFault, Unsupported
from tpfuse.explore.ptx.numbers import TYPES, UNSIGNED, bits_of
from tpfuse.explore.ptx.parser import Immediate, PtxInstruction, Vector
from tpfuse.explore.ptx.program import LANES, Program, Step
from tpfuse.explore.ptx.slots import Slots

_ORDERS = {"relaxed", "acquire", "release", "acq_rel"}
_SCOPES = {"cta", "gpu", "sys"}
# Hints about caches, which change no value.
_HINTS = {"L1::no_allocate", "L1::evict_last", "L1::evict_first", "L2::128B"}


def _access(slots: Slots, instruction: PtxInstruction) -> tuple[bool, frozenset[str], str, int]:
    """Return whether an access is shared, its order, its type and the number of its elements."""
    _, *modifiers, kind = instruction.parts
    given = set(modifiers)
    count = next((int(x[1:]) for x in modifiers if x in ("v2", "v4")), 1)
    order = frozenset(given & (_ORDERS | _SCOPES))
    spaces = given & {"global", "shared", "shared::cta"}
    if given - spaces - order - _HINTS - {f"v{count}"} or len(spaces) != 1:
        raise Unsupported(f"{instruction.opcode} is not supported")
    shared = "global" not in spaces
    if shared:
        slots.granule = min(slots.granule, bits_of(kind) // 8 * count)
    if order and (shared or count != 1):
        raise Unsupported(f"{instruction.opcode} is not supported")
    return shared, order, kind, count


def load(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return ld of global or shared memory, or of parameters."""
    if instruction.parts[1] == "param":
        return _parameter(slots, instruction)
    target, source = instruction.operands
    shared, order, kind, count = _access(slots, instruction)
    guard, dtype = slots.guard(instruction), UNSIGNED[bits_of(kind)]
    address, places = slots.address(source, 32 if shared else 64), slots.elements(target, bits_of(kind))
    registers: tuple[Any, ...] = target.elements if isinstance(target, Vector) else (target,)
    extensions = [_extension(kind, bits_of(kind) if x is None else x.bits) for x in registers]

    def step(p: Program) -> None:
        mask = p.guarded(guard)
        threads, place = p.threads_of(mask), address(p.registers)
        if not len(threads):
            return
        uniform = np.ndim(place) == 0
        if uniform and shared:
            of_warp = np.unique(p.warp_of[threads])  # each warp makes an access of its own
        else:
            of_warp = p.warp_of[threads[:1] if uniform else threads]
        addresses = np.full(len(of_warp), place) if uniform else p.values_of(place, threads)
        if shared:
            data = p.shared.load(addresses, of_warp, dtype, count)
        elif order:
            data = p.memory.ordered(addresses, dtype, order, "ld")[:, None]
        else:
            data = p.memory.load(addresses, dtype, count)
            from_each = place if uniform else addresses
            p.global_order.add(from_each, p.warp_of[threads], data.itemsize * count, p.at, writes=False)
        for slot, column, extend in zip(places, data.T.copy(), extensions, strict=True):
            if slot is not None:
                value = extend(column)
                if uniform:
                    p.write(slot, value[0], mask)
                else:
                    p.write_some(slot, value, threads)

    return step


def _extension(kind: str, bits: int) -> Callable[[Any], Any]:
    """Return how a number of a type fills a register of `bits` bits: by its sign, or by zeros."""
    if kind[0] != "s":
        return lambda x: x.astype(UNSIGNED[bits], copy=False)
    signed, wide = TYPES[kind], TYPES[f"s{bits}"]
    return lambda x: x.view(signed).astype(wide).view(UNSIGNED[bits])


def _parameter(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return ld.param. The address of a parameter is 8 times its number."""
    target, source = instruction.operands
    _, *space, kind = instruction.parts
    slot, extend, unsigned = slots.slot(target, 0), _extension(kind, target.bits), UNSIGNED[bits_of(kind)]
    address = slots.address(source, 64 if source.base is None else source.base.bits)
    places = slots.parameters
    if space != ["param"]:
        raise ValueError

    def step(p: Program) -> None:
        given = np.array([p.registers[place] for place in places], np.uint64)
        number, inside = np.divmod(address(p.registers).astype(np.uint64), np.uint64(8))
        if np.any(number >= len(given)) or np.any(inside):
            raise MemoryFault("no parameter has this address")
        p.write(slot, extend(given[number].astype(unsigned)), p.mask)

    return step


def store(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return st to global or shared memory."""
    target, source = instruction.operands
    shared, order, kind, _ = _access(slots, instruction)
    guard, dtype = slots.guard(instruction), UNSIGNED[bits_of(kind)]
    address, places = slots.address(target, 32 if shared else 64), slots.elements(source, bits_of(kind))

    def step(p: Program) -> None:
        threads = p.threads_of(p.guarded(guard))
        if not len(threads):
            return
        addresses = p.values_of(address(p.registers), threads)
        columns = [p.values_of(p.registers[slot], threads).astype(dtype, copy=False) for slot in places]
        if shared:
            p.shared.store(addresses, p.warp_of[threads], np.stack(columns, axis=1))
        elif order:
            p.memory.ordered(addresses, dtype, order, "st", lambda i, old: columns[0][i])
        else:
            values = np.stack(columns, axis=1)
            p.memory.store(addresses, values)
            p.global_order.add(addresses, p.warp_of[threads], values[0].nbytes, p.at, writes=True)

    return step


def atomic(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return atom or red on global memory, which threads perform one after another; red has no result."""
    _, *modifiers, name, kind = instruction.parts
    order = frozenset(modifiers) & (_ORDERS | _SCOPES)
    if set(modifiers) - order != {"global"}:
        raise Unsupported(f"{instruction.opcode} is not supported")
    results = 0 if instruction.parts[0] == "red" else 1
    place, *sources = instruction.operands[results:]
    bits, guard = bits_of(kind), slots.guard(instruction)
    targets, address = [slots.slot(x, bits) for x in instruction.operands[:results]], slots.address(place, 64)
    arguments = [slots.slot(x, bits) for x in sources]
    change, dtype = _change(name, kind, len(sources)), UNSIGNED[bits]

    def step(p: Program) -> None:
        threads = p.threads_of(p.guarded(guard))
        if not len(threads):
            return
        given = [p.values_of(p.registers[x], threads) for x in arguments]
        addresses = p.values_of(address(p.registers), threads)
        replace = lambda i, old: change(old, *[x[i] for x in given])  # noqa: E731
        old = p.memory.ordered(addresses, dtype, order, f"atom.{name}", replace)
        for slot in targets:
            p.write_some(slot, old, threads)

    return step


def _change(name: str, kind: str, arguments: int) -> Callable[..., Any]:
    """Return what an atomic operation replaces a number by: a function of the number and of the operands."""
    if (name, arguments) == ("cas", 2):
        return lambda old, expected, new: new if old == expected else old
    if (name, arguments) == ("exch", 1):
        return lambda old, new: new
    if name not in ("add", "min", "max", "and", "or", "xor") or arguments != 1:
        raise ValueError
    return operation(f"{name}.{kind}").function


def asynchronous(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return cp.async, or one of the instructions that wait for such copies."""
    if instruction.parts[2] == "bulk":
        return asynchronous_steps.bulk(slots, instruction)
    _, _, what, *hints = instruction.parts
    if what in ("commit_group", "wait_group", "wait_all") and instruction.guard is None:
        left = [x.value for x in instruction.operands if isinstance(x, Immediate)]
        if what == "commit_group":
            return Program.commit_copies
        return lambda p: p.finish_copies(*left)
    if what not in ("ca", "cg") or set(hints) - _HINTS != {"shared", "global"}:
        raise ValueError
    target, source, size, *kept = instruction.operands
    nbytes, guard = size.value, slots.guard(instruction)
    slots.granule = min(slots.granule, nbytes)
    to, come = slots.address(target, 32), slots.address(source, 64)
    kept_slot = slots.slot(kept[0] if kept else size, 32)

    def step(p: Program) -> None:
        threads = p.threads_of(p.guarded(guard))
        targets, sources = (p.values_of(x(p.registers), threads) for x in (to, come))
        length = np.minimum(p.values_of(p.registers[kept_slot], threads), np.uint32(nbytes))
        p.begin_copy(threads, sources, length, targets, nbytes)

    return step


def _matrices(instruction: PtxInstruction) -> tuple[int, bool]:
    """Return the number of matrices of ldmatrix or stmatrix, and whether they are transposed."""
    _, *modifiers = instruction.parts
    count = int(modifiers[3].removeprefix("x"))
    if [x for x in modifiers if x != "trans"] != ["sync", "aligned", "m8n8", f"x{count}", "shared", "b16"]:
        raise Unsupported(f"{instruction.opcode} is not supported")
    return count, "trans" in modifiers


def _row_threads(p: Program, count: int) -> tuple[warps.Array, warps.Array]:
    """Return the active threads, and those of them that give the addresses of the rows of `count` matrices."""
    p.whole_warps(p.mask)
    active = p.threads_of(p.mask)
    return active, active[active % LANES < 8 * count]


def matrix(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return ldmatrix: lane 8 i + j gives the address of row j of matrix i, 16 bytes."""
    target, source = instruction.operands
    count, transposed = _matrices(instruction)
    address, places = slots.address(source, 32), slots.elements(target, 32)

    def step(p: Program) -> None:
        active, threads = _row_threads(p, count)
        rows = p.shared.load(p.values_of(address(p.registers), threads), p.warp_of[threads], np.uint64, 2)
        loaded = warps.matrix_fragments(rows.view(np.uint16), count, transposed)
        for slot, column in zip(places, loaded, strict=True):
            p.write_some(slot, column, active)

    return step


def store_matrix(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return stmatrix: lane 8 i + j gives the address of row j of matrix i, 16 bytes."""
    target, source = instruction.operands
    count, transposed = _matrices(instruction)
    address, places = slots.address(target, 32), slots.elements(source, 32)

    def step(p: Program) -> None:
        active, threads = _row_threads(p, count)
        fragments = np.stack([p.values_of(p.registers[slot], active) for slot in places])
        rows = warps.matrix_rows(fragments, transposed)
        p.shared.store(p.values_of(address(p.registers), threads), p.warp_of[threads], rows.view(np.uint64))

    return step
