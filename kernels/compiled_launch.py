"""Launches a compiled kernel as Triton's `kernel[grid](…)` does, without the work that Triton repeats for each launch.

Triton compiles a kernel again for other types of its arguments, for other values of its constexprs, and when an integer
changes between 1 and another value, or when an integer or an address changes between a multiple of 16 and none. Its
binder looks at every argument for that, and builds strings from the result to look the compiled kernel up: 15 µs a
launch (benchmarks/results/gpu.md). Here a compiled kernel is found by a key from which all of that follows, and
started as Triton starts it, with the same arguments.

The first launch of a key takes Triton's own path, and so do all launches while a hook is registered with Triton, as
profilers do. Triton's settings (triton.knobs) at the first launch of a key apply to the later launches.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

MOST_KEPT = 256  # entries of a table
_Kept = TypeVar("_Kept")


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate a launch's global memory for TMA descriptors; the stream's order prevents too early reuse."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _picker(indices: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that picks the values at these indices as a tuple, also for fewer than two indices."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple([values[index] for index in indices])


class _Form:
    """The launches of a kernel with arguments of the same Python types, and the kernels compiled for them.

    The key contains constexprs and integers with their values. An integer that Triton does not specialise adds only its
    width to the key, and a float adds nothing.
    """

    def __init__(self, kernel: Any, types: Sequence[type]) -> None:
        tensors, changing, keyed = [], [], []
        assert not any(issubclass(of, tuple) for of in types), "tuples of tensors are not supported as arguments"
        for index, (parameter, of) in enumerate(zip(kernel.params, types, strict=True)):
            if issubclass(of, Tensor):
                tensors.append(index)
            elif of is int and parameter.do_not_specialize and not parameter.is_constexpr:
                changing.append(index)
            elif of is not float or parameter.is_constexpr:
                keyed.append(index)
        self.tensors, self._changing, self._keyed = _picker(tensors), _picker(changing), _picker(keyed)
        self.started: dict[tuple[object, ...], Started] = {}

    def key(self, values: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> tuple[object, ...]:
        """Return what Triton compiles for, besides the types. values: all arguments; tensors: those among them."""
        return (
            self._keyed(values),
            *[(x if x >= 0 else ~x).bit_length() // 32 for x in self._changing(values)],  # int32, int64 or uint64
            *[x.dtype for x in tensors],
            *[x.data_ptr() % 16 == 0 for x in tensors],
        )


class _Kernel:
    """A kernel and the forms of its launches so far."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel  # keeps the kernel alive as long as it is looked up by its id
        self.in_order = _picker(kernel.arg_names)
        self.forms: dict[tuple[type, ...], _Form] = {}


_kernels: dict[int, _Kernel] = {}  # by id: Triton computes the hash of a kernel's source under a lock


def _known(kernel: Any) -> _Kernel:
    known = _kernels.get(id(kernel))
    if known is None:
        known = _kernels[id(kernel)] = _Kernel(kernel)
    return known


class Started(NamedTuple):
    """A compiled kernel that has run on a device, and may run again with the arguments for which it was compiled."""

    kernel: _Kernel
    compiled: Any
    run: Any  # of `compiled`, where it is a property
    driver: Any
    device: int

    def start(self, grid: tuple[int, ...], values: tuple[Any, ...]) -> None:
        """Do what the end of Triton's JITFunction.run does when no hook is registered.

        values: those of all parameters, in their order.
        """
        driver, compiled = self.driver, self.compiled
        if driver.get_current_device() != self.device:
            with torch.cuda.device(self.device):
                self.start(grid, values)
            return
        if compiled.metadata.global_scratch_size:
            # At each launch, since the allocator belongs to a context, and backward runs in a thread with another one.
            triton.set_allocator(_scratch)
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.get_current_stream(self.device)
        self.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


def run(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], num_warps: int, num_stages: int
) -> Started | None:
    """Run a kernel over a grid without zeros, on the device of its first tensor. arguments: all of its parameters.

    Return a `Started` that may run again; None where Triton does not return one, or returns one compiled for a
    profiler.
    """
    known = _known(kernel)
    values = known.in_order(arguments)
    types = tuple(map(type, values))
    form = known.forms.get(types)
    if form is None:
        form = known.forms[types] = _Form(kernel, types)
    tensors = form.tensors(values)
    key = tensors[0].get_device(), num_warps, num_stages, *form.key(values, tensors)
    started, is_watched = form.started.get(key), watched(kernel)
    if started is not None and not is_watched:
        started.start(grid, values)
        return started
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device, on whichever device the tensors are
        triton.set_allocator(_scratch)
        compiled = kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)
    if is_watched or not isinstance(compiled, CompiledKernel):
        return None
    return keep(form.started, key, Started(known, compiled, compiled.run, driver.active, key[0]))


def watched(kernel: Any) -> bool:
    """Return whether a hook must be called for launches of this kernel. A chain of hooks may be empty."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or kernel.pre_run_hooks)


def keep(table: dict[tuple[object, ...], _Kept], key: tuple[object, ...], value: _Kept) -> _Kept:
    """Store a value in a table, which is emptied when it is full: shapes may be new in each step.

    Return the value.
    """
    if len(table) >= MOST_KEPT:
        table.clear()
    table[key] = value
    return value
