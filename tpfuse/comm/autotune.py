"""autotune: the ranks of a group measure which implementation of an operation is the fastest here.

    with autotune(seconds=20) as tuning:
        train_step()                        # forward and backward, on every rank
    tuning.decisions                        # the decision for each case, with the times of all candidates

A case is an operation with its shapes, dtype, activation and number of ranks, as text. Within the block a case without
a decision is timed: every rank runs every candidate on the operation's own tensors, in the same order, and the time of
a candidate is the median of the slowest rank. The candidate that is taken without a measurement stays unless another
one is faster by more than `MARGIN`. If several groups of the job have the same case, they take the decision of the
group that decided first. A decision holds until the group ends, inside and outside of the block. Outside nothing is
timed, so that a capture, an evaluation or a generation does nothing that it did not do before.

A candidate is timed only if its first results are those of the usual one. The bound is that of `tpfuse verify`: the
operation is also computed in a wider dtype, which tells the error of the usual results.

Group rank 0 looks for a decision among those that the block is given (`known`: so a resumed run decides as before) and
in a file that keeps decisions for later runs. A decision in the file holds for one machine, which `machine` describes:
that of another machine, of other versions or of another table of tile sizes is not read.

A kernel that accesses memory it may not ends its process, whatever the host does. So the file also names the candidate
that runs for the first time. If a run ends there, later runs leave that candidate out until its entry is deleted.
"""

import contextlib
import ctypes
import hashlib
import itertools
import json
import math
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import triton

from tpfuse._version import __version__
from tpfuse.comm.comparison import Differs, FirstResults
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import Disagreement, PeerTimeout, Unavailable, named
from tpfuse.comm.host import cache_folder, processor, replace_file
from tpfuse.comm.rendezvous import exchange
from tpfuse.comm.settings import settings
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels.configurations import TABLE, specializes_warps

MARGIN = 0.02  # the part of its time by which another candidate must be faster than the usual one: less is noise
ROUNDS = 5  # Each round times every candidate once, so that a disturbance does not affect one candidate alone.
CALLS = 10  # calls in a row that are timed on a GPU: a single call is shorter than its launch overhead
_PERFORMANCE_RANK = 1  # a value of CUdevice_P2PAttribute

_TRIED = "being tried"  # the key of a machine's entry that is no case: the candidates that run for the first time

Candidates = Mapping[str, Callable[[], object]]
"""The functions that compute the operation, by name. Every rank runs them. They write to none of their operands.

Results are compared as the tensors in them, in order; a tuple or a list may have None for one that is not computed.
"""


