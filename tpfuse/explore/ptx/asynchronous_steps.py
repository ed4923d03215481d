"""The steps of the instructions of sm_90 for asynchronous products and copies: wgmma, tensormap, fence and mbarrier."""

from typing import Any

import numpy as np

from tpfuse.explore.ptx import tensor_maps
from tpfuse.explore.ptx.faults import Divergence, MemoryFault, Unsupported
from tpfuse.explore.ptx.mbarriers import Array
from tpfuse.explore.ptx.memory_steps import SPACES, for_threads, mbarrier_at
from tpfuse.explore.ptx.parser import Immediate, PtxInstruction, Vector
from tpfuse.explore.ptx.program import Program, Step
from tpfuse.explore.ptx.slots import Slots
from tpfuse.explore.ptx.wgmma import WARPGROUP, Multiplicand, Product, chunk_addresses

_DEPTHS = {"bf16": 16, "f16": 16, "tf32": 8}
# The forms of fence.proxy.async -> whether they are for shared, and for global memory
_FENCES = {
    "fence.proxy.async": (True, True),
    "fence.proxy.async.shared::cta": (True, False),
    "fence.proxy.async.global": (False, True),
}
# Form of mbarrier -> (number of targets, number of operands after the address)
_MBARRIER_FORMS = {
    "init.shared::cta.b64": (0, 1),
    "inval.shared::cta.b64": (0, 0),
    "arrive.shared::cta.b64": (1, 0),
    "arrive.expect_tx.shared::cta.b64": (1, 1),
    "try_wait.parity.shared::cta.b64": (1, 1),
}


