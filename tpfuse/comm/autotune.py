"""autotune: the ranks of a group measure which implementation of an operation is the fastest here.

    with autotune(seconds=20) as tuning:
        train_step()                        # forward and backward, on every rank
    tuning.decisions                        # the decision for each case, with the times of all candidates

A case is an operation with its shapes, dtype, activation and number of ranks, as text. Within the block a case without
a decision is timed: every rank runs every candidate on the operation's own tensors, in the same order, and the time of
a candidate is the median of the slowest rank. The candidate that is taken without a measurement stays unless another
one is faster by more than `MARGIN`. If several groups of the job have the same case, they take the decision of the
group that decided first. A decision holds until the group ends. Outside of such blocks nothing is timed.

A candidate is timed only if its first results are those of the usual one. The bound is that of `tpfuse verify`: the
operation is also computed in a wider dtype, which tells the error of the usual results.

Group rank 0 looks for a decision among those that the block is given (`known`: so a resumed run decides as before) and
in a file that keeps decisions for later runs (`tpfuse.comm.decisions`).
"""

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.comm.agreement import exchange
from tpfuse.comm.comparison import Differs, FirstResults
from tpfuse.comm.decisions import (
    TRIED,
    Decision,
    Decisions,
    GpuLost,
    Trials,
    add_decisions,
    default_file,
    ended_in,
    machine,
    read_decisions,
)
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import Disagreement, PeerTimeout, Unavailable, named
from tpfuse.comm.settings import settings
from tpfuse.comm.symmetric_memory import SymmetricMemory

MARGIN = 0.02  # a candidate must be this fraction faster; less is noise
ROUNDS = 5  # Each round times every candidate once, so that a disturbance does not affect one candidate alone.
CALLS = 10  # calls in a row that are timed on a GPU: a single call is shorter than its launch overhead

Candidates = Mapping[str, Callable[[], object]]
"""The functions that compute the operation, by name. Every rank runs them. They write to none of their operands.

Results are compared as the tensors in them, in order; a tuple or a list may have None for one that is not computed.
"""


@dataclass
class Autotuning:
    """The state of an `autotune` block on this rank."""

    seconds: float  # the seconds after which no further case is timed
    known: Decisions  # the decisions to take over
    file: Path  # the file that keeps decisions for later runs
    decisions: dict[str, Decision] = field(default_factory=dict)  # the decisions of this rank's groups
    spent: float = 0.0  # the seconds that timing took
    # The memories of the groups that timed a case, in the order of their first cases.
    memories: list[SymmetricMemory] = field(default_factory=list)
    # The candidates that are not tried because an earlier run ended in them, as far as a warning has named them.
    barred: set[str] = field(default_factory=set)


_current: Autotuning | None = None  # one for the process, since backward runs in threads of autograd


@contextlib.contextmanager
def autotune(
    seconds: float = 20.0, *, known: Decisions | None = None, file: str | Path | None = None
) -> Iterator[Autotuning]:
    """Time the operations in a with block whose implementation is `auto`, for at most about `seconds`.

    Every rank enters and leaves the block around the same operations. At its end the ranks free the memory that only
    candidates used that lost; a rank that leaves it by an exception does not. known: decisions to take over; file: the
    file that keeps decisions, by default that of `default_file`. Raise ValueError for seconds below 0, RuntimeError
    within another such block, PeerTimeout if another rank does not come to the end.
    """
    global _current
    if not seconds >= 0:
        raise ValueError(f"autotune: {seconds} seconds: expected 0 or more")
    if _current is not None:
        raise RuntimeError("autotune: this process is in such a block already")
    _current = tuning = Autotuning(seconds, dict(known or {}), default_file() if file is None else Path(file))
    try:
        yield tuning
    finally:
        _current = None
    for memory in tuning.memories:
        memory.close_unused_channels()


