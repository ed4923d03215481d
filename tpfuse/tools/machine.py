"""The machine as `tpfuse doctor` reads it: what `tpfuse.train.host` reads, and the driver, torch and limits.

Here too, every method reads one fact and raises nothing, and tests replace the methods to simulate machines.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import triton

from tpfuse.comm.cuda_calls import CudaCalls, mps_enabled, native_atomics
from tpfuse.comm.decisions import default_file, driver, machine, read_decisions
from tpfuse.comm.probe import MULTICAST, anonymous_memory, available_memory, gpus_with, time_limit
from tpfuse.kernels.launch import INTERPRETED, family
from tpfuse.train.host import Host

_OPEN = "import sys; open(sys.argv[1], 'r+b').close()"

Status = Literal["ok", "note", "fails"]


@dataclass(frozen=True)
class Finding:
    """One fact about the machine, as a sentence. Status "fails" means that something will fail, and the text says what.

    A note is about something that costs speed, that only some programs need, or that is unknown.
    """

    topic: str
    status: Status
    text: str


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use. problem: why Triton kernels cannot run on it; empty if they can."""

    name: str
    memory: int
    capability: tuple[int, int]
    uuid: str
    problem: str = ""


class Machine(Host):
    """This machine, with what the driver, torch and Triton know of it."""

    def __init__(self, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> None:
        super().__init__(root, environment)
        self._not_shared: str | None = None  # the result of `shared_memory`, which starts a process

    def python_header(self) -> bool:
        """Returns whether the C header of this Python is installed."""
        return Path(sysconfig.get_path("include"), "Python.h").is_file()

    def version(self, package: str) -> str:
        """Returns the version of "python", "torch" with the name of its build, "triton" or "numpy"."""
        packages = {"torch": torch.__version__, "triton": triton.__version__, "numpy": np.__version__}
        return platform.python_version() if package == "python" else str(packages[package])

    def pinned_triton(self) -> str | None:
        """Returns the version of Triton that this torch requires; None if it requires none, as CPU builds do."""
        requirements = importlib.metadata.requires("torch") or []
        pins = (re.match(r"triton==([\d.]+)", requirement) for requirement in requirements)
        return next((pin[1] for pin in pins if pin), None)

    def built_for(self) -> str | None:
        """Returns the version of CUDA for which torch was built, such as 12.8; None for another build."""
        return torch.version.cuda

    def nccl(self) -> str | None:
        """Returns the version of torch's NCCL."""
        with contextlib.suppress(Exception):  # Builds without NCCL raise errors of several classes.
            return ".".join(str(number) for number in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        return None

    def gloo(self) -> bool:
        """Returns whether torch has Gloo."""
        return dist.is_available() and dist.is_gloo_available()

    def cuda_of_driver(self) -> int | None:
        """Returns the version of CUDA that the driver supports, such as 12040 for 12.4."""
        version = driver()
        return int(version) if version.isdigit() else None

    def cuda_error(self) -> str:
        """Returns why torch can use no GPU; empty if it can."""
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            return next(iter(str(error).splitlines()), type(error).__name__)
        return ""

    def gpus(self) -> list[Gpu]:
        """Returns the GPUs that torch can use, in its order."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        try:
            return [self._gpu(number) for number in range(count)]
        except RuntimeError:  # CUDA does not start, and `cuda_error` says why.
            return []

    def _gpu(self, number: int) -> Gpu:
        properties = torch.cuda.get_device_properties(number)
        problem = ""
        try:
            family(torch.device("cuda", number))
        except ValueError as error:
            problem = str(error)
        capability = properties.major, properties.minor
        return Gpu(properties.name, properties.total_memory, capability, str(properties.uuid), problem)

    def peer_access(self, one: int, other: int) -> bool:
        """Returns whether each of two GPUs can access the memory of the other."""
        return torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)

    def native_atomics(self, one: int, other: int) -> bool | None:
        """Returns whether the atomic operations of each of two GPUs hold in the memory of the other."""
        answers = native_atomics(one, other), native_atomics(other, one)
        return False if False in answers else None if None in answers else True

    def mps(self, gpu: int) -> bool | None:
        """Returns whether programs on a GPU run under MPS."""
        return mps_enabled(gpu)

    def multicast(self, count: int) -> str:
        """Returns which of the first GPUs support multicast: "yes" (all), "no", their names, or "unknown"."""
        return gpus_with(MULTICAST, count)

    def obstacle(self, gpus: list[Gpu]) -> str:
        """Returns why the ranks of these GPUs, or CPU ranks if there are none, cannot share memory; empty if they can.

        It asks what a rank asks when it connects to the other ranks. Ranks on GPUs share memory of the host too.
        """
        if reason := self.shared_memory():
            return reason
        for number in range(len(gpus)):
            calls = CudaCalls(torch.device("cuda", number))
            if reason := calls.why_not():
                return reason
            for other, gpu in enumerate(gpus):
                if number != other and (reason := calls.obstacle(gpu.uuid)):
                    return f"{reason} between cuda:{number} and cuda:{other}"
        return ""

    def decisions(self) -> int:
        """Returns the number of products for which earlier runs have measured the fastest implementation."""
        return len(read_decisions(default_file(), machine("cuda")))

    def interpreted(self) -> bool:
        """Returns whether Triton interprets kernels in this process."""
        return INTERPRETED

    def shared_memory(self) -> str:
        """Returns why processes of this user cannot share anonymous memory; empty if they can.

        The first call finds out; later calls return the same.
        """
        if self._not_shared is None:
            self._not_shared = anonymous_memory() or self._not_opened()
        return self._not_shared

    def _not_opened(self) -> str:
        """Returns why another process cannot open the anonymous memory of this one; empty if it can."""
        descriptor = os.memfd_create("tpfuse doctor", os.MFD_CLOEXEC)
        try:
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            opened = self.output(sys.executable, "-I", "-S", "-c", _OPEN, path)
        finally:
            os.close(descriptor)
        return "" if opened is not None else f"another process cannot open {path}"

    def process_descriptors(self) -> str:
        """Returns why a process cannot watch another one by pidfd_open; empty if it can."""
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (OSError, AttributeError) as error:
            return str(error)
        return ""

    def available_memory(self) -> int | None:
        """Returns the bytes that may still be allocated."""
        return available_memory(self.root)

    def time_limit(self) -> float | None:
        """Returns the number of cores whose time the control group may take; None if there is no limit."""
        return time_limit(self.root)

    def space(self, folder: str) -> tuple[int, int] | None:
        """Returns (size, free space) of the file system of a folder, in bytes. folder: relative to the root."""
        try:
            usage = shutil.disk_usage(self.root / folder)
        except OSError:
            return None
        return usage.total, usage.free

    def writable(self, folder: str) -> bool:
        """Returns whether a file can be made in a folder. folder: relative to the root."""
        try:
            tempfile.TemporaryFile(dir=self.root / folder).close()
        except OSError:
            return False
        return True

    def limit(self, kind: int) -> int | None:
        """Returns the soft limit of a resource; None if there is none. kind: a constant of the module resource."""
        soft = resource.getrlimit(kind)[0]
        return None if soft == resource.RLIM_INFINITY else soft

    def cores(self) -> int:
        """Returns the number of logical cores of the machine."""
        return os.cpu_count() or 1

    def usable_cores(self) -> set[int]:
        """Returns the logical cores on which this process may run."""
        return os.sched_getaffinity(0)
