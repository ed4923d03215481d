"""The places of a kernel's registers, constants, special registers and parameters in the list that a program has."""

from collections.abc import Callable
from typing import Any

from tpfuse.explore.ptx.faults import Unsupported
from tpfuse.explore.ptx.numbers import bits_of, immediate
from tpfuse.explore.ptx.parser import Address, Immediate, Parsed, PtxInstruction, Vector

_POISON = 0x7FF77FFD7FF77FFD  # a register that nobody has set: NaN as a number of 16, 32 or 64 bits


class Slots:
    """The slots of a kernel while its instructions are compiled.

    initial: their contents at the start of a program. by_name: the slots of registers, special registers and
    parameters. parameters: their slots in order. granule: the width in bytes of the narrowest access to shared memory.
    """

    def __init__(self, kernel: Parsed) -> None:
        self.initial: list[Any] = []
        self.by_name = {name: self._new(immediate(0, bits_of(kind))) for name, kind in kernel.parameters}
        self.granule = 16
        self._constants: dict[tuple[int, int], int] = {}
        self.parameters = tuple(self.by_name.values())

    def slot(self, operand: Any, bits: int) -> int:
        """Return the slot of an operand of an instruction that takes `bits` bits, which only matter for a constant."""
        if isinstance(operand, Immediate):
            key = operand.value & (1 << bits) - 1, bits
            if key not in self._constants:
                self._constants[key] = self._new(immediate(operand.value, bits))
            return self._constants[key]
        if operand.name not in self.by_name:
            self.by_name[operand.name] = self._new(immediate(_POISON, operand.bits))
        return self.by_name[operand.name]

    def elements(self, operand: Any, bits: int) -> list[Any]:
        """Return the slots of the elements of a vector, or of the one operand; None for `_`."""
        elements = operand.elements if isinstance(operand, Vector) else (operand,)
        return [None if x is None else self.slot(x, bits) for x in elements]

    def guard(self, instruction: PtxInstruction) -> tuple[int, bool] | None:
        """Return the slot of an instruction's guard, and whether it is negated."""
        if instruction.guard is None:
            return None
        return self.slot(instruction.guard[0], 1), instruction.guard[1]

    def address(self, operand: Address, bits: int) -> Callable[[list[Any]], Any]:
        """Return a function from a program's registers to an address of `bits` bits."""
        offset = immediate(operand.offset, bits)
        if operand.base is None:
            return lambda registers: offset
        base = self.slot(operand.base, bits)
        if operand.base.bits != bits:
            raise Unsupported(f"an address has {operand.base.bits} bits: expected {bits}")
        return lambda registers: registers[base] + offset

    def _new(self, content: Any) -> int:
        self.initial.append(content)
        return len(self.initial) - 1
