"""How a kernel reaches a device: launched on CUDA, interpreted on the CPU, or recorded for the compiler.

Every launcher asks this module what it launches for and launches through `launch`. On meta tensors, inside
`recording(family)`, nothing runs: the launches are collected with the arguments that a GPU of that family would get, so
that what is compiled ahead of time is what would be launched (`tpfuse.profile.compilation`).

Triton decides whether it interprets when a kernel is decorated: TRITON_INTERPRET=1 must be set before these modules are
imported, and holds for the whole process.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def interpreter_problem(triton_version: str = triton.__version__, numpy_version: str = np.__version__) -> str:
    """Why this Triton cannot interpret kernels with this numpy, in one line; empty where it can."""
    ours, numpy = (tuple(int(x) for x in version.split(".")[:2]) for version in (triton_version, numpy_version))
    if ours >= (3, 7) or numpy < (2, 4):
        return ""
    return (
        f"Triton {triton_version} interprets kernels with numpy < 2.4 only, and this is numpy {numpy_version}: "
        "pip install 'numpy<2.4', or Triton 3.7"
    )


def _skip_overflow_checks() -> None:
    """Ends the interpreter's checks of integers for overflow: it drops their results unless its option `debug` is on.

    They take a third of its time.
    """
    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


if INTERPRETED:
    if interpreter_problem():
        raise ImportError(interpreter_problem())  # once, where all that launches comes by; else each kernel would fail
    _skip_overflow_checks()

# Multiprocessors of A100, H100 and B200, for what is recorded without a GPU (NVIDIA's whitepapers).
_MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
FAMILIES = tuple(_MULTIPROCESSORS)


@dataclass(frozen=True)
class Launch:
    """One recorded launch: arguments by name, constexprs included; tensors are meta tensors."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass
class Recording:
    """The launches of a `recording` block, in order."""

    family: str
    launches: list[Launch] = field(default_factory=list)


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextlib.contextmanager
def recording(family: str) -> Iterator[Recording]:
    """Collects launches on meta tensors as a GPU of `family` (one of FAMILIES) would get them."""
    assert family in FAMILIES, family
    token = _recording.set(Recording(family))
    try:
        current = _recording.get()
        assert current is not None
        yield current
    finally:
        _recording.reset(token)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. On the host triton.cdiv takes 2 µs."""
    return -(-a // b)


def family(device: torch.device) -> str:
    """The GPU family whose configurations fit `device`: "sm_80", "sm_90", "sm_100" or "interpreted".

    sm_80 stands for every other GPU too (8.6, 8.9 and 12.0 have less shared memory; the rows of sm_80 fit them).
    Raises ValueError where Triton cannot run.
    """
    if device.type == "cuda":
        return _cuda_family(device)
    current = _recording.get()
    if device.type == "meta" and current is not None:
        return current.family
    if device.type == "cpu" and INTERPRETED:
        return "interpreted"
    raise ValueError(f"tensors on {device}: Triton kernels need a CUDA GPU, or TRITON_INTERPRET=1 set before the start")


@functools.cache
def _cuda_family(device: torch.device) -> str:
    major = torch.cuda.get_device_capability(device)[0]
    if major < 8:
        raise ValueError(f"{torch.cuda.get_device_name(device)}: the kernels need compute capability 8.0 or newer")
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


@functools.cache
def _cuda_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def multiprocessors(device: torch.device) -> int:
    """How many programs a persistent kernel starts; 3 where interpreted, so that each of them loops."""
    if device.type == "cuda":
        return _cuda_multiprocessors(device)
    return _MULTIPROCESSORS.get(family(device), 3)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Global memory of one launch, where kernels make TMA descriptors; the stream's order keeps it from early reuse."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def launch(kernel: Any, grid: tuple[int, ...], *, num_warps: int, num_stages: int, **arguments: Any) -> None:
    """Runs `kernel` over `grid` on the device of its first tensor, or records it. An empty grid does nothing."""
    if 0 in grid:
        return
    current = _recording.get()
    if current is not None:
        current.launches.append(Launch(kernel, grid, arguments, num_warps, num_stages))
        return
    first = next(x for x in arguments.values() if isinstance(x, Tensor))
    with torch.cuda.device_of(first):  # Triton launches on the current device, whatever the tensors say
        triton.set_allocator(_scratch)  # each time: of a context, and backward runs in a thread with another one
        kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)
