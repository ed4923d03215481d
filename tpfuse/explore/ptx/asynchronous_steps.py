"""The steps of the instructions of sm_90 that work asynchronously: wgmma, bulk copies of tensors, and mbarriers."""

from typing import Any

import numpy as np

from tpfuse.explore.ptx import tensor_maps
from tpfuse.explore.ptx.faults import Divergence, MemoryFault, Unsupported
from tpfuse.explore.ptx.parser import Immediate, PtxInstruction, Vector
from tpfuse.explore.ptx.program import Program, Step
from tpfuse.explore.ptx.slots import Slots
from tpfuse.explore.ptx.tensor_maps import TensorMap
from tpfuse.explore.ptx.wgmma import WARPGROUP, Array, Multiplicand, Product, chunk_addresses

_DEPTHS = {"bf16": 16, "f16": 16, "tf32": 8}
# Other names of the shared memory of one program
_SPACES = {"shared": "shared::cta", "shared::cluster": "shared::cta"}


def matrix_product(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return an instruction of wgmma."""
    _, what, *modifiers = instruction.parts
    if modifiers[:2] != ["sync", "aligned"]:
        raise ValueError
    if what == "mma_async":
        return _begin_product(slots, instruction)
    if len(modifiers) > 2:
        raise ValueError
    if what == "wait_group":
        (left,) = instruction.operands
        return lambda p: p.products.finish(_warpgroups(p), left.value, p.registers, p.shared)
    if what == "commit_group":
        return lambda p: p.products.commit(_warpgroups(p))
    if what != "fence":
        raise ValueError
    return lambda p: p.products.fence(_warpgroups(p), p.registers)


def _warpgroups(p: Program) -> Array:
    """Return the numbers of the active warpgroups. Raise Divergence if not all lanes of one are active."""
    if p.threads % WARPGROUP:
        raise Divergence(f"{p.threads} threads are no whole warpgroups")
    lanes = p.active().reshape(-1, WARPGROUP)
    if (lanes.any(1) != lanes.all(1)).any():
        raise Divergence("some threads of a warpgroup are not active")
    return np.flatnonzero(lanes.all(1))


def _begin_product(slots: Slots, instruction: PtxInstruction) -> Step:
    shape, *kinds = instruction.parts[4:]
    target, left, right, adds, *flags = instruction.operands
    kind = kinds[1]
    columns = int(shape.removeprefix("m64n").removesuffix(f"k{_DEPTHS[kind]}"))
    given = [flag.value for flag in flags]
    in_registers = isinstance(left, Vector)
    if kinds != ["f32", kind, kind] or columns % 8 or not 8 <= columns <= 256:
        raise Unsupported(f"{instruction.opcode} is not supported")
    if len(given) != 2 + (0 if kind == "tf32" else 1 if in_registers else 2) or {*given[:2]} - {1, -1}:
        raise ValueError
    left_transposed, right_transposed = [0, 0, *given[2:]][-2:]
    sums = tuple(slots.elements(target, 32))
    inputs = tuple(slots.elements(left, 32)) if in_registers else ()
    if len(sums) != columns // 2 or len(inputs) not in (0, 4):
        raise ValueError
    places = [None if in_registers else slots.slot(left, 64), slots.slot(right, 64)]
    scale = slots.slot(adds, 1)

    def chunks(p: Program, slot: int | None, rows: int, transposed: int, warpgroups: Array) -> Array | None:
        if slot is None:
            return None
        given = _of_warpgroups(p, slot, warpgroups, "a matrix descriptor")
        return np.stack([chunk_addresses(int(x), rows, bool(transposed)) for x in given])

    def step(p: Program) -> None:
        warpgroups = _warpgroups(p)
        left_chunks = chunks(p, places[0], 64, left_transposed, warpgroups)
        right_chunks = chunks(p, places[1], columns, right_transposed, warpgroups)
        fragments = [p.registers[slot] for slot in inputs] or None
        product = Product(
            warpgroups,
            warpgroups,
            (shape, kind),
            sums,
            inputs,
            Multiplicand(fragments, left_chunks, bool(left_transposed), given[0] < 0),
            Multiplicand(None, right_chunks, bool(right_transposed), given[1] < 0),
            _of_warpgroups(p, scale, warpgroups, "whether to add the sums").astype(bool),
            p.at,
        )
        p.products.begin(product, p.registers, p.shared)

    return step


def _of_warpgroups(p: Program, slot: int, warpgroups: Array, what: str) -> Array:
    """Return a register that is the same in all threads of a warpgroup, for some of them."""
    values = p.array(slot).reshape(-1, WARPGROUP)[warpgroups]
    if (values != values[:, :1]).any():
        raise Divergence(f"{what} differs among the threads of a warpgroup")
    return values[:, 0]


def elect(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return elect.sync. The definition lets any lane be elected, always the same: here it is the last one."""
    lane, chosen, members = instruction.operands
    mask = members.value & 0xFFFFFFFF
    leader, slot = mask.bit_length() - 1, slots.slot(chosen, 1)
    lane_slot = None if lane is None else slots.slot(lane, 32)
    if instruction.opcode != "elect.sync":
        raise ValueError

    def step(p: Program) -> None:
        p.whole_warps(p.mask, mask)
        if lane_slot is not None:
            p.write(lane_slot, np.uint32(leader), p.mask)
        p.write(slot, p.thread_numbers % 32 == leader, p.mask)

    return step


def fence(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return fence.proxy."""
    guard = slots.guard(instruction)
    if instruction.opcode in ("fence.proxy.async", "fence.proxy.async.shared::cta"):
        return lambda p: p.shared.proxy_fence(p.warps_of(p.guarded(guard)))
    if instruction.opcode != "fence.proxy.tensormap::generic.acquire.gpu":
        raise ValueError
    source, size = instruction.operands
    address = slots.address(source, 64)
    if size.value != tensor_maps.SIZE:
        raise ValueError

    def step(p: Program) -> None:
        mask = p.guarded(guard)
        p.whole_warps(mask)
        for warp in p.warps_of(mask):
            place = p.values_of(address(p.registers), np.array([32 * warp]))
            p.maps[int(place[0])] = p.memory.load(place, np.uint32, 32)[0], p.shared.release(warp)

    return step


def tensor_map(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return an instruction of tensormap, which writes a field or copies a whole tensor map to global memory."""
    if instruction.parts[1] == "cp_fenceproxy":
        return _copy_map(slots, instruction)
    _, replace, tile, field, *rest = instruction.parts
    target, *ordinal, value = instruction.operands
    _, bits, elements = tensor_maps.FIELDS[field]
    if [replace, tile, *rest] != ["replace", "tile", "shared::cta", "b1024", f"b{bits}"]:
        raise ValueError
    if len(ordinal) != bool(elements):
        raise ValueError
    offset = np.uint64(tensor_maps.place_of(field, ordinal[0].value if ordinal else 0))
    slots.granule = min(slots.granule, 4)
    guard, address, slot = slots.guard(instruction), slots.address(target, 64), slots.slot(value, bits)

    def step(p: Program) -> None:
        threads = p.threads_of(p.guarded(guard))
        places = p.values_of(address(p.registers), threads)
        if (places % np.uint64(tensor_maps.SIZE)).any():
            raise MemoryFault(f"a tensor map in shared memory is at no multiple of {tensor_maps.SIZE} bytes")
        p.shared.store(places + offset, p.warp_of[threads], p.values_of(p.registers[slot], threads)[:, None])

    return step


def _copy_map(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return tensormap.cp_fenceproxy, which a warp executes together."""
    known = "global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    target, source, size = instruction.operands
    if instruction.opcode != f"tensormap.cp_fenceproxy.{known}" or size.value != tensor_maps.SIZE:
        raise ValueError
    guard, to, come = slots.guard(instruction), slots.address(target, 64), slots.address(source, 64)

    def step(p: Program) -> None:
        mask = p.guarded(guard)
        p.whole_warps(mask)
        for warp in p.warps_of(mask):
            targets, sources = (p.values_of(x(p.registers), np.array([32 * warp])) for x in (to, come))
            p.memory.store(targets, p.shared.load(sources, np.array([warp]), np.uint32, 32))

    return step


def bulk(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return an instruction of cp.async.bulk: a copy of a tile from global to shared memory, which an mbarrier ends.

    No other copy is supported, and so none is in the groups for which wait_group waits.
    """
    if instruction.parts[3] in ("commit_group", "wait_group"):
        return lambda p: None
    _, _, _, tensor, dimensions, *modifiers = [_SPACES.get(x, x) for x in instruction.parts]
    if [tensor, *modifiers] != ["tensor", "shared::cta", "global", "mbarrier::complete_tx::bytes"]:
        raise ValueError
    target, source, barrier = instruction.operands
    axes = [slots.slot(x, 32) for x in source.coordinates]
    if dimensions != f"{len(axes)}d" or not axes:
        raise ValueError
    guard, to = slots.guard(instruction), slots.address(target, 32)
    come, at = slots.address(source, 64), slots.address(barrier, 32)

    def step(p: Program) -> None:
        for thread in p.threads_of(p.guarded(guard)):
            one, warp = np.array([thread]), int(p.warp_of[thread])
            start, place, mbarrier = (int(p.values_of(x(p.registers), one)[0]) for x in (to, come, at))
            coordinates = tuple(int(p.values_of(p.registers[x], one).view(np.int32)[0]) for x in axes)
            _begin_bulk_copy(p, warp, start, place, coordinates, mbarrier)

    return step


def _begin_bulk_copy(
    p: Program, warp: int, target: int, place: int, coordinates: tuple[int, ...], address: int
) -> None:
    if place not in p.maps:
        raise MemoryFault(f"no fence.proxy.tensormap was executed for a tensor map at {place:#x}")
    words, clocks = p.maps[place]
    if not p.shared.has_seen(warp, clocks):
        raise MemoryFault("no barrier orders the use of a tensor map after its fence.proxy.tensormap")
    tile, barrier, at = TensorMap.decode(words), p.mbarriers.at(address), p.at
    if len(tile.box) != len(coordinates):
        raise MemoryFault(f"a tensor map of {len(tile.box)} dimensions is given {len(coordinates)} coordinates")
    # Before others use an mbarrier, its initialization needs a barrier and, for bulk copies, a fence: in the CUDA C++
    # Programming Guide fence.proxy.async, and in CUTLASS fence.mbarrier_init.release.cluster (cutlass/arch/barrier.h,
    # fence_barrier_init). Only the barrier is checked here.
    p.shared.load(np.array([address]), np.array([warp]), np.uint64, 1)
    chunks = tile.chunks(target)
    p.shared.begin_bulk_copy(chunks, warp, 16)

    def perform() -> Array:
        waiting, p.at = p.at, at  # a wrong address is the copy's fault
        values = tile.load(p.memory, coordinates)
        p.at = waiting
        return p.shared.end_bulk_copy(chunks, values)

    barrier.copies.append((tile.nbytes, perform))
    p.moved()


def memory_barrier(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return an instruction of mbarrier."""
    _, what, *modifiers = [_SPACES.get(x, x) for x in instruction.parts]
    guard = slots.guard(instruction)
    targets = instruction.operands[: 1 if what in ("arrive", "try_wait") else 0]
    place, *rest = instruction.operands[len(targets) :]
    address = slots.address(place, 32)
    slots.granule = min(slots.granule, 8)
    known = {
        "init": [["shared::cta", "b64"]],
        "inval": [["shared::cta", "b64"]],
        "arrive": [["shared::cta", "b64"], ["expect_tx", "shared::cta", "b64"]],
        "try_wait": [["parity", "shared::cta", "b64"]],
    }
    if modifiers not in known[what] or len(rest) != {"init": 1, "inval": 0, "arrive": len(modifiers) - 2}.get(what, 1):
        raise ValueError
    argument = slots.slot(rest[0], 32) if rest else slots.slot(Immediate(0), 32)
    if targets and what == "arrive" and targets[0] is not None:
        raise Unsupported(f"{instruction.opcode} with a state is not supported")
    result = slots.slot(targets[0], 1) if targets and targets[0] is not None else None

    def each(p: Program, threads: Array) -> list[tuple[int, int, int]]:
        places = p.values_of(address(p.registers), threads)
        values = p.values_of(p.registers[argument], threads)
        return list(zip(map(int, p.warp_of[threads]), map(int, places), map(int, values), strict=True))

    def change(p: Program) -> None:
        for warp, at, value in each(p, p.threads_of(p.guarded(guard))):
            if what == "init":
                p.shared.store(np.array([at]), np.array([warp]), np.zeros((1, 1), np.uint64))
                p.mbarriers.initialize(at, value, p.shared.release(warp))
                continue
            p.shared.load(np.array([at]), np.array([warp]), np.uint64, 1)
            if what == "inval":
                p.mbarriers.invalidate(at)
            else:
                p.mbarriers.at(at).arrive(p.shared.release(warp), value)
        p.moved()

    def wait(p: Program) -> None:
        threads = p.threads_of(p.guarded(guard))
        done: dict[tuple[int, int, int], bool] = {}
        given = each(p, threads)
        for key in given:
            if key not in done:
                warp, at, parity = key
                p.shared.load(np.array([at]), np.array([warp]), np.uint64, 1)
                barrier = p.mbarriers.at(at)
                before = barrier.phase
                done[key] = barrier.complete(parity)
                if barrier.phase != before:
                    p.moved()
                if done[key]:
                    p.shared.acquire(warp, barrier.seen)
        ended = np.array([done[key] for key in given], bool)
        if result is not None:
            p.write_some(result, ended, threads)
        if not ended.all():
            barrier = p.mbarriers.at(given[int(np.argmin(ended))][1])
            needs = f"{barrier.pending} arrivals and {barrier.bytes} bytes"
            p.wait_again(threads[~ended], f"at an mbarrier that still needs {needs}")

    return wait if what == "try_wait" else change


def touched(slots: Slots, instruction: PtxInstruction) -> frozenset[int]:
    """Return the slots of the registers that an instruction accesses; none for wgmma, which checks them itself."""
    if instruction.parts[0] == "wgmma":
        return frozenset()
    names: set[str] = set()
    given: list[Any] = [*instruction.operands, *(instruction.guard or ())[:1]]
    while given:
        operand = given.pop()
        if isinstance(operand, Vector):
            given += operand.elements
        elif hasattr(operand, "base"):
            given += [operand.base, *operand.coordinates]
        elif hasattr(operand, "bits"):
            names.add(operand.name)
    return frozenset(slots.by_name[name] for name in names if name in slots.by_name)
