"""Starts the operators' launches both by Triton's `kernel[grid](…)` and by `tpfuse.kernels.compiled_launch`.

    python tests/kernels/compare_launches.py gemm adamw

Nothing is compiled and nothing runs: compiler and driver are stand-ins, which record the arguments with which a
compiled kernel is started. Each launch of the operators (`tpfuse.tools.operators`) is compared as it is. Once for each
kernel and types of its arguments, it is also compared with one argument after another changed to a value for which
Triton may compile again. Launchers that plan their calls are compared with themselves, planned again for each call. The
program prints, as JSON, the number of launches of each kernel, and all differences. It needs a Python that does not
interpret kernels.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.compiler
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from tpfuse.kernels import launch
from tpfuse.kernels.activation_backward import activation_backward
from tpfuse.kernels.all_gather_gemm import all_gather_gemm_forward
from tpfuse.kernels.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_backward_,
    cross_entropy_combine,
    cross_entropy_forward,
)
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.gemm_reduce_scatter import gemm_reduce_scatter_forward
from tpfuse.kernels.launch import Launch
from tpfuse.kernels.layer_norm import norm_forward
from tpfuse.kernels.layer_norm_backward import norm_backward
from tpfuse.tools import operators

_INTEGERS = (1, 2, 16, 17, 2**31 - 1, 2**31, 2**63)
_UNALIGNED = {dtype: torch.empty(32, dtype=dtype)[1:] for dtype in (torch.bfloat16, torch.float32, torch.int32)}
started: list[tuple[Any, ...]] = []
bound: list[Any] = []  # the kernels for which Triton's binder was called


class Driver:
    """A driver of a device that CPU tensors and meta tensors are on."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, device: int) -> int:
        return 7


class Compiled(CompiledKernel):
    """The result of the compiler, without code."""

    def __init__(self, source: Any, options: dict[str, Any]) -> None:
        self.source, self.options = source, options
        self.module, self.function, self.packed_metadata = None, id(self), (options["num_warps"], 1, 0)
        self.metadata = SimpleNamespace(global_scratch_size=0)

    @property
    def run(self) -> Any:
        return self._note

    def _note(self, x: int, y: int, z: int, stream: int, function: int, packed: object, *rest: Any) -> None:
        _metadata, _enter, _leave, *values = rest
        started.append((self, (x, y, z), stream, function, packed, values))

    def launch_metadata(self, grid: object, stream: int, *values: object) -> None:
        return None


def _stand_in() -> None:
    triton.runtime.driver.set_active(Driver())
    triton.compiler.compile = lambda source, target, options: Compiled(source, options)
    run = JITFunction.run

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        bound.append(self)
        return run(self, *arguments, **named)

    JITFunction.run = counted


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and one == other)


def _differences(x: Launch) -> Iterator[str]:
    """Yield the differences between Triton's own launch and the second launch of its kind, which no binder sees."""
    name = x.kernel.__name__
    launches = {
        "Triton's": lambda: x.kernel[x.grid](**x.arguments, num_warps=x.num_warps, num_stages=x.num_stages),
        "first": lambda: launch.launch(x.kernel, x.grid, num_warps=x.num_warps, num_stages=x.num_stages, **x.arguments),
    }
    started.clear()
    for call in launches.values():
        call()
    before = len(bound)
    launches["first"]()
    if len(bound) != before:
        yield f"{name}: the binder was called again"
    expected, *others = started
    for other in others:
        if other[0] is not expected[0]:
            yield f"{name}: another compiled kernel"
        elif other[1:-1] != expected[1:-1]:
            yield f"{name}: started with {other[1:-1]}, not {expected[1:-1]}"
        elif not all(map(_same, other[-1], expected[-1])) or len(other[-1]) != len(expected[-1]):
            yield f"{name}: arguments {other[-1]}, not {expected[-1]}"
    if len(started) != 3:
        yield f"{name}: started {len(started)} times, not 3 times"


