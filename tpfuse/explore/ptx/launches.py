"""Launches of Triton's kernels that run as they are compiled, on the CPU."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from tpfuse.explore.ptx import ranks
from tpfuse.explore.ptx.global_memory import Buffer, GlobalMemory
from tpfuse.explore.ptx.kernel import Kernel
from tpfuse.explore.run import ExploredRun

_ALIGNMENT = 128  # bytes, of a tensor map
_MOST_RANKS = 64  # elements of a table of addresses
_kernels: dict[tuple[Any, ...], Kernel] = {}


@contextmanager
def compiled(
    family: str = "sm_80", edit: Callable[[str], str] = str, seed: int | None = None
) -> Iterator[Callable[[ExploredRun], None]]:
    """Within the block, launches of kernels of Triton or Gluon (`kernel[grid](...)`) run compiled, on CPU tensors.

    Triton compiles each of them up to PTX for GPUs of `family`, "sm_80" or "sm_90", without a GPU. `edit` changes the
    PTX of each kernel. seed: of the order in which warps run that could all run; None: those first whose instructions
    come first. `explore(..., launches=compiled)` explores a protocol in this way, with the barriers that the
    compiler has written. A kernel may access its arguments, and tensors whose addresses were taken within the block if
    a table among the arguments has these. Raise ValueError for another family, and if Triton interprets kernels in this
    process.
    """
    if family not in ("sm_80", "sm_90"):
        raise ValueError(f"compiled({family!r}): expected sm_80 or sm_90")
    if triton.knobs.runtime.interpret:
        raise ValueError("compiled runs compiled kernels: unset TRITON_INTERPRET before they are imported")
    current = deque[ExploredRun](maxlen=1)
    addressed: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def run(function: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        backend, (named, specialization, rest) = _bound(function, family, args, options)
        key = function, family, edit, repr(specialization), repr(sorted(rest.items()))
        if key not in _kernels:
            parsed, *parts = function._pack_args(backend, rest, named, specialization, rest)
            _kernels[key] = _compile(source_of(function, *parts), backend, parsed, edit)
        kernel, programs = _kernels[key], grid(named) if callable(grid) else grid
        arguments = [x for x, (kind, *_) in zip(named.values(), specialization, strict=True) if kind != "constexpr"]
        # Triton's own: in the first scratch memory each program makes its tensor maps; the second one is not used.
        arguments += [_scratch(kernel.scratch * math.prod(programs)), None]
        if current:
            ranks.launch(current[0], kernel, programs, arguments, seed)
        else:
            kernel.run(programs, arguments, memory=_memory_of(kernel, arguments, addressed), seed=seed)

    def address(x: Tensor) -> int:
        """Keep for each address the longest tensor on the CPU that begins there."""
        place = take_address(x)
        known = addressed.get(place)
        if x.device.type == "cpu" and (known is None or known.numel() < x.numel()):
            addressed[place] = x
        return place

    # A mode of torch functions would see neither operators of torch.library nor other threads.
    tensors: Any = Tensor
    before, take_address = JITFunction.run, Tensor.data_ptr
    JITFunction.run, tensors.data_ptr = run, address
    try:
        yield current.append
    finally:
        JITFunction.run, tensors.data_ptr = before, take_address


@cache
def _binder(function: Any, family: str) -> tuple[Any, Callable[..., Any]]:
    """Return the compiler's backend, and Triton's function from arguments to named ones with their types."""
    backend = make_backend(GPUTarget("cuda", int(family.removeprefix("sm_")), 32))
    return backend, create_function_from_signature(function.signature, function.params, backend)


def _bound(function: Any, family: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the compiler's backend and the named arguments, with their types. An error names the parameter."""
    backend, bind = _binder(function, family)
    try:
        return backend, bind(*args, **options)
    except TypeError as error:
        given = dict(zip(function.arg_names, args, strict=False)) | options
        types = {x.name: type(given.get(x.name)).__name__ for x in function.params if not x.is_constexpr}
        names = [name for name, kind in types.items() if str(error).endswith(kind)]
        raise TypeError(f"{function.__name__}, parameter {' or '.join(names)}: {error}") from None


def _memory_of(kernel: Kernel, arguments: list[Any], addressed: Mapping[int, Tensor]) -> GlobalMemory:
    """Return the memory of a kernel's tensors, and of those whose addresses are in its tables."""
    buffers = [Buffer.of(name, x) for name, x in kernel.tensors(arguments)]
    tables = [x for x in arguments if isinstance(x, Tensor) and x.dtype == torch.int64]
    places = {place for x in tables if x.numel() <= _MOST_RANKS for place in x.flatten().tolist()}
    return GlobalMemory([*buffers, *(Buffer.of("memory of a table", addressed[x]) for x in places if x in addressed)])


def source_of(function: Any, *parts: Any) -> ASTSource:
    """Return the source that Triton compiles, for its own language or Gluon. parts: as `_pack_args` returns them."""
    return (GluonASTSource if function.is_gluon() else ASTSource)(function, *parts)


def _compile(source: Any, backend: Any, options: Any, edit: Callable[[str], str]) -> Kernel:
    """Return a kernel compiled up to PTX: ptxas is not run."""
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    code = source.make_ir(backend.target, options, implementation, modules, context)
    metadata = {**vars(options), "target": backend.target}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    for stage in itertools.takewhile(lambda stage: stage != "cubin", stages):
        code = stages[stage](code, metadata)
    if metadata["profile_scratch_size"]:
        raise ValueError(f"{source.name} needs memory for a profile, which is not emulated")
    return Kernel(edit(code), metadata["shared"], metadata["global_scratch_size"])


def _scratch(size: int) -> Tensor | None:
    memory = torch.full((size + _ALIGNMENT,), 0xFF, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _ALIGNMENT :][:size] if size else None
