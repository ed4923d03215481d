"""A kernel of PTX that runs on the CPU: compiled to blocks of steps, each of which executes one instruction for all
active threads."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import product
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor

from tpfuse.explore.liveness import live_before
from tpfuse.explore.ptx import asynchronous_steps, memory_steps, register_steps
from tpfuse.explore.ptx.control_flow import weak_topological_order
from tpfuse.explore.ptx.faults import PtxError, Unsupported
from tpfuse.explore.ptx.global_memory import Array, Buffer, GlobalMemory
from tpfuse.explore.ptx.numbers import TYPES, UNSIGNED, bits_of, immediate
from tpfuse.explore.ptx.parser import Immediate, Parsed, PtxInstruction, Register, parse
from tpfuse.explore.ptx.program import LANES, Program, Step, StepBlock
from tpfuse.explore.ptx.shared_memory import CheckedSharedMemory
from tpfuse.explore.ptx.slots import Slots

Grid = Sequence[int]  # three sizes, or a place
_MOST = 1_000_000  # blocks of instructions that a program executes
_ENDS = {"bra": "branch", "brx": "branch", "ret": "exit", "exit": "exit"}
_ENDS |= {"bar": "barrier", "barrier": "barrier", "setmaxnreg": "registers"}
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


class Kernel:
    """A kernel that is parsed and compiled from a PTX text.

    shared: the bytes of shared memory that a launch gives to each program. scratch: the bytes of global memory that it
    gives to each program beside the arguments. copies: whether it has bulk copies. specialized: whether its warps
    differ in what they know: some meet at barriers without the others, or wait for bulk stores. results: registers
    whose values at a program's end count. Raise Unsupported, with the line, for what is not known.
    """

    def __init__(self, text: str, shared: int = 0, scratch: int = 0, results: Sequence[Register] = ()) -> None:
        self.text, self.shared, self.scratch, self.parsed = text, shared, scratch, parse(text)
        self.name, code = self.parsed.name, self.parsed.instructions
        self._slots = Slots(self.parsed)
        self._results = [self._slots.slot(x, x.bits) for x in results]
        asynchronous = any(x.parts[0] == "wgmma" for x in code)
        self._blocks = _blocks(self.parsed, self._slots, asynchronous)
        self.copies = any(x.opcode.startswith("cp.async.bulk.tensor") for x in code)
        self.specialized = any(block.end == "barrier" and block.numbers[1] for block in self._blocks) or any(
            x.opcode.endswith(".bulk_group") for x in code
        )
        self._touched = [asynchronous_steps.touched(self._slots, x) for x in code if asynchronous]

    def run(
        self,
        grid: Grid,
        arguments: Sequence[Any],
        *,
        memory: GlobalMemory | None = None,
        most_blocks: int = _MOST,
        seed: int | None = None,
    ) -> None:
        """Run the programs of a grid one after another.

        arguments: tensors on the CPU, integers and floats, one for each of the kernel's parameters; None is the address
        0. memory: what the kernel may access; by default the tensors among the arguments. most_blocks: how many blocks
        of instructions a program may execute. seed: of the order in which warps run that could all run (`Program`).
        Raise a PtxError for a fault.
        """
        given = self.bind(arguments)
        memory = memory or GlobalMemory(Buffer.of(name, x) for name, x in self.tensors(arguments))
        sizes = (*grid, 1, 1)[:3]
        for z, y, x in product(*(range(size) for size in reversed(sizes))):
            self.run_program((x, y, z), sizes, given, memory, most_blocks, seed)

    def tensors(self, arguments: Sequence[Any]) -> list[tuple[str, Tensor]]:
        """Return the tensors among the arguments, with the names of their parameters."""
        named = zip(self.parsed.parameters, arguments, strict=True)
        return [(name, x) for (name, _), x in named if isinstance(x, Tensor)]

    def bind(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Return the parameters' bits by name."""
        parameters = self.parsed.parameters
        if len(arguments) != len(parameters):
            raise PtxError(f"{self.name} has {len(parameters)} parameters, {len(arguments)} were given")
        return {name: self._bits(name, kind, x) for (name, kind), x in zip(parameters, arguments, strict=True)}

    def _bits(self, name: str, kind: str, argument: Any) -> Any:
        given = argument.data_ptr() if isinstance(argument, Tensor) else 0 if argument is None else argument
        if kind.startswith("f") and isinstance(given, Real):
            return TYPES[kind](given).view(UNSIGNED[bits_of(kind)])
        if not isinstance(given, Integral):
            raise PtxError(f"parameter {name} of {self.name}, of type {kind}, is given a {type(argument).__name__}")
        return immediate(int(given), bits_of(kind))

    def run_program(
        self,
        index: Grid,
        grid: Grid,
        given: dict[str, Any],
        memory: GlobalMemory,
        most_blocks: int = _MOST,
        seed: int | None = None,
    ) -> list[Array]:
        """Run one program, and return the results of its threads. given: as `bind` returns it."""
        threads, slots, thread = self.parsed.threads, self._slots, np.arange(self.parsed.threads)
        values: dict[str, Any] = {"%laneid": thread % LANES, "%warpid": thread // LANES}
        for axis, *each in zip("xyz", (thread, 0, 0), (threads, 1, 1), index, grid, strict=True):
            values |= zip((f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid")), each, strict=True)
        values = {name: np.asarray(x, np.uint32)[()] for name, x in values.items()} | given
        values["%globaltimer"] = np.uint64(time.time_ns())  # it stands still
        registers = [*slots.initial]
        for name in values.keys() & slots.by_name.keys():
            registers[slots.by_name[name]] = values[name]
        shared = CheckedSharedMemory(self.shared, slots.granule, threads // LANES)
        program = Program(self.parsed, self._blocks, self._touched, registers, memory, shared, tuple(index), seed)
        memory.begin(program.source, lambda place: program.state(self._live, place))
        with np.errstate(all="ignore"):
            program.run(most_blocks)
        return [program.array(slot) for slot in self._results]

    @cached_property
    def _live(self) -> list[list[int]]:
        """For each instruction the slots of the registers that count before it."""
        code, slots = self.parsed.instructions, self._slots.by_name
        following = [[number + 1] * _goes_on(x) + [*x.targets] for number, x in enumerate(code)]
        uses = [[(reads, slots[name]) for reads, name in x.uses()] for x in code]
        for x, used in zip(code, uses, strict=True):
            used += [(True, slot) for slot in self._results if _ENDS.get(x.parts[0]) == "exit"]
        return [sorted(live) for live in live_before(following, uses)]


def _goes_on(x: PtxInstruction) -> bool:
    """Return whether the next instruction may follow."""
    return _ENDS.get(x.parts[0]) not in ("branch", "exit") or x.guard is not None


def _blocks(kernel: Parsed, slots: Slots, single: bool) -> list[StepBlock]:
    """Return the blocks of a kernel in the order of `control_flow`. single: each instruction is a step of its own."""
    code = kernel.instructions
    ends = {index: _ENDS[x.parts[0]] for index, x in enumerate(code) if x.parts[0] in _ENDS and "warp" not in x.parts}
    # Threads that have diverged meet where a block begins: what lets threads wait is a block of its own.
    starts = {0, *(index + 1 for index in ends), *(i for i, end in ends.items() if end in ("barrier", "registers"))}
    starts |= {target for x in code for target in x.targets}
    ordered = sorted(start for start in starts if start < len(code))
    spans = [range(start, after) for start, after in zip(ordered, [*ordered[1:], len(code)], strict=True)]
    numbers = {span[0]: number for number, span in enumerate(spans)}
    following: list[list[int]] = []
    for number, span in enumerate(spans):
        last = code[span[-1]]
        following.append([number + 1] * _goes_on(last) + [numbers[x] for x in last.targets])
    if len(spans) in following[-1]:
        raise Unsupported(f"{kernel.name} does not end with ret or a branch")
    order = [*weak_topological_order(following), -1]
    blocks = []
    for number, span in enumerate(spans):
        last, end = code[span[-1]], ends.get(span[-1], "next")
        inside = span if end == "next" else span[:-1]
        groups = [[index] for index in inside] if single else _groups(code, inside)
        steps = tuple((group[0], _step(slots, *[code[index] for index in group])) for group in groups)
        targets = tuple(order[numbers[x]] for x in last.targets)
        guard = slots.guard(last) if end in ("branch", "exit") else None
        choice = slots.slot(last.operands[0], 32) if last.parts[0] == "brx" else None
        numbered = (
            _barrier(last, kernel) if end == "barrier" else _registers(last, kernel) if end == "registers" else ()
        )
        blocks.append(StepBlock(steps, end, span[-1], targets, order[number + 1], guard, choice, numbered))
    return [blocks[number] for number in sorted(numbers.values(), key=order.__getitem__)]


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
        if name in _NEVER_GUARDED and any(x.guard is not None for x in (instruction, *others)):
            raise Unsupported(f"{instruction.opcode} under a predicate is not supported")
        return _MAKERS.get(name, register_steps.arithmetic)(slots, instruction, *others)
    except Unsupported as error:
        raise Unsupported(f"{error}\n  {instruction}") from None
    except (KeyError, IndexError, ValueError, TypeError, AttributeError):
        raise Unsupported(f"{instruction.opcode} with these operands is not supported\n  {instruction}") from None


def _barrier(instruction: PtxInstruction, kernel: Parsed) -> tuple[int, int]:
    """Return the number of a barrier, and how many threads meet there: 0 stands for all of a program."""
    match instruction:
        case PtxInstruction(opcode="bar.sync" | "barrier.sync", operands=(Immediate(value=number), *rest), guard=None):
            match rest:
                case []:
                    return number, 0
                case [Immediate(value=count)] if count and count % LANES == 0:
                    return number, 0 if count == kernel.threads else count
    raise Unsupported(f"{instruction} is not supported")


def _registers(instruction: PtxInstruction, kernel: Parsed) -> tuple[int]:
    """Return how many registers a thread has after setmaxnreg."""
    match instruction:
        case PtxInstruction(
            opcode="setmaxnreg.inc.sync.aligned.u32" | "setmaxnreg.dec.sync.aligned.u32",
            operands=(Immediate(value=count),),
            guard=None,
        ) if kernel.registers and count % 8 == 0 and 24 <= count <= 256:
            return (count,)
    raise Unsupported(f"{instruction} is not supported")