def is_autotuning() -> bool:
    """Return whether cases without a decision are timed now. They are not while a stream is captured."""
    return _current is not None and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def decide(
    group: dist.ProcessGroup,
    device: torch.device,
    case: str,
    candidates: Candidates,
    usual: str,
    exact: Callable[[], object],
) -> Decision:
    """Return the group's decision for a case, and measure if there is none. Collective; only if `is_autotuning`.

    usual: the candidate that is taken without a measurement. exact: computes the operation in a wider dtype, on every
    rank. Raise Disagreement if ranks come with different cases, PeerTimeout if one does not come, and any error that
    the usual candidate raises. Another candidate that raises, or whose results differ on one rank, is left out, with a
    warning; after an error the group's memory is reset. Raise RuntimeError if a candidate has made a GPU unusable.
    """
    current = _current
    assert current is not None
    asked = _Case(case, group, device, candidates, usual, exact, current)
    decision = current.known.get(case)
    asked.compare(decision)
    if decision is None or decision.taken not in candidates:
        started = time.monotonic()
        decision, barred = asked.stored()
        stored = decision is not None
        if decision is None:
            tried = {name: run for name, run in candidates.items() if name == usual or name not in barred}
            decision = replace(asked, candidates=tried).measured()
        decision = asked.first_of_job(decision)
        if not stored and decision.milliseconds and group.rank() == 0:
            with suppress(OSError):  # If the folder cannot be written, the next run measures again.
                add_decisions(current.file, machine(device.type), {case: decision})
        current.spent += time.monotonic() - started
    current.decisions[case] = decision
    return decision


# The kinds of a candidate's failure, of which the first counts: it has made the GPU unusable, raised, computed other
# results, or waited for a rank that did not come, which follows from another failure.
_KINDS = ("lost", "raised", "differs", "waited")
_Failure = tuple[str, str]  # its kind, and what is said of the rank where it failed first