def matrix_product(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return an instruction of wgmma."""
    if instruction.opcode == "wgmma.wait_group.sync.aligned":
        (left,) = instruction.operands
        return lambda p: p.products.finish(_warpgroups(p), left.value, p.registers, p.shared)
    if instruction.opcode == "wgmma.commit_group.sync.aligned":
        return lambda p: p.products.commit(_warpgroups(p))
    if instruction.opcode == "wgmma.fence.sync.aligned":
        return lambda p: p.products.fence(_warpgroups(p), p.registers)
    return _begin_product(slots, instruction)


def _warpgroups(p: Program) -> list[int]:
    """Return the numbers of the active warpgroups. Raise Divergence if not all lanes of one are active."""
    if p.threads % WARPGROUP:
        raise Divergence(f"{p.threads} threads are no whole warpgroups")
    lanes = p.active().reshape(-1, WARPGROUP)
    if (lanes.any(1) != lanes.all(1)).any():
        raise Divergence("some threads of a warpgroup are not active")
    warpgroups: list[int] = np.flatnonzero(lanes.all(1)).tolist()
    return warpgroups


def _begin_product(slots: Slots, instruction: PtxInstruction) -> Step:
    shape, _, kind = instruction.parts[4:7]
    target, left, right, adds, *flags = instruction.operands
    columns, in_registers = int(shape.removeprefix("m64n").removesuffix(f"k{_DEPTHS[kind]}")), isinstance(left, Vector)
    signs, transposed = [x.value for x in flags[:2]], [bool(x.value) for x in flags[2:]]
    form = f"wgmma.mma_async.sync.aligned.m64n{columns}k{_DEPTHS[kind]}.f32.{kind}.{kind}"
    if instruction.opcode != form or columns % 8 or not 8 <= columns <= 256:
        raise Unsupported(f"{instruction.opcode} is not supported")
    sums, inputs = tuple(slots.elements(target, 32)), tuple(slots.elements(left, 32)) if in_registers else ()
    if len(sums) != columns // 2 or len(inputs) not in (0, 4) or len(signs) != 2 or {*signs} - {1, -1}:
        raise ValueError
    if len(transposed) != (0 if kind == "tf32" else 1 if in_registers else 2):
        raise ValueError
    a_transposed, b_transposed = [False, False, *transposed][-2:]
    descriptors, scale = [slots.slot(x, 64) for x in (left, right) if not isinstance(x, Vector)], slots.slot(adds, 1)

    def step(p: Program) -> None:
        for warpgroup in _warpgroups(p):
            *a_start, b_start = (int(_uniform(p, warpgroup, x, "a matrix descriptor")) for x in descriptors)
            if in_registers:
                threads = slice(WARPGROUP * warpgroup, WARPGROUP * (warpgroup + 1))
                a = np.stack([p.array(slot)[threads] for slot in inputs])
            else:
                a = chunk_addresses(*a_start, 64, a_transposed)
            left = Multiplicand(in_registers, a, a_transposed, signs[0] < 0)
            right = Multiplicand(False, chunk_addresses(b_start, columns, b_transposed), b_transposed, signs[1] < 0)
            added = bool(_uniform(p, warpgroup, scale, "whether to add the sums"))
            product = Product(warpgroup, 0, (shape, kind), sums, inputs, left, right, added, p.at)
            p.products.begin(product, p.registers, p.shared)

    return step


def _uniform(p: Program, warpgroup: int, slot: int, what: str) -> Any:
    """Return the value of a register that is the same in all threads of a warpgroup."""
    values = p.array(slot).reshape(-1, WARPGROUP)[warpgroup]
    if (values != values[0]).any():
        raise Divergence(f"{what} differs among the threads of a warpgroup")
    return values[0]


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
    if instruction.opcode in _FENCES:
        inside, outside = _FENCES[instruction.opcode]

        def between(p: Program, threads: Array) -> None:
            warps = np.unique(p.warp_of[threads])
            p.shared.proxy_fence(warps, inside=inside, outside=outside)
            if outside:
                p.memory.proxy_fence(warps.tolist())

        return for_threads(slots, instruction, between)
    source, size = instruction.operands
    if instruction.opcode != "fence.proxy.tensormap::generic.acquire.gpu" or size.value != tensor_maps.SIZE:
        raise ValueError

    def step(p: Program, threads: Array, places: Array) -> None:
        maps = p.memory.load(places, p.warp_of[threads], np.uint32, 32)
        for warp, place, words in zip(p.warp_of[threads].tolist(), places.tolist(), maps, strict=True):
            p.maps[place] = words, p.shared.release(warp)

    return for_threads(slots, instruction, step, (source, 64), whole_warps=True)


def tensor_map(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return an instruction of tensormap, which writes a field or copies a whole tensor map to global memory."""
    if instruction.parts[1] == "cp_fenceproxy":
        return _copy_map(slots, instruction)
    field = instruction.parts[3]
    target, *ordinal, value = instruction.operands
    _, bits, elements = tensor_maps.FIELDS[field]
    form = f"tensormap.replace.tile.{field}.shared::cta.b1024.b{bits}"
    if instruction.opcode != form or len(ordinal) != bool(elements):
        raise ValueError
    offset = np.uint64(tensor_maps.place_of(field, ordinal[0].value if ordinal else 0))
    slots.granule = min(slots.granule, 4)

    def step(p: Program, threads: Array, places: Array, values: Array) -> None:
        if (places % np.uint64(tensor_maps.SIZE)).any():
            raise MemoryFault(f"a tensor map in shared memory is at no multiple of {tensor_maps.SIZE} bytes")
        p.shared.store(places + offset, p.warp_of[threads], values[:, None])

    return for_threads(slots, instruction, step, (target, 64), (value, bits))


def _copy_map(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return tensormap.cp_fenceproxy, which a warp executes together."""
    form = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    target, source, size = instruction.operands
    if instruction.opcode != form or size.value != tensor_maps.SIZE:
        raise ValueError

    def step(p: Program, threads: Array, targets: Array, sources: Array) -> None:
        warps = p.warp_of[threads]
        p.memory.store(targets, warps, p.shared.load(sources, warps, np.uint32, 32))

    return for_threads(slots, instruction, step, (target, 64), (source, 64), whole_warps=True)


def memory_barrier(slots: Slots, instruction: PtxInstruction) -> Step:
    """Return an instruction of mbarrier."""
    form = [SPACES.get(x, x) for x in instruction.parts[1:]]
    name, (results, arguments) = form[0], _MBARRIER_FORMS[".".join(form)]
    target = instruction.operands[0] if results else None
    place, *rest = instruction.operands[results:]
    slots.granule = min(slots.granule, 8)
    if len(rest) != arguments:
        raise ValueError
    if name == "arrive" and target is not None:
        raise Unsupported(f"{instruction.opcode} with a state is not supported")
    result = slots.slot(target, 1) if name == "try_wait" else -1

    def change(p: Program, threads: Array, places: Array, values: Array) -> None:
        for warp, at, value in zip(p.warp_of[threads].tolist(), places.tolist(), values.tolist(), strict=True):
            if name == "init":
                p.shared.store(np.array([at]), warp, np.zeros((1, 1), np.uint64))
                p.mbarriers.initialize(at, value)
            elif name == "inval":
                mbarrier_at(p, warp, at)
                p.mbarriers.invalidate(at)
            else:
                p.memory.arrive(at, warp)
                mbarrier_at(p, warp, at).arrive(p.shared.release(warp), value)
        p.moved()

    def wait(p: Program, threads: Array, places: Array, parities: Array) -> None:
        given = list(zip(p.warp_of[threads].tolist(), places.tolist(), parities.tolist(), strict=True))
        done = {key: _try_wait(p, *key) for key in dict.fromkeys(given)}
        ended = np.array([done[key] for key in given])
        p.write_some(result, ended, threads)
        if not ended.all():
            barrier = p.mbarriers[given[int(np.argmin(ended))][1]]
            needs = f"{barrier.pending} arrivals and {barrier.bytes} bytes"
            p.wait_again(threads[~ended], f"at an mbarrier that still needs {needs}")

    operands = (place, 32), (rest[0] if rest else Immediate(0), 32)
    return for_threads(slots, instruction, wait if name == "try_wait" else change, *operands)


def _try_wait(p: Program, warp: int, address: int, parity: int) -> bool:
    """Return whether the phase of this parity has ended at an mbarrier, for a thread of a warp that waits for it."""
    barrier = mbarrier_at(p, warp, address)
    before, ended = barrier.phase, barrier.complete(parity)
    if barrier.phase != before:
        p.moved()
    if ended:
        p.shared.acquire(warp, barrier.seen)
        p.memory.wait(address, warp)
    return ended


def touched(slots: Slots, instruction: PtxInstruction) -> frozenset[int]:
    """Return the slots of the registers that an instruction accesses; none for wgmma, which checks them itself."""
    if instruction.parts[0] == "wgmma":
        return frozenset()
    names = {*instruction.registers(), *(x.name for x in (instruction.guard or ())[:1])}
    return frozenset(slots.by_name[name] for name in names & slots.by_name.keys())