def _variants(x: Launch) -> Iterator[Launch]:
    """Yield the launch with one argument changed at a time."""
    for parameter in x.kernel.params:
        value = x.arguments[parameter.name]
        others: list[Any] = []
        if isinstance(value, Tensor):
            tensors = sum(isinstance(other, Tensor) for other in x.arguments.values())
            others = [_UNALIGNED[torch.bfloat16], _UNALIGNED[torch.int32], *([None] if tensors > 1 else [])]
            others += [_UNALIGNED[torch.float32], torch.empty(16)]
        elif parameter.is_constexpr:
            others = [not value] if isinstance(value, bool) else [value + 1] if isinstance(value, int) else ["other"]
        elif type(value) is int:
            others = list(_INTEGERS)
        elif isinstance(value, float):
            others = [1.0, 0.0, -0.0]
        for other in others:
            yield Launch(x.kernel, x.grid, {**x.arguments, parameter.name: other}, x.num_warps, x.num_stages)
    yield Launch(x.kernel, x.grid, x.arguments, 2 * x.num_warps, x.num_stages)
    yield Launch(x.kernel, x.grid, x.arguments, x.num_warps, x.num_stages + 1)
    yield Launch(x.kernel, (x.grid[0] + 1, *x.grid[1:]), x.arguments, x.num_warps, x.num_stages)


