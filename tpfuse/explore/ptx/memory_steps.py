"""The steps of instructions that access memory: global, shared, and the kernel's parameters."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

from tpfuse.explore.ptx import warps
from tpfuse.explore.ptx.arithmetic import operation
from tpfuse.explore.ptx.faults import GlobalRace, MemoryFault, Unsupported
from tpfuse.explore.ptx.mbarriers import Array, Mbarrier
from tpfuse.explore.ptx.numbers import TYPES, UNSIGNED, bits_of
from tpfuse.explore.ptx.parser import Address, Immediate, PtxInstruction, Vector
from tpfuse.explore.ptx.program import LANES, Program, Step
from tpfuse.explore.ptx.slots import Slots
from tpfuse.explore.ptx.tensor_maps import TensorMap

_ORDERS = {"relaxed", "acquire", "release", "acq_rel"}
_SCOPES = {"cta", "gpu", "sys"}
# Hints about caches, which change no value.
_HINTS = {"L1::no_allocate", "L1::evict_last", "L1::evict_first", "L2::128B"}
# Other names of the shared memory of one program
SPACES = {"shared": "shared::cta", "shared::cluster": "shared::cta"}


def for_threads(
    slots: Slots,
    instruction: PtxInstruction,
    function: Callable[..., None],
    *operands: tuple[Any, int],
    whole_warps: bool = False,
) -> Step:
    """Return a step that calls function(program, threads, values of each operand) if some threads execute it.

    operands: each with its bits. The value of an address is the address itself. whole_warps: warps execute the
    instruction together, and the threads are the first one of each.
    """
    guard = slots.guard(instruction)
    reads: list[Callable[[list[Any]], Any]] = [
        slots.address(x, bits) if isinstance(x, Address) else itemgetter(slots.slot(x, bits)) for x, bits in operands
    ]

    def step(p: Program) -> None:
        mask = p.guarded(guard)
        threads = p.threads_of(mask)
        if whole_warps:
            p.whole_warps(mask)
            threads = threads[::LANES]
        if len(threads):
            function(p, threads, *[p.values_of(read(p.registers), threads) for read in reads])

    return step


def _access(slots: Slots, instruction: PtxInstruction) -> tuple[bool, frozenset[str], str, int]:
    """Return whether an access is shared, its order, its type and the number of its elements."""
    _, *modifiers, kind = instruction.parts
    given = set(modifiers)
    count = next((int(x[1:]) for x in modifiers if x in ("v2", "v4")), 1)
    order = frozenset(given & (_ORDERS | _SCOPES))
    spaces = given & {"global", "shared", "shared::cta"}
    shared = "global" not in spaces
    if given - spaces - order - _HINTS - {f"v{count}"} or len(spaces) != 1 or (order and (shared or count != 1)):
        raise Unsupported(f"{instruction.opcode} is not supported")
    if shared:
        slots.granule = min(slots.granule, bits_of(kind) // 8 * count)
    return shared, order, kind, count


def load(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return ld of global or shared memory, or of parameters."""
    if instruction.parts[1] == "param":
        return _parameter(slots, instruction)
    target, source = instruction.operands
    shared, order, kind, count = _access(slots, instruction)
    guard, dtype, size = slots.guard(instruction), UNSIGNED[bits_of(kind)], bits_of(kind) // 8 * count
    address, places = slots.address(source, 32 if shared else 64), slots.elements(target, bits_of(kind))
    registers: tuple[Any, ...] = target.elements if isinstance(target, Vector) else (target,)
    extensions = [_extension(kind, bits_of(kind) if x is None else x.bits) for x in registers]

    def step(p: Program) -> None:
        mask = p.guarded(guard)
        threads, place = p.threads_of(mask), address(p.registers)
        if not len(threads):
            return
        of_warp, uniform = p.warp_of[threads], np.ndim(place) == 0
        if uniform:  # each warp makes an access to shared memory of its own
            of_warp = np.unique(of_warp) if shared else of_warp[:1]
        addresses = np.full(len(of_warp), place) if uniform else p.values_of(place, threads)
        if shared:
            data = p.shared.load(addresses, of_warp, dtype, count)
        elif order:
            data = p.memory.ordered(addresses, of_warp, dtype, order, "ld")[:, None]
        else:
            data = p.memory.load(addresses, of_warp, dtype, count)
            p.global_order.add(place if uniform else addresses, p.warp_of[threads], size, p.at, writes=False)
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
    if space != ["param"] or instruction.guard is not None:
        raise ValueError

    def step(p: Program) -> None:
        given = np.array([p.registers[place] for place in slots.parameters], np.uint64)
        number, inside = np.divmod(address(p.registers).astype(np.uint64), np.uint64(8))
        if np.any(number >= len(given)) or np.any(inside):
            raise MemoryFault("no parameter has this address")
        p.write(slot, extend(given[number].astype(unsigned)), p.mask)

    return step


