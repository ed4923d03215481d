"""Inline assembly in interpreted kernels: `tl.inline_asm_elementwise`, whose PTX runs on the memory of an explored run.

The text becomes a kernel of its own, one thread for each element of the operands, and `tpfuse.explore.ptx` executes it.
Each of its accesses to symmetric memory is an operation before which the schedule may switch ranks, so that a loop in
the text which waits for a word is a wait like others, and a deadlock is found. An instruction that is not known (such
as `multimem`) is refused by name, and so is one by which the lanes of a warp act together: no lane has its elements.

The explorer runs a program as one thread, which stands for all threads, but by assembly a kernel may let some threads
do what others do not: `if tid < world_size`. Therefore

- %tid and %laneid are those of thread 0 and may only be compared, in ways that hold for thread 0 (`ThreadNumber`);
- after such a comparison, up to the next barrier, only some threads act: what they acquire, the others know after it;
- without such a comparison every thread executes the text: a read-modify-write, which would happen once in each thread,
  is refused unless there is an element for each thread.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from triton.runtime import interpreter

from tpfuse.explore.memory import Semantics
from tpfuse.explore.ptx.faults import MemoryFault, PtxError, Unsupported
from tpfuse.explore.ptx.global_memory import Change
from tpfuse.explore.ptx.kernel import Kernel
from tpfuse.explore.ptx.parser import Register
from tpfuse.explore.ptx.program import LANES
from tpfuse.explore.ptx.ranks import ExploredGlobalMemory
from tpfuse.explore.run import ExploredRun

Array = NDArray[Any]
_BITS = {"h": 16, "r": 32, "l": 64, "f": 32, "d": 64}  # the registers of LLVM's constraints for PTX
_REFUSED = {"cp", "elect", "fence", "ldmatrix", "mbarrier", "mma", "redux", "shfl", "stmatrix", "tensormap", "wgmma"}
_OWN_THREAD = re.compile(r"%(tid|laneid|warpid)\b")
_VALUE = "the number of a thread is used as a value: the explorer runs a program as one thread, and lets kernels"


class ThreadNumber(np.ndarray):
    """A thread's number, or a number computed from it. Its value is that of thread 0.

    Comparisons that hold for thread 0 give booleans, and call `compared`. All other uses raise ValueError: which value
    is meant depends on the thread.
    """

    compared: Callable[[], None]

    def __array_finalize__(self, source: Any) -> None:
        self.compared = getattr(source, "compared", lambda: None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        result = getattr(ufunc, method)(*(x.view(np.ndarray) if isinstance(x, ThreadNumber) else x for x in inputs))
        if result.dtype != bool:
            return _thread_number(result, self.compared)
        if not result.all():
            raise ValueError(f"{_VALUE} compare it only in ways that hold for thread 0")
        if all(x.dtype.itemsize == 4 for x in inputs):  # not the interpreter's own checks for an overflow, in int64
            self.compared()
        return result

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        refuse_thread_numbers(self)

    def __bool__(self) -> bool:
        refuse_thread_numbers(self)
        return False

    __int__ = __index__ = __bool__


def _thread_number(value: Array, compared: Callable[[], None]) -> ThreadNumber:
    number: ThreadNumber = value.view(ThreadNumber)
    number.compared = compared
    return number


def refuse_thread_numbers(*values: Any) -> None:
    """Raise ValueError if one of the arrays holds numbers of threads."""
    if any(isinstance(x, ThreadNumber) for x in values):
        raise ValueError(f"{_VALUE} only compare it (`if tid < world_size`)")


class AssemblyResults(NamedTuple):
    """The results of a text, as the interpreter asks for them."""

    handles: list[Any]

    def get_result(self, index: int) -> Any:
        """Return one of the results."""
        return self.handles[index]


def execute(
    run: ExploredRun, text: str, constraints: str, operands: Sequence[Any], types: Sequence[Any], grid: Sequence[int]
) -> AssemblyResults:
    """Execute a text for each element of the operands, which are arrays of one shape.

    types: Triton's types of the results. grid: the size of the launch. Raise ValueError for what is not supported.
    """
    refuse_thread_numbers(*operands)
    shape = operands[0].shape if operands else (1,)
    count, outputs = int(np.prod(shape)), [np.zeros(shape, interpreter._get_np_dtype(x)) for x in types]
    of_results, of_operands = _registers(constraints)
    if (len(of_results), len(of_operands)) != (len(types), len(operands)):
        raise ValueError(
            f"inline assembly has the constraints {constraints!r}: expected {len(types)} results and then "
            f"{len(operands)} operands"
        )
    threads = -(-count // LANES) * LANES
    given: dict[str, Any] = {"%ntid.x": np.uint32(run.scheduler.current.threads)}
    given["%outside"] = np.arange(threads) >= count
    for number, (value, bits) in enumerate(zip(operands, of_operands, strict=True), len(of_results)):
        given[f"%operand{number}"] = _padded(value, bits, threads)
    index, own_thread = run.scheduler.current.program, _OWN_THREAD.search(text) is not None
    assert index is not None
    try:
        results = _kernel(text, constraints, threads).run_program(index, grid, given, _Memory(run, count, own_thread))
    except PtxError as error:
        message = re.sub(r"^line \d+: ", "", str(error).partition("\n")[0]).replace("%operand", "$")
        raise ValueError(f"inline assembly: {message}") from None
    for result, output in zip(results, outputs, strict=True):
        kind = f"u{output.itemsize}"
        output.ravel().view(kind)[:] = result[:count].astype(kind)
    if own_thread:
        outputs = [_thread_number(x, lambda: setattr(run.scheduler.current, "some_threads", True)) for x in outputs]
    return AssemblyResults([interpreter.TensorHandle(x, kind.scalar) for x, kind in zip(outputs, types, strict=True)])


def program_barrier(run: ExploredRun) -> None:
    """Record that all threads of the current program have met at a barrier."""
    run.scheduler.observe(run.scheduler.current, lambda: "a barrier")
    run.scheduler.current.some_threads = False
    run.memory.clocks.debug_barrier(run.scheduler.current.chain)


@cache
def _kernel(text: str, constraints: str, threads: int) -> Kernel:
    """Return the text as a kernel. Its operands and results are registers."""
    of_results, of_operands = _registers(constraints)
    text = re.sub(r"\$\{?(\d+)\}?", r"%operand\1", text).replace("$$", "$")
    # A generic address is one of global memory here, and a volatile access is a relaxed one (PTX ISA 8.7, 8.2 and 9.7).
    text = re.sub(r"\b(ld|st|atom|red)\.(?![\w.:]*\b(?:global|shared)\b)", r"\1.global.", text)
    text = re.sub(r"\b((?:ld|st)\.[\w.]*)volatile\.", r"\1relaxed.sys.", text)
    registers = [f".reg .b{x} %operand{number};" for number, x in enumerate(of_results + of_operands)]
    head = [f".visible .entry inline_assembly() .reqntid {threads} {{", ".reg .pred %outside;", *registers]
    results = [Register(f"%operand{number}", x) for number, x in enumerate(of_results)]
    kernel = Kernel("\n".join([*head, "@%outside ret;", text, ";", "ret;", "}"]), results=results)
    for x in kernel.parsed.instructions:
        some_warps = x.parts[0] in ("bar", "barrier") and len(x.operands) > 1
        if x.parts[0] in _REFUSED or x.opcode == "bar.warp.sync" or some_warps:
            raise Unsupported(f"{x.opcode} is not supported")
    return kernel


def _registers(constraints: str) -> tuple[list[int], list[int]]:
    """Return the widths of the results and of the operands in bits."""
    parts = [x.strip() for x in constraints.split(",") if not x.strip().startswith("~")]
    if unknown := [x for x in parts if x.lstrip("=&") not in _BITS]:
        raise ValueError(f"inline assembly has the constraint {unknown[0]!r}: expected one of {', '.join(_BITS)}")
    results = [_BITS[x.lstrip("=&")] for x in parts if x.startswith("=")]
    return results, [_BITS[x] for x in parts if not x.startswith("=")]


def _padded(values: Array, bits: int, threads: int) -> Array:
    """Return the bits of the values as unsigned numbers, one for each thread."""
    values = np.ascontiguousarray(values).ravel()
    if 8 * values.itemsize > bits:
        raise ValueError(f"inline assembly has an operand of {8 * values.itemsize} bits in a register of {bits}")
    padded = np.zeros(threads, f"u{bits // 8}")
    padded[: len(values)] = values.view(f"u{values.itemsize}")
    return padded


class _Memory(ExploredGlobalMemory):
    """All memory of the process, as interpreted kernels access it; symmetric memory is that of the explored run."""

    def __init__(self, run: ExploredRun, count: int, own_thread: bool) -> None:
        super().__init__(run, [])
        some_threads = self._task.some_threads or own_thread  # a text that reads %tid chooses by it
        self._alone = some_threads or count > 1
        self._repeated = not some_threads and count < self._task.threads

    def barrier(self, warps: list[int]) -> None:
        program_barrier(self._run)

    def ordered(
        self,
        addresses: Array,
        warps: Array,
        dtype: Any,
        order: frozenset[str],
        name: str,
        change: Change | None = None,
    ) -> Array:
        if self._repeated and name.startswith("atom"):
            raise ValueError(
                f"inline assembly: each of the program's {self._task.threads} threads executes {name}: compare the "
                "thread's number (%tid) before it"
            )
        for region, _ in self._checked.touched(addresses):
            if np.dtype(dtype).itemsize != region.step:
                raise ValueError(
                    f"inline assembly: an ordered access of {np.dtype(dtype).itemsize} bytes to symmetric buffer "
                    f"{region.key!r}, whose elements have {region.step}: expected the same width"
                )
        return super().ordered(addresses, warps, dtype, order, name, change)

    def _semantics(self, order: frozenset[str], **more: bool) -> Semantics:
        return replace(super()._semantics(order, **more), assembly=True, alone=self._alone)

    @contextmanager
    def _at_source(self, chain: int | None = None) -> Iterator[None]:
        yield  # the source lines are on Python's stack

    def _check(self, addresses: Array, size: Any) -> None:
        if (addresses < size).any():
            raise MemoryFault(f"{size} bytes at address 0")
        if (addresses % size).any():
            raise MemoryFault(f"{size} bytes at an address that is not aligned")
