"""Traces of a model's steps: the spans of its layers, and the file that each rank writes for `tpfuse profile`."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tpfuse.comm import trace
from tpfuse.comm.host import node_identity, replace_file
from tpfuse.comm.mesh import default_group
from tpfuse.kernels.trace import KernelTrace
from tpfuse.trace.clock import clock_offset

_HOOKED = "tpfuse layer"  # a key in the metadata of nodes of autograd's graph


def kernels_compiled_for_traces() -> AbstractContextManager[object]:
    """Return a context manager in which fused kernels are compiled as `record` needs them.

    A step in it, before those to record, keeps the seconds of the compiler out of the trace.
    """
    return KernelTrace()


@contextlib.contextmanager
def record(
    folder: str | Path,
    model: nn.Module | None = None,
    group: dist.ProcessGroup | Literal["default"] | None = "default",
    device: torch.device | None = None,
    layout: Mapping[str, Any] | None = None,
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Record what this rank does within the block, and write it to FOLDER/rankN.json. Collective over `group`.

        with tpfuse.profile.record("trace", model, dist.group.WORLD) as step:
            for batch in batches:
                with step():
                    ...

    `tpfuse profile summary FOLDER` explains the files of all ranks. model: whose layers get spans; None for no layers.
    group: all ranks, by default torch's default group if it is initialised; None for a single one. device: where the
    model computes, default the CPU. layout: how the ranks share the model, for the reader. Each group needs a folder of
    its own. If the block raises, the file has the steps that ended; that of an earlier recording is deleted
    first. Raise OSError if it cannot be written.
    """
    device = torch.device("cpu") if device is None else device
    group = default_group() if group == "default" else group
    rank = 0 if group is None else group.rank()
    path = Path(folder) / f"rank{rank}.json"
    with contextlib.suppress(OSError):
        path.unlink()  # else it stays beside the new files of the other ranks, if this rank dies
    offset, error = clock_offset(group, device)
    kernels = KernelTrace()
    recorder = trace.Recorder(device, kernels)
    try:
        numbers = itertools.count(1)
        with kernels, trace.observed(recorder), contextlib.nullcontext() if model is None else layer_spans(model):
            yield lambda: step_span(next(numbers))
    finally:
        recorder.finish()
        document = {
            "format": trace.FORMAT,
            "rank": rank,
            "group": [0] if group is None else dist.get_process_group_ranks(group),
            "host": node_identity(),
            "device": device.type,
            "layout": dict(layout or {}),
            "clock_offset_ns": offset,
            "clock_error_ns": error,
            "spans": [astuple(span) for span in recorder.ended],
            "signals": recorder.signals,
            "launches": recorder.launches,
            "untraced": kernels.untraced,
        }
        replace_file(path, json.dumps(document))


@contextlib.contextmanager
def step_span(number: int) -> Iterator[None]:
    """Mark a step. One that ends by an error becomes a phase: its time says nothing about whole steps."""
    begun = trace.begin("step", f"step {number}")
    try:
        yield
    except BaseException:
        if begun is not None:
            begun.kind = "phase"
        raise
    finally:
        trace.end(begun)


@contextlib.contextmanager
def layer_spans(model: nn.Module) -> Iterator[None]:
    """Mark a span for each call of a module of `model`, and for each module's part of the backward pass.

    A module's part of a backward pass begins when the gradient of its output is there, and ends when another module's
    begins. Graphs that torch.compile has made have no such parts: the spans of their operators have no layer.
    """
    layers = _Layers()
    handles: list[Any] = []
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            handles.append(module.register_forward_pre_hook(layers.before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(layers.after(name), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Layers:
    """The spans of the modules that are being called, and of the module whose backward pass runs."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, trace.Span | None]] = []
        self._backward: trace.Span | None = None

    def before(self, name: str) -> Callable[..., None]:
        """Return a hook for the beginning of the module's calls."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return
            outer = self._calls[-1][0] if self._calls else ""
            self._mark_backward((args, kwargs), outer)  # there the module's own part ends
            self._calls.append((name, trace.begin("layer", name)))

        return hook

    def after(self, name: str) -> Callable[..., None]:
        """Return a hook for the end of the module's calls."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            while not torch.compiler.is_compiling() and self._calls:
                called, begun = self._calls.pop()  # after an error inside, the modules inside have not ended
                trace.end(begun)
                if called == name:
                    self._mark_backward(output, name)
                    return

        return hook

    def _mark_backward(self, tensors: Any, name: str) -> None:
        """Let the backward pass of module `name` begin when it comes to the nodes that have made `tensors`."""
        for tensor in tree_leaves(tensors):
            node: Any = tensor.grad_fn if isinstance(tensor, Tensor) else None
            if node is not None and _HOOKED not in node.metadata:  # else an inner module, or the one before, ends there
                node.metadata[_HOOKED] = name
                node.register_prehook(lambda gradients: self._begin_backward(name))

    def _begin_backward(self, name: str) -> None:
        trace.end(self._backward)
        self._backward = trace.begin("layer", name) if name else None