@dataclass(frozen=True)
class Decision:
    """The candidate that is taken for a case."""

    taken: str
    # Milliseconds of a call of each candidate: the median of the slowest rank. Empty if no time was left for measuring.
    milliseconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the candidates with their times; the one that is taken comes first."""
        if not self.milliseconds:
            return f"{self.taken}, not measured"
        others = sorted((time, name) for name, time in self.milliseconds.items() if name != self.taken)
        times = [(self.milliseconds[self.taken], self.taken), *others]
        return ", ".join(f"{name} {time:.3g} ms" for time, name in times)


Decisions = Mapping[str, Decision]
"""The decision for each case."""


@dataclass
class Autotuning:
    """The state of an `autotune` block on this rank."""

    # The seconds after which no further case is timed.
    seconds: float
    # The decisions to take over.
    known: Decisions
    # The file that keeps decisions for later runs.
    file: Path
    # The decisions of this rank's groups.
    decisions: dict[str, Decision] = field(default_factory=dict)
    # The seconds that timing took.
    spent: float = 0.0
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
    decision = current.known.get(case)
    _agree(group, case, decision)
    if decision is None or decision.taken not in candidates:
        started = time.monotonic()
        decision, barred = _stored(group, device, case, candidates, usual, current)
        stored = decision is not None
        if decision is None:
            tried = {name: run for name, run in candidates.items() if name == usual or name not in barred}
            decision = _measured(group, device, case, tried, usual, exact, current)
        decision = _first_of_job(group, case, decision)
        if not stored and decision.milliseconds and group.rank() == 0:
            with suppress(OSError):  # If the folder cannot be written, the next run measures again.
                add_decisions(current.file, machine(device.type), {case: decision})
        current.spent += time.monotonic() - started
    current.decisions[case] = decision
    return decision


def _exchange(group: dist.ProcessGroup, value: Any, case: str) -> list[Any]:
    """Exchange values as `exchange` does, with a longer deadline.

    A candidate may have failed on one rank alone: then the other ranks have waited for it, and come that much later.
    """
    return exchange(group, value, f"measuring {case}", 3 * settings().timeout)


def _agree(group: dist.ProcessGroup, case: str, known: Decision | None) -> None:
    """Raise Disagreement if ranks come with different cases, or with different decisions of earlier runs."""
    text = case if known is None else f"{case} with {known.taken}"
    texts, ranks = _exchange(group, text, case), dist.get_process_group_ranks(group)
    for rank, other in zip(ranks, texts, strict=True):
        if other != texts[0]:
            raise Disagreement(f"{named(ranks[0])} measures {texts[0]!r}, {named(rank)} {other!r}")


def _stored(
    group: dist.ProcessGroup, device: torch.device, case: str, candidates: Candidates, usual: str, current: Autotuning
) -> tuple[Decision | None, list[str]]:
    """Return what group rank 0 reads in the file: (the decision, the candidates in which earlier runs have ended).

    The decision is the usual one if there is none and the time is over, None if it must be measured. Warn once of each
    candidate that is left out.
    """
    entry: Any = None
    if group.rank() == 0:
        name = machine(device.type)
        decision = read_decisions(current.file, name).get(case)
        if decision is None or decision.taken not in candidates:
            decision = Decision(usual) if current.spent >= current.seconds else None
        barred = {trial["candidate"]: trial["case"] for trial in _trials(_document(current.file).get(name), _job())}
        for candidate, where in barred.items():
            if decision is None and candidate in candidates and candidate not in current.barred:
                current.barred.add(candidate)
                warnings.warn(
                    f"{candidate} is not tried: a run ended while it computed {where} for the first time. To try it"
                    f" again, delete its entry in {_TRIED!r} of {current.file}",
                    stacklevel=2,
                )
        entry = None if decision is None else vars(decision), list(barred)
    found, names = _exchange(group, entry, case)[0]
    return None if found is None else Decision(**found), names


def _measured(
    group: dist.ProcessGroup,
    device: torch.device,
    case: str,
    candidates: Candidates,
    usual: str,
    exact: Callable[[], object],
    current: Autotuning,
) -> Decision:
    """Compare and time all candidates, and return the decision, which is the same on every rank.

    The decision is the usual one, without times, if there is nothing else to take or nothing to compare with.
    """
    if len(candidates) == 1:
        return Decision(usual)
    memory = None
    with suppress(Unavailable):
        memory = symmetric_memory(group, device)
    if memory is not None and memory not in current.memories:
        current.memories.append(memory)
    with contextlib.nullcontext() if memory is None else memory.trial():
        working = _working(group, device, case, candidates, usual, exact, current, memory)
        if not working:
            return Decision(usual)
        return _timed(group, device, case, {name: candidates[name] for name in working}, usual)


def _working(
    group: dist.ProcessGroup,
    device: torch.device,
    case: str,
    candidates: Candidates,
    usual: str,
    exact: Callable[[], object],
    current: Autotuning,
    memory: SymmetricMemory | None,
) -> list[str]:
    """Run each candidate once and return those whose results are right; none if nothing can be compared."""
    first = FirstResults(usual)
    error = _failure(partial(first.keep, candidates[usual]), device)
    if failure := _first_failure(group, error, device, case):
        raise RuntimeError(f"{case}: {failure.text}") if error is None else error
    if failure := _first_failure(group, _failure(partial(first.find_bounds, exact), device), device, case):
        _warn(group, f"{case}: {usual} is taken, since nothing can be compared with it: {failure.text}")
        return []
    working = [usual]
    with _Trials(group, device, case, current) as trials:
        for name in candidates:
            if name == usual:
                continue
            trials.note(name)
            error = _failure(partial(first.check, candidates[name]), device)
            failure = _first_failure(group, error, device, case)
            if failure is None:
                working.append(name)
                continue
            if failure.kind == "lost":
                raise _GpuLost(
                    f"{case}: {name} has made a GPU unusable, which ends this run; the next one leaves it out:"
                    f" {failure.text}"
                )
            if memory is not None and failure.kind != "differs":
                memory.reset()  # The candidate's waits may have been aborted.
            _warn(group, f"{case}: {name} is not taken: {failure.text}")
    return working


def _timed(group: dist.ProcessGroup, device: torch.device, case: str, working: Candidates, usual: str) -> Decision:
    """Time the candidates and return the decision."""
    samples: dict[str, list[float]] = {name: [] for name in working}
    for _ in range(ROUNDS):
        for name, run in working.items():
            samples[name].append(_milliseconds(run, device))
    medians = _exchange(group, {name: median(times) for name, times in samples.items()}, case)
    slowest = {name: max(times[name] for times in medians) for name in working}
    best = min(slowest, key=lambda name: slowest[name])
    return Decision(best if slowest[best] < (1 - MARGIN) * slowest[usual] else usual, slowest)


def _warn(group: dist.ProcessGroup, text: str) -> None:
    if group.rank() == 0:
        warnings.warn(text, stacklevel=3)


class _GpuLost(RuntimeError):
    """A candidate has made a GPU unusable."""


@dataclass(frozen=True)
class _Failure:
    """How a candidate failed, on the rank where it failed first.

    kind: "lost" if it has made the GPU unusable, "raised", "differs", or "waited" for a rank that did not come, which
    follows from another failure.
    """

    kind: str
    text: str


_KINDS = ("lost", "raised", "differs", "waited")


def _first_failure(
    group: dist.ProcessGroup, error: Exception | None, device: torch.device, case: str
) -> _Failure | None:
    """Exchange the errors of the ranks and return the first by kind, of differences the largest; None for no error."""
    kind = "raised"
    if isinstance(error, Differs):
        kind = "differs"
    elif isinstance(error, PeerTimeout):
        kind = "waited"
    elif error is not None and _is_lost(device):
        kind = "lost"
    text = str(error) if isinstance(error, Differs) else repr(error)
    entry = None if error is None else (_KINDS.index(kind), -getattr(error, "largest", 0.0), text)
    entries = enumerate(_exchange(group, entry, case))
    failures = sorted((number, size, rank, text) for rank, found in entries if found for number, size, text in [found])
    if not failures:
        return None
    number, _, rank, text = failures[0]
    return _Failure(_KINDS[number], f"on {named(dist.get_process_group_ranks(group)[rank])}: {text}")


def _is_lost(device: torch.device) -> bool:
    """Return whether the device does nothing any more, as after an illegal access."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


