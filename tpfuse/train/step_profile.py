"""What `tpfuse train --profile…` records of some steps of a run."""

import contextlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tpfuse.comm import trace
from tpfuse.parallel.tracing import record_trace
from tpfuse.train.messages import warn
from tpfuse.train.options import ProfileOptions
from tpfuse.train.step_numbers import profiled_steps


class StepProfile:
    """The profile of one rank's steps. All ranks make it and use it alike.

    As a context manager it stands around the whole training loop: a run that ends early, or by an error, writes what
    was recorded. A file that cannot be written is a warning, since training must go on.
    """

    def __init__(
        self,
        options: ProfileOptions,
        model: nn.Module,
        layout: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._options, self._model, self._layout = options, model, layout
        self._group, self._device = group, device
        self._steps = profiled_steps(options.steps)
        self._wanted = options.trace is not None
        self._stack = contextlib.ExitStack()
        self._running = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finish()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records step `number` if it is one of those to profile."""
        if self._wanted and number == self._steps.start:
            self._begin()
        with trace.span("step", f"step {number}"):
            yield
        if number == self._steps[-1]:
            self._finish()

    def _begin(self) -> None:
        assert self._options.trace is not None
        self._stack.enter_context(
            record_trace(self._options.trace, self._model, self._group, self._device, self._layout)
        )

    def _finish(self) -> None:
        try:
            self._stack.close()
        except OSError as error:
            warn(f"cannot write the profile: {error}")
