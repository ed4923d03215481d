"""Decisions between candidates, and the file that keeps them for later runs.

A decision in the file holds for one machine, which `machine` describes: another machine, other versions or another
table of tile sizes do not read it.

A kernel that accesses memory it may not ends its process, whatever the host does. So the file also names the candidate
that runs for the first time. If a run ends there, later runs leave that candidate out until its entry is deleted.
"""

import ctypes
import hashlib
import itertools
import json
import math
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

from tpfuse._version import __version__
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.host import cache_folder, processor, replace_file
from tpfuse.kernels.configurations import TABLE

TRIED = "being tried"  # key of the candidates that are on their first run
_PERFORMANCE_RANK = 1  # a value of CUdevice_P2PAttribute


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


def default_file() -> Path:
    """Return the file that keeps decisions for later runs: `tpfuse/decisions.json` in the user's cache folder."""
    return cache_folder() / "decisions.json"


@cache
def machine(device_type: str) -> str:
    """Describe this machine for a device of type "cuda" or "cpu": devices, links between them, driver, versions."""
    table = hashlib.sha256(TABLE.read_bytes()).hexdigest()[:8]
    versions = f"torch {torch.__version__}, triton {triton.__version__}, tpfuse {__version__}, tiles {table}"
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
    """Return the decisions in a JSON value; other entries are left out."""
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
    """Return the readable entries of a machine in a document."""
    found = document.get(machine_name)
    trials = _trials(found)
    entries = document[machine_name] = as_json(from_json(found)) | ({TRIED: trials} if trials else {})
    return entries


def _document(file: Path) -> dict[str, Any]:
    """Return the file's entries by machine; none if the file is damaged or does not exist."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


class GpuLost(RuntimeError):
    """A candidate has made a GPU unusable."""


class Trials:
    """The entry of the file that names the candidate that runs for the first time. Group rank 0 writes it.

    It is removed at the end of the context, also after an exception, unless a GPU is unusable or a rank does not come
    any more: the candidate may be the reason.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, case: str, file: Path) -> None:
        self._first, self._case, self._file = group.rank() == 0, case, file
        self._machine, self._process = machine(device.type), f"{job()} {dist.get_rank()}"

    def note(self, candidate: str | None) -> None:
        """Write that `candidate` is being tried, or that none is, in place of what this process wrote before."""
        if not self._first:
            return
        document = _document(self._file)
        entries = _entries(document, self._machine)
        trials = [trial for trial in entries.pop(TRIED, []) if trial["process"] != self._process]
        if candidate is not None:
            trials.append({"candidate": candidate, "case": self._case, "process": self._process})
        if trials:
            entries[TRIED] = trials
        with suppress(OSError):  # If the folder cannot be written, the next run tries the candidate again.
            replace_file(self._file, json.dumps(document, indent=1))

    def __enter__(self) -> "Trials":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, GpuLost | PeerTimeout):
            self.note(None)


def ended_in(file: Path, machine_name: str) -> dict[str, str]:
    """Return the candidates in which runs of other jobs have ended on a machine, each with its case."""
    return {trial["candidate"]: trial["case"] for trial in _trials(_document(file).get(machine_name), job())}


def job() -> str:
    """Return an identifier of the job, the same on all of its ranks."""
    store = dist.distributed_c10d._get_default_store()
    return str(store.compare_set("tpfuse job", "", uuid.uuid4().hex).decode())


def _trials(entries: Any, job: str = "") -> list[dict[str, str]]:
    """Return what was being tried on a machine, by its entries in the file; without the trials of `job`, if given."""
    found = entries.get(TRIED) if isinstance(entries, dict) else None
    trials = [trial for trial in found if isinstance(trial, dict)] if isinstance(found, list) else []
    keys = "candidate", "case", "process"
    trials = [trial for trial in trials if all(isinstance(trial.get(key), str) for key in keys)]
    return [trial for trial in trials if not job or not trial["process"].startswith(job)]
