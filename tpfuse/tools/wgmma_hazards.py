"""Hazards of asynchronous matrix products, found by data flow over the SASS of sm_90.

A wgmma (HGMMA in SASS) reads its inputs and writes its accumulators after later instructions have run, until the warp
waits for its group. Before that wait no instruction may write registers that are its inputs, nor read or write its
accumulators, except a wgmma of the same shape with the same accumulators (NVIDIA, PTX ISA, "Asynchronous wgmma").
ptxas, not Triton, assigns registers, and some versions of it broke this rule: results are then wrong, seldom and on a
GPU alone.

A wgmma with `gsb0` ends a group, and `WARPGROUP.DEPBAR.LE gsb0, n` waits until at most n groups run. The check follows
every path of the program with the products that may be running. At a branch by a table (BRX) and at the call of a
function nothing may be running: what only these lead to is followed from there. The check knows an instruction's
registers by the first one of each operand, which is enough: operands of 2 and 4 registers begin at multiples of 2 and
4, inputs are 4 registers and accumulators a multiple of 4. It does not follow inputs in shared memory, whose reuse
mbarriers and barriers order.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\{?\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(\w\S*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_PRODUCT = re.compile(r"[A-Z]GMMA(?:\.SP)?\.64x(\d+)x\d+\.(\w+)")
_WAIT = "WARPGROUP.DEPBAR"
_REGISTER = re.compile(r"(?<!\w)R(\d+)")
_RESULT = re.compile(r"(?:!?U?P(?:\d|T), )*R(\d+)\b")  # predicates may precede it
# These instructions have no result in a register, and may have one as their first operand.
_WITHOUT_RESULT = ("BAR", "BRX", "CALL", "DSETP", "FSETP", "HSETP2", "ISETP", "NANOSLEEP", "PLOP3", "RET", "WARPSYNC")


class Instruction(NamedTuple):
    """An instruction: its address in hexadecimal digits, its predicate or "", its name with modifiers, its operands."""

    address: str
    predicate: str
    name: str
    operands: str


@dataclass
class BasicBlock:
    """Instructions that run one after another. after: the numbers of the blocks that may run next."""

    instructions: list[Instruction] = field(default_factory=list)
    after: set[int] = field(default_factory=set)


def _blocks(sass: str) -> list[BasicBlock]:
    """Return the program, divided into blocks at labels and after branches. Its first block is the first to run.

    A call of a function counts as an instruction that the next one follows.
    """
    program, labels, targets = [BasicBlock()], {}, []
    for line in sass.splitlines():
        if match := _LABEL.match(line):
            if program[-1].instructions:
                program[-1].after.add(len(program))
                program.append(BasicBlock())
            labels[match[1]] = len(program) - 1
        elif match := _INSTRUCTION.match(line):
            address, predicate, name, operands = match.groups()
            program[-1].instructions.append(Instruction(address, predicate or "", name, operands))
            branches = name.startswith("BRA")
            if branches and (target := _TARGET.search(operands)):
                targets.append((len(program) - 1, target[1]))
            if branches or name in ("EXIT", "BRX"):
                # BRA.DIV, for example, has an operand before its target: it branches if threads differ.
                if predicate or (branches and not operands.startswith("`(")):
                    program[-1].after.add(len(program))
                program.append(BasicBlock())
    for number, label in targets:
        program[number].after.add(labels[label])
    return program


@dataclass(frozen=True)
class _Product:
    """A wgmma. ends: whether its group ends with it."""

    address: str
    accumulators: range
    inputs: range
    ends: bool


# The products that may be running, each with how many groups have ended since its own ended; None: it has not ended.
_Running = frozenset[tuple[_Product, int | None]]


def hazards(sass: str) -> list[str]:
    """Return a description of each instruction that accesses registers of a wgmma that may be running.

    sass: a kernel with wgmma, as nvdisasm prints it. Raise ValueError where no wgmma is found in it.
    """
    program = _blocks(sass)
    instructions = [instruction for block in program for instruction in block.instructions]
    products = {each: product for each in instructions if (product := _product(each)) is not None}
    if not products:
        raise ValueError("the machine code has no wgmma, although the PTX has some")
    longest = max((_left(each) for each in instructions if each.name.startswith(_WAIT)), default=0)
    entered: dict[int, _Running] = {}
    for start in range(len(program)):  # the first block, and those to which no known path leads
        waiting = [] if start in entered else [start]
        entered.setdefault(start, frozenset())
        while waiting:
            number = waiting.pop()
            running = entered[number]
            for instruction in program[number].instructions:
                running = _after(instruction, products, running, longest)
            for follower in program[number].after:
                known = entered.get(follower)
                if known is None or not running <= known:
                    entered[follower] = running | (known or frozenset())
                    waiting.append(follower)
    return list(_conflicts(program, products, entered, longest))


def _product(instruction: Instruction) -> _Product | None:
    match = _PRODUCT.match(instruction.name)
    if match is None:
        return None
    result, source = instruction.operands.split(", ")[:2]
    registers = int(match[1]) // (4 if match[2] == "F16" else 2)
    first = int(result.removeprefix("R"))
    inputs = _REGISTER.match(source)
    return _Product(
        address=instruction.address,
        accumulators=range(first, first + registers),
        inputs=range(int(inputs[1]), int(inputs[1]) + 4) if inputs else range(0),
        ends="gsb0" in instruction.operands,
    )


def _left(wait: Instruction) -> int:
    """Return how many groups may run after a wait."""
    return int(wait.operands.rpartition(" ")[2], 0)


def _after(
    instruction: Instruction, products: dict[Instruction, _Product], running: _Running, longest: int
) -> _Running:
    """Return the products that may be running after an instruction. longest: the most groups that a wait leaves."""
    if instruction.name.startswith(_WAIT) and not instruction.predicate:
        left = _left(instruction)
        return frozenset((product, ended) for product, ended in running if ended is None or ended < left)
    product = products.get(instruction)
    if product is None:
        return running
    running |= {(product, None)}
    if product.ends:  # beyond `longest` ages need not be distinguished
        running = frozenset((each, 0 if ended is None else min(ended + 1, longest)) for each, ended in running)
    return running


def _conflicts(
    program: Sequence[BasicBlock], products: dict[Instruction, _Product], entered: dict[int, _Running], longest: int
) -> Iterator[str]:
    for number in sorted(entered):
        running = entered[number]
        for instruction in program[number].instructions:
            product = products.get(instruction)
            for other in sorted({each for each, _ in running}, key=lambda each: each.address):
                text = _conflict(instruction, other) if product is None else _conflict_of_products(product, other)
                if text:
                    yield f"{instruction.name} at {instruction.address} {text} of the wgmma at {other.address}"
                    break
            running = _after(instruction, products, running, longest)


def _conflict(instruction: Instruction, running: _Product) -> str:
    """Return what an instruction other than a wgmma does to a running product; "" if it does no harm."""
    base = instruction.name.partition(".")[0]
    if base in ("BRX", "CALL"):
        return "leads to code that is not followed during the run"
    if any(int(number) in running.accumulators for number in _REGISTER.findall(instruction.operands)):
        return "accesses the accumulators"
    result = None if base in _WITHOUT_RESULT else _RESULT.match(instruction.operands)
    return "writes the inputs" if result and int(result[1]) in running.inputs else ""


def _conflict_of_products(product: _Product, running: _Product) -> str:
    if product.accumulators != running.accumulators and _overlap(product.accumulators, running.accumulators):
        return "accesses the accumulators"
    if _overlap(product.inputs, running.accumulators):
        return "reads the accumulators"
    return "writes the inputs" if _overlap(product.accumulators, running.inputs) else ""


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
