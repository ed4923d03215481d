"""Measurement: the ranks of a group find out together which implementation of an operation is the fastest here.

    with measuring(seconds=20) as measurement:
        train_step()                        # forward and backward, on every rank
    measurement.decisions                   # the decision for each case, with the times of all candidates

Within the block an operation is timed if the group has no decision for its shapes: every rank runs every candidate on
the operation's own tensors, in the same order, and the time of a candidate is the median of the slowest rank. The
candidate that is taken without a measurement stays unless another one is faster by more than `MARGIN`. If several
groups of the job have the same case, they take the decision of the group that decided first. A decision holds until the
group ends, inside and outside of the block. Outside nothing is ever timed, so that a capture, an evaluation or a
generation does nothing that it did not do before.

Group rank 0 looks for a decision among those that the block is given (`known`: so a run that is resumed decides as
before) and in the file of `tpfuse.comm.decisions`, to which it also adds what was measured.
"""

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tpfuse.comm.connect import connect
from tpfuse.comm.decisions import Decision, Decisions, add_decisions, default_file, machine, read_decisions
from tpfuse.comm.errors import Disagreement, PeerTimeout, Unavailable, named
from tpfuse.comm.rendezvous import exchange
from tpfuse.comm.settings import settings

MARGIN = 0.02  # the part of its time by which another candidate must be faster than the usual one: less is noise
ROUNDS = 5  # Each round times every candidate once, so that a disturbance does not affect one candidate alone.
CALLS = 10  # the number of calls in a row that are timed on a GPU: one call is shorter than a launch takes

Candidates = Mapping[str, Callable[[], object]]
"""The functions that compute the operation, by name. Every rank runs them."""


@dataclass
class Measurement:
    """The state of a `measuring` block on this rank.

    seconds: the time after which no further case is timed; known: decisions to take over; file: the file that keeps
    decisions for later runs; decisions: the decisions of this rank's groups; spent: the seconds that timing took.
    """

    seconds: float
    known: Decisions
    file: Path
    decisions: dict[str, Decision] = field(default_factory=dict)
    spent: float = 0.0


_current: Measurement | None = None  # one for the process, since backward runs in threads of autograd
_decided: WeakKeyDictionary[dist.ProcessGroup, dict[str, Decision]] = WeakKeyDictionary()


@contextlib.contextmanager
def measuring(
    seconds: float = 20.0, *, known: Decisions | None = None, file: str | Path | None = None
) -> Iterator[Measurement]:
    """Times the operations in a with block whose implementation is `auto`, for at most about `seconds`.

    Every rank enters the block around the same operations. known: decisions to take over; file: the file that keeps
    decisions, by default that of `default_file`. Raises ValueError for seconds below 0, RuntimeError within another
    such block.
    """
    global _current
    if not seconds >= 0:
        raise ValueError(f"measuring: {seconds} seconds: expected 0 or more")
    if _current is not None:
        raise RuntimeError("measuring: this process is measuring already")
    _current = Measurement(seconds, dict(known or {}), default_file() if file is None else Path(file))
    try:
        yield _current
    finally:
        _current = None


def is_measuring() -> bool:
    """Returns whether cases without a decision are timed now. They are not while a stream is captured."""
    return _current is not None and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def decisions(group: dist.ProcessGroup) -> Decisions:
    """Returns the group's decisions."""
    return _decided.get(group, {})


def decide(group: dist.ProcessGroup, device: torch.device, case: str, candidates: Candidates, usual: str) -> Decision:
    """Returns the group's decision for a case, and measures if it has none. Collective; only if `is_measuring`.

    usual: the candidate that is taken without a measurement. Raises Disagreement if ranks come with different cases,
    PeerTimeout if one does not come, and any error that the usual candidate raises. Another candidate that raises is
    left out, with a warning, and the group's memory is reset after it.
    """
    by_case = _decided.setdefault(group, {})
    decision = by_case.get(case)
    if decision is not None:
        return decision
    current = _current
    assert current is not None
    decision = current.known.get(case)
    _agree(group, case, decision)
    if decision is None or decision.taken not in candidates:
        started = time.monotonic()
        decision = _stored(group, device, case, candidates, usual, current)
        stored = decision is not None
        if decision is None:
            decision = _measured(group, device, case, candidates, usual)
        decision = _first_of_job(group, case, decision)
        if not stored and group.rank() == 0:
            with contextlib.suppress(OSError):  # If the folder cannot be written, the next run measures again.
                add_decisions(current.file, machine(device.type), {case: decision})
        current.spent += time.monotonic() - started
    by_case[case] = current.decisions[case] = decision
    return decision