class _Trials:
    """The entry of the file that names the candidate that runs for the first time. Group rank 0 writes it.

    It is removed at the end of the context, also after an exception, unless a GPU is unusable or a rank does not come
    any more: the candidate may be the reason.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, case: str, current: Autotuning) -> None:
        self._first, self._case, self._file = group.rank() == 0, case, current.file
        self._machine, self._process = machine(device.type), f"{_job()} {dist.get_rank()}"

    def note(self, candidate: str | None) -> None:
        """Write that `candidate` is being tried, or that none is, in place of what this process wrote before."""
        if not self._first:
            return
        document = _document(self._file)
        entries = _entries(document, self._machine)
        trials = [trial for trial in entries.pop(_TRIED, []) if trial["process"] != self._process]
        if candidate is not None:
            trials.append({"candidate": candidate, "case": self._case, "process": self._process})
        if trials:
            entries[_TRIED] = trials
        with suppress(OSError):  # If the folder cannot be written, the next run tries the candidate again.
            replace_file(self._file, json.dumps(document, indent=1))

    def __enter__(self) -> "_Trials":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, _GpuLost | PeerTimeout):
            self.note(None)


@cache
def _token() -> str:
    return uuid.uuid4().hex


def _job() -> str:
    """Return an identifier of the job, the same on all of its ranks."""
    store = dist.distributed_c10d._get_default_store()
    return str(store.compare_set("tpfuse job", "", _token()).decode())


def _trials(entries: Any, job: str = "") -> list[dict[str, str]]:
    """Return what was being tried on a machine, by its entries in the file; without the trials of `job`, if given."""
    found = entries.get(_TRIED) if isinstance(entries, dict) else None
    trials = [trial for trial in found if isinstance(trial, dict)] if isinstance(found, list) else []
    keys = "candidate", "case", "process"
    trials = [trial for trial in trials if all(isinstance(trial.get(key), str) for key in keys)]
    return [trial for trial in trials if not job or not trial["process"].startswith(job)]


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


def _first_of_job(group: dist.ProcessGroup, case: str, decision: Decision) -> Decision:
    """Return the decision of the job's group that measured the case first, which may be this group's `decision`."""
    entry: Any = None
    if group.rank() == 0:
        store = dist.distributed_c10d._get_default_store()
        entry = json.loads(store.compare_set(f"tpfuse decision: {case}", "", json.dumps(vars(decision))))
    return Decision(**_exchange(group, entry, case)[0])


def default_file() -> Path:
    """Return the file that keeps decisions for later runs: `tpfuse/decisions.json` in the user's cache folder."""
    return cache_folder() / "decisions.json"