def store(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return st to global or shared memory."""
    target, source = instruction.operands
    shared, order, kind, _ = _access(slots, instruction)
    elements = source.elements if isinstance(source, Vector) else (source,)
    bits, dtype = bits_of(kind), UNSIGNED[bits_of(kind)]

    def step(p: Program, threads: Array, addresses: Array, *columns: Array) -> None:
        values = np.stack([x.astype(dtype, copy=False) for x in columns], axis=1)
        if shared:
            p.shared.store(addresses, p.warp_of[threads], values)
        elif order:
            p.memory.ordered(addresses, p.warp_of[threads], dtype, order, "st", lambda i, old: values[i, 0])
        else:
            p.memory.store(addresses, p.warp_of[threads], values)
            p.global_order.add(addresses, p.warp_of[threads], values[0].nbytes, p.at, writes=True)

    return for_threads(slots, instruction, step, (target, 32 if shared else 64), *((x, bits) for x in elements))


def atomic(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return atom or red on global memory, which threads perform one after another; red has no result."""
    _, *modifiers, name, kind = instruction.parts
    order = frozenset(modifiers) & (_ORDERS | _SCOPES)
    if set(modifiers) - order != {"global"}:
        raise Unsupported(f"{instruction.opcode} is not supported")
    *targets, place, first = instruction.operands[: 2 if instruction.parts[0] == "red" else 3]
    bits, sources = bits_of(kind), (first, *instruction.operands[len(targets) + 2 :])
    results = [slots.slot(x, bits) for x in targets]
    change, dtype = _change(name, kind, len(sources)), UNSIGNED[bits]

    def step(p: Program, threads: Array, addresses: Array, *given: Array) -> None:
        replace = lambda i, old: change(old, *[x[i] for x in given])  # noqa: E731
        old = p.memory.ordered(addresses, p.warp_of[threads], dtype, order, f"atom.{name}", replace)
        for slot in results:
            p.write_some(slot, old, threads)

    return for_threads(slots, instruction, step, (place, 64), *((x, bits) for x in sources))


def _change(name: str, kind: str, arguments: int) -> Callable[..., Any]:
    """Return what an atomic operation replaces a number by, if at all: a function of the number and the operands."""
    if (name, arguments) == ("cas", 2):
        return lambda old, expected, new: new if old == expected else None
    if (name, arguments) == ("exch", 1):
        return lambda old, new: new
    if name not in ("add", "min", "max", "and", "or", "xor") or arguments != 1:
        raise ValueError
    return operation(f"{name}.{kind}").function


def asynchronous(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return cp.async, or one of the instructions that wait for such copies."""
    _, _, what, *hints = instruction.parts
    if what == "bulk":
        return _bulk_copy(slots, instruction)
    if what in ("commit_group", "wait_group", "wait_all") and instruction.guard is None:
        left = [x.value for x in instruction.operands if isinstance(x, Immediate)]
        if what == "commit_group":
            return Program.commit_copies
        return lambda p: p.finish_copies(*left)
    if what not in ("ca", "cg") or set(hints) - _HINTS != {"shared", "global"}:
        raise ValueError
    target, source, size, *given = instruction.operands
    (kept,) = given or (size,)
    if getattr(kept, "bits", 32) != 32:  # a predicate: whether to ignore the source
        raise ValueError
    slots.granule = min(slots.granule, size.value)

    def step(p: Program, threads: Array, targets: Array, sources: Array, lengths: Array) -> None:
        if (sources[lengths > 0] % np.uint64(size.value)).any():
            raise MemoryFault(f"cp.async of {size.value} bytes: the address of its source is not aligned")
        p.begin_copy(threads, sources, np.minimum(lengths, np.uint32(size.value)), targets, size.value)

    return for_threads(slots, instruction, step, (target, 32), (source, 64), (kept, 32))


def _bulk_copy(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return an instruction of cp.async.bulk: a copy of a tile to shared memory, which an mbarrier ends, or from it."""
    given: list[Any] = [*instruction.operands, None]
    target = given[0]
    form = ".".join(SPACES.get(x, x) for x in instruction.parts[3:])
    if form == "commit_group":
        return for_threads(slots, instruction, lambda p, threads: p.bulk_stores.commit(threads))
    if form in ("wait_group", "wait_group.read"):
        reads, left = form.endswith("read"), target.value
        return for_threads(slots, instruction, lambda p, threads: p.bulk_stores.wait(p, threads, left, reads=reads))
    if form == f"tensor.{len(target.coordinates)}d.global.shared::cta.bulk_group":
        return _bulk_store(slots, instruction)
    _, source, barrier, _ = given
    axes = source.coordinates
    if form != f"tensor.{len(axes)}d.shared::cta.global.mbarrier::complete_tx::bytes" or not axes:
        raise ValueError

    def step(p: Program, threads: Array, to: Array, maps: Array, mbarriers: Array, *coordinates: Array) -> None:
        given = p.warp_of[threads], to, maps, mbarriers, *(x.view(np.int32) for x in coordinates)
        for each in zip(*(x.tolist() for x in given), strict=True):
            _begin_bulk_copy(p, *each)

    operands = (target, 32), (source, 64), (barrier, 32), *((axis, 32) for axis in axes)
    return for_threads(slots, instruction, step, *operands)


def _bulk_store(slots: Slots, instruction: PtxInstruction) -> Step:
    target, source = instruction.operands

    def step(p: Program, threads: Array, maps: Array, places: Array, *coordinates: Array) -> None:
        given = threads, maps, places, *(x.view(np.int32) for x in coordinates)
        for thread, at, place, *where in zip(*(x.tolist() for x in given), strict=True):
            tensor_map = _tensor_map(p, int(p.warp_of[thread]), at)
            p.bulk_stores.begin(p, thread, tensor_map.chunks(place), tensor_map.tile(tuple(where)))

    return for_threads(slots, instruction, step, (target, 64), (source, 32), *((x, 32) for x in target.coordinates))


def _tensor_map(p: Program, warp: int, place: int) -> TensorMap:
    """Return the tensor map at a place, which a warp uses."""
    if place not in p.maps:
        raise MemoryFault(f"no fence.proxy.tensormap was executed for a tensor map at {place:#x}")
    words, clocks = p.maps[place]
    if not p.shared.has_seen(warp, clocks):
        raise MemoryFault("no barrier orders the use of a tensor map after its fence.proxy.tensormap")
    return TensorMap.decode(words)


def _begin_bulk_copy(p: Program, warp: int, to: int, place: int, address: int, *coordinates: int) -> None:
    """Begin the copy of a tile. to: an address of shared memory. place: of the tensor map. address: of the mbarrier."""
    tensor_map = _tensor_map(p, warp, place)
    # Before others use an mbarrier, its initialization needs a barrier and, for bulk copies, a fence: in the CUDA C++
    # Programming Guide fence.proxy.async, and in CUTLASS fence.mbarrier_init.release.cluster (cutlass/arch/barrier.h,
    # fence_barrier_init). Only the barrier is checked here.
    chunks, tile, barrier, at = tensor_map.chunks(to), tensor_map.tile(coordinates), mbarrier_at(p, warp, address), p.at
    p.memory.begin_copy(tile.addresses, warp, tile.element, address)
    p.global_order.begin_copy(tile.addresses, warp, tile.element, at, writes=False)
    early = tile.load(p.memory)
    p.shared.begin_copy(chunks, warp, 16, proxy=True)

    def perform() -> Array:
        waiting, p.at = p.at, at  # a wrong address is the copy's fault
        if (tile.load(p.memory) != early).any():
            raise GlobalRace("the source of a bulk copy has changed since it began, and it was not waited for")
        p.at = waiting
        return p.shared.end_bulk_copy(chunks, early)

    barrier.copies.append((tensor_map.nbytes, perform))
    p.moved()


def mbarrier_at(p: Program, warp: int, address: int) -> Mbarrier:
    """Return the mbarrier at an address, which a thread of a warp accesses."""
    p.shared.load(np.array([address]), warp, np.uint64, 1)
    return p.mbarriers[address]


def matrix(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return ldmatrix or stmatrix: lane 8 i + j gives the address of row j of matrix i, 16 bytes."""
    name, transposed = instruction.parts[0], "trans" in instruction.parts
    registers, place = instruction.operands if name == "ldmatrix" else reversed(instruction.operands)
    fragments, count = slots.elements(registers, 32), len(registers.elements)
    if instruction.opcode.replace(".trans", "") != f"{name}.sync.aligned.m8n8.x{count}.shared.b16":
        raise Unsupported(f"{instruction.opcode} is not supported")

    def step(p: Program, threads: Array, addresses: Array) -> None:
        p.whole_warps(p.mask)
        chosen = threads % LANES < 8 * count
        rows, of_warp = addresses[chosen], p.warp_of[threads[chosen]]
        if name == "ldmatrix":
            loaded = p.shared.load(rows, of_warp, np.uint64, 2).view(np.uint16)
            for slot, column in zip(fragments, warps.matrix_fragments(loaded, count, transposed), strict=True):
                p.write_some(slot, column, threads)
        else:
            values = np.stack([p.values_of(p.registers[slot], threads) for slot in fragments])
            p.shared.store(rows, of_warp, warps.matrix_rows(values, transposed).view(np.uint64))

    return for_threads(slots, instruction, step, (place, 32))
