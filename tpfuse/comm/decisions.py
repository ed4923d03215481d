"""Decisions: the implementation that a machine's ranks take for each case, and the file that keeps them for later runs.

A case is an operation with its shapes, dtype, activation and number of ranks, as text. A decision holds for one
machine, which `machine` describes: a decision of another machine, of other versions or of another table of tile sizes
is not read.
"""

import ctypes
import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

import tpfuse
from tpfuse.comm.host import cache_folder, processor, replace_file
from tpfuse.kernels.configurations import TABLE

_PERFORMANCE_RANK = 1  # a value of CUdevice_P2PAttribute


@dataclass(frozen=True)
class Decision:
    """The candidate that is taken for a case.

    milliseconds: for each candidate the time of a call, the median of the slowest rank; empty if nothing was measured,
    because the time for measuring was over.
    """

    taken: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Returns the candidates with their times; the one that is taken comes first."""
        if not self.milliseconds:
            return f"{self.taken}, not measured"
        others = sorted((time, name) for name, time in self.milliseconds.items() if name != self.taken)
        times = [(self.milliseconds[self.taken], self.taken), *others]
        return ", ".join(f"{name} {time:.3g} ms" for time, name in times)


Decisions = Mapping[str, Decision]
"""The decision for each case."""


def default_file() -> Path:
    """Returns the file that keeps decisions for later runs: `tpfuse/decisions.json` in the user's cache folder."""
    return cache_folder() / "decisions.json"


@cache
def machine(device_type: str) -> str:
    """Describes this machine for a device of type "cuda" or "cpu": devices, links between them, driver, versions."""
    table = hashlib.sha256(TABLE.read_bytes()).hexdigest()[:8]
    versions = f"torch {torch.__version__}, triton {triton.__version__}, tpfuse {tpfuse.__version__}, tiles {table}"
    if device_type == "cuda":
        count = torch.cuda.device_count()
        names = sorted({torch.cuda.get_device_name(number) for number in range(count)})
        return f"{count} x {', '.join(names)}, links {_links(count)}, driver {driver()}, {versions}"
    return f"{os.cpu_count()} cores of {processor()}, {versions}"


def _links(count: int) -> str:
    """Returns the classes of links between the first `count` GPUs by the driver's ranking: "0" is the fastest."""
    classes = set()
    with suppress(OSError, AttributeError):
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
        for one, other in itertools.permutations(range(count), 2):
            value = ctypes.c_int(-1)
            ask(ctypes.byref(value), _PERFORMANCE_RANK, one, other)
            classes.add(str(value.value))
    return "/".join(sorted(classes)) or "none"


def driver() -> str:
    """Returns the version of CUDA that the driver supports; "?" if it does not answer."""
    version = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return str(version.value or "?")


def as_json(decisions: Decisions) -> dict[str, Any]:
    """Returns the decisions in the form that `from_json` reads."""
    return {case: {"taken": d.taken, "milliseconds": dict(d.milliseconds)} for case, d in decisions.items()}


def from_json(cases: Any) -> dict[str, Decision]:
    """Returns the decisions in a JSON value, without entries that are not decisions."""
    parsed = {case: _decision(entry) for case, entry in cases.items()} if isinstance(cases, dict) else {}
    return {case: decision for case, decision in parsed.items() if decision is not None}


def read_decisions(file: Path, machine_name: str) -> dict[str, Decision]:
    """Returns the decisions of a machine in a file; none if the file is damaged or does not exist."""
    return from_json(_document(file).get(machine_name))


def add_decisions(file: Path, machine_name: str, decisions: Decisions) -> None:
    """Adds decisions to those in the file, in one rename. Raises OSError if the file cannot be written.

    If two processes add at the same time, the later one may lose what the earlier one added, which is then measured
    again.
    """
    document = _document(file)
    document[machine_name] = as_json(from_json(document.get(machine_name)) | dict(decisions))
    replace_file(file, json.dumps(document, indent=1))


def _document(file: Path) -> dict[str, Any]:
    """Returns the file's entries by machine; none if the file is damaged or does not exist."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _decision(entry: Any) -> Decision | None:
    """Returns the decision in a JSON value; None for anything else."""
    match entry:
        case {"taken": str(taken), "milliseconds": dict(times)}:
            real = all(isinstance(name, str) and _is_time(time) for name, time in times.items())
            return Decision(taken, times) if real and (taken in times or not times) else None
    return None


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