def _exchange(group: dist.ProcessGroup, value: Any, case: str) -> list[Any]:
    """Exchanges values as `exchange` does, with a longer deadline.

    A candidate may have failed on one rank alone: then the other ranks have waited for it, and come that much later.
    """
    return exchange(group, value, f"measuring {case}", 3 * settings().timeout)


def _agree(group: dist.ProcessGroup, case: str, known: Decision | None) -> None:
    """Raises Disagreement if ranks come with different cases, or with different decisions of earlier runs."""
    text = case if known is None else f"{case} with {known.taken}"
    texts, ranks = _exchange(group, text, case), dist.get_process_group_ranks(group)
    for rank, other in zip(ranks, texts, strict=True):
        if other != texts[0]:
            raise Disagreement(f"{named(ranks[0])} measures {texts[0]!r}, {named(rank)} {other!r}")


def _stored(
    group: dist.ProcessGroup, device: torch.device, case: str, candidates: Candidates, usual: str, current: Measurement
) -> Decision | None:
    """Returns the decision that group rank 0 reads in the file, else the usual one if the time is over, else None."""
    entry: Any = None
    if group.rank() == 0:
        decision = read_decisions(current.file, machine(device.type)).get(case)
        if decision is None or decision.taken not in candidates:
            decision = Decision(usual) if current.spent >= current.seconds else None
        entry = None if decision is None else [decision.taken, dict(decision.milliseconds)]
    entry = _exchange(group, entry, case)[0]
    return None if entry is None else Decision(entry[0], entry[1])


def _measured(
    group: dist.ProcessGroup, device: torch.device, case: str, candidates: Candidates, usual: str
) -> Decision:
    """Times all candidates and returns the decision, which is the same on every rank."""
    working = {}
    for name, run in candidates.items():
        error = _failure(run, device)  # This first run also compiles the kernels.
        failures = _exchange(group, [isinstance(error, PeerTimeout), "" if error is None else repr(error)], case)
        failures = sorted((waited, text) for waited, text in failures if text)  # A time-out comes after its cause.
        if not failures:
            working[name] = run
            continue
        if name == usual:
            raise RuntimeError(f"{case}: {failures[0][1]}") if error is None else error
        with contextlib.suppress(Unavailable):
            connect(group, device).reset()  # The candidate's waits may have been aborted.
        if group.rank() == 0:
            warnings.warn(f"{case}: {name} is not taken: {failures[0][1]}", stacklevel=2)
    samples: dict[str, list[float]] = {name: [] for name in working}
    for _ in range(ROUNDS):
        for name, run in working.items():
            samples[name].append(_milliseconds(run, device))
    medians = _exchange(group, {name: median(times) for name, times in samples.items()}, case)
    slowest = {name: max(times[name] for times in medians) for name in working}
    best = min(slowest, key=lambda name: slowest[name])
    return Decision(best if slowest[best] < (1 - MARGIN) * slowest[usual] else usual, slowest)


def _failure(run: Callable[[], object], device: torch.device) -> Exception | None:
    """Returns the error that a candidate raises; None if it raises none."""
    try:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # The other ranks must be told of any error.
        return error
    return None


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the milliseconds of one call.

    On a GPU it times calls in a row, so that the host runs ahead of the GPU as in training.
    """
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record(torch.cuda.current_stream(device))
    for _ in range(CALLS):
        run()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return float(begin.elapsed_time(end)) / CALLS


def _first_of_job(group: dist.ProcessGroup, case: str, decision: Decision) -> Decision:
    """Returns the decision of the job's group that measured the case first, which may be this group's `decision`."""
    entry: Any = None
    if group.rank() == 0:
        store = dist.distributed_c10d._get_default_store()
        ours = json.dumps([decision.taken, dict(decision.milliseconds)])
        entry = json.loads(store.compare_set(f"tpfuse decision: {case}", "", ours))
    taken, milliseconds = _exchange(group, entry, case)[0]
    return Decision(taken, milliseconds)