@dataclass(frozen=True)
class _Case:
    """A case that a group decides, as `decide` takes it. Its methods are collective."""

    name: str
    group: dist.ProcessGroup
    device: torch.device
    candidates: Candidates
    usual: str
    exact: Callable[[], object]
    tuning: Autotuning

    def _exchange(self, value: Any) -> list[Any]:
        """Exchange values as `exchange` does, with a longer deadline.

        A candidate may have failed on one rank alone: then the other ranks have waited for it, and come that much
        later.
        """
        return exchange(value, self.group, op=f"measuring {self.name}", within=3 * settings().timeout)

    def compare(self, known: Decision | None) -> None:
        """Raise Disagreement if ranks come with different decisions of earlier runs, or with different cases."""
        text = self.name if known is None else f"{self.name} with {known.taken}"
        texts, ranks = self._exchange(text), dist.get_process_group_ranks(self.group)
        for rank, other in zip(ranks, texts, strict=True):
            if other != texts[0]:
                raise Disagreement(f"{named(ranks[0])} measures {texts[0]!r}, {named(rank)} {other!r}")

    def stored(self) -> tuple[Decision | None, list[str]]:
        """Return what group rank 0 reads in the file: (the decision, the candidates in which earlier runs have ended).

        The decision is the usual one if there is none and the time is over, None if it must be measured. Warn once of
        each candidate that is left out.
        """
        entry: Any = None
        if self.group.rank() == 0:
            tuning, place = self.tuning, machine(self.device.type)
            decision = read_decisions(tuning.file, place).get(self.name)
            if decision is None or decision.taken not in self.candidates:
                decision = Decision(self.usual) if tuning.spent >= tuning.seconds else None
            barred = ended_in(tuning.file, place)
            for candidate, where in barred.items():
                if decision is None and candidate in self.candidates and candidate not in tuning.barred:
                    tuning.barred.add(candidate)
                    warnings.warn(
                        f"{candidate} is not tried: a run ended while it computed {where} for the first time. To try it"
                        f" again, delete its entry in {TRIED!r} of {tuning.file}",
                        stacklevel=3,
                    )
            entry = None if decision is None else vars(decision), list(barred)
        found, names = self._exchange(entry)[0]
        return None if found is None else Decision(**found), names

    def measured(self) -> Decision:
        """Compare and time all candidates, and return the decision, which is the same on every rank.

        The decision is the usual one, without times, if there is nothing else to take or nothing to compare with.
        """
        if len(self.candidates) == 1:
            return Decision(self.usual)
        memory = None
        with suppress(Unavailable):
            memory = symmetric_memory(self.group, self.device)
        if memory is not None and memory not in self.tuning.memories:
            self.tuning.memories.append(memory)
        with contextlib.nullcontext() if memory is None else memory.trial():
            working = self._working(memory)
            return self._timed(working) if working else Decision(self.usual)

    def _working(self, memory: SymmetricMemory | None) -> list[str]:
        """Run each candidate once and return those whose results are right; none if nothing can be compared."""
        first = FirstResults(self.usual)
        error = _failure(partial(first.keep, self.candidates[self.usual]), self.device)
        if failure := self._first_failure(error):
            raise RuntimeError(f"{self.name}: {failure[1]}") if error is None else error
        if failure := self._first_failure(_failure(partial(first.find_bounds, self.exact), self.device)):
            self._warn(f"{self.usual} is taken, since nothing can be compared with it: {failure[1]}")
            return []
        working = [self.usual]
        with Trials(self.group, self.device, self.name, self.tuning.file) as trials:
            for name, run in self.candidates.items():
                if name == self.usual:
                    continue
                trials.note(name)
                failure = self._first_failure(_failure(partial(first.check, run), self.device))
                if failure is None:
                    working.append(name)
                    continue
                kind, text = failure
                if kind == "lost":
                    raise GpuLost(
                        f"{self.name}: {name} has made a GPU unusable, which ends this run; the next one leaves it out:"
                        f" {text}"
                    )
                if memory is not None and kind != "differs":
                    memory.reset()  # The candidate's waits may have been aborted.
                self._warn(f"{name} is not taken: {text}")
        return working

    def _timed(self, working: list[str]) -> Decision:
        """Time these candidates and return the decision."""
        samples: dict[str, list[float]] = {name: [] for name in working}
        for _ in range(ROUNDS):
            for name in working:
                samples[name].append(_milliseconds(self.candidates[name], self.device))
        medians = self._exchange({name: median(times) for name, times in samples.items()})
        slowest = {name: max(times[name] for times in medians) for name in working}
        best = min(slowest, key=lambda name: slowest[name])
        return Decision(best if slowest[best] < (1 - MARGIN) * slowest[self.usual] else self.usual, slowest)

    def _warn(self, text: str) -> None:
        if self.group.rank() == 0:
            warnings.warn(f"{self.name}: {text}", stacklevel=3)

    def _first_failure(self, error: Exception | None) -> _Failure | None:
        """Exchange the ranks' errors and return the first by kind, of differences the largest; None for no error."""
        kind = "raised"
        if isinstance(error, Differs):
            kind = "differs"
        elif isinstance(error, PeerTimeout):
            kind = "waited"
        elif error is not None and _is_lost(self.device):
            kind = "lost"
        text = str(error) if isinstance(error, Differs) else repr(error)
        rank = named(dist.get_rank())
        entry = None if error is None else (_KINDS.index(kind), -getattr(error, "largest", 0.0), rank, text)
        failures = [found for found in self._exchange(entry) if found]
        if not failures:
            return None
        number, _, rank, text = min(failures, key=lambda found: found[:2])
        return _KINDS[number], f"on {rank}: {text}"

    def first_of_job(self, decision: Decision) -> Decision:
        """Return the decision of the job's group that measured the case first, which may be this group's `decision`."""
        entry: Any = None
        if self.group.rank() == 0:
            store = dist.distributed_c10d._get_default_store()
            entry = json.loads(store.compare_set(f"tpfuse decision: {self.name}", "", json.dumps(vars(decision))))
        return Decision(**self._exchange(entry)[0])


def _is_lost(device: torch.device) -> bool:
    """Return whether the device does nothing any more, as after an illegal access."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _failure(run: Callable[[], object], device: torch.device) -> Exception | None:
    """Return the error that a candidate raises; None if it raises none."""
    try:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # The other ranks must be told of any error.
        return error
    return None


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of one call.

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
