"""Launches of Triton's kernels that run as they are compiled, on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from tpfuse.explore.ptx import ranks
from tpfuse.explore.ptx.kernel import Kernel
from tpfuse.explore.run import ExploredRun

_kernels: dict[tuple[Any, ...], Kernel] = {}


@contextmanager
def compiled() -> Iterator[Callable[[ExploredRun], None]]:
    """Within the block, launches of Triton's kernels (`kernel[grid](...)`) run compiled, on CPU tensors.

    Triton compiles each of them for a GPU of compute capability 8.0, without a GPU. `explore(..., launches=compiled)`
    explores a protocol in this way, with the barriers that the compiler has written. Raise ValueError if Triton
    interprets kernels in this process.
    """
    if triton.knobs.runtime.interpret:
        raise ValueError("compiled runs compiled kernels: unset TRITON_INTERPRET before they are imported")
    current: list[ExploredRun] = []

    def enter(run: ExploredRun) -> None:
        current[:] = [run]

    def run(function: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        given = function.signature.bind(*args, **{k: v for k, v in options.items() if k in function.arg_names})
        given.apply_defaults()
        named = given.arguments
        kernel = _kernel(function, named, {k: v for k, v in options.items() if k not in function.arg_names})
        programs = grid(named) if callable(grid) else grid
        arguments = [value for name, value in named.items() if name not in _constants(function, named)]
        arguments += [None] * (len(kernel.parsed.parameters) - len(arguments))  # Triton's own
        if current:
            ranks.launch(current[0], kernel, programs, arguments)
        else:
            kernel.run(programs, arguments)

    before, JITFunction.run = JITFunction.run, run
    try:
        yield enter
    finally:
        JITFunction.run = before


def _constants(function: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are part of the compiled kernel."""
    always = {parameter.name for parameter in function.params if parameter.is_constexpr}
    return {name: value for name, value in named.items() if name in always or value is None}


def _kernel(function: Any, named: dict[str, Any], options: dict[str, Any]) -> Kernel:
    """Return the compiled kernel of a launch, which is compiled once in a process."""
    constants = _constants(function, named)
    if unknown := [x for x, v in named.items() if x not in constants and not isinstance(v, Tensor | int | float)]:
        kind = type(named[unknown[0]]).__name__
        raise ValueError(f"{function.__name__}: argument {unknown[0]} is a {kind}: expected a tensor or a number")
    types = {name: "constexpr" if name in constants else mangle_type(value) for name, value in named.items()}
    key = function, tuple(types.items()), repr(sorted(constants.items())), repr(sorted(options.items()))
    if key not in _kernels:
        source = ASTSource(function, types, constants)
        with triton.knobs.compilation.scope():
            # What Triton has kept may be of another folder, whose lines the PTX names.
            triton.knobs.compilation.always_compile = True
            compilation: Any = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
        if compilation.metadata.global_scratch_size:
            raise ValueError(f"{function.__name__} needs scratch memory: compiled gives kernels none")
        _kernels[key] = Kernel(compilation.asm["ptx"], compilation.metadata.shared)
    return _kernels[key]
