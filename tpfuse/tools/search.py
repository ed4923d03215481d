"""The search for the best row of configurations.toml, over the trials that choose it, with any means of measurement.

The search goes step by step (`search_space`): it inspects each candidate, compares its results with float64 as the
tests do, and times it. A candidate of gemm with PING_PONG, which `tpfuse.ops.gemm` would prefer to plain torch, must be
faster than plain torch too.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

import torch
from torch import Tensor

from tpfuse.errors import RunError
from tpfuse.kernels.configurations import Configuration, override
from tpfuse.testing.compare import unwritten_memory_is_nan
from tpfuse.tools.operator import Trial, check_rounding
from tpfuse.tools.search_space import Step, candidates

Inspect = Callable[[Sequence[Configuration], Sequence[Trial]], list[str]]
Measure = Callable[[Callable[[], object]], float]
_GAIN = 0.98  # of the present time: a smaller gain is noise, and the present row stays
_HOPELESS = 1.25  # times the present time at one trial: the candidate's other trials are skipped


@dataclass(frozen=True)
class Tuner:
    """The means of the search; tests pass their own.

    inspect: returns for each candidate the reason why it must not be run, or "" if it may be run. measure: returns the
    seconds of a call.
    """

    device: torch.device
    dtype: torch.dtype
    inspect: Inspect
    measure: Measure
    say: Callable[[str], None]
    place: str  # the device, date and Triton, for the row's `measured`
    deadline: float = float("inf")  # seconds, by time.monotonic


class Search:
    """The search for one row, over the trials that choose it."""

    def __init__(self, tuner: Tuner, fitting: Sequence[Trial]) -> None:
        self._tuner, self._trials = tuner, fitting
        self._inputs = [trial.shape.drawn(tuner.device, tuner.dtype) for trial in fitting]
        self._plain = [trial.plain(**x) for trial, x in zip(fitting, self._inputs, strict=True)]
        self._truth = [trial.plain(**widened(x)) for trial, x in zip(fitting, self._inputs, strict=True)]

    def best(self, row: Configuration, steps: Sequence[Step]) -> Configuration | None:
        """Return the best row, with `measured` filled in, or None if no row works.

        Where the present row does not work, the others are compared with the first one that does.
        """
        result = self._times(row, None)
        if isinstance(result, str):
            self._tuner.say(f"  {brief(row)}: the present row does not work, {result}")
        best, times = row, None if isinstance(result, str) else result
        present = times
        for step in steps:
            tried = [candidate for candidate in candidates(best, step) if candidate != best]
            for candidate, reason in zip(tried, self._tuner.inspect(tried, self._trials), strict=True):
                if monotonic() > self._tuner.deadline:
                    break
                result = reason or self._times(candidate, present)
                if isinstance(result, str):
                    self._tuner.say(f"  {brief(candidate)}: skipped, {result}")
                    continue
                if present is None or times is None:
                    self._tuner.say(f"  {brief(candidate)}: works, and is the present row from here on")
                    best, times, present = candidate, result, result
                    continue
                replaces_torch = candidate.operator == "gemm" and candidate.blocks.get("PING_PONG")
                if replaces_torch and _ratio(result, self._plain_times()) >= _GAIN:
                    self._tuner.say(
                        f"  {brief(candidate)}: skipped, plain torch, in whose place it would be, is as fast"
                    )
                    continue
                ratio = _ratio(result, present)
                self._tuner.say(f"  {brief(candidate)}: {ratio:.3f} of the present time")
                if ratio < min(_GAIN, _ratio(times, present)):
                    best, times = candidate, result
        return None if times is None else replace(best, measured=self._measured(times))

    def _measured(self, times: Sequence[float]) -> str:
        return f"{self._tuner.place}, {self._trials[0].speed(times[0])}"

    def _times(self, row: Configuration, present: Sequence[float] | None) -> list[float] | str:
        """Return the seconds at each trial, or the reason why there are none."""
        times: list[float] = []
        try:
            with override(row):
                for index, trial in enumerate(self._trials):
                    self._check(index)
                    times.append(self._tuner.measure(partial(trial.run, **copies(self._inputs[index]))))
                    if present is not None and times[-1] > _HOPELESS * present[index]:
                        return f"{times[-1] / present[index]:.2f} of the present time at {trial.name}"
        except Exception as error:
            _check_device(self._tuner.device, error)
            return one_line(error)
        return times

    def _plain_times(self) -> list[float]:
        """Return the seconds of plain torch at each trial."""
        calls = zip(self._trials, self._inputs, strict=True)
        return [self._tuner.measure(partial(trial.plain, **copies(given))) for trial, given in calls]

    def _check(self, index: int) -> None:
        """Raise AssertionError if a result differs from float64 by more than the tests allow."""
        with unwritten_memory_is_nan():
            outputs = self._trials[index].run(**copies(self._inputs[index]))
        for number, actual in enumerate(outputs):
            check_rounding(f"output {number}", actual, self._plain[index][number], self._truth[index][number])


def copies(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies with the same strides, for launchers that write over their inputs."""
    return {name: x.clone() for name, x in inputs.items()}


def widened(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def _ratio(times: Sequence[float], present: Sequence[float]) -> float:
    return statistics.geometric_mean([a / b for a, b in zip(times, present, strict=True)])


def brief(row: Configuration) -> str:
    values = " ".join(f"{name}={value}" for name, value in row.blocks.items())
    return f"{values} num_warps={row.num_warps} num_stages={row.num_stages}"


def one_line(error: BaseException) -> str:
    """Return an exception as a cell of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _check_device(device: torch.device, error: Exception) -> None:
    """Raise RunError if an error has made the device unusable: no later measurement would be possible."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception:
            raise RunError(f"a candidate took the device down: {one_line(error)}; finished rows are kept") from error
