"""What torch.profiler records of some steps of one rank, and a snapshot of the memory that they allocate."""

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

_EVENTS = 200_000  # the last allocations that a snapshot keeps


class TorchProfile:
    """A context manager around the steps to record: it writes the files of this rank at the end, also after an error.

    FOLDER/rankN.json.gz is the trace, for ui.perfetto.dev. On GPUs FOLDER/rankN.memory.pickle is the snapshot of the
    memory, for pytorch.org/memory_viz; on CPUs the trace itself has the allocations.
    """

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        self._trace, self._snapshot = folder / f"rank{rank}.json.gz", folder / f"rank{rank}.memory.pickle"
        self._on_gpu = device.type == "cuda"
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=lambda step: ProfilerAction.RECORD,  # with a schedule, the trace has a range for each step
            record_shapes=True,
            profile_memory=not self._on_gpu,
        )

    def __enter__(self) -> "TorchProfile":
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
        self._profiler.start()
        return self

    def step(self) -> None:
        """Mark the end of a step and the beginning of the next one."""
        self._profiler.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write the files, and let an error of the steps go on. Raise OSError if they cannot be written."""
        self._profiler.stop()  # a process whose profiler still runs crashes at its end
        try:
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            if self._on_gpu:
                torch.cuda.memory._dump_snapshot(str(self._snapshot))  # type: ignore[no-untyped-call]
        finally:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler.export_chrome_trace(str(self._trace))
