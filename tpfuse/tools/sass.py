"""The machine code of a kernel, as nvdisasm prints it: its instructions, in blocks that branches connect."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\{?\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(\w\S*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


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


def blocks(sass: str) -> list[BasicBlock]:
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
