"""Launches kernels on a device: on CUDA, interpreted on the CPU, or recorded for the compiler.

Every launcher asks this module for the GPU family and launches through `launch`. On meta tensors, inside
`recording(family)`, nothing runs: the launches are collected with the arguments that a GPU of that family would get, so
that the kernels compiled ahead of time are those that would be launched (`tpfuse.tools.compilation`).

On CUDA Triton's binder sees a launch once (`tpfuse.kernels.compiled_launch`). Launchers of products, norms, gradients
of activations and cross entropy also plan a call once for each layout of its tensors (`planned`): checks,
configuration, grid and all arguments but pointers. A later call then only allocates results and calls `Launch.run`.
Operators check their arguments in the same way.

While a trace is being taken (`tpfuse.kernels.trace`), each launch that may wait for peers gets memory for its events.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, TypeVarTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tpfuse.kernels import compiled_launch
from tpfuse.kernels.interpreter import INTERPRETED

# Multiprocessors of A100, H100 and B200, for launches that are recorded without a GPU (NVIDIA's whitepapers).
_MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
FAMILIES = tuple(_MULTIPROCESSORS)

# The multiprocessors that NCCL's kernels, or sums of gradients by our own, get beside products. A program of a product
# takes nearly all shared memory of its multiprocessor: where NCCL holds that, the program begins when NCCL has ended. A
# product would take twice as long, and ranks could wait in a circle: NCCL on rank A for NCCL on C, which finds no
# multiprocessor beside a product that waits for D, whose last programs wait for NCCL on D, and so on to the rank whose
# product waits for A's. Not measured yet.
RESERVED = 16


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and its arguments by name, constexprs included.

    A recorded launch has all arguments, and its tensors are meta tensors; a planned launch (`planned`) has all but
    pointers.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int
    _started: dict[int, compiled_launch.Started | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def run(self, **pointers: Tensor | None) -> None:
        """Launch with these pointers: by the same names, of the same dtypes and on the same device each time."""
        arguments = {**pointers, **self.arguments}
        if INTERPRETED or _recording.get() is not None or 0 in self.grid:
            launch(self.kernel, self.grid, num_warps=self.num_warps, num_stages=self.num_stages, **arguments)
            return
        if _rows is not None:
            arguments = _traced(self.kernel, self.grid, arguments)
        key = 0
        for x in (*pointers.values(), arguments.get("trace_ptr")):
            key = 17 * key + (16 if x is None else x.data_ptr() % 16)
        started = self._started.get(key)
        if started is None or compiled_launch.watched(self.kernel):
            started = compiled_launch.run(self.kernel, self.grid, arguments, self.num_warps, self.num_stages)
            self._started[key] = started
        else:
            started.start(self.grid, started.kernel.in_order(arguments))


@dataclass
class Recording:
    """The launches of a `recording` block, in order."""

    family: str
    launches: list[Launch] = field(default_factory=list)


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextlib.contextmanager
def recording(family: str) -> Iterator[Recording]:
    """Collect launches on meta tensors as a GPU of `family` (one of FAMILIES) would get them."""
    assert family in FAMILIES, family
    current = Recording(family)
    token = _recording.set(current)
    try:
        yield current
    finally:
        _recording.reset(token)


# A function that returns the rows of a launch in the trace that is being taken, or None for a launch that it leaves
# out. It is called with the launch's kernel, grid and arguments by name.
_Rows = Callable[[Any, tuple[int, ...], dict[str, Any]], Tensor | None]
_rows: _Rows | None = None  # of all threads: autograd launches kernels in threads of its own


def start_trace(rows: _Rows) -> None:
    """Let `rows` give the argument trace_ptr of all launches that may wait for peers, until `stop_trace`.

    Raise RuntimeError where a trace is being taken already.
    """
    global _rows
    if _rows is not None:
        raise RuntimeError("a trace of kernels is being taken already: end it before the next one")
    _rows = rows


def stop_trace() -> None:
    """End the trace that is being taken."""
    global _rows
    _rows = None


def _traced(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, with the rows of the trace where the launch may wait: where it has an abort word."""
    if _rows is None or "trace_ptr" not in arguments or arguments["abort_ptr"] is None:
        return arguments
    return arguments | {"trace_ptr": _rows(kernel, grid, arguments)}


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. On the host triton.cdiv takes 2 µs."""
    return -(-a // b)


def family(device: torch.device) -> str:
    """Return the GPU family whose configurations fit `device`: "sm_80", "sm_90", "sm_100" or "interpreted".

    sm_80 stands for every other GPU too (8.6, 8.9 and 12.0 have less shared memory; the rows of sm_80 fit them). Raise
    ValueError where Triton cannot run.
    """
    return _gpu(device)[0]


def multiprocessors(device: torch.device) -> int:
    """Return how many programs a persistent kernel starts; 3 when interpreted, so that each of them loops.

    On a GPU there are `RESERVED` fewer for each owner of a `Reservation`, but at least half of them.
    """
    name, count = _gpu(device)
    return count if name == "interpreted" else max(count - RESERVED * len(set(Reservation.held)), count // 2)


class Reservation:
    """Leaves multiprocessors to an owner's kernels, which run beside products, from now until `end`.

    owner: "NCCL", or a name of kernels of ours that wait for peers meanwhile; together they have at most `RESERVED`
    programs at once. All ranks of a group must make and end theirs between the same two openings of channels, where
    ranks compare how many programs they start. Therefore none ends when an object is collected as garbage.
    """

    held: ClassVar[list[str]] = []  # the owners of those of this process

    def __init__(self, owner: str = "NCCL") -> None:
        self.owner, self._ended = owner, False
        Reservation.held.append(owner)
        forget_plans()

    def end(self) -> None:
        """Let products use these multiprocessors again; do nothing at a second call."""
        if not self._ended:
            self._ended = True
            Reservation.held.remove(self.owner)
            forget_plans()


_gpus: dict[torch.device, tuple[str, int]] = {}  # family and multiprocessors of the devices that CUDA was asked about


def _gpu(device: torch.device) -> tuple[str, int]:
    gpu = _gpus.get(device)
    if gpu is not None:
        return gpu
    if device.type == "cuda":
        return _gpus.setdefault(device, _cuda_gpu(device))
    current = _recording.get()
    if device.type == "meta" and current is not None:
        return current.family, _MULTIPROCESSORS[current.family]
    if device.type == "cpu" and INTERPRETED:
        return "interpreted", 3
    raise ValueError(f"tensors on {device}: Triton kernels need a CUDA GPU, or TRITON_INTERPRET=1 set before the start")


def _cuda_gpu(device: torch.device) -> tuple[str, int]:
    major = torch.cuda.get_device_capability(device)[0]
    if major < 8:
        raise ValueError(f"{torch.cuda.get_device_name(device)}: the kernels need compute capability 8.0 or newer")
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80"), int(count)


_Arguments = TypeVarTuple("_Arguments")
_Planned = TypeVar("_Planned")
_plans: list[dict[tuple[object, ...], Any]] = []
_KEYS = frozenset((str, bool, int, float))  # most arguments that are no tensors


def planned(plan: Callable[[*_Arguments], _Planned]) -> Callable[[*_Arguments], _Planned]:
    """Call `plan` once for all calls whose tensors have the same layout and whose other arguments are the same.

    plan: reads only shape, strides, dtype, device and the address modulo 16 of its tensors, and whether torch uses
    autocast and deterministic algorithms; its other arguments must be hashable, and its result is not None. Its
    exceptions are not cached. It is called each time for tensors without such a layout: sparse ones, those of
    subclasses and of functorch's transforms; and while torch.compile traces.
    """
    plans: dict[tuple[object, ...], _Planned] = {}
    _plans.append(plans)

    @functools.wraps(plan)
    def plan_once(*arguments: *_Arguments) -> _Planned:
        current = _recording.get()
        key: list[object] = [current and current.family, torch._C._get_deterministic_algorithms()]
        if torch._C._is_any_autocast_enabled():
            key += [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
        try:
            for x in arguments:
                of = type(x)
                if of is Tensor or of is Parameter:
                    key.append((x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16))  # type: ignore[attr-defined]
                elif x is None or of in _KEYS or not isinstance(x, Tensor):
                    key.append(x)
                else:
                    return plan(*arguments)
        except RuntimeError:  # torch has no strides, or no address
            return plan(*arguments)
        known = plans.get(tuple(key))
        if known is None:
            known = compiled_launch.keep(plans, tuple(key), plan(*arguments))
        return known

    plan_once._torchdynamo_inline = plan  # type: ignore[attr-defined]  # torch.compile traces this instead
    return plan_once


def forget_plans() -> None:
    """Make `planned` call its plans again after configurations or the number of multiprocessors have changed."""
    for plans in _plans:
        plans.clear()


def launch(kernel: Any, grid: tuple[int, ...], *, num_warps: int, num_stages: int, **arguments: Any) -> None:
    """Run `kernel` over `grid` on the device of its first tensor, or record it. An empty grid does nothing."""
    if 0 in grid:
        return
    arguments = _traced(kernel, grid, arguments)
    current = _recording.get()
    if current is not None:
        current.launches.append(Launch(kernel, grid, arguments, num_warps, num_stages))
    elif INTERPRETED:
        first = next(x for x in arguments.values() if isinstance(x, Tensor))
        with torch.cuda.device_of(first):
            kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)
    else:
        compiled_launch.run(kernel, grid, arguments, num_warps, num_stages)
