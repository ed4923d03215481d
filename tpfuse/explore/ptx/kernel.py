"""A kernel of PTX that runs on the CPU."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from tpfuse.explore.ptx.compilation import compile_kernel
from tpfuse.explore.ptx.faults import PtxError
from tpfuse.explore.ptx.global_memory import Buffer, GlobalMemory
from tpfuse.explore.ptx.numbers import UNSIGNED, bits_of
from tpfuse.explore.ptx.parser import parse
from tpfuse.explore.ptx.program import LANES, Program
from tpfuse.explore.ptx.shared_memory import CheckedSharedMemory
from tpfuse.explore.ptx.slots import special_registers


class Kernel:
    """A kernel that is parsed and compiled from a PTX text.

    shared: the bytes of shared memory that a launch gives to each program. scratch: the bytes of global memory that it
    gives to each program beside the arguments. Raise Unsupported for what is not known.
    """

    def __init__(self, text: str, shared: int = 0, scratch: int = 0) -> None:
        self.text, self.shared, self.scratch, self.parsed = text, shared, scratch, parse(text)
        self.name = self.parsed.name
        self._code = compile_kernel(self.parsed)

    def run(
        self,
        grid: Sequence[int],
        arguments: Sequence[Any],
        *,
        memory: GlobalMemory | None = None,
        most_blocks: int = 1_000_000,
    ) -> None:
        """Run the programs of a grid one after another.

        arguments: tensors on the CPU, integers and floats, one for each of the kernel's parameters; None is the address
        0. memory: what the kernel may access; by default the tensors among the arguments. most_blocks: how many blocks
        of instructions a program may execute. Raise a PtxError for a fault.
        """
        given = self.bind(arguments)
        memory = memory or GlobalMemory(Buffer.of(name, x) for name, x in self.tensors(arguments))
        sizes = (*grid, 1, 1)[:3]
        for z, y, x in product(*(range(size) for size in reversed(sizes))):
            self.run_program((x, y, z), sizes, given, memory, most_blocks)

    def tensors(self, arguments: Sequence[Any]) -> list[tuple[str, Tensor]]:
        """Return the tensors among the arguments, with the names of their parameters."""
        named = zip(self.parsed.parameters, arguments, strict=True)
        return [(name, x) for (name, _), x in named if isinstance(x, Tensor)]

    def bind(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Return the parameters' bits by name."""
        parameters = self.parsed.parameters
        if len(arguments) != len(parameters):
            raise PtxError(f"{self.name} has {len(parameters)} parameters, {len(arguments)} were given")
        return {name: _bits(x, kind) for (name, kind), x in zip(parameters, arguments, strict=True)}

    def run_program(
        self,
        index: Sequence[int],
        grid: Sequence[int],
        given: dict[str, Any],
        memory: GlobalMemory,
        most_blocks: int = 1_000_000,
    ) -> None:
        """Run one program. given: as `bind` returns it."""
        threads, code = self.parsed.threads, self._code
        slots = code.slots
        registers = list(slots.initial)
        for name, value in (special_registers(threads, index, grid) | given).items():
            if name in slots.by_name:
                registers[slots.by_name[name]] = value
        shared = CheckedSharedMemory(self.shared, slots.granule, threads // LANES)
        program = Program(
            code.blocks,
            self.parsed.instructions,
            code.touched,
            registers,
            memory,
            shared,
            threads,
            most_blocks,
            tuple(index),
        )
        with np.errstate(all="ignore"):
            program.run()


def _bits(argument: Any, kind: str) -> Any:
    """Return an argument as a scalar of unsigned bits."""
    if argument is None:
        argument = 0
    if isinstance(argument, Tensor):
        argument = argument.data_ptr()
    if kind == "f32":
        return np.float32(argument).view(np.uint32)
    bits = bits_of(kind)
    return UNSIGNED[bits](int(argument) & (1 << bits) - 1)
