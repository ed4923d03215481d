"""Runs tpfuse's kernels as they are compiled, on CPU tensors: every launch executes its PTX (`tpfuse.explore.ptx`).

    with emulated("sm_80"):
        out = tpfuse.ops.gemm.gemm(x, weight)       # on CPU tensors, under use(kernels="triton")

Launchers choose their configuration as on a GPU of the family, and Triton compiles each launch up to PTX, for which it
needs no GPU. This process must not interpret kernels.
"""

import contextlib
import gc
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
import triton
from torch import Tensor
from triton.compiler import make_backend

from tpfuse import switches
from tpfuse.explore import Report, SimulatedMemory, explore
from tpfuse.explore.ptx import Kernel, ranks
from tpfuse.explore.ptx.global_memory import Buffer, GlobalMemory
from tpfuse.explore.run import ExploredRun
from tpfuse.kernels import compiled_launch, launch
from tpfuse.kernels.launch import Launch
from tpfuse.tools import front_end
from tpfuse.tools.recorded import Job, source_of, target

_ALIGNMENT = 128  # bytes, of a tensor map
_MOST_RANKS = 64  # elements of a table of addresses
_tensors: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by the address of the first element
_kernels: dict[tuple[object, ...], Kernel] = {}


def ptx_of(job: Job) -> tuple[str, int, int]:
    """Return the PTX of a kernel, and how many bytes of shared and of scratch memory each program needs.

    ptxas is not run.
    """
    backend = make_backend(target(job.family))
    options = backend.parse_options({"num_warps": job.num_warps, "num_stages": job.num_stages})
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, job.source.language)
    module, metadata = front_end.lower(job), {**vars(options), "target": target(job.family)}
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[stage](module, metadata)
    if metadata["profile_scratch_size"]:
        raise ValueError(f"{job.source.name} needs memory for a profile, which is not emulated")
    return fenced(module), metadata["shared"], metadata["global_scratch_size"]


def fenced(text: str) -> str:
    """Return a PTX text with the proxy fences that Triton 3.7.1 and older leave out, in the same lines.

    The definition of wgmma asks for a fence.proxy.async after cp.async if wgmma reads what was copied. Triton puts
    it there since its pull request 9610. H100s were not seen to need it.
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) or "wgmma" not in text:
        return text
    return re.sub(r"(cp\.async\.wait_group\s+\d+;)", r"\1 fence.proxy.async.shared::cta;", text)


def kernel_of(launched: Launch, family: str) -> Kernel:
    """Return the compiled kernel of a launch, which is compiled once in a process."""
    job = Job("", family, "", source_of(launched, family), launched.num_warps, launched.num_stages)
    if job.key not in _kernels:
        _kernels[job.key] = Kernel(*ptx_of(job))
    return _kernels[job.key]


def arguments_of(launched: Launch, family: str) -> list[Any]:
    """Return the arguments that a launch passes to its compiled kernel: those that are no constants, in order.

    Triton adds the addresses of two scratch memories. In the first one each program makes its tensor maps; the second
    one is not used.
    """
    source = source_of(launched, family)
    constant = {path[0] for path in source.constants}
    names = [name for index, name in enumerate(source.fn.arg_names) if index not in constant]
    size = kernel_of(launched, family).scratch * math.prod(launched.grid)
    scratch = torch.full((size + _ALIGNMENT,), 0xFF, dtype=torch.uint8)
    aligned = scratch[-scratch.data_ptr() % _ALIGNMENT :][:size] if size else None
    return [*(launched.arguments[name] for name in names), aligned, None]


def emulated(family: str, programs: int = 3) -> contextlib.AbstractContextManager[None]:
    """Within the block, launches on CPU tensors run compiled for a GPU of `family` with so many multiprocessors."""

    def run(kernel: Kernel, grid: tuple[int, ...], arguments: list[Any]) -> None:
        buffers = [Buffer.of(name, x) for name, x in kernel.tensors(arguments)]
        kernel.run(grid, arguments, memory=GlobalMemory([*buffers, *_addressed(arguments)]))

    return _launching(family, programs, run)


def _addressed(arguments: list[Any]) -> Iterator[Buffer]:
    """Yield the memory to which tables of addresses among the arguments lead: that of tensors which begin there."""
    tables = [x for x in arguments if isinstance(x, Tensor) and x.dtype == torch.int64 and x.numel() <= _MOST_RANKS]
    addresses = {address for table in tables for address in table.flatten().tolist()}
    if missing := addresses - set(_tensors):
        for x in gc.get_objects():
            if issubclass(type(x), Tensor) and x.device.type == "cpu" and x.data_ptr() in missing:
                _tensors[x.data_ptr()] = x
    yield from (Buffer.of("memory of a table", _tensors[address]) for address in addresses & set(_tensors))


def explore_compiled(
    program: Callable[[SimulatedMemory], object], world: int, family: str, programs: int = 3, **options: Any
) -> Report:
    """Run `tpfuse.explore.explore` on compiled kernels. options: of `explore`, and raise what it raises."""

    @contextlib.contextmanager
    def launches() -> Iterator[Callable[[ExploredRun], None]]:
        current: list[ExploredRun] = []

        def run(kernel: Kernel, grid: tuple[int, ...], arguments: list[Any]) -> None:
            ranks.launch(current[0], kernel, grid, arguments)

        def enter(explored: ExploredRun) -> None:
            current[:] = [explored]

        with _launching(family, programs, run):
            yield enter

    return explore(program, world, launches=launches, **options)


@contextlib.contextmanager
def _launching(
    family: str, programs: int, execute: Callable[[Kernel, tuple[int, ...], list[Any]], None]
) -> Iterator[None]:
    assert not launch.INTERPRETED, "kernels are interpreted in this process"
    cpu = torch.device("cpu")

    def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], num_warps: int, num_stages: int) -> None:
        launched = Launch(kernel, grid, arguments, num_warps, num_stages)
        execute(kernel_of(launched, family), grid, arguments_of(launched, family))

    before = compiled_launch.run, switches.INTERPRETED
    launch._gpus[cpu] = family, programs
    compiled_launch.run, switches.INTERPRETED = run, True
    launch.forget_plans()
    try:
        yield
    finally:
        compiled_launch.run, switches.INTERPRETED = before
        del launch._gpus[cpu]
        launch.forget_plans()
