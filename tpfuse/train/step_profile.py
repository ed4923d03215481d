"""Recordings of some steps of a run, for `tpfuse train --profile…`."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from tpfuse.trace.recording import kernels_compiled_for_traces, layer_spans, record, step_span
from tpfuse.train.config import profiled_steps
from tpfuse.train.messages import warn
from tpfuse.train.nvtx import NvtxRanges
from tpfuse.train.options import ProfileOptions

_EVENTS = 200_000  # the last allocations that a snapshot keeps


class StepProfile:
    """The profile of one rank's steps. All ranks make it and use it alike.

    As a context manager it stands around the whole training loop: a run that ends early, or by an error, writes what
    was recorded. A file that cannot be written is a warning, since training must go on. compiled: whether the steps run
    by torch.compile: its graphs have no layers, and would be compiled again if these were marked. trained: the steps
    that this start of the run trains.
    """

    def __init__(
        self,
        options: ProfileOptions,
        model: nn.Module,
        layout: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        device: torch.device,
        compiled: bool,
        trained: range,
    ) -> None:
        self._options, self._layout = options, layout
        self._model = None if compiled else model  # whose layers are marked
        self._group, self._device = group, device
        self._wanted = bool(options.trace or options.torch) or (options.nvtx and device.type == "cuda")
        named = profiled_steps(options.steps)
        self._steps = range(max(named.start, trained.start), min(named.stop, trained.stop)) or range(0)
        if self._wanted and self._steps != named and (group is None or group.rank() == 0):
            warn(
                f"--profile.steps {options.steps}: {len(self._steps)} of {len(named)} steps are recorded, since this"
                f" start trains the run from step {trained.start - 1} to step {trained.stop - 1}"
            )
        self._torch: profile | None = None  # while it records
        self._whole = contextlib.ExitStack()  # of all steps
        self._stack = contextlib.ExitStack()  # of the steps to profile

    def __enter__(self) -> None:
        if self._options.nvtx:
            rank, world = (0, 1) if self._group is None else (self._group.rank(), self._group.size())
            self._whole.enter_context(NvtxRanges().shown(rank, world, self._layout))
            if self._model is not None:
                self._whole.enter_context(layer_spans(self._model))

    def __exit__(self, *_: object) -> None:
        self._finish()
        self._whole.close()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record step `number` if it is one of those to profile."""
        if self._wanted and number == self._steps.start:
            self._begin()
        elif self._torch is not None:
            self._torch.step()
        before = self._options.trace is not None and number == self._steps.start - 1
        with kernels_compiled_for_traces() if before else contextlib.nullcontext(), step_span(number):
            yield
        if number + 1 == self._steps.stop:
            self._finish()

    def _begin(self) -> None:
        if self._options.nvtx and self._device.type == "cuda":
            self._stack.enter_context(_captured(self._device))
        if self._options.torch is not None:
            rank = 0 if self._group is None else self._group.rank()
            self._torch = self._stack.enter_context(torch_profile(self._options.torch, rank, self._device))
        if self._options.trace is not None:
            model = None if self._options.nvtx else self._model  # else each layer would have two spans
            self._stack.enter_context(record(self._options.trace, model, self._group, self._device, self._layout))

    def _finish(self) -> None:
        try:
            self._stack.close()
        except OSError as error:
            warn(f"cannot write the profile: {error}")
        self._torch = None


@contextlib.contextmanager
def _captured(device: torch.device) -> Iterator[None]:
    """Let Nsight Systems and Nsight Compute record the work of the GPU within the block, if they wait to be told."""
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def torch_profile(folder: Path, rank: int, device: torch.device) -> Iterator[profile]:
    """Record the steps in the block by torch.profiler, whose `step` marks their ends, and write the files of a rank.

    They are written after an error of a step too. FOLDER/rankN.json.gz is the trace, for ui.perfetto.dev. On GPUs
    FOLDER/rankN.memory.pickle is a snapshot of the memory, for pytorch.org/memory_viz; on CPUs the trace itself has the
    allocations. Raise OSError if they cannot be written.
    """
    on_gpu = device.type == "cuda"
    profiler = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        schedule=lambda step: ProfilerAction.RECORD,  # with a schedule, the trace has a range for each step
        record_shapes=True,
        profile_memory=not on_gpu,
    )
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
    profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()  # a process whose profiler still runs crashes at its end
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if on_gpu:
                torch.cuda.memory._dump_snapshot(str(folder / f"rank{rank}.memory.pickle"))  # type: ignore[no-untyped-call]
        finally:
            if on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