@cache
def machine(device_type: str) -> str:
    """Describe this machine for a device of type "cuda" or "cpu": devices, links between them, driver, versions."""
    table = hashlib.sha256(TABLE.read_bytes()).hexdigest()[:8]
    roles = "" if specializes_warps() else ", no specialized warps"
    versions = f"torch {torch.__version__}, triton {triton.__version__}, tpfuse {__version__}, tiles {table}{roles}"
    if device_type == "cuda":
        count = torch.cuda.device_count()
        names = sorted({torch.cuda.get_device_name(number) for number in range(count)})
        return f"{count} x {', '.join(names)}, links {_links(count)}, driver {driver()}, {versions}"
    return f"{os.cpu_count()} cores of {processor()}, {versions}"


def _links(count: int) -> str:
    """Return the classes of links between the first `count` GPUs by the driver's ranking: "0" is the fastest."""
    classes = set()
    with suppress(OSError, AttributeError):
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
        for one, other in itertools.permutations(range(count), 2):
            value = ctypes.c_int(-1)
            ask(ctypes.byref(value), _PERFORMANCE_RANK, one, other)
            classes.add(str(value.value))
    return "/".join(sorted(classes)) or "none"


def driver() -> str:
    """Return the version of CUDA that the driver supports; "?" if it does not answer."""
    version = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return str(version.value or "?")


def as_json(decisions: Decisions) -> dict[str, Any]:
    """Return the decisions in the form that `from_json` reads."""
    return {case: {"taken": d.taken, "milliseconds": dict(d.milliseconds)} for case, d in decisions.items()}


def from_json(cases: Any) -> dict[str, Decision]:
    """Return the decisions in a JSON value, without entries that are not decisions."""
    decisions = {}
    for case, entry in cases.items() if isinstance(cases, dict) else ():
        match entry:
            case {"taken": str(taken), "milliseconds": dict(times)} if taken in times or not times:
                if all(isinstance(name, str) and _is_time(time) for name, time in times.items()):
                    decisions[case] = Decision(taken, times)
    return decisions


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def read_decisions(file: Path, machine_name: str) -> dict[str, Decision]:
    """Return the decisions of a machine in a file; none if the file is damaged or does not exist."""
    return from_json(_document(file).get(machine_name))


def add_decisions(file: Path, machine_name: str, decisions: Decisions) -> None:
    """Add decisions to those in the file, in one rename. Raise OSError if the file cannot be written.

    If two processes add at the same time, the later one may lose what the earlier one added, which is then measured
    again.
    """
    document = _document(file)
    _entries(document, machine_name).update(as_json(decisions))
    replace_file(file, json.dumps(document, indent=1))


def _entries(document: dict[str, Any], machine_name: str) -> dict[str, Any]:
    """Return the entries of a machine in a document, without those that nothing can be read from."""
    found = document.get(machine_name)
    trials = _trials(found)
    entries = document[machine_name] = as_json(from_json(found)) | ({_TRIED: trials} if trials else {})
    return entries


def _document(file: Path) -> dict[str, Any]:
    """Return the file's entries by machine; none if the file is damaged or does not exist."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