def _laid_out(*shape: int, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of this shape: contiguous twice, with other strides, transposed, and at an odd address."""
    *rows, columns = shape
    tensors = [torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)]
    tensors += [torch.empty(*rows, 2 * columns, dtype=dtype)[..., :columns]]
    tensors += [torch.empty(*rows, 2 * columns, dtype=dtype)[..., ::2]]
    tensors += [torch.empty(columns, *rows, dtype=dtype).movedim(0, -1)]
    return [*tensors, torch.empty(tensors[0].numel() + 1, dtype=dtype)[1:].view(shape)]


def _endpoints(world: int) -> list[Endpoint]:
    """Return endpoints of two ranks, and one that may start fewer programs."""
    tables, words = torch.empty(2, world, dtype=torch.int64), torch.empty(4, dtype=torch.int32)
    cases = [(0, 132), (1, 132), (1, 66)]
    return [
        Endpoint(rank, world, tables[0], 2**20, tables[1], 8 * world, words[:2], words[2:3], programs=programs)
        for rank, programs in cases
    ]


def _calls() -> Iterator[partial[Any]]:
    """Yield calls of the launchers that plan, with one argument after another in all layouts."""
    m, n, k, world = 64, 128, 256, 4
    for dtype, activation in ((torch.bfloat16, "gelu"), (torch.float32, "gelu"), (torch.bfloat16, "swiglu")):
        width = n // 2 if activation == "swiglu" else n
        given = {"x": (m, k), "weight": (n, k), "bias": (n,), "residual": (m, width)}
        tensors = {name: _laid_out(*shape, dtype=dtype) for name, shape in given.items()}
        plain: dict[str, Any] = {name: layouts[0] for name, layouts in tensors.items()}
        varied = [plain | {name: x} for name, layouts in tensors.items() for x in [*layouts, None] if name != "x"]
        varied = [x for x in varied if x["weight"] is not None] + [plain | {"x": x} for x in tensors["x"]]
        for arguments, keep in itertools.product(varied, (False, True)):
            yield partial(gemm_forward, **arguments, activation=activation, keep_preactivation=keep)
        yield partial(gemm_forward, **(plain | {"x": plain["x"][:63], "residual": None}), activation=activation)
        ready = torch.zeros(2 * world, dtype=torch.int32)
        gathered = torch.empty(world, m, k, dtype=dtype)
        for endpoint, arguments in itertools.product(_endpoints(world), varied):
            product = {name: x for name, x in arguments.items() if name != "residual"}
            for copied, keep_own in ((False, False), (False, True), (True, False)):
                yield partial(
                    all_gather_gemm_forward, **product, gathered=gathered, ready=ready, endpoint=endpoint,
                    activation=activation, keep_own=keep_own, copied=copied,
                )  # fmt: skip
            if activation != "swiglu":
                added = arguments["residual"]
                rows = None if added is None else added[: m // world]
                yield partial(_alone, gemm_reduce_scatter_forward, **product, endpoint=endpoint, residual=rows)


def _varied(given: dict[str, tuple[tuple[int, ...], torch.dtype]], *optional: str) -> Iterator[dict[str, Any]]:
    """Yield tensors of these shapes and dtypes, with one after another in all layouts, and without an optional one."""
    layouts = {name: _laid_out(*shape, dtype=dtype) for name, (shape, dtype) in given.items()}
    plain: dict[str, Any] = {name: tensors[0] for name, tensors in layouts.items()}
    for name, tensors in layouts.items():
        for x in [*tensors, *([None] if name in optional else [])]:
            yield plain | {name: x}


def _row_calls() -> Iterator[partial[Any]]:
    """Yield calls of the launchers of norms, gradients of activations and cross entropy, as `_calls` does."""
    m, n, wide = 64, 128, 50257
    half, single = torch.bfloat16, torch.float32
    for centered, columns in ((True, n), (False, n), (True, wide)):
        of_row = {"weight": ((columns,), single), "bias": ((columns,), single)}
        rows, numbers = ((m, columns), half), ((m,), single)
        for given in _varied({"x": rows, **of_row}, "bias"):
            yield partial(norm_forward, **given, eps=1e-5, centered=centered)
        statistics = {"mean": numbers, "rstd": numbers}
        read = {"grad_out": rows, "x": rows, "weight": of_row["weight"], **statistics, "added": rows}
        for given in _varied(read, "mean", "added"):
            for wanted in ((True, True, True), (False, True, True), (True, False, True), (True, True, False)):
                flags = dict(zip(("with_bias", "with_x", "with_weight"), wanted, strict=True))
                yield partial(norm_backward, **given, **flags)
    for activation, width in (("gelu", n), ("swiglu", 2 * n)):
        for given in _varied({"grad": ((m, n), half), "preactivation": ((m, width), half)}):
            for with_sums in (False, True):
                yield partial(activation_backward, **given, activation=activation, with_sums=with_sums)
    target = {"target": ((m,), torch.int64)}
    logits = [torch.empty(m, wide, dtype=half), torch.empty(m, wide + 15, dtype=half)[:, :wide]]
    for given, x, start in itertools.product(_varied(target), logits, (0, wide)):
        yield partial(_alone, cross_entropy_forward, logits=x, start=start, **given)
    for given in _varied({"statistics": ((4, 3, m), single), **target}):
        yield partial(cross_entropy_combine, vocabulary=wide, **given)
    tensors = {**target, "normalizer": ((2, m), single), "scale": ((m,), single)}
    for given, x in itertools.product(_varied(tensors, "scale"), logits):
        for function in (cross_entropy_backward, cross_entropy_backward_):
            yield partial(_alone, function, logits=x, start=0, **given)


def _alone(function: Any, **arguments: Any) -> tuple[Tensor]:
    return (function(**arguments),)


def _described(call: Any) -> tuple[object, ...]:
    """Describe what a call starts.

    Tensors are described by their layout and by their role in the call: an argument, a result or neither.
    """
    started.clear()
    tensors = [*call(), *call.keywords.values()]
    argument_indices = {x.data_ptr(): index for index, x in enumerate(tensors) if isinstance(x, Tensor)}

    def described(x: object) -> object:
        return (x.dtype, x.shape, x.stride(), argument_indices.get(x.data_ptr())) if isinstance(x, Tensor) else x

    return tuple((id(each), *rest, tuple(map(described, values))) for each, *rest, values in started)


def _plans() -> Iterator[str]:
    calls = [*_calls(), *_row_calls()]
    first_round = [_described(call) for call in calls]
    before = len(bound)
    second_round = [_described(call) for call in calls]
    if len(bound) != before:
        yield "plans: the binder was called again"
    for number, (call, first, second) in enumerate(zip(calls, first_round, second_round, strict=True)):
        launch.forget_plans()
        replanned = _described(call)
        if not first == second == replanned:
            yield f"plans: call {number}: {first} and {second}, not {replanned}"


def main() -> None:
    _stand_in()
    launch._gpus[torch.device("cpu")] = "sm_90", 132
    kernels: dict[str, int] = {}
    wrong: list[str] = []
    varied: set[tuple[Any, ...]] = set()
    for operator in sys.argv[1:]:
        with launch.recording("sm_90") as recording:
            operators.load(operator).launches(torch.bfloat16)
        for recorded in recording.launches:
            form = recorded.kernel.__name__, *map(type, recorded.arguments.values())
            more = [] if form in varied else list(_variants(recorded))
            varied.add(form)
            # A launch must not change the launches after it: in the second round the tables are full.
            for x in [recorded, *more, recorded, *more]:
                wrong += _differences(x)
                kernels[x.kernel.__name__] = kernels.get(x.kernel.__name__, 0) + 1
    wrong += _plans()
    print(json.dumps({"triton": triton.__version__, "kernels": kernels, "wrong": wrong}))


if __name__ == "__main__":
    main()
